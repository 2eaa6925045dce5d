"""A jitted function does to random object graphs what the plain function does."""

import copy

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st

from linnet import nnx
from tests.nnx.object_graphs import (
    KINDS,
    NAMES,
    STATICS,
    Leaf,
    Node,
    graphs,
    portrait,
    reachable,
    refill,
    variables,
)


@pytest.fixture(autouse=True, scope="module")
def wide_numbers():
    """Lets numpy's numbers pass through JAX as they are."""
    with jax.enable_x64(True):
        yield


few = settings(max_examples=max(10, settings.default.max_examples // 10))


def holders(root):
    """What can be edited, in an order that isomorphic graphs share."""
    return [x for x in reachable(root) if isinstance(x, Node | Leaf | nnx.List | list | dict)]


def members(root):
    """The objects of the library, which may stand anywhere, also below themselves."""
    return [x for x in reachable(root) if isinstance(x, nnx.Variable | nnx.Pytree)]


@st.composite
def edits(draw):
    """A function that changes a graph somewhere, and isomorphic graphs alike."""
    where, name, kind = draw(st.integers(0, 99)), draw(NAMES), draw(KINDS)
    static, tag = draw(STATICS), draw(st.integers(0, 9))

    def new_variable():
        return kind(jnp.float32(tag))

    def new_node():
        node = Node()
        node.inner = new_variable()
        return node

    values = {
        "static": lambda root: copy.deepcopy(static),
        "variable": lambda root: new_variable(),
        "node": lambda root: new_node(),
        "list": lambda root: [new_variable(), tag],
        "shared": lambda root: members(root)[where % len(members(root))],
    }
    value = values[draw(st.sampled_from(sorted(values)))]
    how = draw(st.sampled_from(["set", "delete", "metadata", "replace"]))

    def edit(root):
        places = holders(root)
        place = places[(where * 7 + tag) % len(places)]
        if how == "metadata":
            for variable in variables(root)[:1]:
                variable.set_metadata(role=tag)
        elif isinstance(place, nnx.List | list):
            edit_list(place, how, value(root))
        elif isinstance(place, dict):
            place.pop(name, None) if how == "delete" else place.update({name: value(root)})
        elif how == "set" or name not in vars(place):
            setattr(place, name, value(root))
        else:
            delattr(place, name)  # and what comes next may get its address
            if how == "replace":
                setattr(place, name, value(root))

    return edit


def edit_list(items, how, value):
    if how == "set" or not len(items):
        items.append(value)
    else:
        items.pop()
        if how == "replace":
            items.append(value)


@few
@given(graphs(marks=False))
def test_updates_come_out_and_nothing_else_changes(graph):
    want, before = nnx.clone(graph), reachable(graph)
    refill(want)
    nnx.jit(refill)(graph)
    assert portrait(graph) == portrait(want)
    assert all(a is b for a, b in zip(reachable(graph), before, strict=True))


@few
@given(graphs(marks=False), st.lists(edits(), min_size=1, max_size=4))
def test_no_edit_between_calls_goes_unseen(graph, changes):
    want, jitted = nnx.clone(graph), nnx.jit(refill)
    for change in [lambda root: None, *changes]:
        change(graph)
        change(want)
        refill(want)
        jitted(graph)
        assert portrait(graph) == portrait(want)


@few
@given(graphs(marks=False), st.lists(edits(), min_size=1, max_size=4))
def test_every_edit_inside_comes_out(graph, changes):
    def rebuild(root):
        for change in changes:
            change(root)
        refill(root)

    want = nnx.clone(graph)
    rebuild(want)
    nnx.jit(rebuild)(graph)
    assert portrait(graph) == portrait(want)


@few
@given(graphs(marks=False))
def test_what_comes_in_goes_out_as_itself(graph):
    out = nnx.jit(members)(graph)
    assert all(a is b for a, b in zip(out, members(graph), strict=True))
