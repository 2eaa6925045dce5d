"""Transforms over live objects.

A call of a transform opens its arguments, runs the user's function on copies inside the JAX
transform, and closes: it writes what changed into the objects outside (``eval_shape`` and
``make_jaxpr`` change nothing; ``jit`` runs the function only while it traces). The way of a call
through the files:

- ``engine`` opens, enters, runs, leaves and closes; read its docstring first. ``effects``: what
  one run changed.
- ``run``: ``Call`` is one call, with its arguments by slot; ``Run`` says what happened to them.
- ``leaks`` names traced arrays that a run leaves where nobody can use them.
- ``axes`` finds the axis or sharding of every slot; ``partition`` names axes in metadata.
- ``jit`` compiles (``lowering``: ahead of time), an ``entry`` for each structure; ``arguments`` has
  its static and donated arguments and shardings; ``plan`` remembers walks; ``donation`` reuses the
  memory of state; on a GPU ``packing`` joins small arrays, ``rewriting`` replaces what XLA compiles
  to too many passes, and ``compiler_options`` chooses options; ``errors`` explains errors of JAX;
  ``retrace`` tells why it traced again.
- ``grad`` (with ``remat``), ``vjp`` (with ``jvp``, ``custom_vjp``), ``vmap`` (with ``pmap``,
  ``shard_map``), ``loops`` and ``carry``, ``control`` (branches), ``staging`` (``make_jaxpr``,
  ``checkify``, ``eval_shape``): the transforms themselves.
- ``accumulate``: gradients of a batch in parts, by ``grad`` inside of ``loops``.
- ``eager`` compiles loops, branches and recurrent layers that are called outside of all traces;
  ``library_code`` tells whether such a call would run code of the user's.
- ``option_types`` is what type checkers are told.
- ``general``: ``split_inputs`` and ``merge_inputs``, for JAX transforms of one's own.
- ``autodiff``, ``compilation``, ``iteration`` and ``transforms`` only re-export names.

Outside of all traces ``nnx.jit`` goes as follows (inside of one it walks in every call):

- The first call with a model walks it, and traces the function: it builds copies of the objects,
  runs the user's function on them, and walks them to see what changed.
- The second call with the same model does not trace. It walks the model once more, because objects
  that are met once are often new in every call, so that nothing was kept of them, and again after
  its parts are watched; the record of the walk is stored on the object, and a plan is made.
- From the third call on nothing is walked. The call finds the plan by the ids of the objects,
  checks that nothing announced a change and that plain lists, dicts, other pytrees and static
  values that can change are as they were, reads the raw values of the Variables and the arrays in
  attributes into flat lists, calls the compiled function, and writes back the values that changed.

What was met before is the object, with whichever function: a model that another jitted function has
a record of is not walked. After a change of structure it is walked again. As with ``jax.jit``, new
shapes and dtypes cause a new trace. Walked in every call are a Variable that is an
argument itself, an object that is passed twice or is part of an argument before it, and objects
with a Variable that is stored as a ref or whose metadata can change in place, or with an array
inside a custom pytree.

``nnx.vmap`` has no plan (``pmap`` has). It compiles nothing: it opens, enters, runs, leaves and
closes in every call, and needs an axis for every slot, new array and output, which may be None.
Inside ``nnx.jit`` that happens while tracing, and costs nothing later.
"""

from linnet.nnx.transforms import general as general
from linnet.nnx.transforms.accumulate import accumulate_gradients
from linnet.nnx.transforms.axes import Carry, StateAxes, StateSharding
from linnet.nnx.transforms.control import cond, switch
from linnet.nnx.transforms.grad import DiffState, grad, remat, value_and_grad
from linnet.nnx.transforms.jit import cached_partial, jit, jit_partial
from linnet.nnx.transforms.loops import fori_loop, scan, while_loop
from linnet.nnx.transforms.partition import transform_metadata
from linnet.nnx.transforms.retrace import explain_retrace
from linnet.nnx.transforms.staging import checkify, eval_shape, make_jaxpr
from linnet.nnx.transforms.vjp import custom_vjp, jvp, vjp
from linnet.nnx.transforms.vmap import pmap, shard_map, vmap

__all__ = [
    "Carry",
    "DiffState",
    "StateAxes",
    "StateSharding",
    "accumulate_gradients",
    "cached_partial",
    "checkify",
    "cond",
    "custom_vjp",
    "eval_shape",
    "explain_retrace",
    "fori_loop",
    "grad",
    "jit",
    "jit_partial",
    "jvp",
    "make_jaxpr",
    "pmap",
    "remat",
    "scan",
    "shard_map",
    "switch",
    "transform_metadata",
    "value_and_grad",
    "vjp",
    "vmap",
    "while_loop",
]
