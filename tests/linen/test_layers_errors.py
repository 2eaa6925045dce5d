"""What layers refuse: the text says what, where (the path), what was given and how to mend it."""

import jax
import jax.numpy as jnp
import pytest

from linnet import linen as nn
from linnet.errors import CacheError, FeatureError, LayerArgumentError

X = jnp.ones((4, 3))
SEQUENCE = jnp.ones((2, 5, 4))
KEY = jax.random.key(0)
WRONG_MASK = jnp.ones((2, 2), bool)


class Model(nn.Module):
    """A layer in a model, so that it has a path."""

    layer: nn.Module

    @nn.compact
    def __call__(self, *args, **kwargs):
        return self.layer.clone(name="inner", parent=self)(*args, **kwargs)


CASES = {
    "dense-without-axes": (nn.Dense(2), (jnp.array(1.0),), {}, FeatureError, "at least 1 axis"),
    "dense-general-batch": (
        nn.DenseGeneral(2, batch_dims=1),
        (SEQUENCE,),
        {},
        LayerArgumentError,
        "consecutive leading dimensions",
    ),
    "dense-general-axis": (nn.DenseGeneral(2, axis=3), (X,), {}, FeatureError, "contracts axes 3"),
    "einsum-equation": (nn.Einsum((3, 2), "abbc->ac"), (X,), {}, LayerArgumentError, "'abbc->ac'"),
    "einsum-kernel": (nn.Einsum((3,), "ab,bc->ac"), (X,), {}, LayerArgumentError, "has 2 axes"),
    "embed-floats": (nn.Embed(3, 4), (X,), {}, FeatureError, "float32[4,3]"),
    "conv-axes": (nn.Conv(2, (3, 3)), (X,), {}, FeatureError, "at least 3 axes"),
    "conv-groups": (
        nn.Conv(2, (3,), feature_group_count=2),
        (X,),
        {},
        LayerArgumentError,
        "feature_group_count=2",
    ),
    "conv-padding": (nn.Conv(2, (3,), padding="foo"), (X,), {}, LayerArgumentError, "'foo'"),
    "conv-mask": (
        nn.Conv(2, (3,), mask=jnp.ones((2, 2))),
        (X,),
        {},
        LayerArgumentError,
        "Mask needs to have the same shape as weights, (3, 3, 2)",
    ),
    "conv-local-groups": (
        nn.ConvLocal(2, (3,), feature_group_count=2),
        (X,),
        {},
        NotImplementedError,
        "feature_group_count=2",
    ),
    "conv-transpose-strides": (
        nn.ConvTranspose(2, (3,), (2, 2)),
        (X,),
        {},
        LayerArgumentError,
        "strides",
    ),
    "norm-axis": (nn.LayerNorm(feature_axes=2), (X,), {}, FeatureError, "works on axis 2"),
    "norm-mask": (
        nn.LayerNorm(),
        (X,),
        {"mask": WRONG_MASK},
        FeatureError,
        "bool[2,2]",
    ),
    "group-norm-both": (
        nn.GroupNorm(2, 2),
        (X,),
        {},
        LayerArgumentError,
        "Either `num_groups` or `group_size` should be specified",
    ),
    "group-norm-groups": (nn.GroupNorm(2), (X,), {}, LayerArgumentError, "num_groups=2"),
    "group-norm-size": (nn.GroupNorm(None, 2), (X,), {}, LayerArgumentError, "group_size=2"),
    "instance-norm-batch": (
        nn.InstanceNorm(feature_axes=0),
        (X,),
        {},
        LayerArgumentError,
        "cannot include the leading dimension",
    ),
    "attention-heads": (
        nn.MultiHeadAttention(3),
        (SEQUENCE,),
        {},
        LayerArgumentError,
        "must be divisible by number of heads (3)",
    ),
    "attention-values": (
        nn.MultiHeadAttention(2),
        (SEQUENCE, None, SEQUENCE),
        {},
        FeatureError,
        "`inputs_k` cannot be None",
    ),
    "attention-older-name": (
        nn.MultiHeadAttention(2),
        (SEQUENCE, SEQUENCE),
        {"inputs_kv": SEQUENCE},
        FeatureError,
        "inputs_kv beside inputs_k",
    ),
    "attention-mask": (
        nn.MultiHeadAttention(2),
        (SEQUENCE,),
        {"mask": jnp.ones((3, 3))},
        FeatureError,
        "broadcasts to (2, 2, 5, 5)",
    ),
    "attention-batch": (
        nn.MultiHeadAttention(2),
        (SEQUENCE, jnp.ones((3, 5, 4))),
        {},
        FeatureError,
        "inputs of one batch",
    ),
    "cell-carry": (nn.GRUCell(5), (X, X), {}, FeatureError, "an array of shape (4, 5)"),
    "rnn-axes": (nn.RNN(nn.GRUCell(5)), (X[0],), {}, FeatureError, "(..., time, features)"),
    "rnn-lengths": (
        nn.RNN(nn.GRUCell(5)),
        (SEQUENCE,),
        {"seq_lengths": jnp.ones(2)},
        FeatureError,
        "integers of shape (2,)",
    ),
    "dropout-rate": (
        nn.Dropout(2.0, deterministic=False),
        (X,),
        {},
        LayerArgumentError,
        "rate=2.0",
    ),
    "dropout-integers": (
        nn.Dropout(0.5, deterministic=False),
        (jnp.arange(3),),
        {},
        FeatureError,
        "floating-point inputs",
    ),
    "dropout-axis": (
        nn.Dropout(0.5, (2,), deterministic=False),
        (X,),
        {},
        FeatureError,
        "draws once along axis 2",
    ),
    "sequential-empty": (nn.Sequential([]), (X,), {}, LayerArgumentError, "has no layers"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_refusals_name_the_path_and_the_fix(case):
    layer, args, kwargs, error, text = case
    with pytest.raises(error) as caught:
        Model(layer).init({"params": KEY, "dropout": KEY}, *args, **kwargs)
    message = str(caught.value)
    assert text in message
    assert f"/inner ({type(layer).__name__})" in message
    assert "\nFix: " in message
    assert message.count("/inner") == 1


def test_flags_are_given_once():
    with pytest.raises(ValueError, match="deterministic"):
        nn.Dropout(0.5).apply({}, X)
    with pytest.raises(ValueError, match="use_running_average"):
        nn.BatchNorm(True).init(KEY, X, use_running_average=False)


def test_a_full_cache_and_a_cache_of_another_shape():
    layer = nn.MultiHeadAttention(2, decode=True)
    variables = layer.init(KEY, SEQUENCE[:, :2])
    for _ in range(2):
        _, cache = layer.apply(variables, SEQUENCE[:, :1], mutable="cache")
        variables = {**variables, **cache}
    with pytest.raises(CacheError, match=r"(?s)the cache is full, 2 of its 2.*Fix: "):
        layer.apply(variables, SEQUENCE[:, :1], mutable="cache")
    with pytest.raises(CacheError, match="Autoregressive cache shape error"):
        layer.apply(variables, SEQUENCE[:1, :1], mutable="cache")


def test_batch_apply_wants_one_batch():
    with pytest.raises(FeatureError, match=r"(?s)first 2 axes .*\(4, 3\), \(3, 4\).*Fix: "):
        nn.BatchApply(lambda x, y: x)(X, X.T)
    assert nn.BatchApply(lambda x: x * 2)(X).shape == (4, 3)
