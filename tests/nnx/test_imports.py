"""The submodules that programs import, under the names users know."""

import importlib

import pytest

import linnet as flax
import linnet.nnx as nnx
from linnet import nnx as from_package
from tests.subprocesses import run_program

SUBMODULES = {
    "graphlib": "GraphDef split merge update state graphdef clone call iter_graph set_graph_mode",
    "statelib": "State FlatState to_flat_state from_flat_state to_pure_dict merge_state",
    "variablelib": "Variable Param BatchStat Cache Intermediate Perturbation VariableState",
    "filterlib": "Filter to_predicate Any All Not OfType PathContains WithTag Everything Nothing",
    "rnglib": "Rngs RngStream RngKey RngCount RngState split_rngs fork_rngs with_rngs reseed "
    "restore_rngs",
    "pytreelib": "Pytree Object data static is_data dataclass register_data_type",
    "graph": "Key GraphDef split merge update state graphdef clone iter_graph UpdateContext",
    "object": "Object Pytree",
    "helpers": "List Dict Sequential TrainState has_keyword_arg",
    "containers": "List Dict",
    "module": "Module iter_modules",
    "spmd": "with_partitioning get_partition_spec get_named_sharding get_var_pspec add_axis "
    "remove_axis",
    "nn": "",
    "nn.activations": "relu gelu softmax",
    "nn.linear": "Linear Conv canonicalize_padding default_embed_init",
    "transforms": "eval_shape",
    "transforms.general": "split_inputs merge_inputs",
    "training": "",
    "training.optimizer": "Optimizer ModelAndOptimizer OptState OptArray OptVariable",
    "training.metrics": "Metric MetricState Average Accuracy Welford Statistics MultiMetric",
    "training.ema": "EMA",
    "optimizer": "Optimizer ModelAndOptimizer OptState OptArray OptVariable",
    "metrics": "Metric MetricState Average Accuracy Welford Statistics MultiMetric Variable",
    "losses": "chunked_softmax_cross_entropy softmax_cross_entropy",
    "summary": "tabulate CallInfo filter_rng_streams",
    "tracers": "TraceState current_jax_trace",
    "traversals": "flatten_mapping unflatten_mapping",
    "reprlib": "",
    "visualization": "display",
}


@pytest.mark.parametrize("name", SUBMODULES)
def test_a_submodule_and_its_names(name):
    module = importlib.import_module(f"linnet.nnx.{name}")
    found = nnx
    for step in name.split("."):
        found = getattr(found, step)
    assert found is module
    for public in SUBMODULES[name].split():
        assert getattr(module, public) is not None
        if hasattr(nnx, public):
            assert getattr(module, public) is getattr(nnx, public)


def test_every_spelling_is_the_same_package():
    assert flax.nnx is nnx is from_package
    assert flax.nnx.Module is nnx.module.Module
    assert flax.struct.dataclass
    assert flax.errors.TraceContextError
    assert flax.config.update and flax.ids.uuid and flax.typing.Array
    assert flax.traverse_util.flatten_dict
    assert flax.__version__


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match=r"'linnet\.nnx\.rnglib' has no attribute 'nope'"):
        nnx.rnglib.nope  # noqa: B018


@pytest.mark.parametrize("first", ["rnglib", "modules.capture"])
def test_a_submodule_can_be_the_first_import(first):
    program = f"import linnet.nnx.{first}; import linnet.nnx.modules.views, linnet.nnx.statelib"
    run_program(program)
