"""Metrics: running values over batches, as objects that update in place, under jit too."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Hashable, Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from linnet import struct
from linnet.errors import IgnoredArgumentWarning, MetricError
from linnet.nnx.filterlib import Filter
from linnet.nnx.graphlib.split_merge import clone, merge, split
from linnet.nnx.pytreelib.objects import Pytree
from linnet.nnx.variablelib.variable import Variable as Variable


class MetricState(Variable[Any]):
    """A running value of a metric.

    One that starts as a Python number is a strongly typed array at once. Otherwise the first update
    would make it one, and compiled functions would be traced again.
    """

    def on_create_value(self, value: Any) -> Any:
        return jax.tree_util.tree_map(_strongly_typed, value)

    on_set_value = on_create_value


def _strongly_typed(value: Any) -> Any:
    weak = isinstance(value, (bool, int, float)) or getattr(value, "weak_type", False)
    return jnp.asarray(value, jnp.result_type(value)) if weak else value


class Metric(Pytree):
    """The base class of metrics.

    A metric of your own defines ``__init__``, ``reset``, ``update`` and ``compute``, and ``merge``
    if those of several batches or devices are to be combined. Keep running values in
    ``MetricState``.

    Raises:
      NotImplementedError: a class does not define the constructor or the method that is called.

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

    def reduce(self, axis_name: Hashable) -> Self:
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


def _gathered(x: Any, count: int, axis_name: Hashable) -> jax.Array:
    """Stacks the values of all devices, by a sum: JAX knows that its result is the same on all."""
    x = jnp.asarray(x)
    summed = x.astype(jnp.int32) if x.dtype == bool else x
    own = jnp.zeros((count, *x.shape), summed.dtype).at[jax.lax.axis_index(axis_name)].set(summed)
    return jax.lax.psum(own, axis_name).astype(x.dtype)


def _must_define(metric: Metric, method: str) -> str:
    return (
        f"{type(metric).__name__} does not define {method}(), which is needed here.\n"
        f"Fix: define {method} in the class; nnx.Metric shows how."
    )


def _argument_names(metric: Any) -> frozenset[str] | None:
    """The names of the arguments of a metric's ``update``; None if it takes any."""
    for cls in type(metric).__mro__:
        if "_takes" in vars(cls):
            return metric._takes()
        if "update" in vars(cls):  # one of the user's own
            break
    parameters = inspect.signature(metric.update).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters)


def _warn_of_arguments(
    metric: Metric, unknown: Any, known: Any, fix: str, stacklevel: int = 3
) -> None:
    if unknown:
        message = (
            f"{type(metric).__name__}.update got {_listed(unknown)}, which it does not know and "
            f"ignores; it takes {_listed(known)}.\nFix: {fix}"
        )
        warnings.warn(message, IgnoredArgumentWarning, stacklevel=stacklevel)


def _listed(names: Any) -> str:
    return ", ".join(map(repr, sorted(names))) or "nothing"


def _named_argument(metric: Any, kwargs: dict[str, Any]) -> jax.Array:
    """The argument that a metric averages over."""
    name, argname = type(metric).__name__, metric.argname
    if argname not in kwargs:
        raise MetricError(
            f"Expected keyword argument {argname!r}: {name}.update got {_listed(kwargs)}.\n"
            f"Fix: metric.update({argname}=...), or build it with another argname."
        )
    unknown = set(kwargs) - {argname}
    fix = "leave that out; the argument that is averaged has the name argname."
    _warn_of_arguments(metric, unknown, {argname, "mask"}, fix, stacklevel=4)
    return jnp.asarray(kwargs[argname])


def _counted(metric: Metric, values: jax.Array, mask: Any) -> tuple[jax.Array | None, jax.Array]:
    """A mask of the shape of the values, and how many of them count."""
    if mask is None:
        return None, jnp.array(values.size, jnp.int32)
    if isinstance(mask, Mapping):
        raise MetricError(
            f"{type(metric).__name__}.update got a dict as mask.\n"
            "Fix: pass an array; nnx.MultiMetric alone takes masks by the names of its metrics."
        )
    mask = jnp.asarray(mask)
    try:
        fits = jnp.broadcast_shapes(mask.shape, values.shape) == values.shape
    except ValueError:
        fits = False
    if not fits:
        raise MetricError(
            f"{type(metric).__name__}.update got a mask of shape {mask.shape} for values of shape "
            f"{values.shape}.\n"
            "Fix: give the mask the shape of the values, or one that broadcasts to it, such as "
            "mask[:, None]."
        )
    mask = jnp.broadcast_to(mask, values.shape).astype(bool)
    return mask, mask.sum(dtype=jnp.int32)


