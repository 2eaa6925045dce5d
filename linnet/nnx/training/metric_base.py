"""The base of metrics: what a metric does, and how it says that it got the wrong arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Hashable
from typing import Any, Self

import jax
import jax.numpy as jnp

from linnet.errors import MetricError
from linnet.nnx.filterlib import Filter
from linnet.nnx.graphlib.split_merge import merge, split
from linnet.nnx.pytreelib.objects import Pytree
from linnet.nnx.variablelib.variable import Variable

AxisName = Hashable


class MetricState(Variable[Any]):
    """A running value of a metric.

    One that starts as a Python number is a strongly typed array at once: it would become one with
    the first update, and retrace.
    """

    def on_create_value(self, value: Any) -> Any:
        return jax.tree_util.tree_map(_strongly_typed, value)

    def on_set_value(self, value: Any) -> Any:
        return jax.tree_util.tree_map(_strongly_typed, value)


def _strongly_typed(value: Any) -> Any:
    weak = isinstance(value, (bool, int, float)) or getattr(value, "weak_type", False)
    return jnp.asarray(value, jnp.result_type(value)) if weak else value


class Metric(Pytree):
    """The base class of metrics.

    A metric of your own defines ``__init__``, ``reset``, ``update`` and ``compute``, and ``merge``
    where it shall be put together from parts. Keep running values in ``MetricState``.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> class Largest(nnx.Metric):
      ...     def __init__(self):
      ...         self.largest = nnx.metrics.MetricState(jnp.array(-jnp.inf))
      ...     def reset(self):
      ...         self.largest.value = jnp.array(-jnp.inf)
      ...     def update(self, *, values):
      ...         self.largest.value = jnp.maximum(self.largest, values.max())
      ...     def compute(self):
      ...         return self.largest.value
      >>> metrics = nnx.MultiMetric(loss=nnx.metrics.Average(), largest=Largest())
      >>> metrics.update(values=jnp.array([1.0, 3.0]))
      >>> {name: float(value) for name, value in metrics.compute().items()}
      {'loss': 2.0, 'largest': 3.0}
    """

    def __init__(self) -> None:
        raise NotImplementedError(_must_define(self, "__init__"))

    def reset(self) -> None:
        """Forgets what was seen, in place."""
        raise NotImplementedError(_must_define(self, "reset"))

    def update(self, **kwargs: Any) -> None:
        """Takes a batch into account, in place."""
        raise NotImplementedError(_must_define(self, "update"))

    def compute(self) -> Any:
        """The value over all that was seen."""
        raise NotImplementedError(_must_define(self, "compute"))

    def split(self, *filters: Filter) -> Any:
        """The metric as a graphdef and states; see ``nnx.split``."""
        return split(self, *filters)

    def merge(self, other: Any) -> Self:
        """A new metric over what the two have seen; neither is changed.

        Args:
          other: a metric of the same kind.

        Returns:
          The metric.
        """
        raise NotImplementedError(_must_define(self, "merge"))

    def reduce(self, axis_name: AxisName) -> Self:
        """A new metric over what all devices have seen, inside ``shard_map`` or ``pmap``.

        Args:
          axis_name: the axis, or the axes, of the devices.

        Returns:
          The metric, the same on every device. This one goes on counting for its own device.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> from linnet import nnx
          >>> def mean(values):
          ...     metric = nnx.metrics.Average()
          ...     metric.update(values=values)
          ...     return metric.reduce("devices").compute()
          >>> jax.vmap(mean, axis_name="devices")(jnp.array([[1.0, 3.0], [5.0, 7.0]])).tolist()
          [4.0, 4.0]
        """
        graphdef, state = split(self)
        count = jax.lax.psum(1, axis_name)
        gathered = jax.tree_util.tree_map(lambda x: _gathered(x, count, axis_name), state)
        parts = [
            merge(graphdef, jax.tree_util.tree_map(lambda x, i=i: x[i], gathered))
            for i in range(count)
        ]
        return functools.reduce(lambda a, b: a.merge(b), parts)


def _gathered(x: Any, count: int, axis_name: AxisName) -> jax.Array:
    """The values of all devices, stacked; by a sum, which JAX knows to be alike on all of them."""
    x = jnp.asarray(x)
    summed = x.astype(jnp.int32) if x.dtype == bool else x
    own = jnp.zeros((count, *x.shape), summed.dtype).at[jax.lax.axis_index(axis_name)].set(summed)
    return jax.lax.psum(own, axis_name).astype(x.dtype)


def _must_define(metric: Metric, method: str) -> str:
    return (
        f"{type(metric).__name__} does not define {method}(), which is needed here.\n"
        f"Fix: define {method} in the class; nnx.Metric shows how."
    )


def argument_names(metric: Any) -> frozenset[str] | None:
    """The names of what a metric's ``update`` takes; None if it takes whatever there is."""
    for cls in type(metric).__mro__:
        if "_takes" in vars(cls):
            return metric._takes()
        if "update" in vars(cls):  # one of the user's own
            break
    parameters = inspect.signature(metric.update).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters)


def refuse_arguments(metric: Metric, unknown: Any, known: Any, fix: str) -> None:
    """Raises for arguments of ``update`` that a metric does not know."""
    if unknown:
        raise MetricError(
            f"{type(metric).__name__}.update got {listed(unknown)}, which it does not know; it "
            f"takes {listed(known)}.\nFix: {fix}"
        )


def listed(names: Any) -> str:
    """Names in a message."""
    return ", ".join(map(repr, sorted(names))) or "nothing"
