"""Where the value of a Variable lies: from axis names in metadata to shardings on a mesh.

``out_sharding`` in the metadata names the axes of a value. Rules translate the names, a mesh is
found (the one in the metadata, then those of ``jax.set_mesh`` and ``with mesh:``, then the one that
the value lies on already), the spec is checked against shape and mesh, and the value is placed:
moved to the devices outside of all traces, constrained inside of one.
"""

from __future__ import annotations

import difflib
import dis
import math
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from linnet.errors import AxisError, ShardingError, ShardingWarning, type_text
from linnet.functional.fusing import is_tracing
from linnet.functional.sharding import as_rules, axis_rules
from linnet.nnx.pytreelib.objects import Pytree
from linnet.nnx.pytreelib.tracing import pushed

AnyMesh = Mesh | AbstractMesh

_UNCONSTRAINED = PartitionSpec.UNCONSTRAINED
_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, bool, int, float, complex)


# ---- specs --------------------------------------------------------------------------------------


def spec_of(names: Any, metadata: Mapping[str, Any]) -> PartitionSpec:
    """The partition spec of axis names, by the rules in force and those in the metadata."""
    if isinstance(names, NamedSharding):
        return names.spec
    if isinstance(names, str):
        names = (names,)
    if not isinstance(names, (tuple, list, PartitionSpec)):
        raise ShardingError(
            f"out_sharding={names!r} is neither axis names nor a sharding.\n"
            "Fix: a tuple with a name, a tuple of names or None for each axis, a "
            "jax.sharding.PartitionSpec, or a jax.sharding.NamedSharding."
        )
    rules = dict(axis_rules.value)
    for name, axis in as_rules(metadata.get("sharding_rules") or ()):
        if rules.setdefault(name, axis) != axis:
            raise AxisError(
                f"Inconsistent logical axis annotations for {name!r}: {rules[name]!r} by "
                f"nnx.logical_axis_rules, but {axis!r} by the Variable's own sharding_rules.\n"
                "Fix: leave the rule out in one of the two places."
            )
    return PartitionSpec(*(_mesh_axis(name, rules) for name in names))


def _mesh_axis(name: Any, rules: dict[str, Any]) -> Any:
    if not isinstance(name, (tuple, list)):
        return rules.get(name, name)
    axes = [_mesh_axis(part, rules) for part in name]
    flat = [part for axis in axes for part in (axis if isinstance(axis, tuple) else (axis,))]
    return tuple(part for part in flat if part is not None) or None


