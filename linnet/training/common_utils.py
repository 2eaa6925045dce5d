"""Small helpers of training loops over several devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from linnet.errors import AxisError, path_string
from linnet.nnx.pytreelib.kinds import key_name


def shard(xs: Any) -> Any:
    """Divides the first axis of every array among the local devices, for ``jax.pmap``.

    Args:
      xs: a pytree of arrays.

    Returns:
      The pytree with arrays of shape ``[devices, size // devices, ...]``.

    Raises:
      AxisError: a first axis cannot be divided.

    Example:
      >>> import jax, numpy as np
      >>> from linnet.training.common_utils import shard
      >>> shard(np.ones((2 * jax.local_device_count(), 3))).shape[1:]
      (2, 3)
    """
    count = jax.local_device_count()

    def divided(path: Any, x: Any) -> Any:
        if not x.shape or x.shape[0] % count:
            where = path_string(map(key_name, path)) or "the array"
            raise AxisError(
                f"shard cannot divide the first axis of {where}, of shape {x.shape}, among "
                f"{count} devices.\nFix: use batches whose size is a multiple of {count}."
            )
        return x.reshape((count, x.shape[0] // count, *x.shape[1:]))

    return jax.tree_util.tree_map_with_path(divided, xs)


def shard_prng_key(prng_key: Any) -> jax.Array:
    """One random key for each local device.

    Args:
      prng_key: the key they are split from.

    Returns:
      The keys, stacked.

    Example:
      >>> import jax
      >>> from linnet.training.common_utils import shard_prng_key
      >>> shard_prng_key(jax.random.key(0)).shape == (jax.local_device_count(),)
      True
    """
    return jax.random.split(prng_key, num=jax.local_device_count())


def stack_forest(forest: Sequence[Any]) -> Any:
    """Stacks the arrays of several pytrees of one structure.

    Args:
      forest: the pytrees; at least one.

    Returns:
      One pytree; each array has a new first axis with one element per tree.

    Raises:
      TypeError: there is no tree.

    Example:
      >>> from linnet.training.common_utils import stack_forest
      >>> stack_forest([{"loss": 1.0}, {"loss": 3.0}])["loss"].tolist()
      [1.0, 3.0]
    """
    if not forest:
        raise TypeError("stack_forest got no trees.\nFix: pass at least one.")
    return jax.tree_util.tree_map(lambda *leaves: jnp.stack(leaves), *forest)


def get_metrics(device_metrics: Sequence[Any]) -> Any:
    """The metrics of many steps on the host, from the first device of each.

    Args:
      device_metrics: one pytree a step, as ``jax.pmap`` gave it: with an axis of devices first.

    Returns:
      One pytree, its arrays stacked over the steps.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet.training.common_utils import get_metrics
      >>> get_metrics([{"loss": jnp.array([3.0])}, {"loss": jnp.array([1.0])}])["loss"].tolist()
      [3.0, 1.0]
    """
    first = jax.tree_util.tree_map(lambda x: x[0], device_metrics)
    return stack_forest(jax.device_get(first))


def onehot(
    labels: Any, num_classes: int, on_value: float = 1.0, off_value: float = 0.0
) -> jax.Array:
    """One-hot vectors of labels, on a new last axis.

    Args:
      labels: integers; those out of range give a vector without an ``on_value``.
      num_classes: the size of the new axis.
      on_value: the value at the label.
      off_value: the value elsewhere.

    Returns:
      A float32 array.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet.training.common_utils import onehot
      >>> onehot(jnp.array([1, 0]), 2).tolist()
      [[0.0, 1.0], [1.0, 0.0]]
    """
    hit = jnp.expand_dims(jnp.asarray(labels), -1) == jnp.arange(num_classes).reshape(
        (1,) * jnp.ndim(labels) + (num_classes,)
    )
    return jnp.where(hit, jnp.float32(on_value), jnp.float32(off_value))
