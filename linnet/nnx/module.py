"""``Module`` and the functions users know beside it."""

from linnet.nnx.modules.capture import capture
from linnet.nnx.modules.module import M, Module, iter_module_children, iter_modules, set_precision
from linnet.nnx.modules.views import view, view_info, with_attributes

__all__ = [
    "M",
    "Module",
    "capture",
    "iter_module_children",
    "iter_modules",
    "set_precision",
    "view",
    "view_info",
    "with_attributes",
]
