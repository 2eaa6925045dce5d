"""The same object with its Variables stored, marked or unwrapped another way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import StorageError, TraceContextError
from tests.models import Count


class Block(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.array([1.0, 2.0]), role="gate")
        self.count = Count(jnp.array(0))


class Model(nnx.Module):
    def __init__(self):
        self.blocks = [Block(), Block()]
        self.scale = jnp.array(3.0)
        self.name = "model"


@pytest.fixture
def model():
    return Model()


def storages(node):
    return {
        path: (variable.hijax, variable.ref, isinstance(variable.raw_value, jax.Ref))
        for path, variable in nnx.to_flat_state(nnx.state(node))
        if isinstance(variable, nnx.Variable)
    }


# ---- with_vars ---------------------------------------------------------------------------------


def test_every_variable_is_stored_the_other_way(model):
    refs = nnx.with_vars(model, hijax=True)
    assert set(storages(refs).values()) == {(True, False, True)}
    assert set(storages(nnx.with_vars(refs, hijax=False, ref=True)).values()) == {
        (False, True, True)
    }
    assert set(storages(nnx.with_vars(refs, hijax=False)).values()) == {(False, False, False)}
    assert set(storages(model).values()) == {(False, False, False)}
    assert nnx.vars_as is nnx.with_vars


def test_the_copy_is_independent_and_keeps_the_rest(model):
    refs = nnx.with_vars(model, ref=True)
    refs.blocks[0].w[...] = 0.0
    np.testing.assert_array_equal(model.blocks[0].w.value, [1.0, 2.0])
    assert (type(refs), refs.name, refs.blocks[0].w.role) == (Model, "model", "gate")
    assert refs.scale is model.scale


def test_only_some_variables_are_copied(model):
    refs = nnx.with_vars(model, hijax=True, only=Count)
    assert refs.blocks[0].count.hijax
    assert refs.blocks[0].count is not model.blocks[0].count
    assert refs.blocks[0].w is model.blocks[0].w


@pytest.mark.parametrize(
    "wrap",
    [lambda v: v, lambda v: {"a": [v]}, lambda v: nnx.State({"a": v})],
    ids=["itself", "dict", "state"],
)
def test_any_pytree_of_variables(wrap):
    v = nnx.Param(jnp.ones(2))
    changed = nnx.with_vars(wrap(v), hijax=True)
    assert type(changed) is type(wrap(v))
    (leaf,) = jax.tree.leaves(changed, is_leaf=lambda x: isinstance(x, nnx.Variable))
    assert (leaf.hijax, v.hijax) == (True, False)


def test_plain_jit_updates_the_copy(model):
    refs = nnx.with_vars(model, hijax=True)

    @jax.jit
    def step(model):
        model.blocks[1].count[...] += 1

    step(refs)
    step(refs)
    assert (int(refs.blocks[1].count.value), int(model.blocks[1].count.value)) == (2, 0)


def test_shared_variables_do_not_become_refs():
    p = nnx.Param(jnp.ones(2))
    shared = {"a": p, "b": [p], "c": nnx.Param(jnp.ones(2))}
    for storage in ("hijax", "ref"):
        with pytest.raises(StorageError) as error:
            nnx.with_vars(shared, **{storage: True})
    assert str(error.value) == (
        "with_vars cannot turn shared Variables into refs, which JAX takes only once:\n"
        "  - .a\n"
        "  - .b[0]\n"
        "Fix: give each place its own Variable, or pass allow_duplicates=True."
    )
    allowed = nnx.with_vars(shared, hijax=True, allow_duplicates=True)
    assert allowed["a"] is allowed["b"][0]
    assert nnx.with_vars(shared, hijax=True, only=nnx.BatchStat)["a"] is p
    plain = nnx.with_vars(shared, hijax=False)
    assert plain["a"] is plain["b"][0]


def test_read_only_variables(model):
    frozen = nnx.with_vars(model, mutable=False, only=nnx.Param)
    w = frozen.blocks[0].w
    for write in (
        lambda: w.set_value(jnp.zeros(2)),
        lambda: w.__setitem__(0, 5.0),
        lambda: w.__iadd__(1.0),
        lambda: setattr(w, "value", jnp.zeros(2)),
        lambda: w.set_raw_value(jnp.zeros(2)),
        lambda: nnx.update(frozen, nnx.state(Model())),
    ):
        with pytest.raises(TraceContextError) as error:
            write()
    assert str(error.value) == (
        "Param at frozen.blocks[0].w is read-only: it was made with mutable=False.\n"
        "Fix: write to the original (for stack[i] of an nnx.Stack: `with stack.borrow(i) as "
        "layer:`), or make a copy with nnx.with_vars(..., mutable=True)."
    )
    np.testing.assert_array_equal(w.value, [1.0, 2.0])
    frozen.blocks[0].count[...] += 1
    again = nnx.with_vars(frozen, mutable=True)
    again.blocks[0].w += 1.0
    np.testing.assert_array_equal(again.blocks[0].w.value, [2.0, 3.0])


def test_read_only_refs():
    v = nnx.with_vars(nnx.Variable(jnp.array(1.0), hijax=True), mutable=False)
    with pytest.raises(TraceContextError, match="Variable at v is read-only"):
        jax.jit(lambda v: v.set_value(2.0))(v)
    assert float(v.value) == 1.0


# ---- as_pure -----------------------------------------------------------------------------------


def test_as_pure_strips_variables(model):
    pure = nnx.as_pure(model)
    assert type(pure) is Model
    assert isinstance(pure.blocks[1].w, jax.Array)
    assert pure.blocks[1].w is model.blocks[1].w.value
    assert isinstance(model.blocks[1].w, nnx.Param)
    assert nnx.pure is nnx.as_pure


def test_as_pure_of_states_and_trees(model):
    state = nnx.as_pure(nnx.state(model))
    assert isinstance(state, nnx.State)
    np.testing.assert_array_equal(state["blocks"][0]["w"], [1.0, 2.0])
    assert nnx.as_pure({"a": nnx.Param(1), "b": [nnx.Cache(2), 3]}) == {"a": 1, "b": [2, 3]}
    assert nnx.as_pure(nnx.Param(1, on_get_value=lambda v, x: x + 1)) == 1, "what is stored"
    assert float(nnx.as_pure(nnx.Param(jnp.array(2.0), hijax=True))) == 2.0


def test_as_pure_keeps_cycles(model):
    model.me = model
    pure = nnx.as_pure(model)
    assert pure.me is pure


# ---- set_metadata ------------------------------------------------------------------------------


def test_set_metadata_in_place(model):
    nnx.set_metadata(model, only=nnx.Param, role="up", note=1)
    assert [(b.w.role, b.w.note) for b in model.blocks] == [("up", 1)] * 2
    assert not model.blocks[0].count.has_metadata("note")
    nnx.set_metadata(model, note=2)
    assert model.blocks[1].count.note == model.blocks[1].w.note == 2
    nnx.set_metadata(model, only=Count, hijax=True)
    assert isinstance(model.blocks[0].count.raw_value, jax.Ref)


# ---- prefix ------------------------------------------------------------------------------------


def test_prefix_by_filters(model):
    axes = nnx.prefix(model, {nnx.Param: 0, Count: 1, ...: None})
    assert type(axes) is Model
    assert [(b.w.value, b.count.value) for b in axes.blocks] == [(0, 1), (0, 1)]
    assert axes.scale is None
    np.testing.assert_array_equal(model.blocks[0].w.value, [1.0, 2.0])


def test_prefix_by_a_function(model):
    paths = nnx.prefix(model, lambda path, leaf: (path, type(leaf).__name__))
    assert paths.blocks[1].w.value == (("blocks", 1, "w"), "Param")
    assert paths.scale[0] == ("scale",)


@pytest.mark.parametrize("storage", [{}, {"hijax": True}, {"ref": True}], ids=str)
def test_a_prefix_serves_as_in_axes(storage):
    batch = nnx.with_vars(Block(), **storage)
    axes = nnx.prefix(batch, {nnx.Param: 0, ...: None})
    scaled = jax.vmap(lambda block, x: block.w * x + block.count, in_axes=(axes, None))
    np.testing.assert_array_equal(scaled(batch, 10.0), [10.0, 20.0])


def test_prefix_of_numbers_and_of_one_array_in_two_places():
    x = jnp.ones(2)
    tree = {"a": x, "b": x, "rate": 0.5, "p": nnx.Param({"k": x})}
    paths = nnx.prefix(tree, lambda path, leaf: path)
    assert {name: paths[name] for name in ("a", "b", "rate")} == {
        "a": ("a",),
        "b": ("b",),
        "rate": ("rate",),
    }
    assert paths["p"].value == ("p",)


def test_prefix_must_cover_everything(model):
    with pytest.raises(ValueError) as error:
        nnx.prefix(model, {nnx.Param: 0})
    assert str(error.value) == (
        "prefix: no filter selects the leaf at .blocks[0].count (Count).\n"
        "Fix: add `...: value` for everything that is left."
    )


def test_prefix_refuses_sharing_in_tree_mode():
    p = nnx.Param(jnp.ones(2))
    assert nnx.prefix({"a": p, "b": p}, {...: 0})["b"].value == 0
    with pytest.raises(ValueError, match=r"at \.b was already seen at \.a"):
        nnx.prefix({"a": p, "b": p}, {...: 0}, graph=False)