def _total(values: jax.Array, mask: jax.Array | None) -> jax.Array:
    """The sum, in float32 or better."""
    dtype = jnp.promote_types(values.dtype, jnp.float32)
    return jnp.sum(values, dtype=dtype, where=mask)


class _ArgumentMetric(Metric):
    """A metric of one argument of ``update`` whose state is a few scalars, zero at first."""

    _dtypes: ClassVar[dict[str, Any]]  # of the scalars by attribute

    def __init__(self, argname: str = "values"):
        self.argname = argname
        for name, dtype in self._dtypes.items():
            setattr(self, name, MetricState(jnp.zeros((), dtype)))

    def reset(self) -> None:
        """Forgets what was seen, in place."""
        for name, dtype in self._dtypes.items():
            getattr(self, name).value = jnp.zeros((), dtype)

    def update(self, mask: Any = None, **kwargs: Any) -> None:
        """Takes a batch into account, in place.

        Args:
          mask: which values count; it broadcasts to them.
          **kwargs: the values, under the name ``argname``.

        Raises:
          MetricError: the values are missing, or the mask does not fit.
        """
        self._add(_named_argument(self, kwargs), mask)

    def _add(self, values: jax.Array, mask: Any) -> None: ...

    def _takes(self) -> frozenset[str]:
        return frozenset({self.argname, "mask"})


class Average(_ArgumentMetric):
    """The mean of values over all batches.

    Args:
      argname: the name under which ``update`` gets the values.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> loss = nnx.metrics.Average("loss")
      >>> loss.update(loss=jnp.array([1.0, 2.0]))
      >>> loss.update(loss=jnp.array([9.0, 99.0]), mask=jnp.array([True, False]))
      >>> float(loss.compute())
      4.0
    """

    total: MetricState
    count: MetricState
    _dtypes: ClassVar = {"total": jnp.float32, "count": jnp.int32}

    def _add(self, values: jax.Array, mask: Any) -> None:
        mask, count = _counted(self, values, mask)
        self.total.value = self.total.value + _total(values, mask)
        self.count.value = self.count.value + count

    def compute(self) -> jax.Array:
        """The mean; nan if nothing was seen."""
        return self.total.value / self.count.value

    def merge(self, other: Any) -> Self:
        """A new metric over what the two have seen; see ``Metric.merge``."""
        merged = clone(self)
        merged.total.value = self.total.value + other.total.value
        merged.count.value = self.count.value + other.count.value
        return merged

    def reduce(self, axis_name: Hashable) -> Self:
        """A new metric over what all devices have seen; see ``Metric.reduce``."""
        reduced = clone(self)
        reduced.total.value = jax.lax.psum(self.total.value, axis_name)
        reduced.count.value = jax.lax.psum(self.count.value, axis_name)
        return reduced


