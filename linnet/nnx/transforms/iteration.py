"""The name under which users know the loops and maps."""

from linnet.nnx.transforms.axes import Carry as Carry
from linnet.nnx.transforms.axes import StateAxes as StateAxes
from linnet.nnx.transforms.devices import pmap as pmap
from linnet.nnx.transforms.loops import fori_loop as fori_loop
from linnet.nnx.transforms.loops import scan as scan
from linnet.nnx.transforms.loops import while_loop as while_loop
from linnet.nnx.transforms.mapping import vmap as vmap
from linnet.nnx.transforms.partition import transform_metadata as transform_metadata
