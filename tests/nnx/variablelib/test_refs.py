"""Variables stored as JAX refs: plain JAX transforms update them, within what JAX allows.

What JAX refuses is on the page docs/refs.md, each with its way around; here each has its test.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import StorageError, TraceContextError
from tests.models import Bag, CountingLinear


@pytest.fixture(params=["hijax", "ref"])
def storage(request):
    return {request.param: True}


@pytest.fixture
def count(storage):
    return nnx.Variable(jnp.array(0.0), **storage)


# ---- choosing the storage ----------------------------------------------------------------------


def test_plain_is_the_default():
    v = nnx.Variable(jnp.array(0.0))
    assert (v.hijax, v.ref) == (False, False)
    assert isinstance(v.raw_value, jax.Array)


def test_values_are_read_from_refs(storage):
    v = nnx.Variable(jnp.arange(3.0), **storage)
    assert isinstance(v.raw_value, jax.Ref)
    assert (v.hijax, v.ref) == ("hijax" in storage, "ref" in storage)
    for value in (v.value, v[...], v.get_value(), v + 0):
        assert isinstance(value, jax.Array)
        np.testing.assert_array_equal(value, [0.0, 1.0, 2.0])
    v[1] = 5.0
    v.value = v * 2
    np.testing.assert_array_equal(v.value, [0.0, 10.0, 4.0])


@pytest.mark.parametrize("value", [3, 2.5, True, np.ones(2, np.float32), np.float32(1)])
def test_numbers_and_numpy_arrays_become_refs(storage, value):
    v = nnx.Variable(value, **storage)
    assert isinstance(v.raw_value, jax.Ref)
    np.testing.assert_array_equal(v.value, value)


def test_keys_become_refs(storage):
    v = nnx.Variable(jax.random.key(0), **storage)
    v.value = jax.random.key(1)
    v[...] = jax.random.key(2)
    assert jax.random.key_data(v.value).tolist() == [0, 2]


def test_var_defaults_in_a_block():
    with nnx.var_defaults(hijax=True) as nothing:
        assert nothing is None
        with nnx.var_defaults(ref=True, hijax=False):
            inner = nnx.Variable(1.0)
        assert nnx.var_defaults().ref is False
        outer, own_choice = nnx.Variable(1.0), nnx.Variable(1.0, hijax=False)
    assert (inner.hijax, inner.ref) == (False, True)
    assert (outer.hijax, outer.ref) == (True, False)
    assert (own_choice.hijax, nnx.Variable(1.0).hijax) == (False, False)
    assert nnx.var_default is nnx.var_defaults


def test_var_defaults_as_a_call():
    nnx.var_defaults(ref=True)
    try:
        assert (nnx.var_defaults().ref, nnx.Variable(1.0).ref) == (True, True)
        nnx.var_defaults(hijax=True)
        assert (nnx.var_defaults().hijax, nnx.var_defaults().ref) == (True, True)
    finally:
        nnx.var_defaults(ref=False, hijax=False)
    assert nnx.Variable(1.0).ref is False


def test_var_defaults_as_a_decorator():
    @nnx.var_defaults(hijax=True)
    def make(fails=False):
        if fails:
            raise KeyError("on purpose")
        return nnx.Param(jnp.ones(2))

    before, made, after = nnx.Param(1.0), make(), nnx.Param(1.0)
    assert [v.hijax for v in (before, made, after)] == [False, True, False]
    with pytest.raises(KeyError, match="on purpose"):
        make(fails=True)
    assert (nnx.var_defaults().hijax, make.__name__) == (False, "make")


def test_var_defaults_once_for_good_then_as_a_block_and_a_decorator():
    setting = nnx.var_defaults(hijax=True)
    found = [nnx.var_defaults()["hijax"]]
    with setting:
        found.append(nnx.var_defaults()["hijax"])
    found.append(nnx.var_defaults()["hijax"])
    found.append(setting(lambda: nnx.var_defaults()["hijax"])())
    found.append(nnx.var_defaults()["hijax"])
    assert found == [True, True, False, True, False]


def test_var_defaults_are_a_mapping():
    defaults = nnx.var_defaults()
    assert "hijax" in defaults
    assert "nope" not in defaults
    assert {**defaults} == {"hijax": False, "ref": False}
    assert (list(defaults), len(defaults), defaults.get("nope", 3)) == (["hijax", "ref"], 2, 3)
    with pytest.raises(KeyError, match="nope"):
        defaults["nope"]
    with nnx.var_defaults(**{**defaults, "ref": True}):
        assert nnx.Variable(1.0).ref


def test_changing_the_storage_of_a_variable(storage):
    v = nnx.Variable(jnp.array(1.0))
    v.set_metadata(**storage)
    assert isinstance(v.raw_value, jax.Ref)
    v.set_metadata(hijax=False, ref=False)
    assert isinstance(v.raw_value, jax.Array)
    assert float(v.value) == 1.0


def test_a_copy_has_its_own_ref(count):
    other = count.copy()
    other[...] = 7.0
    assert float(count.value) == 0.0
    assert count.copy(_copy_ref=False).raw_value is count.raw_value
    assert isinstance(count.copy(hijax=False, ref=False).raw_value, jax.Array)


# ---- plain JAX transforms ----------------------------------------------------------------------


def bump(v, x=1.0):
    v[...] += x


def scan(f):
    return jax.lax.scan(lambda c, x: (f(), x), None, jnp.arange(1))


TRANSFORMS = {
    "jit": lambda f: jax.jit(f)(),
    "grad": lambda f: jax.grad(lambda x: (f(), x)[1])(1.0),
    "grad in jit": lambda f: jax.jit(jax.grad(lambda x: (f(), x)[1]))(1.0),
    "scan": scan,
    "scan in jit": lambda f: jax.jit(lambda: scan(f))(),
    "fori_loop": lambda f: jax.lax.fori_loop(0, 1, lambda i, c: f(), None),
    "while_loop": lambda f: jax.lax.while_loop(lambda i: i < 1, lambda i: (f(), i + 1)[1], 0),
    "cond": lambda f: jax.lax.cond(True, f, lambda: None),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_captured_variables_are_updated(transform, count):
    for _ in range(2):
        transform(lambda: bump(count))
    assert float(count.value) == 2.0


def test_passed_variables_are_updated_without_a_retrace(count):
    traces = []

    @jax.jit
    def step(v, x):
        traces.append(1)
        bump(v, x)

    for x in (1.0, 2.0, 3.0):
        step(count, x)
    assert (float(count.value), len(traces)) == (6.0, 1)


def test_every_form_of_writing_in_jit(count):
    @jax.jit
    def step(v, x):
        v.value = v + x
        v[...] += x
        v += x
        v.set_value(v * 2)

    step(count, 1.0)
    assert float(count.value) == 6.0


def test_the_gradient_sees_the_value_that_was_written(count):
    def loss(w):
        bump(count)
        return w * count

    assert float(jax.grad(loss)(5.0)) == 1.0
    assert float(jax.grad(loss)(5.0)) == 2.0


def test_pytree_values_have_a_ref_for_each_leaf(storage):
    v = nnx.Variable({"a": jnp.array(1), "b": [jnp.zeros(2)]}, **storage)

    @jax.jit
    def step(v):
        v["a"] += 1
        v["b"] = [v["b"][0] + 1.0]

    step(v)
    assert len(jax.tree.leaves(v)) == 2
    assert int(v["a"]) == 2
    np.testing.assert_array_equal(v["b"][0], [1.0, 1.0])


def test_hooks_run_around_refs(storage):
    v = nnx.Variable(
        jnp.array(1.0),
        on_get_value=lambda variable, value: value + 1,
        on_set_value=lambda variable, value: value * 10,
        **storage,
    )
    jax.jit(lambda v: v.set_value(v.value))(v)
    assert (float(v.raw_value[...]), float(v.value)) == (20.0, 21.0)


def test_rngs_count_on_through_jit(storage):
    with nnx.var_defaults(**storage):
        rngs = nnx.Rngs(0)
    draw = jax.jit(lambda rngs: rngs.normal(()))
    plain = nnx.Rngs(0)
    for _ in range(3):
        assert float(draw(rngs)) == float(plain.normal(()))
    assert int(rngs.default.count.value) == 3


def test_the_training_step_of_the_guide(storage):
    with nnx.var_defaults(**storage):
        model = CountingLinear(2, 5, rngs=nnx.Rngs(0))
    x, y = jnp.ones((3, 2)), jnp.ones((3, 5))

    @jax.jit
    def train_step(model, x, y):
        graphdef, params, nondiff = nnx.split(model, nnx.Param, ...)

        def loss_fn(params):
            model = nnx.merge(graphdef, params, nondiff)
            return jnp.mean((model(x) - y) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(nnx.vars_as(params, hijax=False, ref=False))
        model.w[...] -= 0.1 * grads.w
        return loss

    losses = [float(train_step(model, x, y)) for _ in range(3)]
    np.testing.assert_allclose(losses, [0.2635666, 0.2230828, 0.1888172], rtol=1e-6)
    assert int(model.count.value) == 3


# ---- what JAX refuses --------------------------------------------------------------------------


def test_jit_does_not_return_refs(count):
    for make in (lambda v: v, lambda v: v.copy()):
        with pytest.raises(ValueError, match="mutable array references cannot be returned"):
            jax.jit(make)(count)
    assert float(jax.jit(nnx.as_pure)(count)) == 0.0
    returned = jax.jit(lambda v: nnx.with_vars(v, hijax=False, ref=False))(count)
    assert isinstance(returned.raw_value, jax.Array)


def test_one_ref_goes_in_once(count):
    shared = {"a": count, "b": count}
    with pytest.raises(ValueError, match="only one reference to a mutable array may be passed"):
        jax.jit(lambda a, b: a + b)(count, count)
    with pytest.raises(ValueError, match="only one reference to a mutable array may be passed"):
        jax.jit(lambda shared: shared["a"] + shared["b"])(shared)
    with pytest.raises(ValueError, match="both closed over and passed"):
        jax.jit(lambda a: a + count)(count)
    assert float(jax.jit(lambda a: a + a)(count)) == 0.0


def test_grad_does_not_take_refs(storage):
    w = nnx.Param(jnp.array(3.0), **storage)
    with pytest.raises((TypeError, ValueError), match="Ref"):
        jax.grad(lambda w: w[...] ** 2)(w)
    grad = jax.grad(lambda w: w[...] ** 2)(nnx.with_vars(w, hijax=False, ref=False))
    assert float(grad.value) == 6.0


@pytest.mark.parametrize("how", ["captured", "broadcast"])
def test_vmap_does_not_write_to_what_it_broadcasts(how, count):
    write = jax.vmap(bump, in_axes=(None, 0)) if how == "broadcast" else None
    write = write or (lambda v, x: jax.vmap(lambda x: bump(v, x))(x))
    with pytest.raises(Exception, match="on an unbatched array reference"):
        write(count, jnp.arange(3.0))
    read = jax.vmap(lambda x: x + count)(jnp.arange(3.0))
    np.testing.assert_array_equal(read, [0.0, 1.0, 2.0])


def test_vmap_writes_to_what_it_maps(storage):
    v = nnx.Variable(jnp.zeros(3), **storage)
    jax.vmap(bump)(v, jnp.arange(3.0))
    np.testing.assert_array_equal(v.value, [0.0, 1.0, 2.0])


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("old", "new", "held", "got"),
    [
        (jnp.zeros(2), jnp.zeros(3), "float32[2]", "float32[3]"),
        (jnp.zeros(2), jnp.zeros(()), "float32[2]", "float32[]"),
        (jnp.zeros(2, int), jnp.zeros(2), "int32[2]", "float32[2]"),
        (jnp.array(1), 2.5, "int32[]", "the Python float 2.5"),
        (jnp.array(1, jnp.int8), jnp.array(2, jnp.int32), "int8[]", "int32[]"),
    ],
)
def test_a_ref_keeps_its_type(storage, old, new, held, got, wrap):
    holder = Bag(v=nnx.Variable(old, **storage))

    def write():
        holder.v.value = new

    with pytest.raises(StorageError) as error:
        wrap(write)()
    assert str(error.value) == (
        "Variable at holder.v is stored as a JAX ref, whose type is fixed: it holds "
        f"{held}, but got {got}.\n"
        "Fix: keep shape and dtype, or store it plainly with "
        "nnx.with_vars(..., hijax=False, ref=False)."
    )
    np.testing.assert_array_equal(holder.v.value, old)


@pytest.mark.parametrize("new", [2, True, np.float32(2), jnp.array(2)])
def test_numbers_that_fit_are_taken(storage, new):
    v = nnx.Variable(jnp.zeros((), jnp.float32), **storage)
    v[...] = new
    assert (v.dtype, float(v.value)) == (jnp.float32, float(new))


def test_a_ref_keeps_its_structure_and_all_of_the_old_value(storage):
    holder = Bag(v=nnx.Variable({"a": jnp.array(1), "b": jnp.array(2)}, **storage))
    with pytest.raises(StorageError) as error:
        holder.v.value = {"a": jnp.array(5)}
    assert str(error.value) == (
        "Variable at holder.v is stored as JAX refs, whose structure is fixed: it holds "
        "PyTreeDef({'a': *, 'b': *}), but got PyTreeDef({'a': *}).\n"
        "Fix: keep the structure, or store it plainly with "
        "nnx.with_vars(..., hijax=False, ref=False)."
    )
    with pytest.raises(StorageError, match=r"but got float32\[2\]"):
        holder.v.value = {"a": jnp.array(5), "b": jnp.zeros(2)}
    assert (int(holder.v["a"]), int(holder.v["b"])) == (1, 2)


def test_checkpoint_replays_a_write(count):
    jax.grad(jax.checkpoint(lambda x: (bump(count), jnp.sin(x))[1]))(1.0)
    assert float(count.value) == 2.0


# ---- without a ref to write to -----------------------------------------------------------------


@pytest.mark.parametrize("value", [None, "text", jax.ShapeDtypeStruct((2,), jnp.float32)], ids=str)
def test_what_is_no_array_is_held_as_it_is(storage, value):
    v = nnx.Variable(value, **storage)
    assert v.value is v.raw_value is value
    with pytest.raises(TraceContextError, match=r"Cannot mutate Variable at v from"):
        jax.jit(lambda: v.set_value(jnp.ones(2)))()
    v.value = jnp.zeros(2)
    jax.jit(bump)(v)
    np.testing.assert_array_equal(v.value, [1.0, 1.0])


def test_abstract_models(storage):
    def make():
        return CountingLinear(2, 5, rngs=nnx.Rngs(0))

    with pytest.raises(ValueError, match="mutable array references cannot be returned"):
        jax.eval_shape(lambda: nnx.Variable(jnp.zeros(2), **storage))
    with nnx.var_defaults(**storage):
        abstract, real = nnx.eval_shape(make), make()
    assert abstract.w.value == jax.ShapeDtypeStruct((2, 5), jnp.float32)
    nnx.update(abstract, nnx.state(real))
    jax.jit(lambda model: model(jnp.ones((1, 2))) * 0)(abstract)
    assert int(abstract.count.value) == 1
    np.testing.assert_array_equal(abstract.w.value, real.w.value)


# ---- the nnx transforms lack these limits --------------------------------------------------------


def test_nnx_jit_returns_refs_and_takes_them_twice(count):
    @nnx.jit
    def step(a, b):
        bump(a)
        return a + b, a

    total, returned = step(count, count)
    assert (float(total), float(count.value)) == (2.0, 1.0)
    assert returned is count


def test_nnx_grad_and_remat(storage, count):
    w = nnx.Param(jnp.array(3.0), **storage)

    @nnx.remat
    def square(w, count):
        bump(count)
        return w[...] ** 2

    grad = nnx.grad(square)(w, count)
    assert (float(grad.value), float(count.value)) == (6.0, 1.0)
