"""Looking at and checking functions of objects: make_jaxpr, checkify, eval_shape."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

from linnet import nnx
from linnet.errors import SharedReferenceError, TraceContextError
from tests.models import call
from tests.nnx.transforms.stateful import Count, Pair, Scale, counted, values


@pytest.fixture
def model():
    return Scale(2.0)


@pytest.mark.parametrize("options", [{}, {"graph_updates": False}, {"graph": True}])
def test_make_jaxpr_takes_values_and_gives_outputs_and_what_changed(model, options):
    jaxpr = nnx.make_jaxpr(call, **options)(model, jnp.float32(3))
    assert [a.str_short() for a in jaxpr.in_avals] == ["int32[]", "float32[]", "float32[]"]
    changed = [] if "graph_updates" in options else ["int32[]"]
    assert [a.str_short() for a in jaxpr.out_avals] == ["float32[]", *changed]
    assert sorted(e.primitive.name for e in jaxpr.eqns) == ["add", "mul"]
    assert values(model) == values(Scale(2.0))


def test_make_jaxpr_of_new_objects_and_static_arguments(model):
    def f(m, flip, x):
        return Pair(nnx.Param(-m(x) if flip else m(x)), "static")

    for static in (1, (1,), -2):
        jaxpr = nnx.make_jaxpr(f, static_argnums=static)(model, True, jnp.ones(3))
        assert "neg" in str(jaxpr)
        assert [a.shape for a in jaxpr.out_avals] == [(3,), ()]
    with pytest.raises(ValueError, match=r"nnx.make_jaxpr: static argument 5 is out of range for"):
        nnx.make_jaxpr(f, static_argnums=5)(model, True, 1.0)


def test_make_jaxpr_as_decorator(model):
    @nnx.make_jaxpr
    def plain(m, x):
        return m(x)

    @nnx.make_jaxpr(static_argnums=1)
    def static(m, x):
        return m(x)

    assert plain.__name__ == "plain"
    assert len(plain(model, x=3.0).in_avals) == 3
    assert len(static(model, 3.0).in_avals) == 2


def checked(model, x):
    checkify.check(x > 0, "x is {x}", x=x)
    return model(x)


@pytest.mark.parametrize("updates", [True, False])
@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["plain", "jit"])
def test_checkify_returns_the_error_and_writes(model, updates, wrap):
    run = wrap(nnx.checkify(checked, graph_updates=updates))
    error, out = run(model, jnp.float32(3))
    error.throw()
    assert (out, int(model.count.value)) == (6.0, 1)
    error, out = run(model, jnp.float32(-3))
    assert (out, int(model.count.value)) == (-6.0, 2)
    with pytest.raises(checkify.JaxRuntimeError, match=r"x is -3\.0"):
        error.throw()


def test_checkify_looks_for_what_it_is_told(model):
    for errors, found in ((None, False), (checkify.float_checks, True)):
        error, _ = nnx.checkify(lambda m, x: m(x) / 0, errors)(model, jnp.float32(3))
        assert (error.get() is not None) == found


def test_checkify_gives_objects(model):
    def f(m, x):
        m.extra = nnx.Param(x)
        return m, Pair(m.w, nnx.Param(x))

    _, (same, made) = nnx.checkify(f)(model, jnp.float32(3))
    assert same is model
    assert made.a is model.w
    assert model.extra.value == made.b.value == 3.0


def test_eval_shape_changes_nothing(model):
    f, runs = counted(call)
    out = nnx.eval_shape(f, model, jnp.ones(3))
    assert (out.shape, out.dtype, len(runs)) == ((3,), jnp.float32, 1)
    assert values(model) == values(Scale(2.0))
    made = nnx.eval_shape(lambda: Pair(Scale(), [Count(jnp.zeros(5, jnp.int32))]))
    assert isinstance(made.a, Scale)
    assert made.b[0].value == jax.ShapeDtypeStruct((5,), jnp.int32)


@pytest.mark.parametrize("transform", [nnx.make_jaxpr, nnx.checkify])
def test_bad_input(transform, model):
    name = transform.__name__
    with pytest.raises(
        ValueError, match=f"nnx.{name} does not support bound methods: Scale.__call"
    ):
        transform(model.__call__)
    with pytest.raises(SharedReferenceError, match=rf"was already seen at .* tree-mode {name}"):
        transform(lambda a, b: None, graph=False)(model, model)
    with pytest.raises(SharedReferenceError, match="which needs graph updates"):
        transform(lambda m: m.w, graph_updates=False)(model)
    with pytest.raises(TraceContextError, match=r"Cannot mutate Count at model\.count"):
        transform(lambda x: 2 * model(x))(jnp.float32(3))
    assert values(model) == values(Scale(2.0))


@pytest.mark.parametrize("transform", [nnx.make_jaxpr, nnx.checkify])
def test_after_an_error_objects_are_as_before(transform, model):
    def fails(m, x):
        m(x)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        transform(fails)(model, 3.0)
    assert values(model) == values(Scale(2.0))


@pytest.mark.parametrize("storage", [{"ref": True}, {"hijax": True}])
def test_refs_are_read_and_written(storage):
    model = nnx.with_vars(Scale(2.0), **storage)
    assert nnx.eval_shape(call, model, jnp.ones(3)).shape == (3,)
    nnx.make_jaxpr(call)(model, 3.0)
    assert model.count.value == 0
    error, out = nnx.checkify(checked)(model, jnp.float32(3))
    error.throw()
    assert (out, int(model.count.value)) == (6.0, 1)
