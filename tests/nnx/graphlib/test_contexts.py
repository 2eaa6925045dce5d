"""split_context, merge_context and update_context: identities kept across several calls."""

import functools
import threading

import jax
import jax.numpy as jnp
import pytest

from linnet import nnx
from linnet.errors import FilterError, StateMismatchError
from tests.models import Bag, param


def through_jit(f):
    """``jax.jit(f)`` over live objects: split outside, merge inside, and the same way back."""
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def pure(graphdefs, states):
        traces.append(1)
        with nnx.merge_context("here", inner=True) as ctx:
            args = [ctx.merge(*part) for part in zip(graphdefs, states, strict=True)]
        out = f(*args)
        with nnx.split_context("here") as ctx:
            return [ctx.split(x) for x in (*args, out)]

    @nnx.update_context("here")
    def run(*args):
        with nnx.split_context("here") as ctx:
            parts = [ctx.split(x) for x in args]
        out = pure(tuple(part[0] for part in parts), [part[1] for part in parts])
        with nnx.merge_context("here", inner=False) as ctx:
            return [ctx.merge(*part) for part in out][-1]

    run.traces = traces
    return run


# ---- split_context and merge_context ------------------------------------------------------------


def test_what_two_objects_share_is_shared_again():
    shared = Bag(w=param())
    first, second = Bag(part=shared), Bag(again=[shared], w=shared.w)
    with nnx.split_context() as ctx:
        parts = [ctx.split(first), ctx.split(second)]
    assert list(nnx.to_flat_state(parts[1][1]).paths) == []
    with nnx.merge_context() as ctx:
        a, b = (ctx.merge(*part) for part in parts)
    assert a.part is b.again[0] is not shared
    assert a.part.w is b.w


def test_separate_splits_do_not_share():
    shared = Bag(w=param())
    a, b = (nnx.clone(x) for x in (Bag(part=shared), Bag(part=shared)))
    assert a.part is not b.part


def test_contexts_divide_by_filters_and_refuse_the_rest():
    bag = Bag(w=param(), n=nnx.BatchStat(0.0))
    with nnx.split_context() as ctx:
        graphdef, params, rest = ctx.split(bag, nnx.Param, ...)
        with pytest.raises(FilterError, match=r"  - \.n\n"):
            ctx.split(Bag(n=nnx.BatchStat(0.0)), nnx.Param)
    with nnx.merge_context() as ctx:
        assert ctx.merge(graphdef, rest, params).w is bag.w


def test_contexts_flatten_and_unflatten():
    shared = param()
    with nnx.split_context() as ctx:
        first = ctx.flatten(Bag(a=shared, b=param()))
        graphdef, params, rest = ctx.flatten({"x": shared, "y": nnx.Cache(1)}, nnx.Param, ...)
    assert list(first[1].paths) == [("a",), ("b",)]
    assert (list(params.paths), list(rest.paths)) == ([], [("y",)])
    with nnx.merge_context() as ctx:
        a, b = ctx.unflatten(*first), ctx.unflatten(graphdef, params, rest)
    assert a.a is b["x"] is shared


def test_used_on_a_function_the_context_is_its_first_argument():
    @nnx.split_context()
    def split_both(ctx, *nodes):
        return [ctx.split(node) for node in nodes]

    @nnx.merge_context()
    def merge_both(ctx, *parts):
        return [ctx.merge(*part) for part in parts]

    shared = param()
    a, b = merge_both(*split_both([shared], {"p": shared}))
    assert a[0] is b["p"]
    assert split_both.__name__ == "split_both"


def test_merge_context_refuses_a_state_that_does_not_fit():
    with nnx.split_context() as ctx:
        graphdef, _ = ctx.split(Bag(w=param()))
    with (
        pytest.raises(StateMismatchError, match=r"Missing:\n  - \.w\n"),
        nnx.merge_context() as ctx,
    ):
        ctx.merge(graphdef, {})


# ---- update_context -----------------------------------------------------------------------------


def test_values_and_structure_changed_inside_a_jit_reach_the_same_objects_outside():
    @through_jit
    def change(bag):
        bag.w[...] += 1
        bag.layers.append(param(7.0))
        bag.part.name = "changed"
        bag.new = bag.part
        del bag.old

    bag = Bag(w=param(1.0), layers=[param(2.0)], part=Bag(name="before"), old=param())
    kept = (bag, bag.w, bag.layers, bag.layers[0], bag.part)
    change(bag)
    assert (bag.w.value, bag.layers[1].value, bag.part.name) == (2, 7, "changed")
    assert bag.new is bag.part
    assert not hasattr(bag, "old")
    assert all(a is b for a, b in zip(kept, (bag, bag.w, bag.layers, bag.layers[0], bag.part)))  # noqa: B905


def test_objects_can_change_places():
    @through_jit
    def swap(first, second):
        first.part, second.part = second.part, first.part
        second.also = first

    a, b = Bag(part=Bag(n=1, w=param(1.0))), Bag(part=Bag(n=2, w=param(2.0)))
    part_a, part_b = a.part, b.part
    swap(a, b)
    assert a.part is part_b
    assert b.part is part_a
    assert b.also is a
    assert (a.part.n, a.part.w.value) == (2, 2)