class Accuracy(Average):
    """The share of predictions that are right.

    Args:
      threshold: for two classes: predict 1 where a logit is at least this. Left out, the class with
        the largest logit on the last axis is predicted.
      *args, **kwargs: as for ``Average``.

    Raises:
      TypeError: the threshold is not a float.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> accuracy = nnx.metrics.Accuracy()
      >>> accuracy.update(logits=jnp.array([[0.1, 0.9], [0.8, 0.2]]), labels=jnp.array([1, 1]))
      >>> float(accuracy.compute())
      0.5
    """

    def __init__(self, threshold: float | None = None, *args: Any, **kwargs: Any):
        if threshold is not None and not isinstance(threshold, float):
            raise TypeError(
                f"Expected threshold to be a float, got {threshold!r}.\n"
                "Fix: nnx.metrics.Accuracy(threshold=0.5)."
            )
        self.threshold = threshold
        super().__init__(*args, **kwargs)

    def update(self, *, logits: Any, labels: Any, mask: Any = None, **unknown: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Takes a batch into account, in place.

        Args:
          logits: one score per class on the last axis; with a threshold, one score per example.
          labels: the classes, integers.
          mask: which examples count; it broadcasts to the labels.

        Raises:
          MetricError: shapes or dtypes do not fit.
        """
        _warn_of_arguments(self, unknown, self._takes(), "leave that out.")
        logits, labels = jnp.asarray(logits), jnp.asarray(labels)
        binary = self.threshold is not None
        _check_labels(logits, labels, binary)
        predicted = logits >= self.threshold if binary else logits.argmax(axis=-1)
        self._add(predicted == labels, mask)

    def _takes(self) -> frozenset[str]:
        return frozenset({"logits", "labels", "mask"})


def _check_labels(logits: jax.Array, labels: jax.Array, binary: bool) -> None:
    """Raises if logits and labels do not fit together."""
    scored = logits.shape if binary else logits.shape[:-1]
    if scored != labels.shape or (not binary and not logits.shape):
        task, relation, fix = (
            ("binary", "==labels.ndim", "pass one logit an example, such as logits[..., 0].")
            if binary
            else (
                "multi-class",
                "==labels.ndim+1",
                "pass integer labels without a class axis, or build the metric with a threshold "
                "for one logit an example.",
            )
        )
        raise MetricError(
            f"For {task} classification, expected logits.ndim{relation} and equal sizes, got "
            f"logits of shape {logits.shape} and labels of shape {labels.shape}.\nFix: {fix}"
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer) and labels.dtype != bool:
        raise MetricError(
            f"Expected integer labels, such as labels.dtype==jnp.int32, got {labels.dtype}.\n"
            "Fix: labels.astype(jnp.int32), or labels.argmax(-1) of one-hot labels."
        )


@struct.dataclass
class Statistics:
    """What ``Welford`` computes.

    Args:
      mean: the mean.
      standard_error_of_mean: the standard deviation of the mean.
      standard_deviation: that of the values.
    """

    mean: jax.Array
    standard_error_of_mean: jax.Array
    standard_deviation: jax.Array


class Welford(_ArgumentMetric):
    """The mean and the spread of values over all batches, by Welford's stable recurrence.

    Args:
      argname: the name under which ``update`` gets the values.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> spread = nnx.metrics.Welford()
      >>> spread.update(values=jnp.array([1.0, 2.0, 3.0, 4.0]))
      >>> statistics = spread.compute()
      >>> float(statistics.mean), round(float(statistics.standard_deviation), 3)
      (2.5, 1.118)
    """

    count: MetricState
    mean: MetricState
    m2: MetricState
    _dtypes: ClassVar = {"count": jnp.int32, "mean": jnp.float32, "m2": jnp.float32}

    def _add(self, values: jax.Array, mask: Any) -> None:
        mask, count = _counted(self, values, mask)
        mean = _total(values, mask) / jnp.maximum(count, 1)
        m2 = _total((values.astype(mean.dtype) - mean) ** 2, mask)
        self._put(*_joined((self.count.value, self.mean.value, self.m2.value), (count, mean, m2)))

    def _put(self, count: Any, mean: Any, m2: Any) -> None:
        self.count.value, self.mean.value, self.m2.value = count, mean, m2

    def compute(self) -> Statistics:
        """The mean and the spread; nan for the spread if nothing was seen."""
        deviation = jnp.sqrt(self.m2.value / self.count.value)
        return Statistics(
            mean=self.mean.value,
            standard_error_of_mean=deviation / jnp.sqrt(self.count.value),
            standard_deviation=deviation,
        )

    def merge(self, other: Any) -> Self:
        """A new metric over what the two have seen; see ``Metric.merge``."""
        merged = clone(self)
        merged._put(*_joined(*((m.count.value, m.mean.value, m.m2.value) for m in (self, other))))
        return merged

    def reduce(self, axis_name: Hashable) -> Self:
        """A new metric over what all devices have seen; see ``Metric.reduce``."""
        total = functools.partial(jax.lax.psum, axis_name=axis_name)
        count = total(self.count.value)
        mean = total(self.count.value * self.mean.value) / jnp.maximum(count, 1)
        spread = self.m2.value + self.count.value * (self.mean.value - mean) ** 2
        reduced = clone(self)
        reduced._put(count, mean, total(spread))
        return reduced


def _joined(first: Any, second: Any) -> tuple[Any, Any, Any]:
    """Count, mean and sum of squared distances of two parts put together."""
    (n, mean, m2), (other_n, other_mean, other_m2) = first, second
    count = n + other_n
    share = other_n / jnp.maximum(count, 1)
    distance = other_mean - mean
    return count, mean + distance * share, m2 + other_m2 + distance**2 * n * share


_RESERVED = frozenset(name for name in dir(Metric) if not name.startswith("__"))


class MultiMetric(Metric):
    """Several metrics that update and compute together.

    Args:
      **metrics: the metrics by name; each is an attribute too.

    Raises:
      MetricError: a name is one of a metric's own methods, or something is no metric.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> metrics = nnx.MultiMetric(
      ...     accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss")
      ... )
      >>> logits, labels = jnp.array([[0.1, 0.9], [0.8, 0.2]]), jnp.array([1, 1])
      >>> metrics.update(logits=logits, labels=labels, loss=jnp.array([0.5, 1.5]))
      >>> {name: float(value) for name, value in metrics.compute().items()}
      {'accuracy': 0.5, 'loss': 1.0}

      Each metric may have a mask of its own:

      >>> metrics.reset()
      >>> masks = {"accuracy": jnp.array([True, False])}
      >>> metrics.update(logits=logits, labels=labels, loss=jnp.array([0.5, 1.5]), mask=masks)
      >>> {name: float(value) for name, value in metrics.compute().items()}
      {'accuracy': 1.0, 'loss': 1.0}
    """

    def __init__(self, **metrics: Any):
        for name, metric in metrics.items():
            self._check(name, metric)
        self._metric_names = tuple(metrics)
        for name, metric in metrics.items():
            setattr(self, name, metric)

    def _check(self, name: str, metric: Any) -> None:
        if name in _RESERVED or name.startswith("_"):
            raise MetricError(
                f"MultiMetric cannot have a metric named {name!r}, which is a name of its own.\n"
                f"Fix: choose another name, such as {name.strip('_') + '_metric'!r}."
            )
        if isinstance(metric, type):
            raise MetricError(
                f"MultiMetric got {name}={metric.__name__}, which is a class and no metric.\n"
                f"Fix: make one, {name}={metric.__name__}(...)."
            )
        if not all(
            callable(getattr(metric, part, None)) for part in ("update", "reset", "compute")
        ):
            raise MetricError(
                f"MultiMetric got {name}={metric!r}, which is no metric: it lacks update, reset or "
                "compute.\nFix: pass an nnx.Metric, such as nnx.metrics.Average()."
            )

    def _metrics(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._metric_names}

    def reset(self) -> None:
        """Resets all metrics, in place."""
        for metric in self._metrics().values():
            metric.reset()

    def update(self, **updates: Any) -> None:
        """Takes a batch into account in all metrics, in place.

        Args:
          **updates: the arguments of all metrics; each gets those that it takes. A dict as
            ``mask`` has a mask for each metric by name; one that is left out or None gets none.

        Raises:
          MetricError: an argument is missing; a dict of masks names a metric that is not there,
            or one that takes no mask.
        """
        masks = self._masks(updates)
        known = self._takes()
        if known is not None:
            fix = "leave that out, or give a metric that name: nnx.metrics.Average(argname=...)."
            _warn_of_arguments(self, set(updates) - known, known, fix)
        for name, metric in self._metrics().items():
            taken = _argument_names(metric)
            chosen = {k: v for k, v in updates.items() if taken is None or k in taken}
            if masks.get(name) is not None:
                chosen["mask"] = masks[name]
            try:
                metric.update(**chosen)
            except TypeError as error:
                error.add_note(f"This was the metric {name!r} of a MultiMetric.")
                raise

    def _masks(self, updates: dict[str, Any]) -> dict[str, Any]:
        """Takes a dict of masks out of the arguments, and checks its names."""
        if not isinstance(updates.get("mask"), Mapping):
            return {}
        masks, metrics = dict(updates.pop("mask")), self._metrics()
        unknown = set(masks) - set(metrics)
        if unknown:
            raise MetricError(
                f"MultiMetric.update got masks for {_listed(unknown)}, but its metrics are "
                f"{_listed(metrics)}.\nFix: name the masks as the metrics are named."
            )
        for name, metric in metrics.items():
            taken = _argument_names(metric)
            if masks.get(name) is not None and taken is not None and "mask" not in taken:
                raise MetricError(
                    f"MultiMetric.update got a mask for {name!r}, but {type(metric).__name__}."
                    f"update takes {_listed(taken)}.\n"
                    "Fix: leave that mask out, or have the metric's update take mask."
                )
        return masks

    def compute(self) -> dict[str, Any]:
        """The values of all metrics by name."""
        return {name: metric.compute() for name, metric in self._metrics().items()}

    def merge(self, other: Any) -> Self:
        """A new metric over what the two have seen; see ``Metric.merge``."""
        return self._made_of({n: m.merge(getattr(other, n)) for n, m in self._metrics().items()})

    def reduce(self, axis_name: Hashable) -> Self:
        """A new metric over what all devices have seen; see ``Metric.reduce``."""
        return self._made_of({n: m.reduce(axis_name) for n, m in self._metrics().items()})

    def _made_of(self, metrics: dict[str, Any]) -> Self:
        made = clone(self)
        for name, metric in metrics.items():
            setattr(made, name, metric)
        return made

    def _takes(self) -> frozenset[str] | None:
        names = [_argument_names(metric) for metric in self._metrics().values()]
        return None if None in names else frozenset().union(*(n for n in names if n is not None))
