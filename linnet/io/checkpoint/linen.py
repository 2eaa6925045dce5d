"""Linen's variables into NNX models that are built alike, and back, by their paths.

Linen keeps ``{"params": {"Dense_0": {"kernel": ...}}, "batch_stats": ...}``. An NNX model has one
tree, in which the type of a Variable stands for the collection. Layers have the same names and
shapes for their parameters in both (``kernel``, ``bias``, ``scale``, ``mean``, ``embedding``;
``query``, ``key``, ``value`` and ``out`` of attention), so that only the names of submodules
differ: ``rename`` says how.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from linnet.core import meta
from linnet.core.frozen_dict import unfreeze
from linnet.errors import CheckpointArgumentError
from linnet.io.checkpoint import sources
from linnet.io.checkpoint.restoring import restore_from
from linnet.io.shared.entries import Path, folded, text_of
from linnet.io.shared.matching import Rename, RenameRules, refuse
from linnet.io.shared.objects import Restored
from linnet.nnx.graphlib import state
from linnet.nnx.rnglib.streams import RngState
from linnet.nnx.statelib import from_flat_state, iter_flat
from linnet.nnx.variablelib.names import variable_name_from_type
from linnet.nnx.variablelib.variable import Variable
from linnet.serialization import msgpack_restore

_NUMBERED = re.compile(r"(.+)_(\d+)")


def load_linen(
    source: Any, model: Any, *, strict: bool = True, rename: Rename | None = None
) -> Restored:
    """Loads the variables of a Linen model into an NNX model that is built alike.

    Everything is compared before anything is written. Submodules that Linen's ``setup`` has in a
    list (``layers_0``) find their place in a list of the model (``layers[0]``) by themselves.

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
    found, read = _without_collections(found, {_collection_of(x) for x in own.values()})
    idle = []
    if rename:
        found, idle = sources.renamed_source(found, rename)
        if strict and idle:
            what = f"{found.name} does not have what rename names"
            refuse(what, idle, ["name paths that there are, without their collection"])
    tree = from_flat_state(own).raw_mapping
    found = sources.with_paths(
        found, {_twin(path, tree): path for path in found.specs}, lambda path: _twin(path, tree)
    )
    wanted = {path: x for path, x in own.items() if _collection_of(x) in read}
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
    moved = {path: path for path in own}
    if rename:
        rules = RenameRules(rename)
        moved = rules.moved(own)
        if idle := rules.idle():
            what = "The model does not have what rename names"
            refuse(what, idle, ["name paths of the model"], not_done="made")
    collections: dict[Path, Any] = {}
    for new, old in moved.items():
        collections[_collection_of(own[old]), *folded(new)] = own[old].get_value()
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
    return variable_name_from_type(type(variable), allow_register=True)


def _without_collections(
    source: sources.Source, known: set[str]
) -> tuple[sources.Source, set[str]]:
    """A source without the first step of its paths, the collection; and the collections there."""
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


def _twin(path: Path, tree: Any) -> Path:
    """The path of a Linen variable in a model, where its names are not quite the same."""
    new: list[Any] = []
    for step in path:
        steps = [step]
        if isinstance(tree, Mapping) and step not in tree:
            numbered = _NUMBERED.fullmatch(str(step))
            if numbered and int(numbered[2]) in _below(tree, numbered[1]):
                steps = [numbered[1], int(numbered[2])]
            elif f"{step}_" in tree:  # a word that Python keeps for itself, such as `if`
                steps = [f"{step}_"]
        for key in steps:
            tree = _below(tree, key)
            new.append(key)
    return tuple(new)


def _below(tree: Any, key: Any) -> Mapping[Any, Any]:
    found = tree.get(key) if isinstance(tree, Mapping) else None
    return found if isinstance(found, Mapping) else {}
