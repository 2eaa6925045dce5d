"""Saving the weights of a model to safetensors files."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linnet.errors import CheckpointExistsError, NameMapError, UnstorableError
from linnet.io.names.applying import Target, Unit
from linnet.io.names.rules import NameMap, Names, resolved
from linnet.io.shared import folders, placing
from linnet.io.shared.entries import Path, Spec, raw_data, text_of
from linnet.io.shared.matching import Problem, refuse
from linnet.io.shared.objects import why_not_stored
from linnet.io.weights import files
from linnet.io.weights.files import SUFFIX, TensorFiles, open_tensors
from linnet.io.weights.header import code_of, why_no_name
from linnet.io.weights.loading import AS_IT_IS, NAMELESS, ModelEntries, model_entries, tensor_name

Array = np.ndarray[Any, Any]


def save_safetensors(
    path: Any,
    model: Any,
    names: Names | None = None,
    *,
    max_shard_bytes: int | None = None,
    dtype: Any = None,
    metadata: Mapping[str, str] | None = None,
    like: Any = None,
    only: Any = None,
    overwrite: bool = False,
) -> None:
    """Saves the weights of a model to safetensors files, byte for byte as other tools write them.

    For training, see ``io.save``: it keeps optimizer state, random state and plain values, too.

    Args:
      path: a file whose name ends in ``.safetensors``, or a folder; other files in it stay.
      model: a module, a State or a pytree of arrays.
      names: as for ``load_safetensors``. By default an entry's path, with dots.
      max_shard_bytes: divide the tensors over several files of at most this size, with an index;
        ``path`` is a folder then.
      dtype: convert floating-point numbers to this dtype, if it can hold them.
      metadata: text to store beside the tensors; Hugging Face's libraries want
        ``{"format": "pt"}``, which is the default with a map of names.
      like: a file, index or folder that the model was loaded from: the new files have the same
        names, order, dtypes and metadata, and tensors that the map ignores are copied, as are
        those that add up to one of the model's and still do.
      only: a filter for the entries to save; by default all but random state, caches,
        intermediates and the tables of ``nnx.RoPE``.
      overwrite: replace files that are there.

    Raises:
      CheckpointMismatchError: the map has no name for an entry, or the model lacks a tensor of
        ``like``; all are listed.
      CheckpointExistsError: something is there, and is not to be replaced.
      CheckpointWriteError: there is no room or no permission; what was there before is intact.
      UnstorableError: the format has no such dtype, an entry has no value or too large a one, or
        the arguments do not go together.
      NameMapError: two entries get one name, or ``names`` is no map.
      FilterError: ``only`` chooses nothing.

    Example:
      >>> import os, tempfile
      >>> from linnet import io, nnx
      >>> folder = tempfile.mkdtemp()
      >>> model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
      >>> io.save_safetensors(folder, model, max_shard_bytes=256)
      >>> sorted(os.listdir(folder))
      ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors',
       'model.safetensors.index.json']
    """
    place = folders.local_path(path)
    is_file = place.endswith(SUFFIX)
    _check_arguments(place, is_file, max_shard_bytes, dtype)
    given = {"max_shard_bytes": max_shard_bytes, "dtype": dtype, "metadata": metadata}
    also_given = [name for name, value in given.items() if value is not None]
    if like is not None and also_given:
        raise UnstorableError(
            f"like gives the files, dtypes and metadata, so {' and '.join(also_given)} would "
            "change nothing.\nFix: leave out like, or these."
        )
    with TensorFiles() if like is None else open_tensors(like) as original:
        name_map = None if names is None else resolved(names, model, original.tensors)
        saving = _WeightSaving(model_entries(model, only), name_map, original, dtype)
        if like is None:
            layout = files.lay_out(saving.specs, max_shard_bytes, _texts(metadata, names))
            index = files.index_of(layout) if len(layout) > 1 else None
        else:
            layout, index = saving.lay_out_like_original(is_file=is_file), original.index
        if is_file:
            place, name = os.path.split(place)
            layout = {name: next(iter(layout.values()))}
        files.write(place, layout, saving.value, overwrite=overwrite, index=index)


def _check_arguments(place: str, is_file: bool, max_shard_bytes: Any, dtype: Any) -> None:
    if is_file and os.path.isdir(place):
        raise CheckpointExistsError(
            f"{place} is a folder, and would be a file by its name.\nFix: save under another name."
        )
    if is_file and max_shard_bytes is not None:
        raise UnstorableError(
            f"{place} is one file, and max_shard_bytes asks for several.\n"
            "Fix: pass the path of a folder."
        )
    if max_shard_bytes is not None and not isinstance(max_shard_bytes, int | np.integer):
        raise UnstorableError(
            f"max_shard_bytes is a number of bytes, but got {max_shard_bytes!r}.\n"
            "Fix: 5_000_000_000 for files of 5 GB."
        )
    if dtype is not None and not _is_floating_dtype(dtype):
        raise UnstorableError(
            f"dtype is for floating-point numbers, but got {dtype!r}.\nFix: dtype=jnp.bfloat16, or "
            "convert the weights yourself."
        )


def _is_floating_dtype(dtype: Any) -> bool:
    try:
        return jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        return False


def _texts(metadata: Mapping[str, str] | None, names: Names | None) -> Mapping[str, str]:
    if metadata is None:
        return {} if names is None else {"format": "pt"}
    if not all(isinstance(text, str) for pair in metadata.items() for text in pair):
        raise UnstorableError(
            f"metadata maps text to text, but got {metadata!r}.\nFix: json.dumps the values."
        )
    return metadata


class _WeightSaving:
    """One call of ``save_safetensors``."""

    def __init__(
        self, entries: ModelEntries, names: NameMap | None, original: TensorFiles, dtype: Any
    ):
        self.entries, self.names, self.original = entries, names or NameMap([]), original
        self.dtype = None if dtype is None else jnp.dtype(dtype)
        self.sources: dict[str, tuple[Unit, int]] = {}
        self.specs: dict[str, Spec] = {}
        for path, spec in entries.specs.items():
            why_not_in_file = functools.partial(_why_not_in_file, spec)
            if text := why_not_stored(entries.leaf(path), why_not_in_file):
                raise UnstorableError(
                    f"{text_of(path)} {text}.\nFix: only=... to leave it out, or io.save."
                )
        units = self._units_by_path() if names is None else self._units_by_map(names)
        for unit in units:
            for number, name in enumerate(unit.stored):
                if why := why_no_name(name):
                    path = text_of(unit.targets[0].path)
                    raise UnstorableError(
                        f"{path[:100]} would be stored as {name[:100]!r}, and {why}.\n"
                        "Fix: give it another name, or pass a map of names."
                    )
                self.sources[name] = (unit, number)
                self.specs[name] = self._stored_spec(unit, number)
        for name, other in self.names.tied.items():
            is_new = name in self.specs and name not in self.original.tensors
            same_type = is_new and self.specs.get(other) == self.specs[name]
            if same_type and self.value(name).tobytes() == self.value(other).tobytes():
                del self.specs[name]

    def _units_by_path(self) -> Iterator[Unit]:
        seen: dict[str, Path] = {}
        for path, spec in self.entries.specs.items():
            name = tensor_name(path) or NAMELESS
            if name in seen:
                raise NameMapError(
                    f"{path} and {seen[name]} would both be stored as {name}.\n"
                    "Fix: rename one of them, or pass a map of names."
                )
            seen[name] = path
            yield Unit(AS_IT_IS, (name,), (Target(path, (), spec.shape),))

    def _units_by_map(self, names: NameMap) -> list[Unit]:
        units, unnamed = self.entries.apply_map(names, self.entries.specs)
        if unnamed:
            refuse(
                f"The map has no name for {len(unnamed)} entries of the model",
                [Problem("extra", text_of(path), "the map has no name for it") for path in unnamed],
                [
                    "add rules, map.with_paths(...) if the model has other paths",
                    "only=... to leave them out",
                ],
                not_done="written",
                lines=[f"{text_of(path)}: {self.entries.specs[path]}" for path in unnamed],
            )
        return units

    def _stored_spec(self, unit: Unit, number: int) -> Spec:
        dtype = jnp.dtype(self.entries.specs[unit.targets[0].path].dtype)
        if jnp.issubdtype(dtype, jnp.floating):
            known = self.original.tensors.get(unit.stored[number])
            dtype = (known.dtype if known else self.dtype) or dtype
        return Spec("array", np.dtype(dtype).name, unit.stored_shapes()[number])

    def lay_out_like_original(self, *, is_file: bool) -> files.Layout:
        """The files of the original, with the model's tensors."""
        original = self.original
        problems = [
            Problem("missing", name, f"{original.path} has it, and the model does not")
            for name in original.tensors
            if not (name in self.specs or name in self.names.tied or self.names.is_ignored(name))
        ]
        for name, spec in self.specs.items():
            if name not in original.tensors:
                problems.append(Problem("extra", name, f"{original.path} does not have it"))
            elif (found := original.tensors[name].spec) != spec:
                text = f"is {spec}, but {found} in {original.path}"
                problems.append(Problem("shape", name, text))
        if is_file and len(original.files) > 1:
            problems.append(Problem("extra", original.path, "has several files; pass a folder"))
        if problems:
            refuse(
                "The model is not like the original",
                problems,
                ["load it from there, with the same map, or leave out like="],
                not_done="written",
            )
        return {
            name: (list(file.tensors.values()), file.metadata)
            for name, file in original.files.items()
        }

    def value(self, name: str) -> Array:
        if name not in self.sources:
            if self.names.tied.get(name) in self.sources:
                return self.value(self.names.tied[name])
            return self.original.read(name)
        unit, number = self.sources[name]
        tensors = [_on_host(self.entries.leaf(t.path), t.index) for t in unit.targets]
        if unit.rule.add and (summands := self._same_summands(unit, tensors)):
            return summands[number]
        dtype = jnp.dtype(self._stored_spec(unit, number).dtype)
        for target, tensor in zip(unit.targets, tensors, strict=True):
            if tensor.dtype != dtype and placing.overflows(tensor, dtype):
                raise UnstorableError(
                    f"{text_of(target.path)} has numbers that are too large for {dtype}.\n"
                    "Fix: dtype=jnp.bfloat16, or leave out dtype= and like=."
                )
        return np.asarray(unit.rule.store(tensors)[number], dtype)

    def _same_summands(self, unit: Unit, tensors: list[Array]) -> list[Array]:
        """The original summands, if their sum is still what the model has; otherwise none."""
        if not all(name in self.original.tensors for name in unit.stored):
            return []
        summands = [self.original.read(name) for name in unit.stored]
        in_model = [summand.astype(tensors[0].dtype) for summand in summands]
        parts = unit.rule.load(in_model, [target.shape for target in unit.targets])
        same = all(a.tobytes() == b.tobytes() for a, b in zip(parts, tensors, strict=True))
        return summands if same else []


def _why_not_in_file(spec: Spec, leaf: Any) -> str:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return "is spread over several processes"
    if spec.category != "array":
        return f"is {spec}, and a safetensors file holds arrays"
    # NumPy does not know the names of all of its dtypes, such as `str32`.
    dtype = leaf.dtype if isinstance(leaf, np.ndarray) else jnp.dtype(spec.dtype)
    return "" if code_of(dtype) else f"is {spec}, a dtype that safetensors files do not have"


def _on_host(leaf: Any, index: tuple[int, ...]) -> Array:
    if isinstance(leaf, jax.Array):
        leaf = raw_data(leaf)
        if any(device.platform != "cpu" for device in leaf.devices()):
            # np.asarray caches a host copy in the JAX array; that of a temporary is freed with it.
            leaf = leaf[index] if index else jnp.copy(leaf)
            index = ()
    return np.asarray(leaf)[index]
