"""The entries of a model that a weights file holds: no random state, no caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from linnet.io import objects
from linnet.io.entries import ARRAY, KEY, VALUE, Spec
from linnet.io.matching import MISSING, Problem
from linnet.io.objects import Contents, contents_of
from linnet.io.paths import Path, text_of
from linnet.nnx.filterlib import Any as AnyOf
from linnet.nnx.filterlib import Not, to_predicate
from linnet.nnx.graphlib.graphdef import flatten_node
from linnet.nnx.rnglib import RngState
from linnet.nnx.statelib import from_flat_state, iter_flat
from linnet.nnx.variablelib import Cache, Intermediate

ITEM = "model"
WEIGHTS = Not(AnyOf(RngState, Cache, Intermediate))


@dataclasses.dataclass
class Entries:
    """A model taken apart; paths are inside the model.

    Args:
      contents: all of it.
      specs: the type of each entry that is stored or loaded.
      aliases: further paths of these entries.
      left_out: entries that the filter leaves out.
    """

    contents: Contents
    specs: dict[Path, Spec]
    aliases: dict[Path, Path]
    left_out: list[Path]

    def leaf(self, path: Path) -> Any:
        """The array of an entry, or what stands for it."""
        return self.contents.leaves[(ITEM, *path)]

    def write(self, values: dict[Path, Any]) -> Any:
        """Writes values into the model, all at once; returns it."""
        full = {(ITEM, *path): value for path, value in values.items()}
        return objects.write(self.contents, full, {})[ITEM]

    def abstract_left_out(self) -> Iterator[Problem]:
        """Entries without a value that would not get one."""
        for path in self.left_out:
            if isinstance(self.leaf(path), jax.ShapeDtypeStruct):
                text = "has no value yet, and weights files do not hold one"
                yield Problem(MISSING, text_of(path), text)


def entries_of(model: Any, only: Any = None) -> Entries:
    """Takes a model apart.

    Args:
      model: a module, a State, or a nest of containers with arrays.
      only: a filter for the entries that count; by default all but random state, caches and
        intermediates.

    Raises:
      UnstorableError: there is something that cannot be stored.
    """
    contents = contents_of({ITEM: model}, with_positions=False)
    chosen = to_predicate(WEIGHTS if only is None else only)
    excluded = {path for path, leaf in _variables(contents) if not chosen(path[1:], leaf)}
    specs: dict[Path, Spec] = {}
    left_out: list[Path] = []
    for path, spec in contents.specs().items():
        variable = path[: contents.variables.get(path, len(path))]
        if variable in excluded:
            left_out.append(path[1:])
        else:
            specs[path[1:]] = _stored_type(spec, contents.leaves[path])
    aliases = {
        (*other, *path[len(first) :]): path
        for other, first in ((a[1:], b[1:]) for a, b in contents.aliases)
        for path in specs
        if path[: len(first)] == first
    }
    return Entries(contents, specs, aliases, left_out)


def _variables(contents: Contents) -> Iterator[tuple[Path, Any]]:
    nested = from_flat_state(contents.live).raw_mapping if contents.live else {}
    return iter_flat(flatten_node(nested, True, "load")[1])


def _stored_type(spec: Spec, leaf: Any) -> Spec:
    """Keys are stored as the numbers they consist of."""
    if spec.kind != KEY:
        return spec
    return Spec(ARRAY, "uint32", jax.eval_shape(jax.random.key_data, leaf).shape)


def is_castable(found: Spec, wanted: Spec) -> bool:
    """Whether one is a floating-point number and the other, too."""
    return all(
        spec.kind != VALUE and jnp.issubdtype(jnp.dtype(spec.dtype), jnp.floating)
        for spec in (found, wanted)
    )
