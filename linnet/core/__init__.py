"""Linen's ground: FrozenDict, Scope, metadata of axes, lifted transforms of functions of scopes.

``frozen_dict``  an immutable dict that is a pytree
``filters``      which collections are meant: names, sets of names, DenyList
``rng``          random keys that fold in the path of a scope when they are drawn
``scope``        Scope, Variable, and init and apply for functions of a scope
``partial_eval`` running a function on shapes where it needs no values, for ``lazy_init``
``meta``         boxes around values with the names of their axes
``spmd``         rules from such names to the axes of a mesh
``tracers``      whether a scope is used in the trace it was made in
``lift``         JAX's transforms for functions of scopes
"""

from linnet.core import lift as lift
from linnet.core.frozen_dict import (
    FrozenDict as FrozenDict,
)
from linnet.core.frozen_dict import (
    copy as copy,
)
from linnet.core.frozen_dict import (
    freeze as freeze,
)
from linnet.core.frozen_dict import (
    pop as pop,
)
from linnet.core.frozen_dict import (
    pretty_repr as pretty_repr,
)
from linnet.core.frozen_dict import (
    unfreeze as unfreeze,
)
from linnet.core.lift import (
    custom_vjp as custom_vjp,
)
from linnet.core.lift import (
    jit as jit,
)
from linnet.core.lift import (
    jvp as jvp,
)
from linnet.core.lift import (
    remat as remat,
)
from linnet.core.lift import (
    remat_scan as remat_scan,
)
from linnet.core.lift import (
    scan as scan,
)
from linnet.core.lift import (
    vjp as vjp,
)
from linnet.core.lift import (
    vmap as vmap,
)
from linnet.core.lift import (
    while_loop as while_loop,
)
from linnet.core.meta import (
    AxisMetadata as AxisMetadata,
)
from linnet.core.meta import (
    map_axis_meta as map_axis_meta,
)
from linnet.core.meta import (
    unbox as unbox,
)
from linnet.core.scope import (
    Array as Array,
)
from linnet.core.scope import (
    DenyList as DenyList,
)
from linnet.core.scope import (
    Scope as Scope,
)
from linnet.core.scope import (
    apply as apply,
)
from linnet.core.scope import (
    bind as bind,
)
from linnet.core.scope import (
    init as init,
)
from linnet.core.scope import (
    lazy_init as lazy_init,
)
from linnet.core.tracers import (
    check_trace_level as check_trace_level,
)
from linnet.core.tracers import (
    current_trace as current_trace,
)
