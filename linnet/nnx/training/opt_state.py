"""The state of an optimizer: Variables for Optax's arrays, and where they live on a mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.tree_util import DictKey

from linnet.errors import StateMismatchError, list_lines, list_paths, path_string
from linnet.nnx.pytreelib import statics
from linnet.nnx.spmd import as_partition_spec
from linnet.nnx.variablelib.variable import OptArray, OptVariable, Variable

Path = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Transformation:
    """What of an optimizer is structure: its Optax transformation, and what it was built for.

    Its key is taken when it is made. Optax's schedules change what they close over when they are
    first called, which would retrace every step once.

    Args:
      tx: the transformation.
      shapes: the paths of the Variables it is for, with their shapes.
    """

    tx: Any
    shapes: tuple[tuple[Path, Any], ...]

    def __post_init__(self) -> None:
        # Objects such as optax.MultiSteps compare by identity, but are made of what does not.
        is_object = not isinstance(self.tx, tuple) and type(self.tx).__module__.startswith("optax.")
        key = (statics.freeze(vars(self.tx) if is_object else self.tx), self.shapes)
        object.__setattr__(self, "_key", key)
        object.__setattr__(self, "_hash", hash(key))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Transformation)
            and type(self.tx) is type(other.tx)
            and self.__dict__["_key"] == other.__dict__["_key"]
        )

    def __hash__(self) -> int:
        return self.__dict__["_hash"]

    def __repr__(self) -> str:
        return f"{type(self.tx).__name__} for {len(self.shapes)} Variables"

    def __reduce__(self) -> Any:
        return (Transformation, (self.tx, self.shapes))

    def __copy__(self) -> Transformation:
        return self  # nobody can change it

    def __deepcopy__(self, memo: Any) -> Transformation:
        return self

    @classmethod
    def of(cls, tx: Any, targets: dict[Path, Any]) -> Transformation:
        """The structure of an optimizer for these Variables."""
        return cls(tx, tuple(_shapes(targets).items()))

    def check(self, targets: dict[Path, Any]) -> None:
        """Raises if a model's Variables are others than these.

        Raises:
          StateMismatchError: they are; the paths are listed.
        """
        built, given = dict(self.shapes), _shapes(targets)
        if given == built:
            return
        missing = [path for path in built if path not in given]
        new = [path for path in given if path not in built]
        other = [
            f"{path_string(path)}: {_text(given[path])}, built for {_text(shape)}"
            for path, shape in built.items()
            if path in given and given[path] != shape
        ]
        parts = ["This is not the model that the optimizer was built for."]
        parts += [f"No longer there, or frozen since:\n{list_paths(missing)}"] if missing else []
        parts += [f"New, or no longer frozen:\n{list_paths(new)}"] if new else []
        parts += [f"Of another shape:\n{list_lines(other)}"] if other else []
        parts.append(
            "Fix: build the optimizer after the model has taken its shape and what stays fixed is "
            "frozen, or pass the model that it was built for."
        )
        raise StateMismatchError("\n".join(parts))


def _shapes(targets: dict[Path, Any]) -> dict[Path, Any]:
    return {
        path: tuple(getattr(x, "shape", ()) for x in jax.tree_util.tree_leaves(leaf))
        for path, leaf in targets.items()
    }


def _text(shapes: tuple[Any, ...]) -> str:
    return ", ".join(map(str, shapes))


def wrap(opt_state: Any, targets: dict[Path, Any]) -> Any:
    """The arrays of an Optax state as Variables.

    Args:
      opt_state: what ``tx.init`` gave for nested dicts of the targets' values.
      targets: the Variables by path.

    Returns:
      The same structure: ``OptVariable`` with the metadata of its parameter where the path ends
      with that of a parameter, ``OptArray`` elsewhere.
    """

    def wrapped(keys: Iterable[Any], value: Any) -> Any:
        target = _parameter(list(keys), value, targets)
        if target is None:
            return OptArray(value)
        return OptVariable(value, **_metadata(target, value))

    return jax.tree_util.tree_map_with_path(wrapped, opt_state)


def _parameter(keys: list[Any], value: Any, targets: dict[Path, Any]) -> Any:
    """The Variable that a leaf of an Optax state belongs to, if it belongs to one."""
    names: list[Any] = []
    for key in reversed(keys):
        if not isinstance(key, DictKey):
            break
        names.insert(0, key.key)
    for start in range(len(names)):
        if tuple(names[start:]) in targets:
            return targets[tuple(names[start:])]
    alone = targets.get(())  # the model is a Variable
    return alone if alone is not None and jnp.shape(value) == alone.shape else None


def _metadata(target: Any, value: Any) -> dict[str, Any]:
    """The parameter's metadata, less its hooks; axis names only where there are as many axes."""
    if not isinstance(target, Variable):
        return {}
    metadata = target.get_metadata(exclude_required=True)
    kept = {name: entry for name, entry in metadata.items() if not name.startswith("on_")}
    if "opt_sharding" in kept:
        kept["out_sharding"] = kept.pop("opt_sharding")
    if jnp.ndim(value) != len(target.shape):
        kept.pop("out_sharding", None)
    return kept


def move_for_optax(values: Any, targets: dict[Path, Any]) -> Any:
    """Nested dicts with the arrays of parameters that have ``opt_sharding`` placed so."""
    return _moved(values, targets, "opt_sharding")


def move_home(values: Any, targets: dict[Path, Any]) -> Any:
    """Nested dicts with the same arrays placed as the parameters are."""
    return _moved(values, targets, "out_sharding")


def _moved(values: Any, targets: dict[Path, Any], name: str) -> Any:
    mesh = jax.sharding.get_abstract_mesh()
    away = {} if mesh.empty else {p: t for p, t in targets.items() if _moves(t)}
    if not away:
        return values
    explicit = all(kind == AxisType.Explicit for kind in mesh.axis_types)
    place: Any = jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint

    def move(keys: Iterable[Any], value: Any) -> Any:
        target = away.get(tuple(key.key for key in keys if isinstance(key, DictKey)))
        if target is None:
            return value
        return place(value, as_partition_spec(target.get_metadata(name, ()), target))

    return jax.tree_util.tree_map_with_path(move, values)


def _moves(target: Any) -> bool:
    return isinstance(target, Variable) and target.has_metadata("opt_sharding")
