"""Transforms over live objects."""

from linnet.nnx.transforms.axes import Carry as Carry
from linnet.nnx.transforms.axes import StateAxes as StateAxes
from linnet.nnx.transforms.axes import StateSharding as StateSharding
from linnet.nnx.transforms.control import cond as cond
from linnet.nnx.transforms.control import switch as switch
from linnet.nnx.transforms.custom import custom_vjp as custom_vjp
from linnet.nnx.transforms.devices import pmap as pmap
from linnet.nnx.transforms.devices import shard_map as shard_map
from linnet.nnx.transforms.gradients import DiffState as DiffState
from linnet.nnx.transforms.gradients import grad as grad
from linnet.nnx.transforms.gradients import remat as remat
from linnet.nnx.transforms.gradients import value_and_grad as value_and_grad
from linnet.nnx.transforms.jit import cached_partial as cached_partial
from linnet.nnx.transforms.jit import jit as jit
from linnet.nnx.transforms.jit import jit_partial as jit_partial
from linnet.nnx.transforms.linearize import jvp as jvp
from linnet.nnx.transforms.linearize import vjp as vjp
from linnet.nnx.transforms.loops import fori_loop as fori_loop
from linnet.nnx.transforms.loops import scan as scan
from linnet.nnx.transforms.loops import while_loop as while_loop
from linnet.nnx.transforms.mapping import vmap as vmap
from linnet.nnx.transforms.partition import transform_metadata as transform_metadata
from linnet.nnx.transforms.retrace import explain_retrace as explain_retrace
from linnet.nnx.transforms.shapes import eval_shape as eval_shape
from linnet.nnx.transforms.staging import checkify as checkify
from linnet.nnx.transforms.staging import make_jaxpr as make_jaxpr
