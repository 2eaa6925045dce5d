"""The older home of the containers and of ``TrainState``."""

import inspect
from collections.abc import Callable
from typing import Any

from linnet.nnx.modules.containers import Dict, List, Sequential
from linnet.nnx.training.train_state import TrainState

__all__ = [
    "Dict",
    "List",
    "Sequential",
    "TrainState",
    "has_keyword_arg",
]


def has_keyword_arg(func: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of that name which can be given by keyword.

    Args:
      func: the function.
      name: the name.

    Returns:
      False too if it only has ``**kwargs``.

    Example:
      >>> from linnet.nnx.helpers import has_keyword_arg
      >>> has_keyword_arg(lambda x, *, rngs=None: x, "rngs"), has_keyword_arg(len, "rngs")
      (True, False)
    """
    parameter = inspect.signature(func).parameters.get(name)
    return parameter is not None and parameter.kind in (
        parameter.KEYWORD_ONLY,
        parameter.POSITIONAL_OR_KEYWORD,
    )
