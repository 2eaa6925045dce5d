"""Recurrent cells: Flax's numbers, every argument, first carries, and bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import FeatureError, RngsError
from tests.digest import digest
from tests.models import InList
from tests.nnx.nn.flax_cases import doubled

NORMAL = jax.nn.initializers.normal(1.0)
HALF = jnp.bfloat16
B = {"bias_init": NORMAL}
X = jax.random.normal(jax.random.key(1), (2, 2))
C, H = (jax.random.normal(jax.random.key(n), (2, 3)) for n in (2, 3))
CELLS = [nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.GRUCell, nnx.SimpleCell]
cells = pytest.mark.parametrize("cls", CELLS)


OPTIONS = {
    "plain": {},
    "bias_init": B,
    "gate_fn": {"gate_fn": jax.nn.hard_sigmoid, **B},
    "activation_fn": {"activation_fn": jnp.sin, **B},
    "kernel_init": {"kernel_init": NORMAL, **B},
    "recurrent_kernel_init": {"recurrent_kernel_init": NORMAL, **B},
    "dtype": {"dtype": HALF, **B},
    "param_dtype": {"param_dtype": HALF, "recurrent_kernel_init": NORMAL, **B},
    "promote_dtype": {"promote_dtype": doubled, **B},
    "keep_rngs": {"keep_rngs": True, **B},
    "residual": {"residual": True, **B},
}
# The cell, what is special, and Flax's parameters and step.
CASES = [
    (nnx.LSTMCell, "plain", -2.00683, 0.477),
    (nnx.OptimizedLSTMCell, "plain", -2.2386, -0.3495),
    (nnx.GRUCell, "plain", 1.53874, -2.64367),
    (nnx.SimpleCell, "plain", 0.12365, -4.4474),
    (nnx.LSTMCell, "bias_init", -1.40734, 0.06235),
    (nnx.OptimizedLSTMCell, "bias_init", 2.56239, 0.49567),
    (nnx.GRUCell, "bias_init", 3.27075, -1.17944),
    (nnx.SimpleCell, "bias_init", -2.19561, -3.18362),
    (nnx.LSTMCell, "gate_fn", -1.40734, 0.16309),
    (nnx.OptimizedLSTMCell, "gate_fn", 2.56239, 0.60589),
    (nnx.GRUCell, "gate_fn", 3.27075, -1.38625),
    (nnx.LSTMCell, "activation_fn", -1.40734, -0.2943),
    (nnx.OptimizedLSTMCell, "activation_fn", 2.56239, 0.57693),
    (nnx.GRUCell, "activation_fn", 3.27075, -1.09583),
    (nnx.SimpleCell, "activation_fn", -2.19561, -1.28313),
    (nnx.LSTMCell, "kernel_init", -2.51588, 0.03936),
    (nnx.OptimizedLSTMCell, "kernel_init", 1.84926, 0.56414),
    (nnx.GRUCell, "kernel_init", 3.74942, -1.23079),
    (nnx.SimpleCell, "kernel_init", -3.24384, -2.91397),
    (nnx.LSTMCell, "recurrent_kernel_init", -8.01053, -0.25872),
    (nnx.OptimizedLSTMCell, "recurrent_kernel_init", -5.68878, -0.34216),
    (nnx.GRUCell, "recurrent_kernel_init", 8.58303, -0.35332),
    (nnx.SimpleCell, "recurrent_kernel_init", -1.42673, -3.66057),
    (nnx.LSTMCell, "dtype", -1.40734, 0.0563),
    (nnx.OptimizedLSTMCell, "dtype", 2.56239, 0.49873),
    (nnx.GRUCell, "dtype", 3.27075, -1.18529),
    (nnx.SimpleCell, "dtype", -2.19561, -3.18388),
    (nnx.LSTMCell, "param_dtype", -2.26209, -1.45102),
    (nnx.OptimizedLSTMCell, "param_dtype", 0.28615, 2.07038),
    (nnx.GRUCell, "param_dtype", -3.56209, -1.97985),
    (nnx.SimpleCell, "param_dtype", 2.54226, 0.6003),
    (nnx.LSTMCell, "promote_dtype", -1.40734, -0.19052),
    (nnx.OptimizedLSTMCell, "promote_dtype", 2.56239, -0.87393),
    (nnx.GRUCell, "promote_dtype", 3.27075, -0.0435),
    (nnx.SimpleCell, "promote_dtype", -2.19561, -5.33587),
    (nnx.LSTMCell, "keep_rngs", 1.4863, -1.5788),
    (nnx.OptimizedLSTMCell, "keep_rngs", 7.15707, -1.00966),
    (nnx.GRUCell, "keep_rngs", -0.41962, -0.44382),
    (nnx.SimpleCell, "keep_rngs", 1.11944, 2.93102),
    (nnx.SimpleCell, "residual", -2.19561, -3.78538),
]


def build(cls, **options):
    return cls(2, 3, **options, rngs=nnx.Rngs(0))


def carry_of(cls):
    return (C, H) if "LSTM" in cls.__name__ else H


@pytest.mark.parametrize(("cls", "name", "parameters", "step"), CASES)
def test_numbers_of_flax(cls, name, parameters, step):
    cell = build(cls, **OPTIONS[name])
    carry, output = cell(carry_of(cls), X)
    values = [v[...] for _, v in sorted(nnx.to_flat_state(nnx.state(cell, nnx.Param)))]
    tolerance = 0.03 if "dtype" in name else 2e-5
    got = digest(*values), digest(*jax.tree.leaves(carry), output)
    np.testing.assert_allclose(got, (parameters, step), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("cls", "order"),
    [
        (nnx.LSTMCell, "ii.kernel if_.kernel ig.kernel io.kernel hi.kernel hi.bias hf.kernel "
         "hf.bias hg.kernel hg.bias ho.kernel ho.bias"),
        (nnx.OptimizedLSTMCell, "dense_i.kernel dense_h.kernel dense_h.bias"),
        (nnx.GRUCell, "dense_i.kernel dense_i.bias dense_h.kernel"),
        (nnx.SimpleCell, "dense_h.kernel dense_i.kernel dense_i.bias"),
    ],
)  # fmt: skip
def test_parameters_bit_for_bit(cls, order):
    rngs = nnx.Rngs(0)
    init = {"kernel_init": NORMAL, "recurrent_kernel_init": NORMAL, "bias_init": NORMAL}
    cell = cls(2, 3, **init, rngs=rngs)
    names = order.split()
    for number, name in enumerate(names):
        layer, parameter = name.split(".")
        value = getattr(getattr(cell, layer), parameter)[...]
        key = jax.random.fold_in(jax.random.key(0), number)
        assert (value == NORMAL(key, value.shape)).all(), name
    assert rngs.default.count[...] == len(names)
    assert {".".join(path) for path, _ in nnx.to_flat_state(nnx.state(cell))} == set(names)


@cells
def test_metadata(cls):
    names = ("kernel", "recurrent_kernel", "bias")
    cell = build(cls, **{f"{name}_metadata": {"note": name} for name in names})
    notes = {path: v.note for path, v in nnx.to_flat_state(nnx.state(cell))}
    for (layer, parameter), note in notes.items():
        hidden = layer in ("hi", "hf", "hg", "ho", "dense_h")
        assert note == ("recurrent_kernel" if hidden and parameter == "kernel" else parameter)


@cells
def test_attributes(cls):
    cell = build(cls)
    assert (cell.in_features, cell.hidden_features, cell.num_feature_axes) == (2, 3, 1)
    assert (cell.rngs, cell.carry_init) == (None, None)
    assert hasattr(cell, "gate_fn") == (cls is not nnx.SimpleCell)
    assert cell.dtype == (jnp.float32 if cls is nnx.SimpleCell else None)


@cells
def test_half_precision_parameters_have_an_orthogonal_kernel(cls):
    cell = build(cls, param_dtype=HALF)
    layer = cell.hi if cls is nnx.LSTMCell else cell.dense_h
    kernel = layer.kernel[...].astype(jnp.float32)
    np.testing.assert_allclose(kernel @ kernel.T, jnp.eye(3), atol=0.02)
    assert layer.kernel.dtype == HALF


@cells
@pytest.mark.parametrize("carried", [jnp.float32, HALF])
@pytest.mark.parametrize("dtype", [jnp.float32, HALF])
def test_a_carry_keeps_its_dtype(cls, carried, dtype):
    carry = jax.tree.map(lambda x: x.astype(carried), carry_of(cls))
    new, _ = build(cls, dtype=dtype)(carry, X)
    assert {x.dtype for x in jax.tree.leaves(new)} == {jnp.dtype(carried)}


# First carries.


@cells
def test_the_first_carry_is_zero(cls):
    cell = build(cls, param_dtype=jnp.float16)
    for rngs, drawn in ((None, None), (nnx.Rngs(0), 2 if "LSTM" in cls.__name__ else 1)):
        carry = cell.initialize_carry((7, 4, 2), rngs)
        assert jax.tree.structure(carry) == jax.tree.structure(carry_of(cls))
        for x in jax.tree.leaves(carry):
            assert (x.shape, x.dtype) == ((7, 4, 3), jnp.float16)
            assert (x == 0).all()
        assert rngs is None or rngs.default.count[...] == drawn


@pytest.mark.parametrize(
    ("cls", "given", "own"),
    [
        (nnx.LSTMCell, 2.20061, -3.02548),
        (nnx.OptimizedLSTMCell, 2.20061, -3.02548),
        (nnx.GRUCell, 2.37466, -1.60277),
        (nnx.SimpleCell, 2.37466, -1.60277),
    ],
)
def test_random_first_carries_of_flax(cls, given, own):
    for rngs in (nnx.Rngs(1), nnx.Rngs(carry=1), nnx.Rngs(1).anything):
        carry = build(cls).initialize_carry((2, 2), rngs, NORMAL)
        assert digest(*jax.tree.leaves(carry)) == pytest.approx(given, abs=1e-4)
    cell = build(cls, carry_init=NORMAL, keep_rngs=True)
    assert digest(*jax.tree.leaves(cell.initialize_carry((2, 2)))) == pytest.approx(own, abs=1e-4)
    assert cell.rngs.count[...] == (2 if "LSTM" in cls.__name__ else 1)


def test_a_key_is_enough_for_a_carry():
    key = jax.random.key(3)
    carry = build(nnx.GRUCell).initialize_carry((2, 2), key, NORMAL)
    assert (carry == NORMAL(key, (2, 3))).all()


# Bad input.


@cells
def test_inputs_that_do_not_fit(cls):
    model = InList(build(cls))
    with pytest.raises(FeatureError) as error:
        model.blocks[0](carry_of(cls), X[:, :1])
    assert str(error.value) == (
        f"model.blocks[0] ({cls.__name__}) expected inputs whose last axis has size 2, but got "
        "float32[2,1].\nFix: build it with in_features=1, or move the feature axis last."
    )


@pytest.mark.parametrize(
    ("cls", "carry", "text"),
    [
        (
            nnx.LSTMCell,
            H,
            "model.blocks[0] (LSTMCell) expected a carry that is a pair (c, h) of arrays of shape "
            "(2, 3), but got float32[2,3].\nFix: make it with initialize_carry(inputs.shape).",
        ),
        (nnx.OptimizedLSTMCell, (C, H[:1]), "of shape (2, 3), but got float32[2,3], float32[1,3]."),
        (
            nnx.GRUCell,
            H[:, :2],
            "model.blocks[0] (GRUCell) expected a carry that is an array of shape (2, 3), but got "
            "float32[2,2].",
        ),
        (nnx.SimpleCell, (C, H), "an array of shape (2, 3), but got float32[2,3], float32[2,3]."),
    ],
)
def test_carries_that_do_not_fit(cls, carry, text):
    model = InList(build(cls))
    with pytest.raises(FeatureError) as error:
        model.blocks[0](carry, X)
    assert text in str(error.value)


def test_a_random_carry_without_keys():
    model = InList(build(nnx.GRUCell, carry_init=NORMAL))
    with pytest.raises(RngsError) as error:
        model.blocks[0].initialize_carry((2, 2))
    assert str(error.value) == (
        "model.blocks[0] (GRUCell): RNGs must be provided to initialize the cell carry, as "
        "carry_init draws.\nFix: pass rngs=nnx.Rngs(0), or build it with keep_rngs=True."
    )
    with pytest.raises(RngsError, match=r"rngs must be an nnx.Rngs, an nnx.RngStream or a key"):
        model.blocks[0].initialize_carry((2, 2), "key")
    with pytest.raises(AttributeError, match="No RngStream named 'carry'"):
        model.blocks[0].initialize_carry((2, 2), nnx.Rngs(params=0))


@pytest.mark.parametrize("name", ["__call__", "initialize_carry", "num_feature_axes"])
def test_a_cell_of_ones_own_must_define(name):
    class Mine(nnx.RNNCellBase):
        pass

    uses = {
        "__call__": lambda: Mine()(0, 0),
        "initialize_carry": lambda: Mine().initialize_carry((1,)),
        "num_feature_axes": lambda: Mine().num_feature_axes,
    }
    with pytest.raises(NotImplementedError, match=f"Mine does not define {name}"):
        uses[name]()
