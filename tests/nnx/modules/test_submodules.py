"""The submodules that programs import are there, with the same things in them as ``nnx``."""

import importlib

import pytest

from linnet import nnx

NAMES = {
    "filterlib": "All Any Everything Not Nothing OfType PathContains WithTag",
    "graph": "cached_partial clone graphdef iter_graph merge split state update",
    "graphlib": "GraphDef clone graphdef iter_graph merge split state update",
    "helpers": "Dict List Sequential",
    "initializers": "lecun_normal zeros_init",
    "module": "Module capture iter_modules view with_attributes",
    "nn.activations": "PReLU relu",
    "nn.attention": "MultiHeadAttention dot_product_attention make_causal_mask",
    "nn.linear": "Conv ConvTranspose Einsum Embed Linear LinearGeneral",
    "nn.lora": "LoRA LoRALinear LoRAParam",
    "nn.normalization": "BatchNorm GroupNorm LayerNorm RMSNorm SpectralNorm WeightNorm",
    "nn.recurrent": "Bidirectional GRUCell LSTMCell OptimizedLSTMCell RNN SimpleCell",
    "nn.stochastic": "Dropout",
    "object": "Object",
    "optimizer": "Optimizer",
    "pytreelib": "Pytree",
    "rnglib": "RngStream Rngs split_rngs",
    "statelib": "State",
    "training.optimizer": "ModelAndOptimizer Optimizer",
    "transforms.autodiff": "DiffState custom_vjp grad jvp remat value_and_grad vjp",
    "transforms.compilation": "StateSharding jit jit_partial shard_map",
    "transforms.iteration": "Carry StateAxes fori_loop pmap scan vmap while_loop",
    "transforms.transforms": "checkify cond eval_shape make_jaxpr switch",
    "variablelib": "BatchStat Param Variable",
}


@pytest.mark.parametrize("module", NAMES)
def test_a_submodule_has_what_users_import_from_it(module):
    found = importlib.import_module(f"linnet.nnx.{module}")
    for name in NAMES[module].split():
        home = nnx.initializers if module == "initializers" else nnx
        assert getattr(found, name) is getattr(home, name)


def test_a_module_says_what_it_does_not_have():
    with pytest.raises(AttributeError, match="has no attribute 'nope'"):
        importlib.import_module("linnet.nnx.module").nope  # noqa: B018
