"""The NNX API: models as Python objects, on JAX.

The folders, from the ground up; each says in its ``__init__`` what its files are for:

- ``pytreelib``: objects with attributes, what is static in them, who watches them.
- ``variablelib``: Variables: value, metadata, storage, placement on devices.
- ``graphlib``: the walk over an object graph; split, merge, update, state.
- ``rnglib``: streams of random keys. ``modules``: ``Module`` and what is done to whole modules.
- ``transforms``: ``jit``, ``grad``, ``vmap``, ``scan`` and the others, over live objects.
- ``nn``: the layers, over the functions of ``linnet.functional``.
- ``training``: optimizers and metrics. ``bridge``: Linen modules in NNX ones, and the reverse.

And the files: ``filterlib`` (filters), ``statelib`` (``State``), ``traversals`` (flat dicts by
path), ``summary`` (``tabulate``), ``compat`` (functions with ``graph`` and ``graph_updates`` on),
``helpers`` and ``tracers`` (a few functions under the paths of Flax). ``containers``, ``graph``,
``initializers``, ``losses``, ``metrics``, ``module``, ``object``, ``optimizer``, ``reprlib`` and
``visualization`` only re-export names that programs import from there.

Sharding is mainly in five places: ``variablelib.placement`` finds the sharding that the metadata of
a Variable stands for, and places its value; ``transforms.partition`` adds and removes axis names
where a transform adds and removes axes; ``spmd`` has the functions that read and write such
metadata; ``sharding`` shards whole models (``fsdp``) and counts their bytes; ``communication``
lists what a compiled function sends between devices.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from linnet.functional.dtypes import Policy, precision
from linnet.nnx import (
    compat,
    containers,
    filterlib,
    graph,
    graphlib,
    helpers,
    initializers,
    losses,
    metrics,
    module,
    nn,
    object,
    optimizer,
    pytreelib,
    reprlib,
    rnglib,
    spmd,
    statelib,
    summary,
    tracers,
    training,
    transforms,
    traversals,
    variablelib,
    visualization,
)
from linnet.nnx.communication import CollectivesReport, collectives
from linnet.nnx.containers import *
from linnet.nnx.filterlib import *
from linnet.nnx.graphlib import *
from linnet.nnx.module import *
from linnet.nnx.modules.freezing import freeze, frozen, trainable, unfreeze, what_trains
from linnet.nnx.nn.activations import (
    PReLU,
    celu,
    elu,
    gelu,
    glu,
    hard_sigmoid,
    hard_silu,
    hard_swish,
    hard_tanh,
    identity,
    leaky_relu,
    log_sigmoid,
    log_softmax,
    logsumexp,
    one_hot,
    relu,
    relu6,
    selu,
    sigmoid,
    silu,
    soft_sign,
    softmax,
    softplus,
    standardize,
    swish,
    tanh,
)
from linnet.nnx.nn.attention import (
    MultiHeadAttention,
    combine_masks,
    dot_product_attention,
    make_attention_mask,
    make_causal_mask,
)
from linnet.nnx.nn.conv import Conv, ConvTranspose
from linnet.nnx.nn.generation import generate
from linnet.nnx.nn.initializers import Initializer
from linnet.nnx.nn.linear import Einsum, Embed, Linear, LinearGeneral
from linnet.nnx.nn.lora import LoRA, LoRALinear, LoRAParam
from linnet.nnx.nn.normalization import (
    BatchNorm,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    RMSNorm,
    SpectralNorm,
    WeightNorm,
)
from linnet.nnx.nn.pipeline import pipeline
from linnet.nnx.nn.pooling import avg_pool, max_pool, min_pool, pool
from linnet.nnx.nn.recurrent import (
    RNN,
    Bidirectional,
    GRUCell,
    LSTMCell,
    OptimizedLSTMCell,
    RNNCellBase,
    SimpleCell,
)
from linnet.nnx.nn.rotary import RoPE, dot_product_attention_with_rope
from linnet.nnx.nn.stack import Stack
from linnet.nnx.nn.stochastic import Dropout
from linnet.nnx.pytreelib import *
from linnet.nnx.pytreelib.printing import display
from linnet.nnx.rnglib import *
from linnet.nnx.sharding import ShardingReport, activation_bytes, fsdp
from linnet.nnx.spmd import *
from linnet.nnx.statelib import *
from linnet.nnx.summary import tabulate
from linnet.nnx.training.ema import EMA
from linnet.nnx.training.loss_scale import LossScale
from linnet.nnx.training.metrics import Metric, MultiMetric
from linnet.nnx.training.optimizer import ModelAndOptimizer, Optimizer
from linnet.nnx.training.train_state import TrainState
from linnet.nnx.transforms import *
from linnet.nnx.transforms.donation import use_state_donation
from linnet.nnx.variablelib import *
from linnet.nnx.variablelib.variable import A

if TYPE_CHECKING:
    from linnet.nnx import bridge

# Wrong names for these that occur in Flax's documents.
BatchStats = variablelib.BatchStat
Intermediates = variablelib.Intermediate
var_default = variablelib.var_defaults

__all__ = [
    "A",
    "BatchNorm",
    "BatchStats",
    "Bidirectional",
    "CollectivesReport",
    "Conv",
    "ConvTranspose",
    "Dropout",
    "EMA",
    "Einsum",
    "Embed",
    "GRUCell",
    "GroupNorm",
    "Initializer",
    "InstanceNorm",
    "Intermediates",
    "LSTMCell",
    "LayerNorm",
    "Linear",
    "LinearGeneral",
    "LoRA",
    "LoRALinear",
    "LoRAParam",
    "LossScale",
    "Metric",
    "ModelAndOptimizer",
    "MultiHeadAttention",
    "MultiMetric",
    "OptimizedLSTMCell",
    "Optimizer",
    "PReLU",
    "Policy",
    "RMSNorm",
    "RNN",
    "RNNCellBase",
    "RoPE",
    "ShardingReport",
    "SimpleCell",
    "SpectralNorm",
    "Stack",
    "TrainState",
    "WeightNorm",
    "activation_bytes",
    "avg_pool",
    "bridge",
    "celu",
    "collectives",
    "combine_masks",
    "compat",
    "containers",
    "display",
    "dot_product_attention",
    "dot_product_attention_with_rope",
    "elu",
    "filterlib",
    "freeze",
    "frozen",
    "fsdp",
    "gelu",
    "generate",
    "glu",
    "graph",
    "graphlib",
    "hard_sigmoid",
    "hard_silu",
    "hard_swish",
    "hard_tanh",
    "helpers",
    "identity",
    "initializers",
    "leaky_relu",
    "log_sigmoid",
    "log_softmax",
    "logsumexp",
    "losses",
    "make_attention_mask",
    "make_causal_mask",
    "max_pool",
    "metrics",
    "min_pool",
    "module",
    "nn",
    "object",
    "one_hot",
    "optimizer",
    "pipeline",
    "pool",
    "precision",
    "pytreelib",
    "relu",
    "relu6",
    "reprlib",
    "rnglib",
    "selu",
    "sigmoid",
    "silu",
    "soft_sign",
    "softmax",
    "softplus",
    "spmd",
    "standardize",
    "statelib",
    "summary",
    "swish",
    "tabulate",
    "tanh",
    "tracers",
    "trainable",
    "training",
    "transforms",
    "traversals",
    "unfreeze",
    "use_state_donation",
    "var_default",
    "variablelib",
    "visualization",
    "what_trains",
]
__all__ += containers.__all__
__all__ += filterlib.__all__
__all__ += graphlib.__all__
__all__ += module.__all__
__all__ += pytreelib.__all__
__all__ += rnglib.__all__
__all__ += spmd.__all__
__all__ += statelib.__all__
__all__ += transforms.__all__
__all__ += variablelib.__all__


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> ModuleType:
    if name == "bridge":  # it brings Linen along, which most programs have no use for
        return importlib.import_module("linnet.nnx.bridge")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
