"""Pytrees as state dicts (nested dicts with string keys) and as msgpack bytes, as Flax writes them.

``register_serialization_state`` registers how a type becomes a state dict and is restored from one.
Reading bytes never runs code, and sizes are checked against the number of bytes that are there.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linnet.errors import SerializationError

MAX_CHUNK_SIZE = 2**30  # larger arrays are written in pieces: msgpack counts with 32 bits

_NDARRAY, _COMPLEX, _SCALAR = 1, 2, 3  # codes of extension types
_CHUNKED = "__msgpack_chunked_array__"

_handlers: dict[type, tuple[Callable[..., Any], Callable[..., Any]]] = {}
_NAMED_TUPLE_PARTS = {"name", "fields", "values"}
_OTHER_TARGET = (
    "\nFix: give a target with the structure of what was written; from_bytes(None, data) shows it."
)


_steps: ContextVar[tuple[str, ...]] = ContextVar("steps", default=())


def current_path() -> str:
    """The path in the state dict that is being restored, such as ``./params/0``.

    Returns:
      The path; empty where nothing is being restored.

    Example:
      >>> from linnet import serialization
      >>> class Point:
      ...     pass
      >>> serialization.register_serialization_state(
      ...     Point, lambda point: {}, lambda point, state: serialization.current_path())
      >>> serialization.from_state_dict({"a": Point()}, {"a": {}})
      {'a': './a'}
    """
    return "/".join(_steps.get())


# ---- state dicts --------------------------------------------------------------------------------


def register_serialization_state(
    ty: type,
    ty_to_state_dict: Callable[..., Any],
    ty_from_state_dict: Callable[..., Any],
    override: bool = False,
) -> None:
    """Registers how a type is turned into a state dict and restored from one.

    Args:
      ty: the type.
      ty_to_state_dict: takes an instance and returns nested dicts with string keys.
      ty_from_state_dict: takes an instance and a state dict, and returns a new instance.
      override: replace what was registered before.

    Raises:
      SerializationError: the type is registered already.

    Example:
      >>> from linnet import serialization
      >>> class Point:
      ...     def __init__(self, x): self.x = x
      >>> serialization.register_serialization_state(
      ...     Point, lambda p: {"x": p.x}, lambda p, state: Point(state["x"]))
      >>> serialization.to_state_dict([Point(3)])
      {'0': {'x': 3}}
    """
    if ty in _handlers and not override:
        raise SerializationError(
            f'A serialization handler for "{ty.__name__}" is already registered.\n'
            "Fix: pass override=True to replace it."
        )
    _handlers[ty] = (ty_to_state_dict, ty_from_state_dict)


def is_serializable(target: Any) -> bool:
    """Whether an object's type, or a type, is registered.

    Args:
      target: an object or a type.

    Returns:
      True for those that ``register_serialization_state`` knows, and for dicts, lists and tuples.

    Example:
      >>> from linnet import serialization
      >>> serialization.is_serializable([1]), serialization.is_serializable(1)
      (True, False)
    """
    return (target if inspect.isclass(target) else type(target)) in _handlers


def is_named_tuple(obj: Any) -> bool:
    """Whether something is an instance of a named tuple.

    Args:
      obj: anything.

    Returns:
      True if it is.

    Example:
      >>> import collections
      >>> from linnet import serialization
      >>> Point = collections.namedtuple("Point", "x y")
      >>> serialization.is_named_tuple(Point(1, 2)), serialization.is_named_tuple((1, 2))
      (True, False)
    """
    return isinstance(obj, tuple) and hasattr(obj, "_fields")


def to_state_dict(target: Any) -> Any:
    """Returns a tree as nested dicts with string keys; leaves stay as they are.

    Args:
      target: the tree: dicts, lists, tuples and registered types.

    Returns:
      The state dict, or ``target`` itself where it is a leaf.

    Raises:
      SerializationError: two keys of a dict have the same text.

    Example:
      >>> from linnet import serialization
      >>> serialization.to_state_dict({"a": [1, 2]})
      {'a': {'0': 1, '1': 2}}
    """
    if is_named_tuple(target):
        return {name: to_state_dict(getattr(target, name)) for name in target._fields}
    if type(target) not in _handlers:
        return target
    state = _handlers[type(target)][0](target)
    if isinstance(state, dict) and not all(isinstance(key, str) for key in state):
        raise SerializationError(
            "A state dict must only have string keys, but that of a "
            f"{type(target).__name__} has {list(state)}."
        )
    return state


def from_state_dict(target: Any, state: Any, name: str = ".") -> Any:
    """Returns a tree like ``target`` with the leaves of a state dict.

    Args:
      target: gives the structure; its leaves do not matter.
      state: the state dict.
      name: what the path in an error starts with.

    Returns:
      The new tree.

    Raises:
      SerializationError: the state dict does not have the structure; the path is named.

    Example:
      >>> from linnet import serialization
      >>> serialization.from_state_dict({"a": (0, 0)}, {"a": {"0": 1, "1": 2}})
      {'a': (1, 2)}
    """
    before = _steps.set((*_steps.get(), name))
    try:
        if is_named_tuple(target):
            return _restore_named_tuple(target, state)
        if type(target) not in _handlers:
            return state
        return _handlers[type(target)][1](target, state)
    finally:
        _steps.reset(before)


def _mapping(state: Any, what: str) -> dict[str, Any]:
    if not isinstance(state, dict):
        raise SerializationError(
            f"A {what} is restored from a dict, but the state dict has a {type(state).__name__} "
            f"at path {current_path()}.{_OTHER_TARGET}"
        )
    return state


def _dict_state(target: dict[Any, Any]) -> dict[str, Any]:
    texts = [str(key) for key in target]
    if len(set(texts)) != len(texts):
        twice = {text for text in texts if texts.count(text) > 1}
        raise SerializationError(
            f"Dict keys do not have a unique string representation: {twice}, of the keys "
            f"{list(target)}."
        )
    return {text: to_state_dict(item) for text, item in zip(texts, target.values(), strict=True)}


def _restore_dict(target: dict[Any, Any], state: Any) -> dict[Any, Any]:
    state = _mapping(state, "dict")
    missing = [str(key) for key in target if str(key) not in state]
    if missing:
        raise SerializationError(
            "The target dict keys and state dict keys do not match, target dict contains keys "
            f"{missing} which are not present in state dict at path {current_path()}; "
            f"that has {list(state)}.{_OTHER_TARGET}"
        )
    return {
        key: from_state_dict(item, state[str(key)], name=str(key)) for key, item in target.items()
    }


def _sequence_state(target: Any) -> dict[str, Any]:
    return {str(position): to_state_dict(item) for position, item in enumerate(target)}


def _restore_list(target: Any, state: Any) -> list[Any]:
    state = _mapping(state, "list")
    if len(state) != len(target) or not all(str(i) in state for i in range(len(target))):
        raise SerializationError(
            "The size of the list and the state dict do not match, got "
            f"{len(target)} and {len(state)} at path {current_path()}.{_OTHER_TARGET}"
        )
    return [from_state_dict(item, state[str(i)], name=str(i)) for i, item in enumerate(target)]


def _restore_named_tuple(target: Any, state: Any) -> Any:
    state = _mapping(state, type(target).__name__)
    if set(state) == _NAMED_TUPLE_PARTS:  # as Flax wrote them before 2022
        positions = range(len(state["fields"]))
        state = {state["fields"][str(i)]: state["values"][str(i)] for i in positions}
    if set(state) != set(target._fields):
        raise SerializationError(
            "The field names of the state dict and the named tuple do not match, got "
            f"{sorted(state)} and {sorted(target._fields)} at path {current_path()}."
            f"{_OTHER_TARGET}"
        )
    fields = {
        name: from_state_dict(getattr(target, name), state[name], name=name)
        for name in target._fields
    }
    return type(target)(**fields)


def _partial_state(target: Any) -> dict[str, Any]:
    return {"args": to_state_dict(target.args), "keywords": to_state_dict(target.keywords)}


def _restore_partial(target: Any, state: Any) -> Any:
    args = from_state_dict(target.args, state["args"], name="args")
    keywords = from_state_dict(target.keywords, state["keywords"], name="keywords")
    return jax.tree_util.Partial(target.func, *args, **keywords)


register_serialization_state(dict, _dict_state, _restore_dict)
register_serialization_state(list, _sequence_state, _restore_list)
register_serialization_state(
    tuple, _sequence_state, lambda target, state: tuple(_restore_list(target, state))
)
register_serialization_state(jax.tree_util.Partial, _partial_state, _restore_partial)


# ---- bytes --------------------------------------------------------------------------------------


def to_bytes(target: Any) -> bytes:
    """Returns the state dict of a tree as msgpack bytes.

    Args:
      target: the tree.

    Returns:
      The bytes, the same that Flax writes.

    Raises:
      SerializationError: a leaf is of a type that cannot be written; its path is named.

    Example:
      >>> import numpy as np
      >>> from linnet import serialization
      >>> data = serialization.to_bytes({"w": np.ones(2)})
      >>> serialization.from_bytes({"w": None}, data)
      {'w': array([1., 1.])}
    """
    _refuse_endless(target)
    return msgpack_serialize(to_state_dict(target), in_place=True)


def from_bytes(target: Any, encoded_bytes: bytes) -> Any:
    """Returns a tree like ``target`` with the leaves of msgpack bytes.

    Args:
      target: gives the structure; None gives the state dict itself.
      encoded_bytes: what ``to_bytes``, or Flax, wrote.

    Returns:
      The new tree.

    Raises:
      SerializationError: the bytes are no serialized tree, or one of another structure.

    Example:
      >>> from linnet import serialization
      >>> data = serialization.to_bytes({"steps": (1, 2)})
      >>> serialization.from_bytes({"steps": (0, 0)}, data)
      {'steps': (1, 2)}
      >>> serialization.from_bytes(None, data)
      {'steps': {'0': 1, '1': 2}}
    """
    state = msgpack_restore(encoded_bytes)
    return state if target is None else from_state_dict(target, state)


def msgpack_serialize(pytree: Any, in_place: bool = False) -> bytes:
    """Returns nested dicts and lists of arrays and plain values as msgpack bytes.

    Args:
      pytree: the tree.
      in_place: keep the order of dict keys and put NumPy arrays into the tree itself; otherwise
        a copy is made, with sorted keys.

    Returns:
      The bytes.

    Raises:
      SerializationError: a leaf is of a type that cannot be written; its path is named.

    Example:
      >>> from linnet import serialization
      >>> serialization.msgpack_serialize({"a": [1, 2]})
      b'\\x81\\xa1a\\x92\\x01\\x02'
    """
    import msgpack

    _refuse_endless(pytree)
    if not in_place:
        try:
            pytree = jax.tree_util.tree_map(lambda leaf: leaf, pytree)
        except ValueError as error:
            raise SerializationError(
                "The keys of a dict cannot be sorted, as when some are text and some are not.\n"
                "Fix: serialization.to_bytes(tree), which makes all of them text."
            ) from error
    try:
        tree = _prepared(pytree, ())
        return bytes(msgpack.packb(tree, default=_pack_leaf, strict_types=True) or b"")
    except (TypeError, OverflowError, ValueError) as error:
        if isinstance(error, SerializationError):
            raise
        raise SerializationError(f"The tree cannot be serialized: {error}.") from error


def _refuse_endless(tree: Any) -> None:
    """Raises for containers that contain themselves or nest too deeply for JAX."""
    try:
        _visit_all(tree)
    except RecursionError:
        raise SerializationError(
            "The tree holds itself, or containers inside each other without end.\n"
            "Fix: serialize the parts of it one by one."
        ) from None


def _visit_all(node: Any) -> None:
    if isinstance(node, dict | list | tuple):
        for child in node.values() if isinstance(node, dict) else node:
            _visit_all(child)


_WRITTEN_AS_THEY_ARE = (type(None), bool, int, float, str, bytes, bytearray, memoryview, complex)


def _prepared(tree: Any, path: tuple[Any, ...], in_list: bool = False) -> Any:
    """The tree with arrays on the host, large ones in pieces; its dicts are changed in place.

    In a list they stay whole: Flax would not put them together again.
    """
    if type(tree) is dict:
        for key, item in tree.items():
            tree[key] = _prepared(item, (*path, key), in_list)
        return tree
    if type(tree) is list:
        tree[:] = [_prepared(item, (*path, i), True) for i, item in enumerate(tree)]
        return tree
    if isinstance(tree, jax.Array | np.ndarray | np.generic):
        array = _prepared_array(tree, path)
        return array if in_list or array.nbytes <= MAX_CHUNK_SIZE else _in_pieces(array)
    if type(tree) is int and not -(2**63) <= tree < 2**64:
        raise SerializationError(
            f"can not serialize the integer at {_text(path)}: {tree} has more than 64 bits."
        )
    if type(tree) not in _WRITTEN_AS_THEY_ARE:
        raise SerializationError(
            f"can not serialize {type(tree).__name__!r} object at {_text(path)}.\n"
            "Fix: serialization.to_bytes(tree) for tuples and registered types; "
            "nnx.to_pure_dict(state) for the state of a model."
        )
    return tree


def _text(path: tuple[Any, ...]) -> str:
    return repr("/".join(map(str, path)))


def _prepared_array(array: Any, path: tuple[Any, ...]) -> Any:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise SerializationError(
            f"can not serialize the PRNG key at {_text(path)}.\n"
            "Fix: jax.random.key_data(key), and jax.random.wrap_key_data after restoring."
        )
    array = np.asarray(array) if isinstance(array, jax.Array) else array
    if isinstance(array, np.ma.MaskedArray):
        raise SerializationError(
            f"can not serialize the masked array at {_text(path)}: its mask would "
            "be lost.\nFix: write its data and its mask under names of their own."
        )
    if array.dtype.kind in "OSU" or array.dtype.names or array.dtype.type is np.void:
        raise SerializationError(
            "Object and structured dtypes not supported for serialization of ndarrays, but the one "
            f"at {_text(path)} is {array.dtype}."
        )
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return array


def _in_pieces(array: Any) -> dict[str, Any]:
    step = max(1, MAX_CHUNK_SIZE // array.dtype.itemsize)
    flat = array.reshape(-1)
    pieces = [flat[start : start + step] for start in range(0, flat.size, step)]
    numbered = lambda items: {str(i): item for i, item in enumerate(items)}  # noqa: E731
    return {_CHUNKED: True, "shape": numbered(array.shape), "chunks": numbered(pieces)}


def _pack_leaf(leaf: Any) -> Any:
    import msgpack

    if isinstance(leaf, complex) and not isinstance(leaf, np.generic):
        return msgpack.ExtType(_COMPLEX, msgpack.packb((leaf.real, leaf.imag)))
    if isinstance(leaf, np.ndarray | np.generic):
        parts = (leaf.shape, leaf.dtype.name, leaf.tobytes())
        code = _NDARRAY if isinstance(leaf, np.ndarray) else _SCALAR
        return msgpack.ExtType(code, msgpack.packb(parts, use_bin_type=True))
    raise TypeError(f"can not serialize {type(leaf).__name__!r} object")


def msgpack_restore(encoded_pytree: bytes) -> Any:
    """Reads nested dicts and lists from msgpack bytes, with NumPy arrays as leaves.

    Args:
      encoded_pytree: what ``msgpack_serialize``, or Flax, wrote.

    Returns:
      The tree.

    Raises:
      SerializationError: the bytes are not whole, or no serialized tree.

    Example:
      >>> import numpy as np
      >>> from linnet import serialization
      >>> data = serialization.msgpack_serialize({"w": np.ones(2), "steps": [1, 2]})
      >>> serialization.msgpack_restore(data)
      {'steps': [1, 2], 'w': array([1., 1.])}
    """
    import msgpack

    try:
        tree = msgpack.unpackb(
            encoded_pytree, ext_hook=_unpack_leaf, raw=False, strict_map_key=False
        )
        return _joined(tree)
    except SerializationError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError, msgpack.UnpackException) as error:
        text = str(error) or type(error).__name__
        raise SerializationError(
            f"These are not the bytes of a serialized tree: {text}.\nFix: read the whole file."
        ) from error


def _unpack_leaf(code: int, data: bytes) -> Any:
    import msgpack

    if code == _COMPLEX:
        real, imag = msgpack.unpackb(data)
        return complex(real, imag)
    if code in (_NDARRAY, _SCALAR):
        array = _array(*msgpack.unpackb(data, raw=False))
        return array if code == _NDARRAY else array[()]
    return msgpack.ExtType(code, data)


def _array(shape: Any, name: Any, data: Any) -> np.ndarray:
    if not _is_shape(shape) or type(data) is not bytes:
        raise SerializationError(
            f"An array has the shape {shape!r}, which is no shape, or data that are no bytes."
        )
    if type(name) is not str or not _DTYPE_NAME.fullmatch(name):
        raise SerializationError(f"An array has the dtype {name!r}, which is no dtype.")
    dtype = np.dtype(jnp.dtype(name)) if name in _ml_dtypes() else np.dtype(name)
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(data):
        raise SerializationError(
            f"An array is said to be {name}{shape}, but {len(data)} bytes of it are there."
        )
    return np.frombuffer(data, dtype).reshape(shape)


def _is_shape(sizes: Any) -> bool:
    return type(sizes) is list and all(type(size) is int and size >= 0 for size in sizes)


_DTYPE_NAME = re.compile(r"\w+(\[\w+\])?")  # NumPy parses other text as Python


@functools.cache
def _ml_dtypes() -> set[str]:
    """The names of the dtypes that JAX adds to NumPy's."""
    starts = ("bfloat16", "float8", "float4", "int2", "int4", "uint2", "uint4")
    found = [getattr(jnp, name) for name in dir(jnp) if name.startswith(starts)]
    return {np.dtype(dtype).name for dtype in found}


def _joined(tree: Any) -> Any:
    """Joins the arrays that were written in pieces."""
    if type(tree) is list:
        return [_joined(item) for item in tree]
    if type(tree) is not dict:
        return tree
    if _CHUNKED not in tree:
        return {key: _joined(item) for key, item in tree.items()}
    sizes = [tree["shape"][str(i)] for i in range(len(tree["shape"]))]
    pieces = [tree["chunks"][str(i)] for i in range(len(tree["chunks"]))]
    whole = np.concatenate(pieces)
    if not _is_shape(sizes) or whole.size != math.prod(sizes):
        raise SerializationError(f"An array in pieces has {whole.size} elements, not {sizes}.")
    return whole.reshape(sizes)
