"""update and pop: an object changed in place from a state, all of it or nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import FilterError, StateMismatchError, TraceContextError
from linnet.nnx.pytreelib.objects import fix_data
from tests.models import Bag, Pair, param


def full(value, *shape):
    return jnp.full(shape, value, jnp.float32)


def values(tree):
    return [np.asarray(x).ravel()[0].item() for x in jax.tree.leaves(tree)]


@pytest.fixture
def model():
    return Bag(
        w=param(1.0, 2),
        mean=nnx.BatchStat(full(2.0, 2)),
        layers=[Bag(w=param(3.0)), {"a": param(4.0)}],
        raw=full(5.0, 3),
        size=2,
    )


# ---- update -------------------------------------------------------------------------------------


def test_update_writes_values_and_keeps_every_object(model):
    w, layers, inner = model.w, model.layers, model.layers[0]
    nnx.update(model, jax.tree.map(lambda x: x * 10, nnx.state(model)))
    assert values(model) == [30, 40, 20, 50, 10]
    assert (model.w, model.layers, model.layers[0]) == (w, layers, inner)
    assert model.w is w


def test_update_leaves_paths_alone_that_are_not_mentioned(model):
    nnx.update(model, {"layers": {1: {"a": full(7.0)}}})
    assert values(model) == [3, 7, 2, 5, 1]


def test_update_takes_several_states_and_later_ones_win(model):
    nnx.update(model, {"w": full(6.0, 2)}, nnx.State({"w": param(7.0, 2), "raw": full(8.0, 3)}))
    assert values(model) == [3, 4, 2, 8, 7]


def test_update_with_its_own_state_changes_nothing(model):
    before = values(model)
    nnx.update(model, nnx.state(model))
    assert values(model) == before


@pytest.mark.parametrize("new", [np.float32([9, 9]), nnx.Param(full(9.0, 2)), full(9.0, 2)])
def test_update_takes_arrays_and_variables(model, new):
    kept = model.w
    nnx.update(model, {"w": new})
    assert model.w is kept
    assert np.asarray(model.w.value).tolist() == [9, 9]


def test_update_takes_metadata_over(model):
    nnx.update(model, {"w": nnx.Param(full(9.0, 2), role="gate")})
    assert model.w.role == "gate"


def test_update_reaches_into_tuples_and_other_pytrees():
    bag = Bag(pair=Pair(full(1.0), (param(2.0), full(3.0))), state=nnx.State({"x": full(4.0)}))
    kept = bag.pair.right[0]
    nnx.update(bag, jax.tree.map(lambda x: -x, nnx.state(bag)))
    assert values(bag) == [-1, -2, -3, -4]
    assert isinstance(bag.pair, Pair)
    assert bag.pair.right[0] is kept


@pytest.mark.parametrize(
    "root",
    [
        lambda bag: (bag, {"other": param(0.0)}),
        lambda bag: [bag],
        lambda bag: {"bag": bag},
        lambda bag: bag,
    ],
)
def test_update_takes_any_tree_of_modules_as_state_does(root, model):
    tree = root(model)
    nnx.update(tree, jax.tree.map(lambda x: x + 1, nnx.state(tree)))
    assert model.w.value.tolist() == [2, 2]


def test_update_of_a_lone_variable():
    variable = param(1.0)
    nnx.update(variable, full(2.0))
    nnx.update(variable, nnx.Param(full(3.0)))
    assert variable.value == 3


def test_update_carries_out_of_jit_what_state_returned(model):
    @jax.jit
    def step(model):
        model.mean[...] += 1
        model.raw = model.raw * 2
        return nnx.state(model)

    nnx.update(model, step(model))
    assert values(model) == [3, 4, 3, 10, 1]


def test_new_variables_are_taken_over_when_they_were_sown():
    @jax.jit
    def run(model):
        model.sow(nnx.Intermediate, "seen", jnp.ones(()))
        model.sow(nnx.Intermediate, "seen", jnp.zeros(()))
        return nnx.state(model, nnx.Intermediate)

    model = Bag(w=param())
    nnx.update(model, run(model))
    assert [float(x) for x in model.seen.value] == [1, 0]
    nnx.update(model, run(model))
    assert [float(x) for x in model.seen.value] == [1, 0, 1, 0]


def test_update_of_a_shared_variable_changes_both_places():
    shared = param(1.0)
    bag = Bag(a=shared, b=shared)
    nnx.update(bag, {"a": full(2.0)})
    assert (bag.b.value, bag.a is bag.b) == (2, True)


MISFITS = {
    "extra": ({"x": 1, "layers": {5: {"q": 2}}}, [".x: not in the object", ".layers[5].q: not in"]),
    "a dict for a Variable": ({"w": {"q": jnp.ones(2)}}, [".w: expected PyTreeDef(*), got Py"]),
    "None for a Variable": ({"w": None}, [".w: expected PyTreeDef(*), got PyTreeDef(None)"]),
    "a leaf for a module": ({"layers": {0: 3}}, [".layers[0]: is a Bag, got int"]),
    "an extra sown into a list": ({"layers": {9: nnx.Intermediate(1)}}, [".layers[9]: not in"]),
    "an array for a number": ({"size": jnp.ones(2)}, [".size: expected the Python int 2, got fl"]),
    "several": (
        {"w": {"q": 1}, "mean": None, "y": 1, "layers": {1: {"z": 2}}},
        [
            ".w: expected",
            ".mean: expected PyTreeDef(*), got PyTreeDef(None)",
            ".y: not",
            ".layers[1].z: not",
        ],
    ),
}


@pytest.mark.parametrize(("state", "lines"), MISFITS.values(), ids=MISFITS)
def test_a_state_that_does_not_fit_is_refused_with_all_paths_and_changes_nothing(
    model, state, lines
):
    before, structure = values(model), nnx.graphdef(model)
    fitting = {"layers": {0: {"w": full(99.0)}}} if "layers" not in state else {}
    with pytest.raises(StateMismatchError) as error:
        nnx.update(model, fitting, state)
    text = str(error.value)
    assert text.startswith("The state does not fit the object, which is unchanged:\n  - ")
    assert all(f"  - {line}" in text for line in lines)
    assert len([line for line in text.splitlines() if line.startswith("  - ")]) == len(lines)
    assert "Fix: take the state from an object of the same structure" in text
    assert (values(model), nnx.graphdef(model)) == (before, structure)


def test_variables_that_hold_pytrees_must_get_the_same_structure():
    bag = Bag(v=nnx.Variable({"a": jnp.ones(2), "b": (jnp.ones(1),)}))
    nnx.update(bag, {"v": {"a": jnp.zeros(2), "b": (jnp.zeros(1),)}})
    assert values(bag) == [0, 0]
    for wrong in ({"a": jnp.ones(2)}, {"a": jnp.ones(2), "c": (jnp.ones(1),)}):
        with pytest.raises(StateMismatchError, match=r"\.v: expected PyTreeDef\({'a': \*, 'b': "):
            nnx.update(bag, {"v": wrong})


def test_values_may_have_another_shape_or_dtype():
    bag = Bag(v=nnx.Variable(1), w=param(), raw=jnp.ones(2))
    nnx.update(bag, {"v": jnp.array(2), "w": jnp.ones((3, 1), jnp.int32), "raw": jnp.zeros(3)})
    assert (bag.v.value, bag.w.value.shape, bag.w.value.dtype) == (2, (3, 1), jnp.int32)
    assert bag.raw.tolist() == [0, 0, 0]
    nnx.update(bag.v, jnp.ones(3))
    assert bag.v.value.tolist() == [1, 1, 1]


def test_a_stacked_state_is_written_back_for_vmap():
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    before = layer(jnp.ones(2))
    nnx.update(layer, jax.tree.map(lambda x: jnp.stack([x, 2 * x]), nnx.state(layer)))
    out = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(layer, jnp.ones(2))
    assert layer.kernel.shape == (2, 2, 3)
    assert jnp.allclose(out, jnp.stack([before, 2 * before]))


def test_update_in_jit_changes_shapes_outside():
    layer = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    before = layer.kernel[...]
    nnx.jit(lambda m: nnx.update(m, jax.tree.map(lambda x: jnp.stack([x, x]), nnx.state(m))))(layer)
    assert (layer.kernel.shape, layer.bias.shape) == ((2, 1, 1), (2, 1))
    assert (layer.kernel[...] == before[None]).all() and (layer.bias[...] == 0).all()


def test_the_type_of_a_ref_is_fixed_and_nothing_is_written():
    bag = Bag(a=param(1.0), v=nnx.Param(jnp.ones(1), ref=True))
    with pytest.raises(StateMismatchError, match=r"\.v: expected float32\[1\], got float32\[2\]"):
        nnx.update(bag, {"a": full(2.0), "v": jnp.ones(2)})
    assert bag.a.value == 1


@pytest.mark.parametrize(
    ("node", "state", "error", "text"),
    [
        (Bag(), 3, StateMismatchError, "takes a State or a mapping, but got int"),
        (3, {}, TypeError, "changes a module, a Variable or a pytree of them, but got int"),
        (jnp.ones(2), {}, TypeError, "but got ArrayImpl"),
        ((jnp.ones(1),), {0: jnp.ones(1)}, StateMismatchError, "stands directly in a tuple passed"),
    ],
)
def test_what_cannot_be_updated(node, state, error, text):
    with pytest.raises(error, match=text):
        nnx.update(node, state)


def test_a_read_only_variable_stops_the_whole_update():
    bag = Bag(a=param(1.0), b=nnx.Param(full(1.0), mutable=False))
    with pytest.raises(TraceContextError, match=r"Param at bag\.b is read-only"):
        nnx.update(bag, {"a": full(2.0), "b": full(2.0)})
    assert bag.a.value == 1


@pytest.mark.parametrize("name", ["variable", "array"])
def test_an_update_from_another_trace_stops_before_the_first_write(name):
    outside = Bag(variable=param(1.0), array=full(1.0))

    @jax.jit
    def f():
        inside = Bag(first=param(1.0), outside=outside)
        with pytest.raises(TraceContextError, match="different trace level"):
            nnx.update(inside, {"first": full(2.0), "outside": {name: full(2.0)}})
        return inside.first[...]

    assert f() == 1
    assert (outside.variable.value, outside.array) == (1, 1)


def test_update_writes_through_refs():
    bag = Bag(v=nnx.Param(full(1.0), ref=True))
    ref = bag.v.raw_value
    nnx.update(bag, {"v": full(2.0)})
    assert bag.v.raw_value is ref
    assert bag.v.value == 2


# ---- pop ----------------------------------------------------------------------------------------


def test_pop_removes_variables_and_returns_them(model):
    w, inner = model.w, model.layers[1]["a"]
    popped = nnx.pop(model, nnx.Param)
    assert list(popped.flat_state().paths) == [("layers", 0, "w"), ("layers", 1, "a"), ("w",)]
    assert popped.w is w
    assert popped.layers[1].a is inner
    assert values(model) == [2, 5]
    assert not hasattr(model, "w")
    assert model.layers[1] == {}


def test_pop_divides_among_filters(model):
    stats, params = nnx.pop(model, nnx.BatchStat, nnx.PathContains("layers"))
    assert list(stats.flat_state().paths) == [("mean",)]
    assert list(params.flat_state().paths) == [("layers", 0, "w"), ("layers", 1, "a")]
    assert values(model) == [5, 1]


def test_pop_of_what_was_sown(model):
    model.layers[0].sow(nnx.Intermediate, "seen", 1)
    popped = nnx.pop(model, nnx.Intermediate)
    assert list(popped.flat_state().paths) == [("layers", 0, "seen")]
    assert popped.layers[0].seen.value == (1,)
    assert not hasattr(model.layers[0], "seen")


def test_pop_from_lists_removes_the_right_positions():
    bag = Bag(xs=[param(0.0), nnx.BatchStat(1.0), param(2.0), 3], ys=nnx.List([param(4.0), "y"]))
    popped = nnx.pop(bag, nnx.Param)
    assert list(popped.flat_state().paths) == [("xs", 0), ("xs", 2), ("ys", 0)]
    assert (len(bag.xs), bag.xs[1], list(bag.ys)) == (2, 3, ["y"])


def test_pop_removes_a_shared_variable_everywhere_under_its_first_path():
    shared = param()
    bag = Bag(a=shared, b=[shared], inner=Bag(c=shared))
    popped = nnx.pop(bag, nnx.Param)
    assert list(popped.flat_state().paths) == [("a",)]
    assert popped.a is shared
    assert (hasattr(bag, "a"), bag.b, hasattr(bag.inner, "c")) == (False, [], False)


def test_pop_decides_where_a_variable_is_met_first():
    shared = param()
    bag = Bag(a=shared, z=shared)
    assert nnx.pop(bag, nnx.PathContains("z")) == {}
    assert bag.a is bag.z is shared
    assert list(nnx.pop(bag, nnx.PathContains("a")).flat_state().paths) == [("a",)]


def test_pop_goes_round_cycles_once():
    bag = Bag(w=param())
    bag.me = bag
    assert list(nnx.pop(bag, ...).flat_state().paths) == [("w",)]
    assert bag.me is bag


@pytest.mark.parametrize("filters", [(), (3,)])
def test_pop_wants_filters(filters):
    with pytest.raises(FilterError, match=r"Expected at least one filter|Not a filter: 3"):
        nnx.pop(Bag(w=param()), *filters)


def test_pop_takes_arrays_where_a_filter_selects_them():
    bag = Bag(w=param(1.0), raw=jnp.ones(2), d={"x": jnp.zeros(1), "n": 3}, mark=nnx.data("m"))
    assert list(nnx.pop(bag, nnx.PathContains("x")).flat_state().paths) == [("d", "x")]
    assert bag.d == {"n": 3}
    params, rest = nnx.pop(bag, nnx.Param, ...)
    assert (list(params), list(rest)) == (["w"], ["mark", "raw"])
    assert sorted(vars(bag)) == ["d"]
    tree = {"a": param(1.0), "c": jnp.ones(3), "n": 3}
    popped = nnx.pop(tree, lambda path, x: isinstance(x, jax.Array))
    assert (list(popped), sorted(tree)) == (["c"], ["a", "n"])


@pytest.mark.parametrize(
    ("holder", "place"), [(lambda p: (p,), "[0]"), (lambda p: Pair(p, 1), ".left")]
)
def test_pop_cannot_shorten_a_tuple_and_then_removes_nothing(holder, place):
    bag = Bag(a=param(), deep=[holder(param())])
    kind = type(bag.deep[0]).__name__
    with pytest.raises(ValueError) as error:
        nnx.pop(bag, nnx.Param)
    assert str(error.value) == (
        f"nnx.pop cannot remove the Param at .deep[0]{place}: a {kind} has a fixed length. "
        "Nothing was removed.\nFix: hold it in a list, a dict or an attribute."
    )
    assert len(jax.tree.leaves(bag)) == 2


def test_text_where_integers_are_meant():
    model = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(2)])
    state = {str(n): dict(nnx.state(layer)) for n, layer in enumerate(model)}
    with pytest.raises(StateMismatchError) as caught:
        nnx.update(model, state | {"7": {"kernel": jnp.ones((2, 2))}})
    hint = "the key is the integer {}; nnx.restore_int_paths turns text into integers"
    lines = str(caught.value).splitlines()
    assert lines[1] == f"  - ['0'].bias: not in the object: {hint.format(0)}"
    assert lines[3] == f"  - ['1'].bias: not in the object: {hint.format(1)}"
    assert lines[5] == "  - ['7'].kernel: not in the object"
    nnx.update(model, nnx.restore_int_paths(state))
    with pytest.raises(
        StateMismatchError, match=r"Fix: nnx\.restore_int_paths\(state\): some keys"
    ):
        nnx.merge(nnx.graphdef(model), state)


def test_a_long_list_of_what_does_not_fit_is_cut():
    model = nnx.List([nnx.Param(jnp.ones(2)) for _ in range(40)])
    with pytest.raises(StateMismatchError) as caught:
        nnx.update(model, dict.fromkeys(range(40)))
    lines = str(caught.value).splitlines()
    assert lines[10] == "  - [9]: expected PyTreeDef(*), got PyTreeDef(None)"
    assert lines[11] == "  - and 30 more"
    assert lines[12].startswith("Fix: ")
    assert len(lines) == 13


def test_pop_removes_nothing_where_one_module_refuses():
    pair = Bag(a=Bag(w=nnx.Intermediate(full(1.0))), b=Bag(w=nnx.Intermediate(full(2.0))))
    fix_data(pair.a)
    with pytest.raises(TraceContextError, match=r"pair\.a\.w is read-only"):
        nnx.pop(pair, nnx.Intermediate)
    assert values(nnx.state(pair)) == [1.0, 2.0]
