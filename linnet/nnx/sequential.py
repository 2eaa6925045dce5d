"""Sequential: modules and functions applied one after the other."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from linnet.errors import LayerArgumentError
from linnet.nnx import locate
from linnet.nnx.containers import List
from linnet.nnx.module import Module


class Sequential(Module):
    """Applies modules and functions in order, each to the output of the one before.

    A tuple is passed on as positional arguments, a dict as keyword arguments.

    Args:
      *fns: modules or functions.

    Example:
      >>> from linnet import nnx
      >>> nnx.Sequential(lambda x: x + 1, lambda x: (x, 2), lambda x, y: x * y)(3)
      8
    """

    def __init__(self, *fns: Callable[..., Any]):
        self.layers = List(fns)

    def __call__(self, *args: Any, rngs: Any = None, **kwargs: Any) -> Any:
        """Runs the layers.

        Args:
          *args: the input of the first layer.
          rngs: passed to every layer that takes it.
          **kwargs: more input of the first layer.

        Returns:
          The output of the last layer.

        Raises:
          LayerArgumentError: a layer cannot be called.
        """
        output: Any = _as_output(args, kwargs)
        for position, layer in enumerate(self.layers):
            if not callable(layer):
                _refuse_layer(self, position, layer)
            if position > 0:
                args, kwargs = _as_arguments(output)
            if rngs is not None and takes_rngs(layer):
                kwargs = {**kwargs, "rngs": rngs}
            output = layer(*args, **kwargs)
        return output


def _refuse_layer(model: Sequential, position: int, layer: Any) -> None:
    fix, got = "pass the module or the function itself, such as nnx.relu", repr(layer)
    if isinstance(layer, (list, tuple)):
        fix, got = "nnx.Sequential(*layers)", f"a {type(layer).__name__} of {len(layer)}"
    place = locate.describe(model) or "Sequential"
    raise LayerArgumentError(
        f"{place}.layers[{position}] is not callable: Sequential applies modules and functions, "
        f"but got {got}.\nFix: {fix}."
    )


def _as_output(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kwargs if not args else args[0] if len(args) == 1 else args


def _as_arguments(output: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(output, tuple):
        return output, {}
    return ((), output) if isinstance(output, dict) else ((output,), {})


def takes_rngs(function: Callable[..., Any]) -> bool:
    """Whether a module or function takes an argument called ``rngs``."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.name == "rngs" or p.kind is p.VAR_KEYWORD for p in parameters)
