"""Exporting: a model as a StableHLO program with its weights, to run without its source."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import os
import shutil
from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from linnet.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    ExportError,
    MissingPackageError,
    NotACheckpointError,
)
from linnet.io import exported, folders, plain_files, strict_json, tensor_header, tensor_writing
from linnet.io.entries import ARRAY, Spec
from linnet.io.exported import PROGRAM, WEIGHTS, Program
from linnet.io.paths import first_names
from linnet.io.pure_calls import PureCall, raw
from linnet.io.tensor_files import TensorFile

MANIFEST, LOADER = "export.json", "load.py"
FORMAT, VERSION = "linnet export", 1
_NAME_IT = "name the folder that io.export wrote."
_MOST_PROGRAM_BYTES = 1 << 31  # of flatbuffers


def export(
    path: Any,
    f: Any,
    *args: Any,
    batch: bool = False,
    shapes: Any = None,
    constraints: Sequence[str] = (),
    platforms: Sequence[str] | None = None,
    vjp_order: int = 0,
    overwrite: bool = False,
) -> None:
    """Exports a model with its weights to a folder, to be run without its source or Linnet.

    The folder holds ``program.bin`` (from ``jax.export``), ``weights.safetensors``, ``export.json``
    (what there is) and ``load.py``, a short program that runs it with JAX, NumPy and flatbuffers
    alone. ``io.load_exported`` does the same here. The weights are arguments of the program, so
    the file may be replaced by a later one of the same model.

    What a call changes in the model (running statistics, random streams, caches) is part of the
    program's result, and ``load.py`` keeps it for the next call. Call ``model.eval()`` first if
    the program is to evaluate.

    Args:
      path: the folder to be.
      f: a model, a method of one, or a function of models and inputs.
      *args: example arguments of ``f``: arrays, or their shapes (``jax.ShapeDtypeStruct``), in any
        nest of dicts, lists and tuples. Models among them are exported with their weights, and are
        no arguments of the program. For keyword arguments, and others that never change:
        ``functools.partial(model, scale=2)``.
      batch: the first axis of every input may have any size, the same in all of them.
      shapes: in place of ``batch``, which sizes are open, as for
        ``jax.export.symbolic_args_specs``: ``"batch, 28, 28, 1"`` for one input, or a tuple with an
        entry (or None) for each.
      constraints: what holds for open sizes, such as ``"batch <= 64"``.
      platforms: what to compile for, such as ``("cpu", "cuda", "tpu")``; by default what runs here.
      vjp_order: how often the program can be differentiated.
      overwrite: replace an older export.

    Raises:
      ExportError: an argument, an output or the model cannot be exported.
      MissingPackageError: flatbuffers is not installed.
      CheckpointExistsError: something is there, and is not to be replaced.
      CheckpointWriteError: there is no room or no permission.

    Example:
      >>> import tempfile
      >>> import jax, jax.numpy as jnp
      >>> from linnet import io, nnx
      >>> folder = tempfile.mkdtemp() + "/small"
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> io.export(folder, model, jax.ShapeDtypeStruct((1, 2), "float32"), batch=True)
      >>> run = io.load_exported(folder)
      >>> bool(jnp.allclose(run(jnp.ones((5, 2))), model(jnp.ones((5, 2)))))
      True
    """
    _check_flatbuffers()
    folder = folders.local_path(path)
    if overwrite and os.path.lexists(folder):
        _check_is_export(folder)
    program = PureCall(f, args)
    specs = _input_specs(program.inputs, batch, shapes, constraints)
    compiled = jax.export.export(jax.jit(program), platforms=platforms)(program.specs(), *specs)
    code = _serialized(compiled, vjp_order)
    nbytes = len(code) + program.nbytes
    folders.prepare(folder, nbytes, overwrite=overwrite, is_checkpoint=False)
    new = folder + folders.REPLACEMENT
    shutil.rmtree(new, ignore_errors=True)
    try:
        os.mkdir(new)
        _write(new, program, compiled, code)
        folders.replace(new, folder)
    except OSError as error:
        raise folders.write_error(folder, error) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def load_exported(path: Any) -> Program:
    """Loads what ``export`` wrote.

    A program can do no more than JAX's computations can; still, run those that you trust.

    Args:
      path: the folder.

    Returns:
      The model: call it with the inputs. ``weights`` holds its arrays by name, and ``exported`` is
      the ``jax.export.Exported``.

    Raises:
      CheckpointNotFoundError: there is nothing.
      NotACheckpointError: there is something else.
      DamagedCheckpointError: a file is not what was written.
      MissingPackageError: flatbuffers is not installed.
    """
    _check_flatbuffers()
    folder = folders.find_replacement(folders.local_path(path))
    if not os.path.lexists(folder):
        raise CheckpointNotFoundError(f"There is no export {folder}.\nFix: {_NAME_IT}")
    facts = _read_manifest(folder)
    code = _read_program(folder, facts)
    weights = TensorFile(os.path.join(folder, WEIGHTS), folder)
    try:
        arrays = {name: jnp.asarray(weights.read(name)) for name in weights.tensors}
    finally:
        weights.close()
    if sorted(arrays) != facts.get("weights"):
        raise DamagedCheckpointError(
            f"{weights.path} does not hold the weights of the program beside it, which are "
            f"{_listed(facts.get('weights'))}.\nFix: io.save_safetensors(path, model, only=..., "
            "overwrite=True) of the model that was exported."
        )
    try:
        return Program(code, arrays)
    except Exception as error:  # whatever comes to the mind of a reader of bytes
        raise DamagedCheckpointError(
            f"JAX {jax.__version__} does not take {os.path.join(folder, PROGRAM)} for a program: "
            f"{error}\nFix: load it with JAX {facts.get('jax')}, or export the model again."
        ) from error


def _listed(names: Any) -> str:
    """Names in a manifest, which may be anything."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return "not listed"
    return first_names(names, 10)


