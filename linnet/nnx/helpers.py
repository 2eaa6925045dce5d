"""The older home of the containers."""

from linnet.nnx.modules.containers import Dict, List, Sequential

__all__ = [
    "Dict",
    "List",
    "Sequential",
]
