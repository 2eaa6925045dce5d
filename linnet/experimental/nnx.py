"""``linnet.nnx`` under the path it had before."""

from typing import Any

from linnet import nnx as _nnx
from linnet.nnx import *  # noqa: F403
from linnet.nnx import __all__ as __all__


def __getattr__(name: str) -> Any:
    return getattr(_nnx, name)
