"""Linen's variables into NNX models that are built alike, and back, by their paths.

Linen keeps ``{"params": {"Dense_0": {"kernel": ...}}, "batch_stats": ...}``. An NNX model has one
tree, in which the type of a Variable stands for the collection. Layers have the same names and
shapes for their parameters in both (``kernel``, ``bias``, ``scale``, ``mean``, ``embedding``;
``query``, ``key``, ``value`` and ``out`` of attention), so that only the names of submodules
differ: ``rename`` says how. What differs always is known here:

- ``layers_0`` is the item ``layers[0]`` of a list, and ``heads_left`` the item ``heads["left"]`` of
  a dict;
- what Linen scanned over layers lies in the ``stacked`` layer of an ``nnx.Stack``;
- recurrent cells of NNX keep the gates side by side in one kernel.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from linnet.core import meta
from linnet.errors import CheckpointArgumentError
from linnet.frozen_dict import unfreeze
from linnet.io.checkpoint import sources
from linnet.io.checkpoint.restoring import restore_from
from linnet.io.shared.entries import Path, Spec, steps_as_text, text_of
from linnet.io.shared.matching import Rename, refuse, renamed
from linnet.io.shared.objects import Restored
from linnet.nnx.graphlib import iter_graph, state
from linnet.nnx.modules.containers import Dict, List
from linnet.nnx.nn.recurrent import GRUCell, LSTMCell, OptimizedLSTMCell, SimpleCell
from linnet.nnx.nn.stack import Stack
from linnet.nnx.pytreelib.objects import Pytree
from linnet.nnx.rnglib.streams import RngState
from linnet.nnx.statelib import from_flat_state, iter_flat
from linnet.nnx.variablelib.names import variable_name_from_type
from linnet.nnx.variablelib.variable import Variable
from linnet.serialization import msgpack_restore

# The gates of a cell, by the layer that has them side by side in NNX, in their order there.
_GATES = {
    SimpleCell: {"dense_i": ("i",), "dense_h": ("h",)},
    OptimizedLSTMCell: {
        "dense_i": ("ii", "if", "ig", "io"),
        "dense_h": ("hi", "hf", "hg", "ho"),
    },
    GRUCell: {"dense_i": ("ir", "iz", "in"), "dense_h": ("hr", "hz", "hn")},
}


def load_linen(
    source: Any, model: Any, *, strict: bool = True, rename: Rename | None = None
) -> Restored:
    """Loads the variables of a Linen model into an NNX model that is built alike.

    Everything is compared before anything is written. Submodules that Linen's ``setup`` has in a
    list or dict (``layers_0``) find their place in one of the model (``layers[0]``) by themselves,
    scanned layers theirs in an ``nnx.Stack``, and the gates of recurrent cells theirs in kernels
    that are fused in NNX. A model that was converted from Linen needs no ``rename``.

    Args:
      source: the collections, as ``init`` returns them; msgpack bytes or a file of them
        (``linnet.serialization.to_bytes``); or the folder of a checkpoint that Linnet or another
        program wrote with Orbax. Parameters alone will do, and so will a train state, of which
        step and optimizer are left out.
      model: the NNX model; it may be abstract (``nnx.eval_shape``).
      strict: refuse variables that are missing, too many or misshapen; otherwise load what fits,
        and return the list as ``problems``.
      rename: from the names in Linen to those of the model, as for ``io.restore``:
        ``{"Dense_0": "encoder", "block_*/Dense_0": "blocks/*/up", "Dense_2": None}``. Paths are
        without the collection, and rename what is below them.

    Returns:
      The model, as ``model``, and the ``problems``.

    Raises:
      CheckpointMismatchError: variables do not fit; all are listed, and nothing was changed.
      CheckpointArgumentError: the source is none of these.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import io, linen, nnx
      >>> class Linen(linen.Module):
      ...     @linen.compact
      ...     def __call__(self, x):
      ...         x = linen.relu(linen.Dense(4)(x))
      ...         return linen.Dense(1)(x)
      >>> class Model(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.up, self.down = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)
      ...     def __call__(self, x):
      ...         return self.down(nnx.relu(self.up(x)))
      >>> x = jnp.ones((1, 3))
      >>> variables = Linen().init(jax.random.key(0), x)
      >>> model = Model(nnx.Rngs(1))
      >>> _ = io.load_linen(variables, model, rename={"Dense_0": "up", "Dense_1": "down"})
      >>> bool((model(x) == Linen().apply(variables, x)).all())
      True
    """
    found = _open(source)
    own = _variables_of(model)
    found, read = _without_collections(found, set().union(*map(_collections_of, own.values())))
    idle = []
    if rename:
        found, idle = sources.renamed_source(found, rename)
        if strict and idle:
            what = f"{found.name} does not have what rename names"
            refuse(what, idle, ["name paths that there are, without their collection"])
    found = _as_in(model, own, found)
    wanted = {path: x for path, x in own.items() if not _collections_of(x).isdisjoint(read)}
    restored = restore_from(
        sources.source_below(found, "model"),
        {"model": from_flat_state(wanted)},
        strict=strict,
        rename=None,
    )
    return Restored({"model": model}, idle + restored.problems, found.name)


def linen_variables(model: Any, *, rename: Rename | None = None) -> dict[str, Any]:
    """The Variables of an NNX model as the collections of a Linen model that is built alike.

    Args:
      model: the NNX model.
      rename: from the paths of the model to those in Linen, as for ``io.restore``:
        ``{"encoder": "Dense_0", "blocks/*/up": "block_*/Dense_0"}``.

    Returns:
      The collections, without random streams.

    Raises:
      CheckpointMismatchError: ``rename`` names a path that the model does not have.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import io, linen, nnx
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> x = jnp.ones((1, 2))
      >>> bool((linen.Dense(3).apply(io.linen_variables(model), x) == model(x)).all())
      True
    """
    own = _variables_of(model)
    moved, idle = renamed(own, rename or {})
    if idle:
        what = "The model does not have what rename names"
        refuse(what, idle, ["name paths of the model"], not_done="made")
    collections: dict[Path, Any] = {}
    for new, old in moved.items():
        value = own[old].get_value()
        for path, part in _in_linen(model, old, new, value):
            collections[_collection_of(own[old]), *steps_as_text(path)] = part
    return from_flat_state(collections).to_pure_dict()


def _open(source: Any) -> sources.Source:
    if isinstance(source, bytes):
        source = msgpack_restore(source)
    elif isinstance(source, str | os.PathLike) and os.path.isfile(source):
        with open(source, "rb") as file:
            source = msgpack_restore(file.read())
    elif isinstance(source, str | os.PathLike):
        return sources.open_checkpoint(source)
    if not isinstance(source, Mapping):
        raise CheckpointArgumentError(
            "Linen's variables are nested dicts, msgpack bytes, a file of them or the folder of a "
            f"checkpoint, but got a {type(source).__name__}.\n"
            "Fix: io.load_linen(variables, model), with what linen_model.init returned."
        )
    return sources.tree_source(meta.unbox(unfreeze(source)))


def _variables_of(model: Any) -> dict[Path, Any]:
    flat = iter_flat(state(model, graph=True).raw_mapping)
    return {p: x for p, x in flat if isinstance(x, Variable) and not isinstance(x, RngState)}


def _collection_of(variable: Variable[Any]) -> str:
    """The collection of a Variable: its type's registered name, or its class name in snake case."""
    cls = type(variable)
    name = variable_name_from_type(cls, allow_register=True)
    if name != cls.__name__:
        return name
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removesuffix("Variable") or name).lower()


