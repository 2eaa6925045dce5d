"""The name under which users know the branches and checks."""

from linnet.nnx.transforms.control import cond as cond
from linnet.nnx.transforms.control import switch as switch
from linnet.nnx.transforms.shapes import eval_shape as eval_shape
from linnet.nnx.transforms.staging import checkify as checkify
from linnet.nnx.transforms.staging import make_jaxpr as make_jaxpr
