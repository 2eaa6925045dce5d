"""The entries of a model that a weights file holds: no random state, no caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from linnet.errors import FilterError
from linnet.io import objects
from linnet.io.entries import ARRAY, KEY, VALUE, Spec
from linnet.io.matching import MISSING, Problem
from linnet.io.objects import Contents, contents_of
from linnet.io.paths import Path, first_names, text_of
from linnet.nnx.filterlib import Any as AnyOf
from linnet.nnx.filterlib import Not, to_predicate
from linnet.nnx.graphlib.graphdef import flatten_node
from linnet.nnx.rnglib.streams import RngState
from linnet.nnx.statelib import from_flat_state, iter_flat
from linnet.nnx.variablelib.variable import Cache, Intermediate

ITEM = "model"
WEIGHTS = Not(AnyOf(RngState, Cache, Intermediate))
NO_VALUE = "has no value yet, and weights files do not hold one"


@dataclasses.dataclass
class Entries:
    """A model taken apart; paths are inside the model.

    Args:
      contents: all of it.
      specs: the type of each entry that is stored or loaded.
      left_out: the types of those that the filter leaves out.
      is_chosen: whether the filter is the caller's.
    """

    contents: Contents
    specs: dict[Path, Spec]
    left_out: dict[Path, Spec]
    is_chosen: bool

    @property
    def passed_over(self) -> dict[Path, Spec]:
        """The entries that the caller left out: their tensors may be in the file."""
        return self.left_out if self.is_chosen else {}

    def aliases(self, paths: Iterable[Path]) -> dict[Path, Path]:
        """Further paths of entries that stand in several places."""
        return {
            (*other[1:], *path[len(first) - 1 :]): path
            for other, first in self.contents.aliases
            for path in paths
            if path[: len(first) - 1] == first[1:]
        }

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
                yield Problem(MISSING, text_of(path), NO_VALUE)


def entries_of(model: Any, only: Any = None) -> Entries:
    """Takes a model apart.

    Args:
      model: a module, a State, or a nest of containers with arrays.
      only: a filter for the entries that count; by default all but random state, caches and
        intermediates.

    Raises:
      UnstorableError: there is something that cannot be stored.
      FilterError: the filter chooses nothing.
    """
    contents = contents_of({ITEM: model}, with_positions=False)
    chosen = to_predicate(WEIGHTS if only is None else only)
    holders = dict(_variables(contents))
    specs: dict[Path, Spec] = {}
    left_out: dict[Path, Spec] = {}
    for path, spec in contents.specs().items():
        leaf = contents.leaves[path]
        holder = path[: contents.variables.get(path, len(path))]
        kept = specs if chosen(holder[1:], holders.get(holder, leaf)) else left_out
        kept[path[1:]] = _stored_type(spec, leaf)
    if only is not None and left_out and not specs:
        raise FilterError(
            f"only={only!r} chooses none of the {len(left_out)} entries: "
            f"{first_names(map(text_of, left_out))}\n"
            "Fix: a filter for some of them, or only=... for all."
        )
    return Entries(contents, specs, left_out, is_chosen=only is not None)


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
