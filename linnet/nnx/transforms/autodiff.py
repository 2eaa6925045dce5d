"""The name under which users know the derivatives."""

from linnet.nnx.transforms.custom import custom_vjp as custom_vjp
from linnet.nnx.transforms.gradients import DiffState as DiffState
from linnet.nnx.transforms.gradients import grad as grad
from linnet.nnx.transforms.gradients import remat as remat
from linnet.nnx.transforms.gradients import value_and_grad as value_and_grad
from linnet.nnx.transforms.linearize import jvp as jvp
from linnet.nnx.transforms.linearize import vjp as vjp
