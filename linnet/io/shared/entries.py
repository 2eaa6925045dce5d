"""The type of an entry, its path, and plain values as JSON.

A path is a tuple of attribute names, dict keys and list positions, with the name of the saved item
first. As text its steps are joined by ``/``: ``model/layers/0/kernel``.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import math
import operator
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from linnet.errors import DamagedCheckpointError, name_some
from linnet.traverse_util import put_leaf, taken_place

# ---- types --------------------------------------------------------------------------------------

PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes)
_NUMBERS = {
    "bool": np.bool_,
    "int": np.integer,
    "float": np.floating,
    "complex": np.complexfloating,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """The type of an entry: an array, a typed PRNG key, a plain Python value, or anything."""

    category: Literal["array", "key", "value", "any"]
    dtype: str = ""  # the name of the dtype, such as `float32` or `key<fry>`, or of the Python type
    shape: tuple[int, ...] = ()  # of keys, without the axis of their data

    def __str__(self) -> str:
        if self.category in ("value", "any"):
            return self.dtype or "anything"
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    @property
    def is_value(self) -> bool:
        """Whether it is the type of a plain Python value."""
        return self.category == "value"

    @property
    def is_floating(self) -> bool:
        """Whether it is the type of an array of floating-point numbers."""
        return self.category == "array" and jnp.issubdtype(jnp.dtype(self.dtype), jnp.floating)

    @property
    def nbytes(self) -> int:
        """How many bytes the array takes; zero for values."""
        if self.category != "array":
            return 0
        return math.prod(self.shape) * np.dtype(jnp.dtype(self.dtype)).itemsize


ANYTHING = Spec("any")


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a typed PRNG key, or an array of them."""
    return jnp.issubdtype(getattr(leaf, "dtype", int), jax.dtypes.prng_key)


def raw_data(leaf: Any) -> Any:
    """The key data (``jax.random.key_data``) of a typed PRNG key; any other leaf as it is."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def leaf_spec(leaf: Any) -> Spec | None:
    """The type of an array, a ShapeDtypeStruct or a plain value; None for anything else."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is not None and hasattr(leaf, "shape"):
        if is_key(leaf):
            return Spec("key", str(dtype), tuple(leaf.shape))
        return Spec("array", np.dtype(dtype).name, tuple(leaf.shape))
    if type(leaf) in PLAIN_TYPES:
        return Spec("value", type(leaf).__name__)
    return None


@functools.cache
def key_implementations() -> dict[str, str]:
    """The name of each PRNG implementation by the dtype of its keys, such as ``key<fry>``."""
    names = ("threefry2x32", "rbg", "unsafe_rbg")
    return {
        str(jax.eval_shape(functools.partial(jax.random.key, 0, impl=n)).dtype): n for n in names
    }


def fits(wanted: Spec, found: Spec) -> bool:
    """Whether a stored entry can become the wanted one without a change of meaning."""
    # Raw key data can become a key. A plain number and a scalar array of the same type of number
    # can become each other.
    categories = {wanted.category, found.category}
    if wanted == found or "any" in categories:
        return True
    if wanted.category == "key" and found.category == "array":
        return found.dtype == "uint32" and found.shape[:-1] == wanted.shape and found.shape != ()
    if categories == {"array", "value"} and wanted.shape == found.shape == ():
        return _number_type(wanted) == _number_type(found) != ""
    return False


def _number_type(spec: Spec) -> str:
    if spec.is_value:
        return spec.dtype if spec.dtype in _NUMBERS else ""
    dtype = jnp.dtype(spec.dtype)
    return next((name for name, cls in _NUMBERS.items() if jnp.issubdtype(dtype, cls)), "")


def is_count(value: Any, least: int = 0) -> bool:
    """Whether a value is an integer, of Python or NumPy, of at least ``least``."""
    return isinstance(value, int | np.integer) and type(value) is not bool and int(value) >= least


# ---- paths --------------------------------------------------------------------------------------

Path = tuple[str | int, ...]

_UNSAFE = re.compile(r"[/%~\x00\ud800-\udfff]|^\.+$|^$")


def text_of(path: Iterable[Any]) -> str:
    """The path as text, its steps joined by ``/``."""
    return "/".join(map(str, path))


def first_names(names: Iterable[str], most: int = 5) -> str:
    """The first few of several names, for an error message."""
    return name_some(names, most, ", ...")


def steps_as_text(path: Iterable[Any]) -> tuple[str, ...]:
    """The path with every step as text, so that ``0`` and ``'0'`` are the same step."""
    return tuple(map(str, path))