def _read_program(folder: str, facts: dict[str, Any]) -> bytes:
    place = os.path.join(folder, PROGRAM)
    with plain_files.open_to_read(place, folder) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MOST_PROGRAM_BYTES:
            raise DamagedCheckpointError(
                f"{place} has {size} bytes; {_MOST_PROGRAM_BYTES} are allowed for a program.\n"
                "Fix: export the model again."
            )
        code = file.readall()
    if hashlib.sha256(code).hexdigest() != facts.get("sha256"):
        raise DamagedCheckpointError(
            f"{place} is not what was written.\nFix: export the model again."
        )
    return code


def _check_flatbuffers() -> None:
    if importlib.util.find_spec("flatbuffers") is None:
        raise MissingPackageError(
            "Exported programs need the package flatbuffers, which JAX does not bring along.\n"
            "Fix: pip install 'linnet[export]', or flatbuffers itself."
        )


def _check_is_export(folder: str) -> None:
    if not os.path.isfile(os.path.join(folder, MANIFEST)):
        raise CheckpointExistsError(
            f"{folder} is there already and is no export, so it is not replaced.\n"
            "Fix: export to another folder."
        )


def _read_manifest(folder: str) -> dict[str, Any]:
    place = os.path.join(folder, MANIFEST)
    if not os.path.lexists(place):
        raise NotACheckpointError(
            f"{folder} is not an export: there is no {MANIFEST} in it.\nFix: {_NAME_IT}"
        )
    facts = strict_json.loads(place, strict_json.read(place, folder))
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise NotACheckpointError(f"{place} does not belong to an export.\nFix: {_NAME_IT}")
    if facts.get("version") != VERSION:
        raise NotACheckpointError(
            f"{place} is of version {facts.get('version')!r}; this version of Linnet reads "
            f"version {VERSION}.\nFix: load it with the Linnet that wrote it, or with its load.py."
        )
    return facts


def _input_specs(inputs: list[Any], batch: bool, shapes: Any, constraints: Sequence[str]) -> Any:
    leaves = jax.tree.leaves(inputs)
    for leaf in leaves:
        if not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float | complex):
            raise ExportError(
                f"An example argument holds {leaf!r}, which is no array.\n"
                "Fix: functools.partial(f, name=value) for arguments that never change."
            )
    specs = jax.tree.map(lambda x: jax.eval_shape(jnp.asarray, x), inputs)
    if batch:
        if shapes is not None:
            raise ExportError("batch=True and shapes= say the same thing.\nFix: pass one of them.")
        shapes = jax.tree.map(lambda x: "batch, ..." if x.ndim else "...", specs)
    elif isinstance(shapes, str):
        shapes = [shapes] * len(specs)
    elif shapes is not None:
        shapes = list(shapes)
    return jax.export.symbolic_args_specs(specs, shapes, constraints)


def _serialized(compiled: jax.export.Exported, vjp_order: int) -> bytes:
    try:
        return bytes(compiled.serialize(vjp_order=vjp_order))
    except ValueError as error:
        raise ExportError(
            f"The inputs or outputs have a form that cannot be stored: {error}\n"
            "Fix: take and return arrays in dicts, lists and tuples."
        ) from error


def _write(folder: str, program: PureCall, compiled: jax.export.Exported, code: bytes) -> None:
    specs = {n: Spec(ARRAY, np.dtype(s.dtype).name, s.shape) for n, s in program.specs().items()}
    layout: tensor_writing.Layout = {WEIGHTS: (tensor_header.arrange(specs), {})}

    def value(name: str) -> Any:
        return np.asarray(raw(program.leaves[name]), jnp.dtype(specs[name].dtype))

    tensor_writing.write(folder, layout, value, overwrite=False)
    (_, *inputs), _ = compiled.in_tree.unflatten(compiled.in_avals)
    outputs, updates = compiled.out_tree.unflatten(compiled.out_avals)
    facts = {
        "format": FORMAT,
        "version": VERSION,
        "jax": jax.__version__,
        "platforms": list(compiled.platforms),
        "inputs": jax.tree.map(_type_text, inputs),
        "outputs": jax.tree.map(_type_text, outputs),
        "updates": sorted(updates),
        "weights": sorted(specs),
        "sha256": hashlib.sha256(code).hexdigest(),
    }
    texts = {
        MANIFEST: (json.dumps(facts, indent=2) + "\n").encode(),
        LOADER: inspect.getsource(exported).encode(),
        PROGRAM: code,
    }
    for name, data in texts.items():
        with open(os.path.join(folder, name), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    folders.flush_folder(folder)


def _type_text(aval: Any) -> str:
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