def test_sharing_between_arguments_is_one_object_inside_and_outside():
    @through_jit
    def change(first, second):
        assert first.w is second.w
        first.w[...] += 1
        second.w[...] += 1

    shared = param(0.0)
    a, b = Bag(w=shared), Bag(w=shared)
    change(a, b)
    assert a.w is b.w is shared
    assert shared.value == 2


def test_an_argument_that_is_returned_is_itself_and_new_objects_are_new():
    @through_jit
    def make(bag):
        return {"same": bag, "part": bag.part, "new": Bag(w=bag.part.w, v=param(5.0))}

    bag = Bag(part=Bag(w=param()))
    out = make(bag)
    assert out["same"] is bag
    assert out["part"] is bag.part
    assert out["new"].w is bag.part.w
    assert out["new"].v.value == 5


def test_sharing_can_be_made_and_broken_inside():
    @through_jit
    def change(bag):
        bag.b = bag.a
        bag.d = nnx.Param(bag.d[...] * 3)

    shared = param(2.0)
    bag = Bag(a=param(), b=param(), c=shared, d=shared)
    a = bag.a
    change(bag)
    assert bag.b is bag.a is a
    assert bag.c is shared
    assert (bag.c.value, bag.d.value) == (2, 6)


def test_the_jitted_function_is_traced_once_for_one_structure():
    @through_jit
    def count(bag):
        bag.n[...] += 1

    bag = Bag(n=nnx.Variable(jnp.array(0)))
    for _ in range(3):
        count(bag)
    assert (bag.n[...], len(count.traces)) == (3, 1)
    count(Bag(n=nnx.Variable(jnp.array(0)), size=2))
    assert len(count.traces) == 2


def test_the_order_of_a_dict_changed_inside_reaches_the_outside():
    @through_jit
    def reorder(bag):
        bag.d["a"] = bag.d.pop("a")
        bag.plain["a"] = bag.plain.pop("a")

    bag = Bag(d=nnx.Dict(a=param(), b=1), plain={"a": param(), "b": 1})
    d, plain = bag.d, bag.plain
    reorder(bag)
    assert list(d) == list(plain) == ["b", "a"]
    assert bag.d is d
    assert bag.plain is plain


def test_a_method_stays_bound_to_its_object():
    @through_jit
    def change(bag):
        bag.f(2.0)

    class Acc(Bag):
        def add(self, x):
            self.w[...] += x

    acc = Acc(w=param(1.0))
    acc.f = acc.add
    change(acc)
    assert acc.f.__self__ is acc
    assert acc.w.value == 3


def test_update_context_is_a_block_too_and_can_be_nested():
    with nnx.update_context("outer") as outer:
        assert nnx.current_update_context("outer") is outer
        with nnx.update_context("outer") as inner:
            assert nnx.current_update_context("outer") is inner
        assert nnx.current_update_context("outer") is outer


def test_a_context_ends_with_its_block_also_after_an_error():
    with pytest.raises(RuntimeError), nnx.update_context("gone"):
        raise RuntimeError
    with pytest.raises(
        ValueError, match=r"^No update context found for tag 'gone'\.\nFix: with nnx"
    ):
        nnx.current_update_context("gone")


def test_contexts_belong_to_their_thread():
    found = []

    def look():
        try:
            found.append(nnx.current_update_context("mine"))
        except ValueError as error:
            found.append(str(error))

    with nnx.update_context("mine"):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert found[0].startswith("No update context found for tag 'mine'.")


@pytest.mark.parametrize(
    "use",
    [
        lambda: nnx.split_context("nowhere").__enter__(),
        lambda: nnx.current_update_context("nowhere"),
    ],
)
def test_a_tag_without_a_context_is_refused(use):
    with pytest.raises(ValueError, match="No update context found for tag 'nowhere'"):
        use()


def test_merge_context_with_a_tag_must_know_its_side():
    with pytest.raises(
        ValueError, match=r"^merge_context with a tag needs inner=True \(inside\) or"
    ):
        nnx.merge_context("tag")


def test_an_update_context_takes_the_arguments_of_flax_and_tells_what_was_merged_inside():
    context = nnx.graph.UpdateContext("tag", None, [], None, None, static_cache={})
    assert (context.outer_index_inner_ref, context.static_cache) == ([], {})
    with nnx.update_context("tag") as context:
        with nnx.split_context("tag") as ctx:
            parts = ctx.split(Bag(w=param()))
        with nnx.merge_context("tag", inner=True) as ctx:
            inside = ctx.merge(*parts)
    assert context.outer_index_inner_ref[0] is inside
    assert context.outer_index_inner_ref[1] is inside.w


# ---- the outer index of a graphdef --------------------------------------------------------------


def test_a_graphdef_of_the_inside_knows_its_objects_outside():
    bag = Bag(w=param())
    with nnx.update_context("ties"):
        with nnx.split_context("ties") as ctx:
            outside = ctx.split(bag)
        with nnx.merge_context("ties", inner=True) as ctx:
            inside = ctx.merge(*outside)
        inside.new = param()
        with nnx.split_context("ties") as ctx:
            graphdef, _ = ctx.split(inside)
    assert outside[0].outer_index is None
    assert graphdef.outer_index == (0, None, 1)
    assert graphdef.with_no_outer_index() == nnx.graphdef(inside)
    assert graphdef.with_same_outer_index().outer_index == (0, 1, 2)
    assert nnx.graphdef(inside).with_matching_outer_index(graphdef) == graphdef
    assert graphdef != nnx.graphdef(inside)
