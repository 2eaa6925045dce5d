"""Exporting: a model as a StableHLO program with its weights, to run without its source."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey

from linnet.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    ExportError,
    MissingPackageError,
    NotACheckpointError,
    type_text,
)
from linnet.functional.fusing import is_tracing
from linnet.io import exported
from linnet.io.exported import MANIFEST, PROGRAM, WEIGHTS, Program
from linnet.io.shared import folders
from linnet.io.shared.entries import Spec, first_names, is_key, raw_data
from linnet.io.shared.files import open_to_read, parse_json, read_json, write_through
from linnet.io.shared.objects import is_live, why_not_stored
from linnet.io.weights import files
from linnet.io.weights.files import TensorFile
from linnet.io.weights.header import arrange, code_of
from linnet.nnx.graphlib import as_pure, merge, split, state
from linnet.nnx.pytreelib.kinds import key_name
from linnet.nnx.pytreelib.tracing import reading

LOADER = "load.py"
FORMAT, VERSION = "linnet export", 1
_NAME_IT = "name the folder that io.export wrote."
_MOST_PROGRAM_BYTES = 1 << 31  # flatbuffers cannot be larger
_CONTAINER_TYPES = (dict, list, tuple, set)


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
    (the types of inputs and outputs, and the names of the weights) and ``load.py``, a short program
    that runs the model with JAX, NumPy and flatbuffers alone. ``io.load_exported`` loads it where
    Linnet is installed. The weights are arguments of the program, so ``weights.safetensors`` may be
    replaced by a later one of the same model.

    What a call changes in the model (running statistics, random streams, caches) is part of the
    program's result, and ``load.py`` keeps it for the next call. Call ``model.eval()`` first if
    the program is to evaluate.

    Args:
      path: the folder to write.
      f: a model, a method of one, or a function of models and inputs.
      *args: example arguments of ``f``: pytrees of arrays, or of their shapes
        (``jax.ShapeDtypeStruct``), in dicts, lists and tuples. Models among them are exported with
        their weights, and are no arguments of the program. For keyword arguments, and others that
        never change: ``functools.partial(model, scale=2)``.
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
    is_export = os.path.isfile(os.path.join(folder, MANIFEST))
    if overwrite and os.path.lexists(folder) and not is_export:
        raise CheckpointExistsError(
            f"{folder} is there already and is no export, so it is not replaced.\n"
            "Fix: export to another folder."
        )
    pure_call = PureCall(f, args)
    specs = _input_specs(pure_call.inputs, batch, shapes, constraints)
    compiled = jax.export.export(jax.jit(pure_call), platforms=platforms)(pure_call.types, *specs)
    try:
        code = bytes(compiled.serialize(vjp_order=vjp_order))
    except ValueError as error:
        raise ExportError(
            f"The inputs or outputs have a form that cannot be stored: {error}\n"
            "Fix: take and return arrays in dicts, lists and tuples."
        ) from error
    nbytes = len(code) + sum(x.size * x.dtype.itemsize for x in pure_call.types.values())
    folders.prepare(folder, nbytes, overwrite=overwrite, is_checkpoint=False)
    new = folder + folders.REPLACEMENT
    folders.remove_tree(new)
    try:
        os.mkdir(new)
        _write(new, pure_call, compiled, code)
    except OSError as error:
        raise folders.write_error(folder, error) from error
    else:
        folders.replace(new, folder)
    finally:
        folders.remove_tree(new)


def load_exported(path: Any) -> Program:
    """Loads what ``export`` wrote.

    A program can do no more than JAX's computations can; still, run only those that you trust.

    Args:
      path: the folder.

    Returns:
      The model: call it with the inputs; an error lists those that do not fit. ``weights`` holds
      its arrays by name, and ``exported`` is the ``jax.export.Exported``.

    Raises:
      CheckpointNotFoundError: there is nothing at ``path``.
      NotACheckpointError: what is there is no export.
      DamagedCheckpointError: a file is not what was written.
      MissingPackageError: flatbuffers is not installed.

    Example:
      >>> import tempfile
      >>> import jax, jax.numpy as jnp
      >>> from linnet import io, nnx
      >>> path = f"{tempfile.mkdtemp()}/model"
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> io.export(path, model, jax.ShapeDtypeStruct((1, 2), jnp.float32), batch=True)
      >>> io.load_exported(path)(jnp.ones((5, 2))).shape
      (5, 3)
    """
    _check_flatbuffers()
    folder = folders.find_replacement(folders.local_path(path))
    if not os.path.lexists(folder):
        raise CheckpointNotFoundError(f"There is no export {folder}.\nFix: {_NAME_IT}")
    facts = _read_manifest(folder)
    code = _read_program(folder, facts)
    with contextlib.closing(TensorFile(os.path.join(folder, WEIGHTS), folder)) as weights:
        arrays = {name: jnp.asarray(weights.read(name)) for name in weights.tensors}
    # The manifest may have anything in place of names.
    names: Any = facts.get("weights")
    inputs: Any = facts.get("names")
    input_names = list(map(str, inputs)) if isinstance(inputs, list) else []
    if sorted(arrays) != names:
        is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
        listed = first_names(names, 10) if is_list else "not listed"
        raise DamagedCheckpointError(
            f"{weights.path} does not hold the weights of the program beside it, which are "
            f"{listed}.\nFix: io.save_safetensors(path, model, only=..., overwrite=True) of the "
            "model that was exported."
        )
    try:
        return Program(code, arrays, input_names)
    except Exception as error:  # JAX's reader raises many kinds of errors for bytes it cannot read
        raise DamagedCheckpointError(
            f"JAX {jax.__version__} does not take {os.path.join(folder, PROGRAM)} for a program: "
            f"{error}\nFix: load it with JAX {facts.get('jax')}, or export the model again."
        ) from error


def _read_program(folder: str, facts: dict[str, Any]) -> bytes:
    place = os.path.join(folder, PROGRAM)
    with open_to_read(place, folder) as file:
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


def _read_manifest(folder: str) -> dict[str, Any]:
    place = os.path.join(folder, MANIFEST)
    if not os.path.lexists(place):
        raise NotACheckpointError(
            f"{folder} is not an export: there is no {MANIFEST} in it.\nFix: {_NAME_IT}"
        )
    facts = parse_json(place, read_json(place, folder))
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise NotACheckpointError(f"{place} does not belong to an export.\nFix: {_NAME_IT}")
    if facts.get("version") != VERSION:
        raise NotACheckpointError(
            f"{place} is of version {facts.get('version')!r}; this version of Linnet reads "
            f"version {VERSION}.\nFix: load it with the Linnet that wrote it, or with its load.py."
        )
    return facts


def _input_specs(inputs: list[Any], batch: bool, shapes: Any, constraints: Sequence[str]) -> Any:
    for leaf in jax.tree.leaves(inputs):
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


def _write(folder: str, pure_call: PureCall, compiled: jax.export.Exported, code: bytes) -> None:
    specs = {n: Spec("array", np.dtype(x.dtype).name, x.shape) for n, x in pure_call.types.items()}
    layout: files.Layout = {WEIGHTS: (arrange(specs), {})}

    def value(name: str) -> Any:
        return np.asarray(raw_data(pure_call.leaves[name]), jnp.dtype(specs[name].dtype))

    files.write(folder, layout, value, overwrite=False)
    (_, *inputs), _ = compiled.in_tree.unflatten(compiled.in_avals)
    outputs, updates = compiled.out_tree.unflatten(compiled.out_avals)
    facts = {
        "format": FORMAT,
        "version": VERSION,
        "jax": jax.__version__,
        "platforms": list(compiled.platforms),
        "names": pure_call.input_names,
        "inputs": jax.tree.map(type_text, inputs),
        "outputs": jax.tree.map(type_text, outputs),
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
        write_through(os.path.join(folder, name), data)
    folders.flush_folder(folder)


# ---- the call as a pure function ----------------------------------------------------------------


class PureCall:
    """A pure function of weights by name and of inputs; returns outputs and changed weights."""

    def __init__(self, f: Any, args: Sequence[Any]):
        self.args = list(args)
        self.inputs = [arg for arg in args if not is_live(arg)]
        self.names = _argument_names(f, len(args))
        self.input_names = [self.names[n] for n, arg in enumerate(args) if not is_live(arg)]
        self.model, self.f = _model_and_function(f, {id(arg) for arg in args})
        self._model_name = "self" if "model" in self.names else "model"
        self.objects = {} if self.model is None else {self._model_name: self.model}
        self.objects |= {self.names[n]: arg for n, arg in enumerate(args) if is_live(arg)}
        self._is_alone = len(self.objects) == 1 and self.model is not None
        self.graphdef, values = split(self.objects, graph=True)
        found, self.treedef = jax.tree_util.tree_flatten_with_path(values)
        self.leaves: dict[str, Any] = {}
        for steps, leaf in found:
            if (name := self._name(steps)) in self.leaves:
                raise ExportError(
                    f"Two entries of the model would have the name {name}.\n"
                    "Fix: rename one of them; a dot in a key looks like the dot between two steps."
                )
            if text := why_not_stored(leaf, _why_not_in_export):
                raise ExportError(
                    f"{name} {text}, so it cannot be exported.\nFix: give it an array of numbers."
                )
            self.leaves[name] = leaf
        self.types = {name: _stored_type(leaf) for name, leaf in self.leaves.items()}

    def _name(self, steps: Sequence[Any]) -> str:
        # A Variable is a step of its own in the tree, and none in the name.
        texts = [str(key_name(step)) for step in steps if not isinstance(step, GetAttrKey)]
        return ".".join(texts[1:] if self._is_alone else texts) or "value"

    def __call__(self, weights: dict[str, Any], *inputs: Any) -> Any:
        """The outputs, and the weights that have changed; adding or removing some is refused."""
        before = {name: _as_in_model(weights[name], leaf) for name, leaf in self.leaves.items()}
        objects = merge(self.graphdef, self.treedef.unflatten(before.values()))
        rest = iter(inputs)
        args = [
            objects[name] if is_live(arg) else next(rest)
            for name, arg in zip(self.names, self.args, strict=True)
        ]
        if self.model is not None:
            args = [objects[self._model_name], *args]
        with reading() as read:  # Variables of models that are not among the arguments, too
            outputs = as_pure(self.f(*args))
        if read and is_tracing():
            raise _holds_a_model(self.f)
        found = jax.tree_util.tree_flatten_with_path(split(objects, graph=True)[1])[0]
        after = {self._name(steps): leaf for steps, leaf in found}
        if after.keys() != before.keys():
            changed = ", ".join(sorted(after.keys() ^ before.keys())[:5])
            raise ExportError(
                f"The call adds or removes Variables ({changed}), which a program cannot do.\n"
                "Fix: make them before the export, or leave out sow and the like."
            )
        return outputs, {name: raw_data(x) for name, x in after.items() if x is not before[name]}


def _model_and_function(f: Any, passed: set[int]) -> tuple[Any, Any]:
    """The model that is called, if any, and a function whose first argument it is."""
    if inspect.ismethod(f) and is_live(f.__self__):
        return f.__self__, f.__func__
    if not callable(f):
        raise ExportError(
            f"A {type(f).__name__} cannot be called.\nFix: pass a model, or a function."
        )
    if is_live(f):
        return f, type(f).__call__
    if any(
        id(held) not in passed and is_live(held) and jax.tree.leaves(state(held))
        for held in _held_by(f, set())
    ):
        raise _holds_a_model(f)
    if isinstance(f, functools.partial):
        model, function = _model_and_function(f.func, passed)
        if model is not None:
            return model, lambda model, *args: function(model, *f.args, *args, **f.keywords)
    return None, f


def _holds_a_model(f: Any) -> ExportError:
    return ExportError(
        f"{getattr(f, '__name__', 'The function')} holds a model that is not among its "
        "arguments; its weights would become constants of the program.\n"
        "Fix: io.export(path, lambda model, x: ..., model, x)."
    )


def _held_by(f: Any, seen: set[int]) -> Iterator[Any]:
    """The objects that a function uses besides its arguments: closure, globals, their contents."""
    if id(f) in seen:
        return
    seen.add(id(f))
    for held in _parts_of(f):
        yield held
        if not is_live(held) and (isinstance(held, _CONTAINER_TYPES) or callable(held)):
            yield from _held_by(held, seen)


def _parts_of(f: Any) -> list[Any]:
    if isinstance(f, functools.partial):
        is_model = is_live(getattr(f.func, "__self__", f.func))
        return [*f.args, *f.keywords.values(), *([] if is_model else [f.func])]
    if isinstance(f, dict):
        return list(f.values())
    if isinstance(f, _CONTAINER_TYPES):
        return list(f)
    if inspect.ismethod(f):
        return [*getattr(f.__self__, "__dict__", {}).values(), f.__func__]
    function = inspect.unwrap(f)
    if not inspect.isfunction(function):
        return []
    used = inspect.getclosurevars(function)
    home = function.__module__
    # Functions from elsewhere, such as those of JAX, hold no model of this program.
    near = [x for x in used.globals.values() if not inspect.isfunction(x) or x.__module__ == home]
    return [*used.nonlocals.values(), *near]


def _argument_names(f: Any, count: int) -> list[str]:
    """The names of the first parameters of a function, as far as they are known."""
    try:
        parameters = inspect.signature(f).parameters.values()
    except (ValueError, TypeError):
        parameters = ()
    found = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [*found, *(f"arg{n}" for n in range(len(found), count))][:count]


def _as_in_model(array: Any, like: Any) -> Any:
    """A stored array as the model has it: a typed PRNG key where ``like`` is one."""
    if not is_key(like):
        return array
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(like))


def _stored_type(leaf: Any) -> Any:
    """The type of a leaf as it is stored; weak types stay weak."""
    stored = jax.eval_shape(raw_data, leaf)
    weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(stored.shape, stored.dtype, weak_type=weak)


def _why_not_in_export(leaf: Any) -> str:
    if not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float):
        return f"is a {type(leaf).__name__}"
    dtype = _stored_type(leaf).dtype
    return "" if code_of(dtype) else f"is {dtype}, a dtype that safetensors files do not have"
