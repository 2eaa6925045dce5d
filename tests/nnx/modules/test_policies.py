"""Layers and models under a precision policy."""

import pickle

import jax
import jax.numpy as jnp
import optax
import pytest

from linnet import nnx
from linnet.errors import PrecisionError
from tests.nnx.nn.catalogue import CATALOGUE

HALF, FULL = jnp.dtype("bfloat16"), jnp.dtype("float32")
MIXED = "mixed_bfloat16"
X = jax.random.normal(jax.random.key(0), (4, 3))


class Model(nnx.Module):
    """Keeps the dtypes that its layers gave, and the policy of its head if it has one."""

    def __init__(self, rngs, head_region=None):
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs), nnx.LayerNorm(3, rngs=rngs)])
        self.fixed = nnx.Linear(3, 3, dtype=jnp.float16, rngs=rngs)
        self.head = nnx.Linear(3, 2, rngs=rngs)
        self.head_region = head_region

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        self.sow(nnx.Intermediate, "hidden", x)
        fixed = self.fixed(x)
        self.sow(nnx.Intermediate, "fixed_out", fixed)
        if self.head_region is None:
            out = self.head(fixed)
        else:
            with nnx.precision(self.head_region):
                out = self.head(fixed)
        self.sow(nnx.Intermediate, "out", out)
        return out

    def encode(self, x):
        return self.layers[0](x)


def build(**options):
    return Model(nnx.Rngs(0), **options)


def dtypes(model, x=X):
    """The dtypes inside of a call, and of its output."""
    out, sown = nnx.capture(model, nnx.Intermediate)(x)
    inside = {name: sown[name][...][0].dtype for name in ("hidden", "fixed_out", "out")}
    return {**inside, "returned": out.dtype}


IN_HALF = {"hidden": HALF, "fixed_out": jnp.float16, "out": HALF, "returned": FULL}
IN_FULL = {"hidden": FULL, "fixed_out": jnp.float16, "out": FULL, "returned": FULL}


LAYERS = {entry.layer: entry for entry in CATALOGUE if entry.layer is not nnx.Stack}


@pytest.mark.parametrize("entry", LAYERS.values(), ids=str)
def test_every_layer_computes_as_if_the_dtype_were_its_own(entry):
    ruled, told = entry.build(nnx.Rngs(0)), entry.build(nnx.Rngs(0))
    kinds = jax.tree.map(lambda x: x.dtype, nnx.state(ruled))
    with nnx.precision("compute=bfloat16"):
        got = ruled(*entry.inputs, **entry.kwargs)
    told.set_attributes(dtype=jnp.bfloat16, raise_if_not_found=False)
    want = told(*entry.inputs, **entry.kwargs)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert jnp.allclose(a.astype(FULL), b.astype(FULL), atol=0.05)
    assert jax.tree.map(lambda x: x.dtype, nnx.state(ruled)) == kinds  # nothing was rounded