def axes_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes that one entry of a spec names."""
    if entry is None or entry is _UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def _check(
    names: Any, spec: PartitionSpec, mesh: AnyMesh, x: Any, name: Callable[[], str], strict: bool
) -> None:
    """Raises unless an array can be sharded by a spec."""
    used = [axis for entry in spec for axis in axes_of(entry)]
    missing = next((axis for axis in used if axis not in mesh.axis_names), None)
    twice = next((axis for axis in used if used.count(axis) > 1), None)
    shape = np.shape(x)
    uneven = None
    if missing is not None:
        near = difflib.get_close_matches(str(missing), mesh.axis_names, 1)
        problem = f"the mesh has no axis {missing!r}"
        fix = f"write {near[0]!r}, or, if" if near else "if"
        fix += f" {missing!r} is a name of your own, say what it stands for with "
        fix += f"nnx.logical_axis_rules([({missing!r}, mesh axis or None)])"
    elif twice is not None:
        problem = f"two axes of the array are sharded along {twice!r}"
        fix = "name each mesh axis once; check the rules where the names are your own"
    elif len(spec) > len(shape):
        problem = f"these are {len(spec)} entries for {len(shape)} axes"
        fix = "one entry for each axis of the array; those at the end may be left out"
    elif uneven := _uneven_axis(spec, mesh, shape):
        number, parts = uneven
        problem = f"axis {number} of size {shape[number]} does not divide into {parts} parts"
        fix = f"make the size a multiple of {parts}, or shard another axis (None in its place)"
    else:
        return
    situation = _situation(names, spec, mesh, x, name)
    if uneven and not strict:
        warnings.warn(
            f"{situation}, but {problem}. Inside jit the compiler pads or replicates it; outside "
            f"this is an error.\nFix: {fix}.",
            ShardingWarning,
            stacklevel=2,
        )
        return
    raise ShardingError(f"{situation}, but {problem}.\nFix: {fix}.")


def _uneven_axis(
    spec: PartitionSpec, mesh: AnyMesh, shape: tuple[int, ...]
) -> tuple[int, int] | None:
    """The first axis that does not divide, and into how many parts it should."""
    types = types_of(mesh)
    for number, entry in enumerate(spec):
        axes = (axis for axis in axes_of(entry) if types[axis] != AxisType.Manual)
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if shape[number] % parts:
            return number, parts
    return None


def types_of(mesh: AnyMesh) -> dict[str, AxisType]:
    """The type of each axis of a mesh."""
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def _situation(
    names: Any, spec: PartitionSpec, mesh: AnyMesh, x: Any, name: Callable[[], str]
) -> str:
    axes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    given = f"out_sharding={names!r}"
    if not isinstance(names, (str, Sharding)) and tuple(names) != tuple(spec):
        given += f", by the rules {tuple(spec)!r},"
    return f"{name()}, {type_text(x)}, has {given} on the mesh ({axes})"


class _RunningConstructors(threading.local):
    def __init__(self) -> None:
        # Objects, and the attribute that each of them is about to be given.
        self.making: list[tuple[Any, str]] = []


_running = _RunningConstructors()


def making(owner: Any, attribute: str) -> AbstractContextManager[Any]:
    """While the block lasts, what is made is for this attribute, if ``while_building`` asks."""
    return pushed(_running.making, (owner, attribute))


def while_building(type_name: str) -> str:
    """Text for errors: the type of a Variable being made, and whose constructors are running.

    The path to it is known as far as these assign what they make to attributes, or say by
    ``making`` which one it is for.
    """
    frame = sys._getframe(1)
    owners: list[Any] = []
    attributes = {id(owner): attribute for owner, attribute in _running.making}
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Pytree):
            attributes[id(owner)] = attributes.get(id(owner)) or _attribute_to_be(frame)
            building = frame.f_code.co_name == "__init__"
            if building and not any(owner is known for known in owners):
                owners.append(owner)
        frame = frame.f_back
    if not owners:
        return f"A {type_name}"
    inside = ", in ".join(type(owner).__name__ for owner in owners)
    path = ".".join(attributes[id(owner)] or "?" for owner in reversed(owners))
    path = path.removesuffix("?").removesuffix(".")
    return f"A {type_name} of {inside}" + (f", at .{path}" if path else "")


def _attribute_to_be(frame: Any) -> str:
    """The attribute that the statement a frame is executing assigns to, or an empty text."""
    in_comprehension = False
    for step in dis.get_instructions(frame.f_code):
        if step.offset <= frame.f_lasti:
            continue
        if step.opname == "STORE_ATTR":
            return step.argval
        in_comprehension = in_comprehension or step.opname in ("LIST_APPEND", "MAP_ADD")
        ends = ("POP_TOP", "RETURN_VALUE", "SWAP", "UNPACK_SEQUENCE", "STORE_FAST", "STORE_NAME")
        if step.opname in ends and not in_comprehension:
            return ""
    return ""


# ---- meshes -------------------------------------------------------------------------------------


def mesh_in_force() -> AnyMesh | None:
    """The mesh of ``jax.set_mesh``, of ``shard_map`` or of ``with mesh:``, or None."""
    abstract = jax.sharding.get_abstract_mesh()
    if not abstract.empty:
        mesh = jax.sharding.get_mesh() if not is_tracing() else abstract
        return abstract if mesh.empty else mesh
    return _mesh_of_block()


def _mesh_of_block() -> Mesh | None:
    """The mesh of a ``with mesh:`` block, which is found by placing something there."""
    try:
        with jax.ensure_compile_time_eval():
            there = jax.lax.with_sharding_constraint(np.float32(0), PartitionSpec())
    except RuntimeError:
        return None
    return there.sharding.mesh


def mesh_for(metadata: Mapping[str, Any], value: Any = None) -> AnyMesh | None:
    """The mesh that a Variable's axis names belong to, or None."""
    own = metadata.get("mesh")
    mesh = mesh_in_force()
    if own is not None and not own.empty:
        # Inside a trace the same mesh may have manual axes.
        same = mesh is not None and mesh.shape_tuple == own.shape_tuple
        return mesh if same and is_tracing() else own
    if mesh is None and isinstance(value, jax.Array) and not isinstance(value, Tracer):
        place = value.sharding
        mesh = place.mesh if isinstance(place, NamedSharding) else None
    return mesh


# ---- placing ------------------------------------------------------------------------------------


