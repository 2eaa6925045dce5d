"""Learning rates by step, counted in epochs. Optax has more of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

Schedule = Callable[[Any], Any]


def _with_warmup(rate: Schedule, steps_per_epoch: int, warmup_length: float) -> Schedule:
    """Turns a rate by epoch into a schedule by step that rises from zero over the first epochs."""

    def schedule(step: Any) -> Any:
        epoch = step / steps_per_epoch
        if not warmup_length:
            return rate(epoch)
        return rate(epoch) * jnp.minimum(1.0, epoch / warmup_length)

    return schedule


def create_constant_learning_rate_schedule(
    base_learning_rate: float, steps_per_epoch: int, warmup_length: float = 0.0
) -> Schedule:
    """A constant learning rate.

    Args:
      base_learning_rate: the rate.
      steps_per_epoch: how many steps make an epoch.
      warmup_length: over how many epochs the rate rises from zero.

    Returns:
      A function of the step.

    Example:
      >>> from linnet.training.lr_schedule import create_constant_learning_rate_schedule
      >>> rate = create_constant_learning_rate_schedule(0.5, steps_per_epoch=10, warmup_length=2)
      >>> [float(rate(step)) for step in (0, 10, 20, 30)]
      [0.0, 0.25, 0.5, 0.5]
    """
    return _with_warmup(lambda epoch: base_learning_rate, steps_per_epoch, warmup_length)


def create_stepped_learning_rate_schedule(
    base_learning_rate: float,
    steps_per_epoch: int,
    lr_sched_steps: Sequence[Sequence[float]],
    warmup_length: float = 0.0,
) -> Schedule:
    """A learning rate that changes after given epochs.

    Args:
      base_learning_rate: the rate at first.
      lr_sched_steps: pairs of an epoch and the factor of the base rate after it, in order.
      steps_per_epoch, warmup_length: as for ``create_constant_learning_rate_schedule``.

    Returns:
      A function of the step.

    Example:
      >>> from linnet.training.lr_schedule import create_stepped_learning_rate_schedule
      >>> rate = create_stepped_learning_rate_schedule(1.0, 10, [[2, 0.5], [4, 0.25]])
      >>> [float(rate(step)) for step in (0, 20, 21, 41)]
      [1.0, 1.0, 0.5, 0.25]
    """
    boundaries = jnp.array([epoch * steps_per_epoch for epoch, _ in lr_sched_steps])
    boundaries = jnp.round(boundaries).astype(jnp.int32)
    factors = jnp.array([1.0, *(factor for _, factor in lr_sched_steps)])

    def rate(epoch: Any) -> Any:
        passed = jnp.sum(boundaries < jnp.round(epoch * steps_per_epoch))
        return factors[passed] * base_learning_rate

    return _with_warmup(rate, steps_per_epoch, warmup_length)


def create_cosine_learning_rate_schedule(
    base_learning_rate: float,
    steps_per_epoch: int,
    halfcos_epochs: int,
    warmup_length: float = 0.0,
) -> Schedule:
    """A learning rate that falls to zero along half a cosine.

    Args:
      base_learning_rate: the rate at first.
      halfcos_epochs: after how many epochs the rate is zero.
      steps_per_epoch, warmup_length: as for ``create_constant_learning_rate_schedule``.

    Returns:
      A function of the step.

    Example:
      >>> from linnet.training.lr_schedule import create_cosine_learning_rate_schedule
      >>> rate = create_cosine_learning_rate_schedule(1.0, steps_per_epoch=10, halfcos_epochs=4)
      >>> [round(float(rate(step)), 3) for step in (0, 20, 40)]
      [1.0, 0.5, 0.0]
    """

    def rate(epoch: Any) -> Any:
        return base_learning_rate * (jnp.cos(epoch * jnp.pi / halfcos_epochs) + 1) / 2

    return _with_warmup(rate, steps_per_epoch, warmup_length)
