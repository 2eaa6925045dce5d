"""Where a Variable or module is, as the running program would write it."""

import functools

import jax
import jax.numpy as jnp
import pytest

from linnet import nnx
from linnet.errors import TraceContextError
from linnet.nnx.pytreelib import locate
from tests.models import Pair


class Leaf(nnx.Module):
    def __init__(self):
        self.count = nnx.Variable(jnp.array(0))

    def bump(self):
        self.count.value = 1


class Tree(nnx.Module):
    def __init__(self):
        self.leaf = Leaf()
        self.layers = nnx.List([Leaf(), Leaf()])
        self.plain = [Leaf(), {"a b": Leaf()}]
        self.table = {"key": Leaf(), 3: Leaf()}
        self.pair = Pair(nnx.Variable(1), nnx.Variable(2))
        self.up = self  # a cycle


PLACES = {
    "tree.leaf.count": lambda tree: tree.leaf.count,
    "tree.layers[1].count": lambda tree: tree.layers[1].count,
    "tree.plain[0].count": lambda tree: tree.plain[0].count,
    "tree.plain[1]['a b'].count": lambda tree: tree.plain[1]["a b"].count,
    "tree.table['key'].count": lambda tree: tree.table["key"].count,
    "tree.table[3].count": lambda tree: tree.table[3].count,
    "tree.pair.right": lambda tree: tree.pair.right,
    "tree.layers[0]": lambda tree: tree.layers[0],
}


@pytest.mark.parametrize("place", PLACES)
def test_places_in_a_model(place):
    tree = Tree()
    assert locate.describe(PLACES[place](tree)) == place


def test_no_way_leads_there():
    tree = Tree()
    assert locate.describe(nnx.Variable(0)) == ""
    assert locate.route(tree, nnx.Variable(0)) is None
    assert locate.route(tree, tree) == []


def error_of(f):
    with pytest.raises(TraceContextError) as error:
        jax.jit(f)()
    return str(error.value)


def test_the_whole_path_wins_over_the_method_s_own_view():
    tree = Tree()
    assert "at tree.layers[1].count from" in error_of(tree.layers[1].bump)


MODEL = Tree()


def test_globals_are_searched():
    assert "at MODEL.leaf.count from" in error_of(MODEL.leaf.bump)


def test_wrappers_do_not_hide_the_name():
    def passed_on(f):
        @functools.wraps(f)
        def wrapper(*args, **kwargs):
            return f(*args, **kwargs)

        return wrapper

    @passed_on
    def step(model):
        return error_of(model.leaf.bump)

    assert "at model.leaf.count from" in step(Tree())


def test_lone_variables_and_lists_of_them():
    total = nnx.Variable(jnp.array(0))
    assert "Variable at total from" in error_of(lambda: total.set_value(1))
    counts = {"seen": [nnx.Variable(jnp.array(0))]}
    assert "at counts['seen'][0] from" in error_of(lambda: counts["seen"][0].set_value(1))


def test_without_a_name_the_kind_is_told():
    hidden = iter([nnx.Param(jnp.array(0))])
    assert error_of(lambda: next(hidden).set_value(1)).startswith("Cannot mutate Param from a")


def test_strange_neighbours_do_not_hide_the_error():
    @jax.tree_util.register_pytree_node_class
    class Sealed:
        def tree_flatten(self):
            raise RuntimeError("sealed")

        @classmethod
        def tree_unflatten(cls, aux, children):
            return cls()

    sealed, numbers = [Sealed()], list(range(300_000))
    total = nnx.Variable(jnp.array(0))
    assert "Variable at total from" in error_of(lambda: total.set_value(len(sealed + numbers)))


@pytest.mark.parametrize("transforms", [1, 2])
def test_a_copy_inside_a_transform_is_found_where_its_original_is(transforms):
    found = []

    def look(leaf):
        found.extend([locate.describe(leaf.count), locate.describe(leaf)])

    for _ in range(transforms):
        look = nnx.remat(look)
    tree = Tree()
    look(tree.layers[1])
    assert found == ["tree.layers[1].count", "tree.layers[1]"]
    assert locate.describe(tree.leaf.count) == "tree.leaf.count"
