"""Axis names on Variables, and the shardings made from them.

What places values on devices is in `test_placement.py`; here it is switched off.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from linnet import nnx
from linnet.errors import AxisError

KEY = jax.random.key(0)


class Model(nnx.Module):
    def __init__(self):
        init = nnx.with_partitioning(jax.nn.initializers.ones, ("rows", None))
        self.made = nnx.Param(init(KEY, (2, 3)))
        self.named = nnx.Param(jnp.ones((2, 2)), sharding_names=("rows", "columns"))
        self.bare = nnx.BatchStat(jnp.ones(2))
        self.number = nnx.Variable(1.0)
        self.array = jnp.ones(2)
        self.width = 3


SPECS = {
    "made": PartitionSpec("rows", None),
    "named": PartitionSpec("rows", "columns"),
    "bare": PartitionSpec(),
    "number": None,
    "array": PartitionSpec(),
}


@pytest.fixture(autouse=True)
def names_alone():
    with nnx.use_eager_sharding(False):
        yield


@pytest.fixture
def mesh():
    return jax.make_mesh((1, 1), ("rows", "columns"))


def values(tree):
    found = {
        name: tree[name] if isinstance(tree, nnx.State) else getattr(tree, name) for name in SPECS
    }
    return {name: v.value if isinstance(v, nnx.Variable) else v for name, v in found.items()}


def test_with_partitioning_puts_the_names_on_the_variable(mesh):
    init = nnx.with_partitioning(jax.nn.initializers.ones, ("rows", None), mesh, unit="m")
    param = nnx.Param(init(KEY, (2, 3)))
    assert param.value.tolist() == [[1, 1, 1]] * 2
    assert (param.out_sharding, param.mesh, param.unit) == (("rows", None), mesh, "m")
    assert not nnx.Param(nnx.with_partitioning(jax.nn.initializers.ones, ())(KEY, ())).has_metadata(
        "mesh"
    )


@pytest.mark.parametrize("tree", [Model, lambda: nnx.state(Model())], ids=["module", "state"])
def test_specs_stand_in_the_place_of_arrays(tree):
    tree = tree()
    specs = nnx.get_partition_spec(tree)
    assert type(specs) is type(tree)
    assert values(specs) == SPECS
    assert type(specs.made) is nnx.Param
    assert specs.made.out_sharding == ("rows", None)


@pytest.mark.parametrize("tree", [Model, lambda: nnx.state(Model())], ids=["module", "state"])
def test_shardings_stand_in_the_place_of_arrays(tree, mesh):
    shardings = nnx.get_named_sharding(tree(), mesh)
    want = {name: spec and NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    want |= {name: NamedSharding(mesh, PartitionSpec()) for name in ("bare", "array")}
    assert values(shardings) == want


@pytest.mark.parametrize("name", ["out_sharding", "sharding_names", "sharding"])
def test_every_name_of_the_names(name):
    specs = nnx.get_partition_spec({"w": nnx.Param(jnp.ones(2), **{name: ("rows",)})})
    assert specs["w"].value == PartitionSpec("rows")
    ready = nnx.get_partition_spec(nnx.Param(jnp.ones(2), **{name: PartitionSpec("rows")}))
    assert ready.value == PartitionSpec("rows")


def test_abstract_models_have_shardings_too(mesh):
    shardings = nnx.get_named_sharding(nnx.eval_shape(Model), mesh)
    assert shardings.named.value == NamedSharding(mesh, SPECS["named"])


def test_the_name_of_the_name():
    assert nnx.PARTITION_NAME == "partition_name"


# ---- names by rules -----------------------------------------------------------------------------


def spec(names, **metadata):
    variable = nnx.Param(jnp.ones((4, 2)), out_sharding=names, **metadata)
    return tuple(nnx.get_partition_spec(variable).value)


RULES = [
    ([("embed", None), ("mlp", "model")], ("embed", "mlp"), (None, "model")),
    ([("embed", ("data", "model"))], ("embed", "mlp"), (("data", "model"), "mlp")),
    ([("embed", ["data", "model"])], ("embed", None), (("data", "model"), None)),
    ([("mlp", "model"), ("mlp", "data")], ("mlp", "model"), ("data", "model")),  # the last counts
    (
        [("embed", "data"), ("gone", None)],
        (("embed", "gone", "model"), None),
        (("data", "model"), None),
    ),
    ([], ("embed", "mlp"), ("embed", "mlp")),
]


@pytest.mark.parametrize(("rules", "names", "want"), RULES)
def test_rules_say_which_mesh_axes_names_stand_for(rules, names, want):
    with nnx.logical_axis_rules(rules):
        assert spec(names) == want
        assert spec(PartitionSpec(*names)) == want
    assert spec(names) == tuple(names)


def test_rules_of_an_inner_block_stand_alone():
    with nnx.logical_axis_rules([("embed", "data"), ("mlp", "model")]):
        with nnx.logical_axis_rules([("embed", "rows")]):
            assert spec(("embed", "mlp")) == ("rows", "mlp")
        assert spec(("embed", "mlp")) == ("data", "model")


def test_rules_of_a_variable_join_those_of_the_block():
    assert spec(("embed", "mlp"), sharding_rules=[("embed", "data")]) == ("data", "mlp")
    with nnx.logical_axis_rules([("mlp", "model")]):
        assert spec(("embed", "mlp"), sharding_rules=[("embed", "data")]) == ("data", "model")
        with pytest.raises(AxisError) as caught:
            spec(("embed", "mlp"), sharding_rules=[("mlp", "data")])
    assert str(caught.value) == (
        "Inconsistent logical axis annotations for 'mlp': 'model' by nnx.logical_axis_rules, but "
        "'data' by the Variable's own sharding_rules.\n"
        "Fix: leave the rule out in one of the two places."
    )


def test_a_function_is_traced_again_under_other_rules():
    specs = []

    @nnx.jit
    def f(model):
        specs.append(nnx.get_partition_spec(nnx.state(model)).named.value)
        return model.bare.value

    model = Model()
    for rules in ([], [("rows", "data")], [("rows", "data")]):
        with nnx.logical_axis_rules(rules):
            f(model)
    assert specs == [PartitionSpec("rows", "columns"), PartitionSpec("data", "columns")]


# ---- abstract models ----------------------------------------------------------------------------


@pytest.mark.parametrize("tree", [Model, lambda: nnx.state(Model())], ids=["module", "state"])
def test_abstract_trees_get_shardings(tree, mesh):
    abstract = nnx.eval_shape(tree)
    with jax.set_mesh(mesh):
        placed = nnx.as_abstract(abstract)
    assert type(placed) is type(abstract) and nnx.abstract_with_sharding is nnx.as_abstract
    for name in ("made", "named", "bare"):
        value = values(placed)[name]
        assert value.sharding == NamedSharding(mesh, SPECS[name])
        assert (value.shape, value.dtype) == (values(abstract)[name].shape, jnp.float32)
    assert values(nnx.as_abstract(abstract))["named"].sharding is None  # no mesh


def test_the_mesh_of_a_variable_counts_before_the_one_in_force(mesh):
    own = nnx.Param(jax.ShapeDtypeStruct((2,), jnp.float32), out_sharding=("rows",), mesh=mesh)
    assert nnx.as_abstract(own).value.sharding == NamedSharding(mesh, PartitionSpec("rows"))


def test_arrays_stay_as_they_are_and_sharing_stays(mesh):
    param = nnx.Param(jnp.ones(2), out_sharding=("rows",))
    with jax.set_mesh(mesh):
        placed = nnx.as_abstract({"a": param, "b": [param], "c": 3})
    assert placed["a"] is placed["b"][0] and placed["c"] == 3
    assert isinstance(placed["a"].value, jax.Array)


def test_an_abstract_model_with_its_shardings(mesh):
    made = []

    def init():
        made.append(None)
        return Model()

    graphdef, state = nnx.get_abstract_model(init, mesh)
    assert len(made) == 1 and graphdef == nnx.graphdef(nnx.eval_shape(Model))
    assert state.named.value == jax.ShapeDtypeStruct(
        (2, 2), jnp.float32, sharding=NamedSharding(mesh, SPECS["named"])
    )


def names_state():
    kernel = nnx.Param(jnp.ones((2, 3)), out_sharding=("a", "b"), eager_sharding=False)
    return nnx.State({"w": kernel, "plain": nnx.Param(jnp.ones(2)), "array": jnp.ones(2)})


@pytest.mark.parametrize(
    ("index", "names"),
    [
        (0, ("layers", "a", "b")),
        (1, ("a", "layers", "b")),
        (2, ("a", "b", "layers")),
        (-1, ("a", "b", "layers")),
        (-3, ("layers", "a", "b")),
    ],
)
def test_names_of_axes_are_added_and_removed(index, names):
    state = names_state()
    metadata = {nnx.PARTITION_NAME: "layers"}
    added = nnx.spmd.add_axis(state, index, metadata)
    assert added["w"] is state["w"] and added["w"].out_sharding == names
    assert added["plain"].get_metadata("out_sharding", None) is None
    assert nnx.spmd.remove_axis(added, index, metadata)["w"].out_sharding == ("a", "b")


def test_the_hooks_hear_of_axes():
    seen = []
    hook = lambda variable, index, name: seen.append((index, name))  # noqa: E731
    variable = nnx.Param(jnp.ones(2), on_add_axis=hook, on_remove_axis=hook)
    nnx.spmd.add_axis(variable, 1, {nnx.PARTITION_NAME: "z"})
    nnx.spmd.remove_axis(variable, 0, {nnx.PARTITION_NAME: "y"})
    assert seen == [(1, "z"), (0, "y")]


def test_an_axis_that_has_another_name():
    with pytest.raises(ValueError) as error:
        nnx.spmd.remove_axis(names_state(), 1, {nnx.PARTITION_NAME: "layers"})
    assert str(error.value).startswith(
        "transform_metadata: axis 1 of this Param should be named 'layers', but "
        "out_sharding=('a', 'b') has 'b' there.\nFix: "
    )


def test_an_axis_without_a_name():
    with pytest.raises(ValueError) as error:
        nnx.spmd.add_axis(names_state(), 0, {})
    assert str(error.value) == (
        "A Param has the axis names ('a', 'b'), but transform_metadata={} does not name the axis.\n"
        'Fix: {nnx.PARTITION_NAME: "name"}, with None for an axis that is not sharded.'
    )


def test_the_spec_of_one_variable():
    spec = nnx.spmd.get_var_pspec
    value = jnp.ones((2, 3))
    rules = (("x", "data"),)
    named = nnx.Param(value, out_sharding=("x", None), sharding_rules=rules, eager_sharding=False)
    assert spec(named) == jax.sharding.PartitionSpec("data", None)
    assert spec(nnx.Param(value)) == jax.sharding.PartitionSpec()
    assert spec(nnx.Param(3)) is None
