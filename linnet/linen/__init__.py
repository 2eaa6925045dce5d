"""Linen."""

from linnet.core.frozen_dict import FrozenDict as FrozenDict
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
from linnet.linen.summary import tabulate as tabulate
