"""The running trace of JAX, as ``nnx`` shows it."""

from __future__ import annotations

from typing import Any

from linnet.nnx.pytreelib.printing import PrintedForm, Representable
from linnet.nnx.pytreelib.tracing import current_trace, same_trace


def current_jax_trace() -> Any:
    """The token of the running trace; tokens of the same trace are equal."""
    return current_trace()


class TraceState(Representable):
    """Remembers the trace it was made in.

    Example:
      >>> import jax
      >>> from linnet import nnx
      >>> outside = nnx.tracers.TraceState()
      >>> outside.is_valid(), jax.eval_shape(lambda: outside.is_valid() * 1)
      (True, ShapeDtypeStruct(shape=(), dtype=int32, weak_type=True))
      >>> seen = jax.jit(lambda x: print("inside:", outside.is_valid()))(0)
      inside: False
    """

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __init__(self) -> None:
        self._jax_trace = current_trace()

    @property
    def jax_trace(self) -> Any:
        """The token of the trace."""
        return self._jax_trace

    def is_valid(self) -> bool:
        """Whether that trace is the one that runs now."""
        return same_trace(self._jax_trace)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TraceState) and self._jax_trace == other._jax_trace

    def _printed_form(self) -> PrintedForm:
        return PrintedForm("TraceState(", [("jax_trace=", self._jax_trace)], ")")