def sharding_of(
    names: Any,
    metadata: Mapping[str, Any],
    x: Any,
    name: Callable[[], str],
    strict: bool | None = None,
) -> Sharding:
    """The sharding of an array with axis names; ``name()`` says in errors whose it is.

    An axis that does not divide is an error if ``strict``, and a warning otherwise: by default
    inside a trace without explicit axes, where the sharding is a hint to the compiler.
    """
    if isinstance(names, Sharding) and not isinstance(names, NamedSharding):
        return names
    try:
        spec = spec_of(names, metadata)
    except AxisError as error:
        raise type(error)(f"{name()}, {type_text(x)}: {error}") from None
    mesh = names.mesh if isinstance(names, NamedSharding) else mesh_for(metadata, x)
    if mesh is None:
        raise ShardingError(
            f"{name()}, {type_text(x)}, has out_sharding={names!r}, but there is no mesh to place "
            "it on.\nFix: make it under `with jax.set_mesh(mesh):`, give it mesh=mesh in its "
            "metadata, or leave it where it is with nnx.use_eager_sharding(False)."
        )
    if strict is None:
        strict = not is_tracing() or AxisType.Explicit in mesh.axis_types
    _check(names, spec, mesh, x, name, strict)
    return NamedSharding(mesh, spec)


def _names_nothing(names: Any) -> bool:
    """Whether ``out_sharding`` is None or without names."""
    return not isinstance(names, Sharding) and not names


def place(value: Any, metadata: Mapping[str, Any], name: Callable[[], str]) -> Any:
    """The value of a Variable, each of its arrays in the sharding that the metadata asks for."""
    names = metadata["out_sharding"]
    if _names_nothing(names):
        return value

    def placed(x: Any) -> Any:
        if not isinstance(x, (*_ARRAYS, Tracer)):
            return x
        return put(x, sharding_of(names, metadata, x, name))

    return jax.tree_util.tree_map(placed, value)


def put(x: Any, sharding: Sharding) -> Any:
    """An array in a sharding: moved there, or constrained inside a trace."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    if not is_tracing() or not isinstance(sharding, NamedSharding):
        return jax.device_put(x, of_devices(sharding))
    types = types_of(sharding.mesh)
    entries = [axes_of(entry) for entry in sharding.spec]
    if AxisType.Explicit in types.values():
        x = jax.sharding.reshard(x, _part(sharding, entries, types, AxisType.Explicit, None))
    if AxisType.Auto in types.values():
        rest = _part(sharding, entries, types, AxisType.Auto, _UNCONSTRAINED)
        x = jax.lax.with_sharding_constraint(x, rest)
    return x


def as_before(old: Any, new: Any) -> Any:
    """``new``, moved to the sharding of ``old`` if both are arrays of one shape."""
    if is_tracing() or not isinstance(old, jax.Array):
        return new
    moves = isinstance(new, jax.Array) and new.shape == old.shape and old.sharding != new.sharding
    return jax.device_put(new, old.sharding) if moves else new


def _part(
    sharding: NamedSharding, entries: Any, types: Any, axis_type: AxisType, other: Any
) -> Any:
    """The sharding along mesh axes of one type; an entry of axes of other types is ``other``."""

    def entry(given: Any, axes: tuple[str, ...]) -> Any:
        kept = [axis for axis in axes if types[axis] == axis_type]
        if kept:
            return tuple(kept) if len(kept) > 1 else kept[0]
        return other if axes else (given if axis_type == AxisType.Auto else None)

    pairs = zip(sharding.spec, entries, strict=True)
    return NamedSharding(sharding.mesh, PartitionSpec(*(entry(*pair) for pair in pairs)))


def of_devices(sharding: Sharding) -> Sharding:
    """A sharding that ``jax.device_put`` takes: on a mesh of devices, every axis decided."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    mesh = sharding.mesh
    if isinstance(mesh, AbstractMesh):
        here = jax.sharding.get_mesh()
        if here.empty or here.shape_tuple != mesh.shape_tuple:
            raise ShardingError(
                f"A value cannot be placed on {mesh}, which has no devices.\n"
                "Fix: give a jax.sharding.Mesh, or make the Variable inside nnx.eval_shape."
            )
        mesh = here
    decided = (None if entry is _UNCONSTRAINED else entry for entry in sharding.spec)
    return NamedSharding(mesh, PartitionSpec(*decided), memory_kind=sharding.memory_kind)


def placed_shapes(
    value: Any, metadata: Mapping[str, Any], mesh: AnyMesh, name: Callable[[], str]
) -> Any:
    """The value of a Variable with the sharding of each ``jax.ShapeDtypeStruct`` in it."""
    names = metadata.get("out_sharding")

    def placed(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        if _names_nothing(names):
            spec = x.sharding.spec if isinstance(x.sharding, NamedSharding) else PartitionSpec()
            return put(x, NamedSharding(mesh, spec))
        return put(x, sharding_of(names, {**metadata, "mesh": mesh}, x, name, strict=False))

    return jax.tree_util.tree_map(placed, value)