def _collections_of(variable: Variable[Any]) -> set[str]:
    """The collections that a Variable is loaded from: a bridge may name one after the class."""
    return {_collection_of(variable), type(variable).__name__}


def _without_collections(
    source: sources.Source, known: set[str]
) -> tuple[sources.Source, set[str]]:
    """Strips the collection from the paths of a source; returns the names it found."""
    known = known | {"params", "batch_stats"}
    at = 1 if source.is_named else 0  # after the name of the item
    if not any(len(path) > at and path[at] in known for path in source.specs):
        return source, {"params"}  # the parameters alone

    def inner(path: Path) -> Path | None:
        return path[at + 1 :] if len(path) > at and path[at] in known else None

    moved: dict[Path, Path] = {}
    for path in source.specs:
        new = inner(path)
        if new in moved:
            raise CheckpointArgumentError(
                f"{source.name} has {text_of(new)} in two collections: {text_of(moved[new])} and "
                f"{text_of(path)}; an NNX model has one Variable there.\n"
                "Fix: load the collections one after the other, each with its own rename."
            )
        if new:
            moved[new] = path
    found = {str(path[at]) for path in moved.values()}
    inside = sources.with_paths(source, moved, inner)
    return inside, found | {"params", "batch_stats"}


# ---- paths ---------------------------------------------------------------------------------------


def _as_in(model: Any, own: Mapping[Path, Any], source: sources.Source) -> sources.Source:
    """Gives Linen's variables in a source the paths that they have in the model."""
    places = {id(x): path for path, x in iter_graph(model) if isinstance(x, Variable)}
    moved: dict[Path, Path] = {}
    fused: dict[Path, dict[int, Path]] = {}  # the parts of a fused entry, by position
    for path in source.specs:
        variable, part = next(_resolved(model, path), (None, None))
        place = places.get(id(variable), path)
        if part is None:
            moved[place] = path
        else:
            fused.setdefault(place, {})[part] = path
    whole = {}
    for place, parts in fused.items():
        shape = getattr(own.get(place), "shape", ())
        spec = _joined([source.specs[parts[i]] for i in sorted(parts)])
        if spec is not None and spec.shape == shape:
            whole[place] = [parts[i] for i in sorted(parts)], spec
        else:
            moved |= {path: path for path in parts.values()}
    new_paths = {old: new for new, old in moved.items()}
    found = sources.with_paths(source, moved, lambda path: new_paths.get(path, path))
    return _with_fused(found, source, whole)


