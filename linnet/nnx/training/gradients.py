"""Whether gradients belong to parameters, said with their paths."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from linnet.errors import StateMismatchError, list_lines, list_paths, path_string
from linnet.nnx.pytreelib.kinds import key_name

Path = tuple[Any, ...]


def refuse_gradients(
    of: str, fix: str, missing: list[Path], extra: list[Path], shapes: list[tuple[Path, Any, Any]]
) -> None:
    """Raises if there are gradients too few, too many, or of other shapes.

    Args:
      of: what the gradients should be those of.
      fix: what to do about it.
      missing: the paths of parameters without a gradient.
      extra: the paths of gradients without a parameter.
      shapes: paths with the shapes of gradient and parameter, where they differ.

    Raises:
      StateMismatchError: any of them is not empty.
    """
    if not (missing or extra or shapes):
        return
    parts = [f"The gradients are not those of {of}."]
    parts += [f"Missing:\n{list_paths(missing)}"] if missing else []
    parts += [f"Not optimized:\n{list_paths(extra)}"] if extra else []
    other = [
        f"{path_string(path)}: the gradient is {given}, the parameter {wanted}"
        for path, given, wanted in shapes
    ]
    parts += [f"Of another shape:\n{list_lines(other)}"] if other else []
    raise StateMismatchError("\n".join([*parts, f"Fix: {fix}"]))


def check_gradients(params: Any, grads: Any) -> None:
    """Raises if a pytree of gradients is not one of parameters.

    Args:
      params: the parameters.
      grads: the gradients.

    Raises:
      StateMismatchError: the structures or the shapes differ; the paths are listed.
    """
    wanted, given = _shapes(params), _shapes(grads)
    refuse_gradients(
        "the parameters",
        "differentiate with respect to all of params, and pass what jax.grad returned.",
        [path for path in wanted if path not in given],
        [path for path in given if path not in wanted],
        [(p, given[p], wanted[p]) for p in wanted if p in given and given[p] != wanted[p]],
    )


def _shapes(tree: Any) -> dict[Path, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {tuple(map(key_name, keys)): jnp.shape(leaf) for keys, leaf in leaves}
