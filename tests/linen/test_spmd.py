"""Names of axes and the rules to mesh axes; expected values are those of Flax 0.12.8."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from linnet import errors, linen as nn, nnx
from linnet.core import spmd as core_spmd
from linnet.linen import spmd
from linnet.linen.spmd import RulesFallback

MESH = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
RULES = (("embed", None), ("mlp", "model"), ("batch", "data"))
SEVERAL = (("a", "data"), ("a", "model"), ("b", "data"), ("c", ("data", "model")))
ONES = jnp.ones((2, 3))


@pytest.mark.parametrize(
    ("names", "rules", "spec"),
    [
        (("batch", "embed", "mlp"), RULES, P("data", None, "model")),
        (("batch", "zzz", None), RULES, P("data", None, None)),
        ((), RULES, P()),
        (None, RULES, None),
        (P(P.UNCONSTRAINED, "mlp"), RULES, P(P.UNCONSTRAINED, "model")),
        ((("batch", "mlp"), "c"), RULES, P(("batch", "mlp"), None)),
        (("a", "b"), SEVERAL, P("data", None)),
        (("b", "a"), SEVERAL, P(None, "data")),
        (("c", "a"), SEVERAL, P(None, "data")),
        (("b", "c", "a"), SEVERAL, P(None, None, "data")),
        (("c",), SEVERAL, P(("data", "model"))),
    ],
)
def test_logical_to_mesh_axes(names, rules, spec):
    assert nn.logical_to_mesh_axes(names, rules) == spec


def test_a_name_stands_once():
    with pytest.raises(errors.AxisError, match=r"names \('mlp', 'mlp'\) have 'mlp' more than once"):
        nn.logical_to_mesh_axes(("mlp", "mlp"), RULES)


def test_rules_are_set_for_a_block_or_for_good():
    assert nn.get_logical_axis_rules() == ()
    with nn.logical_axis_rules(RULES):
        assert nn.get_logical_axis_rules() == RULES
        with nn.logical_axis_rules([("x", ["data", "model"])]):
            assert nn.get_logical_axis_rules() == (("x", ("data", "model")),)
        assert nn.logical_to_mesh_axes(("batch", "mlp")) == P("data", "model")
    nn.set_logical_axis_rules(RULES)
    assert core_spmd.get_logical_axis_rules() == RULES
    nn.set_logical_axis_rules(())
    assert nn.get_logical_axis_rules() == ()


def test_nnx_has_the_same_rules():
    kernel = nnx.Param(ONES, out_sharding=("batch", "mlp"), eager_sharding=False)
    with nn.logical_axis_rules(RULES):
        assert nnx.get_partition_spec(kernel).get_value() == P("data", "model")
    with nnx.logical_axis_rules(RULES):
        assert nn.logical_to_mesh_axes(("batch", "mlp")) == P("data", "model")


def test_trees_of_specs():
    tree = {"w": P("batch", "mlp"), "n": None, "t": ("batch", None)}
    assert nn.logical_to_mesh(tree, RULES) == {
        "w": P("data", "model"),
        "n": None,
        "t": P("data", None),
    }
    placed = nn.logical_to_mesh_sharding({"w": P("batch", "mlp")}, MESH, RULES)
    assert placed == {"w": NamedSharding(MESH, P("data", "model"))}


def constraints(function):
    return str(jax.make_jaxpr(function)(ONES)).count("sharding_constraint")


def test_constraints_need_rules_and_a_mesh():
    names = ("batch", "mlp")
    assert constraints(lambda x: nn.with_logical_constraint(x, names, RULES, MESH)) == 1
    assert constraints(lambda x: nn.with_logical_constraint(x, names, RULES)) == 0
    assert constraints(lambda x: nn.with_logical_constraint(x, names, mesh=MESH)) == 0
    assert constraints(lambda x: nn.with_logical_constraint(x, None, RULES, MESH)) == 0
    with jax.set_mesh(MESH), nn.logical_axis_rules(RULES):
        assert constraints(lambda x: nn.with_logical_constraint(x, names)) == 1
    out = nn.with_logical_constraint(ONES, names, RULES, MESH)
    assert out.sharding == NamedSharding(MESH, P("data", "model"))
    tree = nn.with_logical_constraint({"a": ONES}, {"a": P("batch")}, RULES, MESH)
    assert tree["a"].sharding.spec == P("data")
    both = nn.with_logical_constraint({"a": ONES, "b": ONES}, P("batch"), RULES, MESH)
    assert both["b"].sharding.spec == P("data")


def test_names_without_a_rule():
    names = ("nope", "mlp")

    def run(fallback):
        return lambda x: nn.with_logical_constraint(x, names, RULES, MESH, fallback)

    assert constraints(run(RulesFallback.AXIS_IS_UNSHARDED)) == 1
    assert constraints(run(RulesFallback.NO_CONSTRAINT)) == 0
    with pytest.raises(errors.AxisError) as caught:
        run(RulesFallback.RAISE_ERROR)(ONES)
    assert str(caught.value) == (
        "There is no rule for the axis 'nope' of ('nope', 'mlp'); there are rules for 'embed', "
        "'mlp', 'batch'.\nFix: add ('nope', mesh_axis_or_None) to the rules."
    )


def test_logically_partitioned():
    init = nn.with_logical_partitioning(jax.nn.initializers.ones, ("batch", "mlp"))
    box = init(jax.random.key(0), (2, 3))
    assert isinstance(box, nn.LogicallyPartitioned) and isinstance(box, nn.Partitioned)
    assert box.names == ("batch", "mlp") and box.rules is None
    assert box.add_axis(0, {nn.PARTITION_NAME: "layers"}).names == ("layers", "batch", "mlp")
    assert nn.get_partition_spec({"w": box}) == {"w": P("batch", "mlp")}
    assert repr(nn.LogicallyPartitioned(1, ("a",))) == (
        "LogicallyPartitioned(value=1, names=('a',), mesh=None, rules=None)"
    )

    def unbox(**fields):
        return lambda x: box.replace(value=x, **fields).unbox()

    assert constraints(unbox()) == constraints(unbox(mesh=MESH)) == 0
    assert constraints(unbox(mesh=MESH, rules=RULES)) == 1
    with jax.set_mesh(MESH), nn.logical_axis_rules(RULES):
        assert constraints(unbox()) == 1
    metadata = box.replace(rules=RULES).to_nnx_metadata()
    assert metadata["sharding_rules"] == RULES and metadata["out_sharding"] == ("batch", "mlp")
    assert nn.LogicallyPartitioned.from_nnx_metadata(metadata).rules == RULES


def test_rules_of_two_places():
    assert core_spmd.composite_rules((("a", "x"),), (("b", "y"),)) == (("a", "x"), ("b", "y"))
    assert core_spmd.composite_rules(None, (("a", "x"),)) == (("a", "x"),)
    with pytest.raises(ValueError, match="Inconsistent logical axis annotations for 'a'"):
        core_spmd.composite_rules((("a", "x"),), (("a", "y"),))
    assert core_spmd.get_pspec(("a", "b"), (("a", "x"), ("b", None))) == P("x", None)
    assert core_spmd.get_pspec(None) is None
    assert spmd.get_logical_axis_rules is core_spmd.get_logical_axis_rules
