"""Data for several devices: replicated, read ahead, padded; and scans over any axes."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from linnet.core.partial_eval import partially
from linnet.typing import has_shape_dtype

_AXIS_NAME = "_device_put_sharded"


def _along(devices: Sequence[Any], axis_name: str) -> NamedSharding:
    return NamedSharding(Mesh(np.array(devices), (axis_name,)), PartitionSpec(axis_name))


def replicate(tree: Any, devices: Sequence[Any] | None = None, axis_name: str = _AXIS_NAME) -> Any:
    """Copies a tree to each of several devices, as ``jax.pmap`` takes it.

    Args:
      tree: a pytree of arrays.
      devices: the devices; by default all of this process.
      axis_name: the name of the mesh axis that the copies lie along.

    Returns:
      The tree with a leading axis of one entry for each device.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import jax_utils
      >>> jax_utils.replicate({"w": jnp.ones(3)}, jax.devices()[:1])["w"].shape
      (1, 3)
    """
    devices = devices or jax.local_devices()
    sharding = _along(devices, axis_name)

    def copied(x: Any) -> jax.Array:
        one = jnp.asarray(x)[None]
        copies = [jax.device_put(one, device) for device in devices]
        shape = (len(copies), *one.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, copies)

    return jax.tree.map(copied, tree)


def unreplicate(tree: Any) -> Any:
    """The first of the copies that ``replicate`` made.

    Args:
      tree: a pytree of arrays with a leading axis for the devices.

    Returns:
      The tree without that axis, on the first device.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import jax_utils
      >>> jax_utils.unreplicate(jax_utils.replicate({"w": jnp.ones(2)}))
      {'w': Array([1., 1.], dtype=float32)}
    """

    def first(x: Any) -> Any:
        if isinstance(x, jax.Array) and not isinstance(x, Tracer):
            part = x.addressable_shards[0].data
            if part.shape[1:] == x.shape[1:]:  # read from the first device alone
                return part[0]
        return x[0]

    return jax.tree.map(first, tree)


def prefetch_to_device(
    iterator: Iterable[Any],
    size: int,
    devices: Sequence[Any] | None = None,
    axis_name: str = _AXIS_NAME,
) -> Iterator[Any]:
    """Puts batches onto the devices ahead of time.

    Args:
      iterator: gives pytrees of arrays whose leading axis has one entry for each device.
      size: how many batches to have on the devices; 2 is enough for a GPU.
      devices: the devices; by default all of this process.
      axis_name: the name of the mesh axis that the leading axis is divided along.

    Returns:
      An iterator of the same batches on the devices.

    Raises:
      ValueError: ``size`` is less than 1, or a leading axis is not that of the devices.

    Example:
      >>> import jax, numpy as np
      >>> from linnet import jax_utils
      >>> batches = ({"x": np.full((1, 4), i)} for i in range(3))
      >>> [int(b["x"][0, 0]) for b in jax_utils.prefetch_to_device(batches, 2, jax.devices()[:1])]
      [0, 1, 2]
    """
    if size < 1:
        raise ValueError(
            f"prefetch_to_device has at least 1 batch ready, but got size={size}.\n"
            "Fix: prefetch_to_device(batches, 2)."
        )
    sharding = _along(devices or jax.local_devices(), axis_name)
    count = sharding.mesh.size

    def put(x: Any) -> jax.Array:
        if np.shape(x)[:1] != (count,):
            raise ValueError(
                "prefetch_to_device takes arrays whose leading axis has one entry for each of "
                f"{count} devices, but got one of shape {np.shape(x)}.\n"
                f"Fix: reshape batches to ({count}, size of the batch // {count}, ...)."
            )
        return jax.device_put(x, sharding)

    return _ahead((jax.tree.map(put, batch) for batch in iterator), size)


def _ahead(items: Iterator[Any], size: int) -> Iterator[Any]:
    ready: collections.deque[Any] = collections.deque(itertools.islice(items, size))
    while ready:
        yield ready.popleft()
        ready.extend(itertools.islice(items, 1))


def partial_eval_by_shape(
    fn: Callable[..., Any], input_spec: Iterable[Any], *args: Any, **kwargs: Any
) -> Any:
    """Calls a function with some arguments of which only shapes are known.

    Args:
      fn: the function.
      input_spec: the shape of each of the first arguments, or a pair of shape and dtype; without a
        dtype it is float32.
      *args: further arguments, with their values.
      **kwargs: keyword arguments, with their values.

    Returns:
      What the function returns, with values where they depend on none of the unknown ones, and
      a ``jax.ShapeDtypeStruct`` elsewhere.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import jax_utils
      >>> def init(x):
      ...     return jnp.ones(x.shape[-1]), x + 1
      >>> jax_utils.partial_eval_by_shape(init, [((4, 2), jnp.float32)])
      (Array([1., 1.], dtype=float32), ShapeDtypeStruct(shape=(4, 2), dtype=float32))
    """
    unknown = [_spec(entry) for entry in input_spec]
    return partially(lambda *unknown: fn(*unknown, *args, **kwargs), *unknown)


def _spec(entry: Any) -> jax.ShapeDtypeStruct:
    if has_shape_dtype(entry):
        return jax.ShapeDtypeStruct(entry.shape, entry.dtype)
    entry = tuple(entry)
    if len(entry) == 2 and isinstance(entry[0], Sequence):
        return jax.ShapeDtypeStruct(tuple(entry[0]), entry[1])
    return jax.ShapeDtypeStruct(entry, jnp.float32)


def pmean(xs: Any, axis_name: Any) -> Any:
    """The mean over a mapped axis, of each leaf; the name under which programs import it.

    Args:
      xs: a pytree of arrays.
      axis_name: the name of the axis.

    Returns:
      The pytree of means.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import jax_utils
      >>> mean = jax.vmap(lambda x: jax_utils.pmean(x, "batch"), axis_name="batch")
      >>> mean(jnp.array([1.0, 3.0]))
      Array([2., 2.], dtype=float32)
    """
    return jax.lax.pmean(xs, axis_name)


def scan_in_dim(
    body_fn: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    axis: int | Sequence[int] = (0,),
    unroll: int | Sequence[int] = (1,),
    keepdims: bool = False,
) -> tuple[Any, Any]:
    """``jax.lax.scan`` over any axes, the first of them outermost.

    Args:
      body_fn: takes the carry and a slice; returns the new carry and an output.
      init: the first carry.
      xs: a pytree of arrays.
      axis: the axis or axes to scan over.
      unroll: how many steps to unroll, for each axis.
      keepdims: slices, and outputs, have the axes with size 1.

    Returns:
      The last carry, and the outputs with their axes where those of ``xs`` are.

    Raises:
      IndexError: an array has no such axis.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import jax_utils
      >>> x = jnp.arange(6.0).reshape(2, 3)
      >>> total, sums = jax_utils.scan_in_dim(
      ...     lambda carry, column: (carry + column.sum(), column), 0.0, x, axis=1)
      >>> float(total), sums.shape
      (15.0, (2, 3))
    """
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    steps = (unroll,) if isinstance(unroll, int) else tuple(unroll)
    steps += (1,) * (len(axes) - len(steps))

    def to_front(x: Any) -> Any:
        if not all(-x.ndim <= a < x.ndim for a in axes):
            raise IndexError(
                f"scan_in_dim scans over the axes {axes}, but got an array of shape {x.shape}.\n"
                "Fix: give axes that every array has."
            )
        return jnp.moveaxis(x, axes, range(len(axes)))

    def to_place(x: Any) -> Any:
        if keepdims:  # without the axes of size 1 that the slices had
            scanned, rest = x.shape[: len(axes)], x.shape[len(axes) :]
            ones = {a % len(rest) for a in axes}
            x = x.reshape(*scanned, *(n for a, n in enumerate(rest) if a not in ones))
        return jnp.moveaxis(x, range(len(axes)), axes)

    def body(carry: Any, x: Any) -> tuple[Any, Any]:
        if keepdims:
            x = jax.tree.map(lambda leaf: jnp.expand_dims(leaf, axes), x)
        return body_fn(carry, x)

    step: Callable[[Any, Any], tuple[Any, Any]] = body
    for steps_of_axis in reversed(steps):
        step = functools.partial(jax.lax.scan, step, unroll=steps_of_axis)
    last, ys = step(init, jax.tree.map(to_front, xs))
    return last, jax.tree.map(to_place, ys)


def pad_shard_unpad(
    wrapped: Callable[..., Any],
    static_argnums: Sequence[int] = (0,),
    static_argnames: Sequence[str] = (),
    static_return: bool = False,
) -> Callable[..., Any]:
    """Lets a function of batches for several devices take batches of any size.

    Arrays are padded with zeros to a multiple of the number of devices and get a leading axis for
    the devices, and what comes back loses both again. Padded entries are computed like others, so
    that the function must not sum over its batch.

    Args:
      wrapped: the function, such as one from ``jax.pmap``.
      static_argnums: the positions of arguments that stay as they are; by default the first one,
        for parameters.
      static_argnames: the names of such keyword arguments.
      static_return: return what the function returns, without removing anything.

    Returns:
      The function of batches. Its argument ``min_device_batch`` pads to at least so many entries
      for each device, so that fewer shapes are compiled.

    Raises:
      ValueError: the arrays have different sizes along their first axis.

    Example:
      >>> import jax, numpy as np
      >>> from linnet import jax_utils
      >>> predict = jax_utils.pad_shard_unpad(lambda params, x: params * x)
      >>> predict(2.0, np.arange(3.0))
      array([0., 2., 4.])
    """

    @functools.wraps(wrapped)
    def padded(*args: Any, min_device_batch: int | None = None, **kwargs: Any) -> Any:
        count = jax.local_device_count()
        batches = [arg for i, arg in enumerate(args) if i not in static_argnums]
        batches += [arg for name, arg in kwargs.items() if name not in static_argnames]
        sizes = {np.shape(leaf)[0] for leaf in jax.tree.leaves(batches)}
        if len(sizes) != 1:
            raise BatchSizeError(
                "pad_shard_unpad takes batches of one size, but got arrays of sizes "
                f"{sorted(sizes)}.\nFix: name arguments that are no batches in static_argnums or "
                "static_argnames."
            )
        (size,) = sizes
        each = max(-(-size // count), min_device_batch or 0)

        def pad(leaf: Any) -> Any:
            rest = np.shape(leaf)[1:]
            filler = np.zeros((count * each - size, *rest), leaf.dtype)
            return np.concatenate([leaf, filler]).reshape(count, each, *rest)

        def unpad(leaf: Any) -> Any:
            whole = np.asarray(leaf)
            return whole.reshape(count * each, *whole.shape[2:])[:size]

        shards = functools.partial(jax.tree.map, pad)
        result = wrapped(
            *(arg if i in static_argnums else shards(arg) for i, arg in enumerate(args)),
            **{k: arg if k in static_argnames else shards(arg) for k, arg in kwargs.items()},
        )
        return result if static_return else jax.tree.map(unpad, result)

    return padded


class BatchSizeError(ValueError, AssertionError):
    """Arrays that should be batches of one size are not."""
