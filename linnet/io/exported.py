"""Loads and runs an exported model. Needs JAX, NumPy and flatbuffers, and nothing else.

``linnet.io.export`` puts a copy of this file into each folder it writes, as ``load.py``:

    from load import load

    model = load()             # the folder that load.py is in, or load("elsewhere")
    y = model(x)               # what the model returns; state that it changed is kept

or, if you hold the weights yourself:

    y, updates = model.exported.call(weights, x)
    weights = {**weights, **updates}

``weights`` maps names to arrays, as ``weights.safetensors`` does, and ``updates`` has new values of
those that the call changed (running statistics, counters, caches). PRNG keys are stored as their
key data (``jax.random.key_data``).
"""

import json
import os

import jax
import jax.export
import numpy as np

PROGRAM, WEIGHTS, MANIFEST = "program.bin", "weights.safetensors", "export.json"

# The dtypes of safetensors files; tensors with the last of these dtypes come first in a file.
DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "I16": "int16", "U16": "uint16", "F16": "float16",
    "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32", "C64": "complex64",
    "F64": "float64", "I64": "int64", "U64": "uint64",
}  # fmt: skip


class Program:
    """A model that was exported: call it with the inputs.

    Args:
      program: the bytes of the program.
      weights: arrays by name.
      names: those of the inputs, for errors.
    """

    def __init__(self, program, weights, names=()):
        self.exported = jax.export.deserialize(bytearray(program))
        self.weights = dict(weights)
        self.names = list(names)
        self._call = jax.jit(self.exported.call)

    def __call__(self, *inputs):
        """What the model returns for these inputs; changed state is kept in ``weights``."""
        try:
            outputs, updates = self._call(self.weights, *inputs)
        except (TypeError, ValueError) as error:
            self._explain(error, inputs)
            raise
        self.weights.update(updates)
        return outputs

    def _explain(self, error, inputs):
        """Raises an error that names the inputs that do not fit, if there are such."""
        (_, *wanted), _ = self.exported.in_tree.unflatten(self.exported.in_avals)
        known = len(self.names) == len(wanted)
        names = self.names if known else [f"input {n}" for n in range(len(wanted))]
        cls = TypeError if isinstance(error, TypeError) else ValueError
        if len(inputs) != len(wanted):
            raise cls(
                f"The exported model takes {len(wanted)} input{'s' * (len(wanted) != 1)} "
                f"({', '.join(names)}), but got {len(inputs)}.\nFix: pass them by position."
            ) from error
        lines, sizes = [], {}
        for name, want, given in zip(names, wanted, inputs, strict=True):
            lines += _misfits(name, want, given, sizes)
        for size, found in sizes.items():
            if len(set(found.values())) > 1:
                text = ", ".join(f"{number} in {place}" for place, number in found.items())
                lines.append(f"{size} is one size, but it is {text}")
        if lines:
            raise cls(
                "The exported model was called with inputs that do not fit:\n"
                + "\n".join(f"  - {line}" for line in lines)
                + "\nFix: pass what was exported, or export it again; "
                "batch=True or shapes= leave sizes open."
            ) from error
        pairs = zip(names, wanted, inputs, strict=True)
        texts = [f"{n}: expected {_text(want)}, got {_text(x)}" for n, want, x in pairs]
        error.add_note("The inputs of the exported model: " + "; ".join(texts) + ".")

    def __repr__(self):
        (weights, *inputs), _ = self.exported.in_tree.unflatten(self.exported.in_avals)
        outputs, updates = self.exported.out_tree.unflatten(self.exported.out_avals)
        return (
            f"Program(inputs={tuple(inputs)}, outputs={outputs}, {len(weights)} weights, "
            f"{len(updates)} of them updated, platforms={self.exported.platforms})"
        )


def _misfits(name, want, given, sizes):
    """How an input differs from what is wanted; notes the values of open sizes in ``sizes``."""
    if jax.tree.structure(want) != jax.tree.structure(given):
        return [f"{name}: expected {_text(want)}, got {_text(given)}"]
    lines = []
    leaves = jax.tree_util.tree_leaves_with_path(want)
    for (path, leaf), value in zip(leaves, map(_type, jax.tree.leaves(given)), strict=True):
        where = name + jax.tree_util.keystr(path)
        shape = getattr(value, "shape", ())
        fits = getattr(value, "dtype", None) == leaf.dtype and len(shape) == len(leaf.shape)
        pairs = list(zip(leaf.shape, shape, strict=False))
        if not fits or any(isinstance(size, int) and size != found for size, found in pairs):
            lines.append(f"{where}: expected {_text(leaf)}, got {_text(value)}")
            continue
        for axis, (size, found) in enumerate(pairs):
            if not isinstance(size, int):
                sizes.setdefault(str(size), {})[f"{where}.shape[{axis}]"] = found
    return lines


def _type(leaf):
    """The type that JAX gives an array or number; the leaf itself if it is none."""
    try:
        return jax.typeof(leaf)
    except TypeError:
        return leaf


def _text(tree):
    """Arrays as dtype and shape, in their containers."""

    def text(leaf):
        if not hasattr(leaf, "dtype"):
            return type(leaf).__name__
        return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"

    return str(jax.tree.map(lambda leaf: text(_type(leaf)), tree)).replace("'", "")


def load(folder=None):
    """Loads the exported model of a folder.

    Args:
      folder: its path; by default the folder that this file is in.

    Returns:
      The model; call it with the inputs.
    """
    folder = os.path.dirname(os.path.abspath(__file__)) if folder is None else folder
    with open(os.path.join(folder, PROGRAM), "rb") as file:
        program = file.read()
    with open(os.path.join(folder, MANIFEST), encoding="utf-8") as file:
        names = json.load(file).get("names", ())
    return Program(program, read_weights(os.path.join(folder, WEIGHTS)), names)


def read_weights(path):
    """Reads the arrays of a safetensors file.

    Args:
      path: the file.

    Returns:
      The arrays by name.

    Raises:
      ValueError: it is no such file, or was cut off.
    """
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > os.path.getsize(path) - 8:
            raise ValueError(f"{path} is not a safetensors file.")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        arrays = {}
        for name, facts in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            start, end = facts["data_offsets"]
            file.seek(8 + length + start)
            dtype = np.dtype(jax.numpy.dtype(DTYPES[facts["dtype"]]))
            data = file.read(end - start)
            if len(data) < end - start:
                raise ValueError(f"{path} was cut off.")
            flat = np.frombuffer(data, dtype)
            arrays[name] = jax.numpy.asarray(flat.reshape(facts["shape"]))
    return arrays


if __name__ == "__main__":
    print(load())
