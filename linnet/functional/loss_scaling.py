"""Loss scaling: gradients that float16 would flush to zero, made larger and smaller again.

The loss is multiplied by a scale, and the gradients are divided by it. The scale adjusts itself: it
grows after a run of finite gradients and shrinks when one is not finite, in which case the step is
left out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

SMALLEST = jnp.finfo(jnp.float32).tiny


def scaled_loss(fun: Callable[..., Any], scale: Any, has_aux: bool = False) -> Callable[..., Any]:
    """A function whose gradients are those of a loss, times a scale.

    Args:
      fun: returns the loss, or ``(loss, aux)``.
      scale: the scale.
      has_aux: whether it returns a pair.

    Returns:
      A function of the same arguments that returns ``(scaled loss, what fun returned)``.

    Example:
      >>> scaled_loss(lambda x: x.sum(), 8.0)(jnp.array([1.0, 2.0]))
      (Array(24., dtype=float32), Array(3., dtype=float32))
    """

    def scaled(*args: Any, **kwargs: Any) -> tuple[Array, Any]:
        out = fun(*args, **kwargs)
        loss = out[0] if has_aux else out
        return loss * jnp.asarray(scale, _at_least_float32(loss)), out

    return scaled


def unscaled(grads: Any, scale: Any, axis_name: Any = None) -> Any:
    """Gradients of a scaled loss, divided by the scale, in at least float32.

    Args:
      grads: a pytree of arrays.
      scale: the scale.
      axis_name: a mapped axis to average over.

    Returns:
      The pytree.

    Example:
      >>> unscaled(jnp.array([8.0, 16.0], jnp.float16), 8.0)
      Array([1., 2.], dtype=float32)
    """

    def divide(grad: Array) -> Array:
        dtype = _at_least_float32(grad)
        return grad.astype(dtype) / jnp.asarray(scale, dtype)

    grads = jax.tree.map(divide, grads)
    return grads if axis_name is None else lax.pmean(grads, axis_name)


def _at_least_float32(x: Any) -> Any:
    return jnp.promote_types(jnp.result_type(x), jnp.float32)


def all_finite(tree: Any) -> Array:
    """Whether no number in a pytree of arrays is infinite or nan.

    Example:
      >>> all_finite([jnp.ones(2), jnp.array(jnp.inf)])
      Array(False, dtype=bool)
    """
    checks = (jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))
    return jax.tree.reduce(operator.and_, list(checks), jnp.array(True))


class Growth(Protocol):
    """How a scale adjusts itself.

    Args:
      growth_factor: what the scale is multiplied with to grow.
      backoff_factor: what it is multiplied with to shrink.
      growth_interval: it grows in a finite step that follows so many others.
      minimum_scale: it does not shrink below; None for no limit.
    """

    @property
    def growth_factor(self) -> float: ...
    @property
    def backoff_factor(self) -> float: ...
    @property
    def growth_interval(self) -> int: ...
    @property
    def minimum_scale(self) -> float | None: ...


def next_scale(scale: Any, steps: Any, finite: Array, growth: Growth) -> tuple[Array, Array]:
    """The scale of the next step.

    Args:
      scale: the scale of this step.
      steps: how many finite steps since the scale changed.
      finite: whether the gradients of this step are finite.
      growth: how the scale adjusts itself.

    Returns:
      ``(scale, steps)``.
    """
    scale, steps = jnp.asarray(scale, jnp.float32), jnp.asarray(steps, jnp.int32)
    grows = steps == growth.growth_interval
    larger = jnp.minimum(scale * growth.growth_factor, jnp.finfo(jnp.float32).max)
    smaller = scale * growth.backoff_factor
    if growth.minimum_scale is not None:
        smaller = jnp.maximum(smaller, growth.minimum_scale)
    new = jnp.where(finite, jnp.where(grows, larger, scale), smaller)
    return new, jnp.where(finite & ~grows, steps + 1, 0)


def where_finite(finite: Array, new: Any, old: Any) -> Any:
    """The new pytree where a step is finite, the old one where it is not.

    Example:
      >>> where_finite(jnp.array(False), jnp.ones(2), jnp.zeros(2))
      Array([0., 0.], dtype=float32)
    """
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(finite, a, b), new, old)
