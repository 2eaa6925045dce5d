"""What Linen is built on: FrozenDict, Scope, metadata of axes, transforms of functions of scopes.

``frozen_dict``  an immutable dict that is a pytree; ``linnet.frozen_dict`` has the class
``filters``      which collections are meant: names, sets of names, DenyList
``rng``          random keys that fold in the path of a scope when they are drawn
``scoping``      the classes Scope and Variable
``scope``        init and apply for functions of a scope; it and ``variables`` re-export the classes
``packing``      scopes as arrays and structure, to take them through a transform
``partial_eval`` running a function on shapes where it needs no values, for ``lazy_init``
``meta``         boxes around values with the names of their axes
``spmd``         rules from such names to the axes of a mesh
``tracers``      whether a scope is used in the trace it was made in
``lift``         JAX's transforms for functions of scopes, to be imported from there: jit, remat,
                 branches and mapped variables, beside those of the next two
``lift_axes``    vmap, scan and while_loop
``lift_grad``    vjp, grad, jvp and custom_vjp

``init`` and ``apply`` make a root ``Scope`` of the collections and random keys that they are given,
run a function on it, and return its output and, if any could be written, these collections. The
function makes child scopes, which are views on the same nested dicts, draws keys by their paths,
and takes values out of the boxes of ``meta``. A lifted transform takes scopes apart into groups of
collections and keys, runs the function on new scopes of these groups inside JAX's transform, and
writes what came out into the scopes outside; ``packing`` tells how.
"""

from linnet.core import frozen_dict, lift, meta, partial_eval, scope, spmd, tracers
from linnet.core.lift import (
    broadcast,
    custom_vjp,
    jit,
    jvp,
    remat,
    remat_scan,
    scan,
    vjp,
    vmap,
    while_loop,
)
from linnet.core.meta import AxisMetadata, map_axis_meta, unbox
from linnet.core.scope import Array, DenyList, Scope, apply, bind, init, lazy_init
from linnet.core.tracers import check_trace_level, current_trace
from linnet.frozen_dict import FrozenDict, copy, freeze, pop, pretty_repr, unfreeze

__all__ = [
    "Array",
    "AxisMetadata",
    "DenyList",
    "FrozenDict",
    "Scope",
    "apply",
    "bind",
    "broadcast",
    "check_trace_level",
    "copy",
    "current_trace",
    "custom_vjp",
    "freeze",
    "frozen_dict",
    "init",
    "jit",
    "jvp",
    "lazy_init",
    "lift",
    "map_axis_meta",
    "meta",
    "partial_eval",
    "pop",
    "pretty_repr",
    "remat",
    "remat_scan",
    "scan",
    "scope",
    "spmd",
    "tracers",
    "unbox",
    "unfreeze",
    "vjp",
    "vmap",
    "while_loop",
]
