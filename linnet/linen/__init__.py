"""Linen."""

from linnet.core.frozen_dict import FrozenDict as FrozenDict
from linnet.core.lift import broadcast as broadcast
from linnet.core.meta import (
    PARTITION_NAME as PARTITION_NAME,
)
from linnet.core.meta import (
    Partitioned as Partitioned,
)
from linnet.core.meta import (
    get_partition_spec as get_partition_spec,
)
from linnet.core.meta import (
    get_sharding as get_sharding,
)
from linnet.core.meta import (
    unbox as unbox,
)
from linnet.core.meta import (
    with_partitioning as with_partitioning,
)
from linnet.linen.activation import PReLU as PReLU
from linnet.linen.activation import celu as celu
from linnet.linen.activation import elu as elu
from linnet.linen.activation import gelu as gelu
from linnet.linen.activation import glu as glu
from linnet.linen.activation import hard_sigmoid as hard_sigmoid
from linnet.linen.activation import hard_silu as hard_silu
from linnet.linen.activation import hard_swish as hard_swish
from linnet.linen.activation import hard_tanh as hard_tanh
from linnet.linen.activation import leaky_relu as leaky_relu
from linnet.linen.activation import log_sigmoid as log_sigmoid
from linnet.linen.activation import log_softmax as log_softmax
from linnet.linen.activation import logsumexp as logsumexp
from linnet.linen.activation import normalize as normalize
from linnet.linen.activation import one_hot as one_hot
from linnet.linen.activation import relu as relu
from linnet.linen.activation import relu6 as relu6
from linnet.linen.activation import selu as selu
from linnet.linen.activation import sigmoid as sigmoid
from linnet.linen.activation import silu as silu
from linnet.linen.activation import soft_sign as soft_sign
from linnet.linen.activation import softmax as softmax
from linnet.linen.activation import softplus as softplus
from linnet.linen.activation import standardize as standardize
from linnet.linen.activation import swish as swish
from linnet.linen.activation import tanh as tanh
from linnet.linen.attention import MultiHeadAttention as MultiHeadAttention
from linnet.linen.attention import MultiHeadDotProductAttention as MultiHeadDotProductAttention
from linnet.linen.attention import SelfAttention as SelfAttention
from linnet.linen.attention import combine_masks as combine_masks
from linnet.linen.attention import dot_product_attention as dot_product_attention
from linnet.linen.attention import dot_product_attention_weights as dot_product_attention_weights
from linnet.linen.attention import make_attention_mask as make_attention_mask
from linnet.linen.attention import make_causal_mask as make_causal_mask
from linnet.linen.batch_apply import BatchApply as BatchApply
from linnet.linen.combinators import Sequential as Sequential
from linnet.linen.fp8_ops import Fp8DirectDotGeneralOp as Fp8DirectDotGeneralOp
from linnet.linen.fp8_ops import Fp8DotGeneral as Fp8DotGeneral
from linnet.linen.fp8_ops import Fp8DotGeneralOp as Fp8DotGeneralOp
from linnet.linen.fp8_ops import Fp8Einsum as Fp8Einsum
from linnet.linen.fp8_ops import NANOOFp8DotGeneralOp as NANOOFp8DotGeneralOp
from linnet.linen.initializers import ones as ones
from linnet.linen.initializers import ones_init as ones_init
from linnet.linen.initializers import zeros as zeros
from linnet.linen.initializers import zeros_init as zeros_init
from linnet.linen.linear import Conv as Conv
from linnet.linen.linear import ConvLocal as ConvLocal
from linnet.linen.linear import ConvTranspose as ConvTranspose
from linnet.linen.linear import Dense as Dense
from linnet.linen.linear import DenseGeneral as DenseGeneral
from linnet.linen.linear import Einsum as Einsum
from linnet.linen.linear import Embed as Embed
from linnet.linen.module import (
    DenyList as DenyList,
)
from linnet.linen.module import (
    Module as Module,
)
from linnet.linen.module import (
    Variable as Variable,
)
from linnet.linen.module import (
    apply as apply,
)
from linnet.linen.module import (
    compact as compact,
)
from linnet.linen.module import (
    compact_name_scope as compact_name_scope,
)
from linnet.linen.module import (
    disable_named_call as disable_named_call,
)
from linnet.linen.module import (
    enable_named_call as enable_named_call,
)
from linnet.linen.module import (
    init as init,
)
from linnet.linen.module import (
    init_with_output as init_with_output,
)
from linnet.linen.module import (
    intercept_methods as intercept_methods,
)
from linnet.linen.module import (
    merge_param as merge_param,
)
from linnet.linen.module import (
    nowrap as nowrap,
)
from linnet.linen.module import (
    override_named_call as override_named_call,
)
from linnet.linen.module import (
    share_scope as share_scope,
)
from linnet.linen.normalization import BatchNorm as BatchNorm
from linnet.linen.normalization import GroupNorm as GroupNorm
from linnet.linen.normalization import InstanceNorm as InstanceNorm
from linnet.linen.normalization import LayerNorm as LayerNorm
from linnet.linen.normalization import RMSNorm as RMSNorm
from linnet.linen.normalization import SpectralNorm as SpectralNorm
from linnet.linen.normalization import WeightNorm as WeightNorm
from linnet.linen.pooling import avg_pool as avg_pool
from linnet.linen.pooling import max_pool as max_pool
from linnet.linen.pooling import pool as pool
from linnet.linen.recurrent import RNN as RNN
from linnet.linen.recurrent import Bidirectional as Bidirectional
from linnet.linen.recurrent import ConvLSTMCell as ConvLSTMCell
from linnet.linen.recurrent import GRUCell as GRUCell
from linnet.linen.recurrent import LSTMCell as LSTMCell
from linnet.linen.recurrent import MGUCell as MGUCell
from linnet.linen.recurrent import OptimizedLSTMCell as OptimizedLSTMCell
from linnet.linen.recurrent import RNNCellBase as RNNCellBase
from linnet.linen.recurrent import SimpleCell as SimpleCell
from linnet.linen.spmd import (
    LogicallyPartitioned as LogicallyPartitioned,
)
from linnet.linen.spmd import (
    get_logical_axis_rules as get_logical_axis_rules,
)
from linnet.linen.spmd import (
    logical_axis_rules as logical_axis_rules,
)
from linnet.linen.spmd import (
    logical_to_mesh as logical_to_mesh,
)
from linnet.linen.spmd import (
    logical_to_mesh_axes as logical_to_mesh_axes,
)
from linnet.linen.spmd import (
    logical_to_mesh_sharding as logical_to_mesh_sharding,
)
from linnet.linen.spmd import (
    set_logical_axis_rules as set_logical_axis_rules,
)
from linnet.linen.spmd import (
    with_logical_constraint as with_logical_constraint,
)
from linnet.linen.spmd import (
    with_logical_partitioning as with_logical_partitioning,
)
from linnet.linen.stochastic import Dropout as Dropout
from linnet.linen.summary import tabulate as tabulate
from linnet.linen.transforms import (
    add_metadata_axis as add_metadata_axis,
)
from linnet.linen.transforms import (
    checkpoint as checkpoint,
)
from linnet.linen.transforms import (
    cond as cond,
)
from linnet.linen.transforms import (
    custom_vjp as custom_vjp,
)
from linnet.linen.transforms import (
    fold_rngs as fold_rngs,
)
from linnet.linen.transforms import (
    grad as grad,
)
from linnet.linen.transforms import (
    jit as jit,
)
from linnet.linen.transforms import (
    jvp as jvp,
)
from linnet.linen.transforms import (
    map_variables as map_variables,
)
from linnet.linen.transforms import (
    remat as remat,
)
from linnet.linen.transforms import (
    remat_scan as remat_scan,
)
from linnet.linen.transforms import (
    scan as scan,
)
from linnet.linen.transforms import (
    switch as switch,
)
from linnet.linen.transforms import (
    value_and_grad as value_and_grad,
)
from linnet.linen.transforms import (
    vjp as vjp,
)
from linnet.linen.transforms import (
    vmap as vmap,
)
from linnet.linen.transforms import (
    while_loop as while_loop,
)