def grouped(sizes: Mapping[Any, int], most: float) -> list[list[Any]]:
    """Divides names, in their order, into groups of up to ``most`` bytes; a larger one is alone."""
    groups: list[list[Any]] = [[]]
    held = 0
    for name, size in sizes.items():
        if groups[-1] and held + size > most:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    return groups


def is_list_index(step: Any) -> bool:
    """Whether a step can be a position in a list: an integer, or the text of one."""
    return str(step).isascii() and str(step).isdecimal()


def storage_names(paths: Iterable[Path]) -> dict[Path, tuple[str, ...]]:
    """A unique name for each path in a format whose keys are text, such as Orbax's."""
    # Two paths may have the same text (``0`` and ``'0'``, or ``a.b`` and ``a``, ``b``, which Orbax
    # joins by dots); the later one gets a number appended.
    names: dict[Path, tuple[str, ...]] = {}
    leaves: set[str] = set()
    folders: set[str] = {""}
    for path in paths:
        *head, last = (_UNSAFE.sub(_percent, str(step)) for step in path)
        for depth in range(len(head)):
            while (joined := ".".join(head[: depth + 1])) in leaves:
                head[depth] += "%2"
            folders.add(joined)
        name, number = (*head, last), 1
        while (joined := ".".join(name)) in leaves or joined in folders:
            number += 1
            name = (*head, f"{last}%{number}")
        leaves.add(joined)
        names[path] = name
    return names


def _percent(found: re.Match[str]) -> str:
    return "".join(f"%{ord(c):02X}" for c in found.group()) or "%"


def value_at(tree: Any, path: Iterable[Any]) -> Any:
    """The value at a path of nested containers."""
    return functools.reduce(operator.getitem, path, tree)


def at_or_below(top: Path, by_path: Mapping[Path, Any]) -> dict[Path, Any]:
    """What has a path at or below ``top``."""
    return {path: x for path, x in by_path.items() if path[: len(top)] == top}


def lists_in(paths: Iterable[Path]) -> dict[Path, str]:
    """The paths of the lists that integer steps lead into, as ``nest_containers`` takes them."""
    return {
        path[:end]: "list" for path in paths for end, step in enumerate(path) if type(step) is int
    }


def nest_containers(
    values: Mapping[Path, Any], containers: Mapping[Path, str], top: Path = ()
) -> Any:
    """Builds the nested containers below ``top`` from values by path; refuses overlapping ones."""
    # `containers` has the lists and tuples, and what is empty; all other containers are dicts. All
    # of them are built as dicts, below a key that stands for `top`.
    nested: dict[Any, Any] = {}
    for path in containers:
        put_leaf(nested, (None, *path[len(top) :]), {})
    for path, value in values.items():
        below_root = (None, *path[len(top) :])
        if not put_leaf(nested, below_root, value, replace=True):
            _refuse_overlap((*top, *taken_place(nested, below_root)[1:]), (*containers, *values))
    for path in sorted(containers.keys() - values.keys(), key=len, reverse=True):
        if containers[path] != "dict":
            *above, key = (None, *path[len(top) :])
            holder = value_at(nested, above)
            ordered = [holder[key][step] for step in sorted(holder[key])]
            holder[key] = ordered if containers[path] == "list" else tuple(ordered)
    return nested.get(None, {})


def _refuse_overlap(taken: Path, paths: Iterable[Path]) -> NoReturn:
    deeper = next(path for path in at_or_below(taken, dict.fromkeys(paths)) if path != taken)
    raise DamagedCheckpointError(
        f"The manifest has a value at {text_of(taken)} and another one below it, at "
        f"{text_of(deeper)}."
    )


# ---- plain values as JSON -----------------------------------------------------------------------


def encode_value(value: Any) -> Any:
    """A plain value as JSON can hold it."""
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return value


def decode_value(value: Any) -> Any:
    """The reverse of ``encode_value``; refuses what ``encode_value`` does not make."""
    try:
        match value:
            case None | bool() | int() | float() | str():
                return value
            case {"bytes": str(text)}:
                return base64.b64decode(text, validate=True)
            case {"complex": [str(real), str(imag)]}:
                return complex(float.fromhex(real), float.fromhex(imag))
            case {"float": "inf" | "-inf" | "nan" as text}:
                return float(text)
    except ValueError:
        pass
    raise DamagedCheckpointError(f"The manifest has {str(value)[:80]!r} where a value should be.")
