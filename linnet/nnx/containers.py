"""List, Dict and Sequential."""

from linnet.nnx.modules.containers import Dict, List, Sequential

__all__ = ["Dict", "List", "Sequential"]
