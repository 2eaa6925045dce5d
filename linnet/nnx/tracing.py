"""Which trace is running, so that a write from the wrong one can be refused.

JAX gives an opaque token for the trace at hand. Outside of any trace it is always the same one,
kept here as ``EAGER`` so that the common comparison is by identity.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

EAGER = get_opaque_trace_state()


def current_trace() -> Any:
    """The token of the running trace; ``EAGER`` itself outside of all traces."""
    token = get_opaque_trace_state()
    return EAGER if token == EAGER else token


def same_trace(owner: Any) -> bool:
    """Whether ``owner`` is the token of the running trace."""
    return owner == get_opaque_trace_state()


@functools.cache
def mapped_tracer() -> type:
    """The class of the tracers that ``jax.vmap`` makes, found by making one."""
    found: list[type] = []
    jax.vmap(lambda x: found.append(type(x)) or x)(jnp.zeros(1))
    return found[0]
