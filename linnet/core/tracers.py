"""The running trace of JAX, and whether it is still the one a scope was made in."""

from __future__ import annotations

from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state

from linnet.errors import JaxTransformError
from linnet.functional.fusing import EAGER


def current_trace() -> Any:
    """The token of the running trace; tokens of the same trace are equal.

    Returns:
      The token.

    Example:
      >>> import jax
      >>> from linnet import core
      >>> outside = core.current_trace()
      >>> outside == core.current_trace()
      True
      >>> jax.make_jaxpr(lambda x: x if core.current_trace() == outside else -x)(1.0).eqns != []
      True
    """
    return get_opaque_trace_state()


def check_trace_level(base_level: Any) -> None:
    """Refuses to go on in another trace than the one that was running before.

    Args:
      base_level: what ``current_trace`` returned then.

    Raises:
      JaxTransformError: another trace is running now.

    Example:
      >>> from linnet import core
      >>> core.check_trace_level(core.current_trace())
    """
    if base_level != get_opaque_trace_state():
        raise JaxTransformError


def check_no_leak(base_level: Any, value: Any, what: str) -> None:
    """Refuses to store a tracer where it would outlive its trace.

    What was made outside of all traces may hold no tracer. Inside a trace it cannot be told which
    of two nested traces a tracer belongs to, so JAX is left to find a leak.
    """
    if base_level == EAGER and any(isinstance(x, Tracer) for x in jax.tree.leaves(value)):
        raise JaxTransformError(what)
