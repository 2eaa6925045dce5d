"""How objects print."""

from linnet.nnx.pytreelib.printing import Representable, pretty

__all__ = [
    "Representable",
    "pretty",
]
