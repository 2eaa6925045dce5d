"""Low-rank adaptation."""

import jax
import optax
import pytest

from linnet import nnx
from linnet.errors import FeatureError, LayerArgumentError
from tests.compare import close

X = jax.random.normal(jax.random.key(0), (2, 4))
NORMAL = jax.nn.initializers.normal(1.0)


def kinds(layer):
    flat = nnx.to_flat_state(nnx.state(layer))
    return {path: (type(leaf), leaf.shape) for path, leaf in flat}


def test_names_kinds_and_shapes():
    low_rank = {"lora_a": (nnx.LoRAParam, (4, 2)), "lora_b": (nnx.LoRAParam, (2, 3))}
    assert kinds(nnx.LoRA(4, 2, 3, rngs=nnx.Rngs(0))) == {(k,): v for k, v in low_rank.items()}
    assert kinds(nnx.LoRALinear(4, 3, lora_rank=2, rngs=nnx.Rngs(0))) == {
        ("bias",): (nnx.Param, (3,)),
        ("kernel",): (nnx.Param, (4, 3)),
        **{("lora", k): v for k, v in low_rank.items()},
    }


def test_it_starts_as_the_layer_it_adapts():
    base = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    linear = nnx.LoRALinear(4, 3, lora_rank=2, rngs=nnx.Rngs(0))
    close(linear(X), base(X))
    close(nnx.LoRA(4, 2, 3, base_module=base, rngs=nnx.Rngs(1))(X), base(X))
    assert (nnx.LoRA(4, 2, 3, rngs=nnx.Rngs(0))(X) == 0).all()


def test_the_product_is_added():
    layer = nnx.LoRALinear(4, 3, lora_rank=2, b_initializer=NORMAL, rngs=nnx.Rngs(0))
    a, b = layer.lora.lora_a[...], layer.lora.lora_b[...]
    close(layer(X), X @ layer.kernel[...] + X @ a @ b, tolerance=1e-5)
    close(layer(x=X[0]), layer(X)[0], tolerance=1e-5)


def test_it_trains_alone():
    model = nnx.LoRALinear(4, 3, lora_rank=2, rngs=nnx.Rngs(0))
    kernel, lora_b = model.kernel[...], model.lora.lora_b[...]
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.LoRAParam)
    grads = nnx.grad(lambda m: (m(X) ** 2).sum(), argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
    optimizer.update(model, grads)
    assert (model.kernel[...] == kernel).all()
    assert (model.lora.lora_b[...] != lora_b).any()


def test_the_kind_and_the_metadata_of_the_parameters():
    options = {
        "lora_param_type": nnx.Param,
        "a_metadata": {"note": "a"},
        "b_metadata": {"note": "b"},
    }
    for layer in (
        nnx.LoRA(4, 2, 3, rngs=nnx.Rngs(0), **options),
        nnx.LoRALinear(4, 3, lora_rank=2, rngs=nnx.Rngs(0), **options).lora,
    ):
        assert type(layer.lora_a) is type(layer.lora_b) is nnx.Param
        assert (layer.lora_a.note, layer.lora_b.note) == ("a", "b")


def test_arguments_reach_the_base():
    layer = nnx.LoRA(4, 2, 3, base_module=lambda x, *, factor: factor * x[:, :3], rngs=nnx.Rngs(0))
    close(layer(X, factor=2), 2 * X[:, :3])
    assert nnx.LoRA(4, 2, 3, rngs=nnx.Rngs(0))(X, factor=2).shape == (2, 3)


def test_the_output_can_be_sharded():
    spec = jax.P("data", None)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        layer = nnx.LoRALinear(4, 3, lora_rank=2, b_initializer=NORMAL, rngs=nnx.Rngs(0))
        sharded = jax.jit(lambda x: layer(x, out_sharding=spec))(X)
        plain = layer(X)
    assert sharded.sharding.spec == spec
    close(sharded, plain)


def test_layers_can_be_swapped_in():
    model = nnx.Sequential(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.relu)
    want = model(X)
    model.layers[0] = nnx.LoRA(4, 2, 3, base_module=model.layers[0], rngs=nnx.Rngs(1))
    close(model(X), want)


def test_wrong_features():
    model = nnx.List([nnx.LoRA(5, 2, 3, rngs=nnx.Rngs(0))])
    with pytest.raises(FeatureError) as caught:
        model[0](X)
    assert str(caught.value) == (
        "model[0] (LoRA) expected inputs whose last axis has size 5, but got float32[2,4].\n"
        "Fix: build it with in_features=4, or move the feature axis last."
    )


def test_a_base_that_cannot_be_called():
    model = nnx.List([nnx.LoRA(4, 2, 3, base_module="linear", rngs=nnx.Rngs(0))])
    with pytest.raises(LayerArgumentError) as caught:
        model[0](X)
    assert str(caught.value) == (
        "`self.base_module` must be callable: model[0] (LoRA) has 'linear'.\n"
        "Fix: pass a module, a function or None."
    )
