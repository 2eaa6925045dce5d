"""Transforms over objects whose data attributes hold text, dtypes, numbers, None or nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx


class Model(nnx.Module):
    def __init__(self, held):
        self.w, self.held = nnx.Param(jnp.arange(2.0)), nnx.data(held)


def read(model):
    assert model.held["text"] == "x"
    return model.w.value.astype(model.held["dtype"])


def held():
    return {"dtype": np.dtype("int32"), "text": "x"}


WAYS = {
    "jit": nnx.jit(read),
    "jit without updates": nnx.jit(read, graph_updates=False),
    "remat": nnx.remat(read),
    "cond": lambda m: nnx.cond(True, read, lambda m: m.w.value.astype(jnp.int32) + 7, m),
    "switch": lambda m: nnx.switch(0, [read, read], m),
    "vmap": nnx.vmap(lambda m: m.w.value.astype(m.held["dtype"])),
    "broadcast": lambda m: nnx.vmap(lambda m, _: read(m), in_axes=(None, 0))(m, jnp.ones(1))[0],
    "fori_loop": lambda m: read(nnx.fori_loop(0, 3, lambda i, m: m, m)),
    "scan": lambda m: nnx.scan(lambda m, _: (m, read(m)), in_axes=(nnx.Carry, 0))(m, jnp.ones(1))[
        1
    ][0],
    "made in jit": lambda m: read(nnx.jit(lambda: Model(held()))()),
}


@pytest.mark.parametrize("way", WAYS)
def test_text_and_dtypes_inside_data_stay_static(way):
    model = Model(held())
    out = WAYS[way](model)
    assert (out.dtype, out.tolist()) == (jnp.int32, [0, 1])
    assert model.held == held()


def test_eval_shape_keeps_static_leaves():
    assert nnx.eval_shape(lambda: Model(held())).held == held()


def test_a_static_leaf_that_changes_is_traced_anew():
    model, seen = Model({"text": "x", "number": 3}), []

    @nnx.jit
    def look(model):
        seen.append((model.held["text"], model.held["number"]))

    for change in ({}, {}, {"text": "y"}, {"number": 4}, {}):
        model.held.update(change)
        look(model)
    assert seen == [("x", 3), ("y", 3), ("y", 4)]


def test_a_static_leaf_set_inside_comes_out():
    model = Model({"text": "x"})

    @nnx.jit
    def change(model):
        model.held["text"] = "y"
        model.w[...] += 1

    change(model)
    assert (model.held, model.w.value.tolist()) == ({"text": "y"}, [1, 2])


@pytest.mark.parametrize("empty", [{}, [], {"a": []}, None])
def test_what_is_empty_keeps_its_mark_and_is_traced_once(empty):
    model, traces = Model(empty), []

    @nnx.jit
    def step(model):
        traces.append(1)
        model.w[...] += 1

    for _ in range(4):
        step(model)
    assert (len(traces), model.held, model.w.value.tolist()) == (1, empty, [4, 5])


def test_an_empty_dict_is_filled_and_a_missing_array_given_and_taken_in_jit():
    model = Model({})
    nnx.jit(lambda m: m.held.update(a=jnp.ones(2)))(model)
    assert nnx.state(model)["held"]["a"].tolist() == [1, 1]
    traces = []

    @nnx.jit
    def toggle(model):
        traces.append(1)
        model.held = jnp.ones(3) if model.held is None else None

    model.held = None
    for want in (True, False, True, False):
        toggle(model)
        assert (model.held is not None) is want
        assert ("held" in nnx.state(model)) is want
    assert len(traces) == 2


@pytest.mark.parametrize("values", [(None, 3, None), (3, None, 4), (None, jnp.ones(1), None)])
def test_none_in_turn_with_something_else_is_never_confused(values):
    model = Model(None)
    look = nnx.jit(lambda m: jnp.zeros(()) if m.held is None else jnp.sum(m.held))
    for _ in range(3):
        for value in values:
            model.held = value
            assert float(look(model)) == (0 if value is None else float(jnp.sum(value)))


def test_a_shared_empty_dict_stays_shared_and_is_traced_once():
    shared, traces = {}, []
    model = Model(shared)
    model.again = nnx.data(shared)

    @nnx.jit
    def step(model):
        traces.append(1)
        assert model.held is model.again

    for _ in range(3):
        step(model)
    assert len(traces) == 1
    merged = nnx.merge(*nnx.split(model))
    assert merged.held is merged.again
    assert nnx.graphdef(merged) == nnx.graphdef(model)


@nnx.register_data_type
@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Box:
    array: object
    other: object = None


def test_arrays_and_variables_in_registered_pytrees_go_through_jit():
    model = Model(Box(jnp.ones(2), nnx.Param(jnp.zeros(2))))

    @nnx.jit
    def step(model):
        model.held.other[...] += 1
        out = model.held.array * 2
        model.held = Box(model.held.array + 1, model.held.other)
        return out

    assert [step(model).tolist() for _ in range(3)] == [[2, 2], [4, 4], [6, 6]]
    assert model.held.array.tolist() == [4, 4]
    assert model.held.other.value.tolist() == [3, 3]
    grads = nnx.grad(lambda m: (m.held.array * m.held.other**2).sum())(model)
    assert grads["held"]["other"].value.tolist() == [24, 24]