@pytest.mark.parametrize("transform", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_a_stack_takes_what_its_first_layer_takes(transform):
    stack = nnx.Stack(lambda rngs: nnx.Linear(3, 3, rngs=rngs), 2, rngs=nnx.Rngs(0))
    layers = stack.to_list()
    run = transform(lambda stack, x: stack(x))
    with nnx.precision("compute=bfloat16"):
        got, want = run(stack, X), layers[1](layers[0](X))
    assert got.dtype == want.dtype == HALF
    assert jnp.allclose(got, want)


def test_a_layer_that_was_given_a_dtype_keeps_it():
    rngs = nnx.Rngs(0)
    layers = [
        nnx.Linear(3, 2, dtype=jnp.float32, rngs=rngs),
        nnx.PReLU(dtype=jnp.float32),
        nnx.RMSNorm(3, dtype=jnp.float32, rngs=rngs),
    ]
    embed = nnx.Embed(3, 2, dtype=jnp.float32, rngs=rngs)
    cell = nnx.SimpleCell(3, 4, dtype=jnp.float32, rngs=rngs)
    with nnx.precision("compute=bfloat16"):
        assert [layer(X).dtype for layer in layers] == [FULL] * 3
        assert embed(jnp.arange(3)).dtype == embed.attend(jnp.ones((1, 2))).dtype == FULL
        assert cell(jnp.zeros((4, 4), jnp.bfloat16), X)[1].dtype == FULL


def test_layers_whose_default_is_a_dtype_obey_too():
    rngs = nnx.Rngs(0)
    embed, cell = nnx.Embed(3, 2, rngs=rngs), nnx.SimpleCell(3, 4, rngs=rngs)
    assert (embed.dtype, cell.dtype, cell.dense_i.dtype) == (FULL, jnp.float32, jnp.float32)
    for region, want in ((None, FULL), ("compute=bf16", HALF)):
        with nnx.precision(region):
            assert embed(jnp.arange(3)).dtype == want
            assert embed.attend(jnp.ones((1, 2))).dtype == want
            assert cell(jnp.zeros((4, 4), jnp.bfloat16), X.astype(jnp.bfloat16))[1].dtype == want


def test_statistics_and_softmax_stay_in_float32():
    layer = nnx.BatchNorm(1, use_running_average=True, rngs=nnx.Rngs(0))
    layer.mean[...] = jnp.array([1.001])
    x = jnp.array([[1.0]])
    with nnx.precision("compute=bfloat16"):
        y = layer(x)
        attention = jax.make_jaxpr(nnx.dot_product_attention)(*[jnp.ones((1, 2, 1, 8))] * 3)
        layer.train()
        layer(x)
    assert y.dtype == HALF
    assert abs(float(y[0, 0]) + 0.001) < 1e-5  # 1.001 is 1 in bfloat16
    assert layer.mean[...].dtype == layer.var[...].dtype == FULL
    exponential = [e for e in attention.jaxpr.eqns if e.primitive.name == "exp"]
    assert [e.outvars[0].aval.dtype for e in exponential] == [FULL]
    assert attention.out_avals[0].dtype == HALF


def test_parameters_of_layers_made_in_a_region():
    def make(**options):
        return Model(nnx.Rngs(0)), nnx.Linear(3, 2, rngs=nnx.Rngs(0), **options)

    with nnx.precision("params=bfloat16"):
        model, told = make(param_dtype=jnp.float32)
        cell = nnx.GRUCell(3, 4, rngs=nnx.Rngs(0))
        norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    other, _ = make()
    assert {x.dtype for x in jax.tree.leaves(nnx.state(model, nnx.Param))} == {HALF}
    assert (model.head.param_dtype, told.kernel.dtype) == (HALF, FULL)
    assert cell.initialize_carry((1, 3)).dtype == HALF
    assert (norm.scale.dtype, norm.mean.dtype) == (HALF, FULL)
    assert other.head.param_dtype is jnp.float32


def test_a_model_with_a_policy():
    model = build()
    assert dtypes(model) == IN_FULL
    nnx.set_precision(model, MIXED)
    assert dtypes(model) == IN_HALF
    assert model.encode(X).dtype == model.layers[0](X).dtype == FULL  # each an outermost call
    assert model.head.kernel.dtype == FULL
    nnx.set_precision(model, None)
    assert dtypes(model) == IN_FULL
    assert not any("precision_policy" in vars(m) for _, m in model.iter_modules())


def test_setting_a_policy_brings_parameters_to_their_dtype():
    model = nnx.Sequential(nnx.BatchNorm(3, rngs=nnx.Rngs(0)), build())
    nnx.set_precision(model, "params=bfloat16")
    assert {x.dtype for x in jax.tree.leaves(nnx.state(model, nnx.Param))} == {HALF}
    assert model.layers[0].mean.dtype == FULL
    assert model.layers[1].head.param_dtype == HALF


@pytest.mark.parametrize("nothing", [nnx.List([]), [jnp.ones(2)], nnx.Rngs(0)], ids=type)
def test_a_policy_for_no_module_is_refused(nothing):
    with pytest.raises(PrecisionError) as error:
        nnx.set_precision(nothing, MIXED)
    assert str(error.value) == (
        "set_precision found no module that can be called in "
        f"{type(nothing).__name__}.\nFix: pass a module, or a list or dict of modules."
    )


@pytest.mark.parametrize(
    "policy",
    [{"params": "bfloat16"}, {}, ("bfloat16", "float32"), [jnp.bfloat16], 16, jnp.ones(2), build()],
    ids=lambda policy: type(policy).__name__,
)
def test_a_policy_of_another_type_is_refused(policy):
    model = build()
    with pytest.raises(PrecisionError) as error:
        nnx.set_precision(model, policy)
    assert str(error.value) == (
        f"A precision policy was expected, but got {type(policy).__name__}.\n"
        "Fix: pass nnx.Policy(params=..., compute=..., output=...), a text such as "
        "'params=float32,compute=bfloat16', 'mixed_bfloat16' or 'mixed_float16', a dtype for "
        "everything, or None for no policy."
    )
    assert dtypes(model) == IN_FULL
    assert not any("precision_policy" in vars(m) for _, m in model.iter_modules())


def test_the_innermost_counts():
    model = build(head_region="compute=float16")
    nnx.set_precision(model, MIXED)
    want = {**IN_HALF, "out": jnp.float16}
    assert dtypes(model) == want
    with nnx.precision("compute=float32,output=float16"):  # the model's own comes later
        assert dtypes(model) == want
        assert dtypes(build()) == {**IN_FULL, "returned": jnp.float16}
        assert model.encode(X).dtype == FULL
    nnx.set_precision(model.head, "compute=float32")  # and the head's later still
    assert dtypes(model) == {**want, "out": FULL}


def test_output_is_for_the_outermost_call_alone():
    model = build()
    with nnx.precision(MIXED):
        assert dtypes(model) == IN_HALF
        assert model.encode(X).dtype == FULL  # the outermost module here is a layer
        assert nnx.precision("output=float16")(model)(X).dtype == jnp.float16

    @nnx.precision(MIXED)
    def run(model, x):
        hidden = model.encode(x)
        assert hidden.dtype == HALF
        return hidden, model

    hidden, same = run(model, X)
    assert hidden.dtype == FULL
    assert same is model


def step(model, x):
    return model(x).sum()


TRANSFORMS = {
    "jit": nnx.jit(lambda model, x: model(x)),
    "jax.jit": jax.jit(lambda model, x: model(x)),
    "remat": nnx.remat(lambda model, x: model(x)),
    "vmap": nnx.vmap(lambda model, x: model(x), in_axes=(None, 0)),
    "scan": lambda model, x: nnx.scan(lambda m, x: (m, m(x)))(model, x)[1],
    "split and merge": lambda model, x: nnx.merge(*nnx.split(model))(x),
    "tree": lambda model, x: jax.tree.map(lambda v: v, model)(x),
    "clone": lambda model, x: nnx.clone(model)(x),
    "pickle": lambda model, x: pickle.loads(pickle.dumps(model))(x),
    "view": lambda model, x: nnx.view(model, deterministic=True, raise_if_not_found=False)(x),
    "eval_shape": lambda model, x: nnx.eval_shape(lambda model, x: model(x), model, x),
}


class Plain(nnx.Module):
    """Says in its output what its layer computed in."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        y = self.layer(x)
        return y, jnp.zeros(x.shape[:-1], jnp.int8 if y.dtype == HALF else jnp.int32)


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("where", ["region", "model"])
def test_policies_go_through_transforms(transform, where):
    model, want = Plain(nnx.Rngs(0)), (FULL, "int8")
    region = nnx.precision(MIXED if where == "region" else None)
    if where == "model":
        nnx.set_precision(model, MIXED)
    else:
        assert [x.dtype for x in transform(model, X)] == [FULL, "int32"]
    with region:
        got = transform(model, X)
    assert tuple(x.dtype for x in got) == want


@pytest.mark.parametrize("jit", [nnx.jit, jax.jit], ids=["nnx", "jax"])
def test_compiled_functions_are_traced_for_each_policy_once(jit):
    traces, model = [], Plain(nnx.Rngs(0))

    @jit
    def run(model, x):
        traces.append(1)
        return model(x)[1]

    for _ in range(2):
        assert run(model, X).dtype == "int32"
        with nnx.precision(MIXED):
            assert run(model, X).dtype == "int8"
        with nnx.precision("compute=float16"), nnx.precision(nnx.Policy("f32", HALF, FULL)):
            assert run(model, X).dtype == "int8"
    assert len(traces) == 2
    for _ in range(2):
        nnx.set_precision(model, MIXED)
        assert run(model, X).dtype == "int8"
        nnx.set_precision(model, None)
        assert run(model, X).dtype == "int32"
    assert len(traces) == 3


def test_a_training_step_under_a_policy():
    @nnx.jit
    def train(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss, grads

    models = [build(), build(), build()]
    nnx.set_precision(models[1], MIXED)
    losses, grads = [], []
    for model, region in zip(models, (None, None, MIXED), strict=True):
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        with nnx.precision(region):
            loss, grad = train(model, optimizer, X)
        losses.append(float(loss))
        grads.append(grad)
        assert {x.dtype for x in jax.tree.leaves(nnx.state(model, nnx.Param))} == {FULL}
        assert {x.dtype for x in jax.tree.leaves(grad)} == {FULL}
    assert losses[0] != losses[1] == losses[2]
    assert abs(losses[0] - losses[1]) < 0.02
    close = jax.tree.map(lambda a, b: bool(jnp.allclose(a, b, atol=0.05)), grads[0], grads[1])
    assert jax.tree.all(close)


def test_a_restored_state_changes_no_policy():
    model, other = build(), build()
    nnx.set_precision(model, MIXED)
    state = jax.tree.map(lambda x: x + 1, nnx.state(other))
    nnx.update(model, state)
    assert dtypes(model) == IN_HALF
    assert jnp.array_equal(model.head.bias[...], jnp.ones(2))
    abstract = nnx.eval_shape(build)
    nnx.set_precision(abstract, "compute=bfloat16")
    assert nnx.merge(nnx.graphdef(abstract), state)(X).dtype == HALF


def test_a_policy_shows_and_explains_a_retrace():
    model = Plain(nnx.Rngs(0))
    run = nnx.jit(lambda model, x: model(x))
    run(model, X)
    nnx.set_precision(model, "compute=bfloat16")
    run(model, X)
    assert "precision_policy=Policy(compute=bfloat16)" in repr(model)
    assert "model.precision_policy" in nnx.explain_retrace(run)
    with nnx.precision("compute=float16"):
        run(model, X)
    assert nnx.explain_retrace(run).endswith(
        "because the precision policy: none -> Policy(compute=float16)"
    )
