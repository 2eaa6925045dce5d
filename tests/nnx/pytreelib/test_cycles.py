"""Objects that hold themselves are refused by JAX's own functions with an error that says so."""

import jax
import jax.numpy as jnp
import pytest

from linnet import nnx
from linnet.errors import CyclicReferenceError


class Node(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))
        self.children = []

    def add(self, parent_name="parent"):
        child = Node()
        setattr(child, parent_name, self)
        self.children.append(child)
        return child


def depth_left():
    levels = 0

    def go_down():
        nonlocal levels
        levels += 1
        go_down()

    with pytest.raises(RecursionError):
        go_down()
    return levels


@pytest.fixture
def tree():
    root = Node()
    root.add()
    return root


USES = {
    "tree.map": lambda tree: jax.tree.map(lambda x: x, tree),
    "with paths": jax.tree_util.tree_leaves_with_path,
    "jit": jax.jit(lambda tree: tree.w.value),
    "grad": jax.grad(lambda tree: tree.w.value.sum()),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_the_way_round_and_the_fix_are_named(tree, use):
    before = depth_left()
    with pytest.raises(CyclicReferenceError) as caught:
        use(tree)
    text = str(caught.value)
    # Where the cycle is found depends on how much was flattened before.
    ways = {
        "tree holds itself, at .children[0].parent, and JAX takes only trees.",
        "tree.children[0] holds itself, at .parent.children[0], and JAX takes only trees.",
    }
    assert text.splitlines()[0] in ways
    assert "Fix: use the nnx transforms" in text
    assert "graph=True" in text
    assert isinstance(caught.value, (RecursionError, ValueError))
    assert depth_left() > before / 2


def test_sharing_without_a_cycle_and_deep_nesting_are_fine():
    shared = Node()
    model = nnx.List([shared] * 300)
    assert len(jax.tree.leaves(model)) == 300
    root = node = Node()
    for _ in range(40):
        node = node.add("other")
        del node.other
    for _ in range(10):
        assert len(jax.tree.leaves(root)) == 41


def test_transforms_of_nnx_take_cycles(tree):
    assert nnx.jit(lambda tree: tree.children[0].parent.w.value)(tree).tolist() == [1.0, 1.0]
    graphdef, state = nnx.split(tree)
    pure = jax.jit(lambda state: nnx.merge(graphdef, state).children[0].w.value)
    assert pure(state).tolist() == [1.0, 1.0]


def test_a_class_that_is_no_pytree_ends_the_way():
    class Leaf(nnx.Pytree, pytree=False):
        pass

    leaf = Leaf()
    model = nnx.List([leaf, nnx.Param(jnp.ones(2))])
    leaf.model = model
    for _ in range(300):
        assert len(jax.tree.leaves(model)) == 2
