"""Arguments that tell Orbax how to save and restore each leaf of a tree."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from linnet import serialization, traverse_util


def is_multi_device_array(value: Any) -> bool:
    """Whether a value is a ``jax.Array`` on more than one device.

    Args:
      value: anything.

    Returns:
      True if it is.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet.training import orbax_utils
      >>> orbax_utils.is_multi_device_array(jnp.ones(2))
      False
    """
    return isinstance(value, jax.Array) and len(value.sharding.device_set) > 1


def save_args_from_target(target: Any) -> Any:
    """What Orbax's ``PyTreeCheckpointer`` takes as ``save_args``: one for each leaf.

    Args:
      target: the tree to be saved.

    Returns:
      A tree of ``orbax.checkpoint.SaveArgs``.

    Example:
      >>> import numpy as np
      >>> from linnet.training import orbax_utils
      >>> args = orbax_utils.save_args_from_target({"w": np.ones(3)})
      >>> type(args["w"]).__name__
      'SaveArgs'
    """
    import orbax.checkpoint

    return jax.tree.map(lambda _: orbax.checkpoint.SaveArgs(), target)


def restore_args_from_target(target: Any, mesh: jax.sharding.Mesh | None = None) -> Any:
    """What Orbax's ``PyTreeCheckpointer`` takes as ``restore_args``: one for each leaf.

    An array of JAX is restored with the sharding that the target's has, one of NumPy to the host.

    Args:
      target: a tree like the one that was saved; leaves may be abstract arrays.
      mesh: put arrays on this mesh, divided as those of the target; by default on theirs.

    Returns:
      A tree of ``orbax.checkpoint.RestoreArgs``.

    Example:
      >>> import numpy as np
      >>> from linnet.training import orbax_utils
      >>> orbax_utils.restore_args_from_target({"w": np.ones(3)})["w"].restore_type
      <class 'numpy.ndarray'>
    """
    import orbax.checkpoint as ocp

    def args_of(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            sharding = leaf.sharding
            if mesh is not None:
                spec = getattr(sharding, "spec", jax.sharding.PartitionSpec())
                sharding = jax.sharding.NamedSharding(mesh, spec)
            return ocp.ArrayRestoreArgs(sharding=sharding, dtype=leaf.dtype)
        dtype = leaf.dtype if isinstance(leaf, np.ndarray) else None
        return ocp.RestoreArgs(restore_type=type(leaf), dtype=dtype)

    return jax.tree.map(args_of, target)


def maybe_construct_transformations(target: Any, transforms: Any | None) -> Any:
    """The transformations with which Orbax keeps the entries of a target that have no value.

    Args:
      target: the tree to be restored into.
      transforms: transformations; they are returned as they are.

    Returns:
      ``transforms`` or, without them, one that keeps each None and empty dict of the target.

    Example:
      >>> from linnet.training import orbax_utils
      >>> sorted(orbax_utils.maybe_construct_transformations({"w": 1, "ema": None}, None))
      ['ema']
    """
    if transforms is not None:
        return transforms
    import orbax.checkpoint

    state = serialization.to_state_dict(target)
    flat = traverse_util.flatten_dict({"": state}, keep_empty_nodes=True, sep="/")
    keep = orbax.checkpoint.Transform(use_fallback=True)
    return {
        path.removeprefix("/"): keep
        for path, leaf in flat.items()
        if leaf is None or (leaf is traverse_util.empty_node and path)
    }