def _with_fused(
    found: sources.Source, source: sources.Source, whole: Mapping[Path, tuple[list[Path], Spec]]
) -> sources.Source:
    """The source ``found`` with entries that join several of ``source`` along the last axis."""

    def read(placements: sources.Placements) -> dict[Path, Any]:
        values = found.read({path: x for path, x in placements.items() if path not in whole})
        for path in placements:
            if path in whole:
                parts = source.read(dict.fromkeys(whole[path][0], np.ndarray))
                arrays = [np.asarray(parts[part]) for part in whole[path][0]]
                values[path] = np.concatenate(arrays, axis=-1)
        return values

    specs = {path: spec for path, (_, spec) in whole.items()}
    return dataclasses.replace(found, specs=found.specs | specs, read=read)


def _joined(specs: list[Spec]) -> Spec | None:
    """The type of arrays side by side along the last axis."""
    first = specs[0]
    alike = len({(x.category, x.dtype, x.shape[:-1]) for x in specs}) == 1
    if not alike or first.category != "array" or not all(x.shape for x in specs):
        return None
    return Spec("array", first.dtype, (*first.shape[:-1], sum(x.shape[-1] for x in specs)))


def _resolved(node: Any, path: Path) -> Iterator[tuple[Any, int | None]]:
    """The Variables that a path of Linen can lead to, and which part of each is meant."""
    if isinstance(node, Stack):
        node = node.stacked
    if not path:
        if isinstance(node, Variable):
            yield node, None
        return
    for child in _named(node, str(path[0])):
        yield from _resolved(child, path[1:])
    for layer, gates in _GATES.get(type(node), {}).items():
        if len(path) == 2 and path[0] in gates:
            variable = _child(_child(node, layer), str(path[1]))
            if isinstance(variable, Variable):
                yield variable, gates.index(str(path[0])) if len(gates) > 1 else None


def _named(node: Any, name: str) -> Iterator[Any]:
    """The parts that a name of Linen can mean: an attribute, or an item of a container."""
    # A word that Python keeps for itself, such as `if`, has an underscore in NNX.
    for key in (name, f"{name}_") if isinstance(node, LSTMCell) else (name,):
        child = _child(node, key)
        if child is not None:
            yield child
    words = name.split("_")
    for end in range(1, len(words)):
        container = _child(node, "_".join(words[:end]))
        if _is_container(container):
            yield from _named(container, "_".join(words[end:]))


def _is_container(node: Any) -> bool:
    return isinstance(node, list | tuple | dict | List | Dict)


def _child(node: Any, key: str) -> Any:
    """An attribute or item, or None."""
    if isinstance(node, list | tuple | List):
        return node[int(key)] if key.isdecimal() and int(key) < len(node) else None
    if isinstance(node, dict | Dict):
        return next((item for name, item in node.items() if str(name) == key), None)
    return vars(node).get(key) if isinstance(node, Pytree) else None


def _in_linen(model: Any, path: Path, renamed: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """The paths and values in Linen of the model's value at ``path``, which rename has moved."""
    same = 0
    while same < min(len(path), len(renamed)) and path[-1 - same] == renamed[-1 - same]:
        same += 1
    start = len(path) - same
    steps = list(steps_as_text(renamed[: len(renamed) - same]))
    node, cell = model, None
    for position, step in enumerate(path):
        if position >= start:
            if _is_container(node) and steps:
                steps[-1] = f"{steps[-1]}_{step}"
            elif not (isinstance(node, Stack) and step == "stacked"):
                steps.append(str(step).removesuffix("_" if isinstance(node, LSTMCell) else ""))
        if position == len(path) - 2 and position >= start and type(node) in _GATES:
            cell = node
        node = _child(node, str(step))
    if cell is None:
        yield tuple(steps), value
        return
    *above, layer, leaf = steps
    gates = _GATES[type(cell)][layer]
    parts = jnp.split(value, len(gates), axis=-1)
    for gate, part in zip(gates, parts, strict=True):
        yield (*above, gate, leaf), part
    if isinstance(cell, GRUCell) and layer == "dense_h":  # Linen's cell has a bias more
        shape = (*value.shape[:-2], parts[-1].shape[-1])
        yield (*above, "hn", "bias"), jnp.zeros(shape, value.dtype)
