"""``nnx.transforms.autodiff``, where users find the derivatives."""

from linnet.nnx.transforms.grad import DiffState, grad, remat, value_and_grad
from linnet.nnx.transforms.vjp import custom_vjp, jvp, vjp

__all__ = [
    "DiffState",
    "custom_vjp",
    "grad",
    "jvp",
    "remat",
    "value_and_grad",
    "vjp",
]
