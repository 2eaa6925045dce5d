"""to_tree and from_tree: objects inside pytrees of other things."""

import jax
import jax.numpy as jnp
import pytest

from linnet import nnx
from linnet.errors import SharedReferenceError
from tests.models import Bag, param


def test_objects_are_replaced_by_their_parts_and_put_back():
    bag, lone = Bag(w=param(1.0), n=2), param(3.0)
    tree = {"x": [bag, 4, "text"], "y": (lone, jnp.ones(2))}
    pure = nnx.to_tree(tree)
    assert isinstance(pure["x"][0], nnx.NodeStates)
    assert pure["x"][0].state.w is bag.w
    assert pure["x"][1:] == [4, "text"]
    back = nnx.from_tree(pure)
    assert back["x"][0].w is bag.w
    assert (back["x"][0].n, back["x"][1:]) == (2, [4, "text"])
    assert back["y"][0] is lone


def test_the_parts_are_a_pytree():
    pure = nnx.to_tree([Bag(w=param(1.0)), param(2.0), 3.0])
    back = nnx.from_tree(jax.jit(lambda t: jax.tree.map(lambda x: x * 2, t))(pure))
    assert (back[0].w.value, back[1].value, back[2]) == (2, 4, 6)


def test_what_is_shared_between_the_places_is_shared_again():
    shared = param()
    first = Bag(w=shared)
    back = nnx.from_tree(nnx.to_tree([first, {"again": first}, Bag(v=shared), shared]))
    assert back[0] is back[1]["again"] is not first
    assert back[0].w is back[2].v is back[3]


def test_a_split_function_sees_path_prefix_and_object():
    seen = []

    def split(ctx, path, prefix, leaf):
        seen.append((jax.tree_util.keystr(path), prefix, type(leaf)))
        return nnx.NodeStates.from_split(*ctx.split(leaf, nnx.Param, ...), metadata=prefix)

    bag = Bag(w=param(), n=nnx.BatchStat(0.0))
    pure = nnx.to_tree({"a": [bag, 1], "b": param()}, prefix={"a": 0, "b": None}, split_fn=split)
    assert seen == [("['a'][0]", 0, Bag), ("['b']", None, nnx.Param)]
    assert len(pure["a"][0].states) == 2
    assert pure["a"][0].metadata == 0
    assert nnx.from_tree(pure)["a"][0].n is bag.n


def test_other_leaves_can_be_mapped_too():
    def split(ctx, path, prefix, leaf):
        return (
            (prefix, leaf) if isinstance(leaf, int) else nnx.NodeStates.from_split(*ctx.split(leaf))
        )

    pure = nnx.to_tree([1, param()], prefix="p", split_fn=split, map_non_graph_nodes=True)
    assert pure[0] == ("p", 1)

    def merge(ctx, path, prefix, leaf):
        return ctx.merge(leaf.graphdef, leaf.state) if isinstance(leaf, nnx.NodeStates) else -leaf

    back = nnx.from_tree([5, pure[1]], merge_fn=merge, map_non_graph_nodes=True)
    assert back[0] == -5
    assert isinstance(back[1], nnx.Param)


def test_from_tree_passes_prefixes_on():
    seen = []

    def merge(ctx, path, prefix, leaf):
        seen.append((jax.tree_util.keystr(path), prefix))
        return ctx.merge(leaf.graphdef, *leaf.states)

    pure = nnx.to_tree([Bag(w=param()), (param(), param())])
    nnx.from_tree(pure, prefix=[0, 1], merge_fn=merge)
    assert seen == [("[0]", 0), ("[1][0]", 1), ("[1][1]", 1)]


@pytest.mark.parametrize(
    ("tree", "first", "second", "kind"),
    [
        (lambda p: {"a": p, "b": p}, ".a", ".b", "Param"),
        (lambda p: {"a": Bag(w=p), "b": [Bag(deep={"v": p})]}, ".a.w", ".b[0].deep.v", "Param"),
    ],
)
def test_one_variable_under_two_prefixes_is_refused_with_both_paths(tree, first, second, kind):
    tree = tree(param())
    with pytest.raises(SharedReferenceError) as error:
        nnx.to_tree(tree, prefix={"a": 0, "b": 1})
    assert str(error.value) == (
        f"{kind} at {second} was already seen at {first}, under another prefix: 0 and 1.\n"
        "Fix: give both places the same prefix, or pass a copy."
    )
    assert nnx.to_tree(tree, prefix={"a": 0, "b": 0})
    assert nnx.to_tree(tree, prefix={"a": 0, "b": 1}, check_aliasing=False)


def test_identities_are_kept_across_a_transform():
    bag = Bag(w=param(1.0), part=Bag(n=1))
    part = bag.part

    @jax.jit
    def f(pure):
        (inside,) = nnx.from_tree(pure, ctxtag="t", is_inner=True)
        inside.w[...] += 1
        inside.part.n = 2
        return nnx.to_tree((inside,), ctxtag="t")

    with nnx.update_context("t"):
        out = nnx.from_tree(f(nnx.to_tree((bag,), ctxtag="t")), ctxtag="t", is_inner=False)
    assert out[0] is bag
    assert bag.part is part
    assert (bag.w.value, part.n) == (2, 2)


def test_node_states_hold_a_structure_and_states():
    graphdef, params, rest = nnx.split(Bag(w=param(), n=nnx.BatchStat(0.0)), nnx.Param, ...)
    both = nnx.NodeStates.from_split(graphdef, params, rest, metadata="m")
    assert (both.graphdef, both.states, both.metadata) == (graphdef, (params, rest), "m")
    assert both.replace(metadata="n").metadata == "n"
    assert nnx.NodeStates.from_states(params).state is params
    assert nnx.NodeStates.from_prefixes([0, None]).states == (0, None)
    rebuilt = jax.tree.map(lambda x: x, both)
    assert (rebuilt.graphdef, rebuilt.metadata) == (graphdef, "m")


def test_node_states_say_what_they_lack():
    alone = nnx.NodeStates.from_states(nnx.State({}), nnx.State({}))
    with pytest.raises(ValueError, match=r"^No graphdef available: .* made from states alone\."):
        _ = alone.graphdef
    with pytest.raises(ValueError, match=r"^Expected exactly one state, got 2\."):
        _ = alone.state
