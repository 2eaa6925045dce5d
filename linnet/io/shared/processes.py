"""Several processes of one run: what one of them does for all, and what has to be the same in all.

As with JAX's own collectives, every process calls these functions, in the same order. With a single
process they do nothing but call what they are given.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from linnet import errors
from linnet.errors import CheckpointWriteError, LinnetError, ProcessMismatchError, misfit_text
from linnet.io.shared.entries import is_key, raw_data

T = TypeVar("T")

_CHUNK = 2048  # bytes; one size, so that one program is compiled
_HEAD = 8  # bytes that hold the length
_ABSENT = "nothing"


def are_several() -> bool:
    """Whether this process is one of several."""
    return jax.process_count() > 1


def gather(value: Any) -> list[Any]:
    """What each process passes, in the order of the processes; JSON has to be able to hold it."""
    if not are_several():
        return [value]
    from jax.experimental import multihost_utils

    data = json.dumps(value).encode()
    data = len(data).to_bytes(_HEAD, "little") + data
    texts, start, longest = [b""] * jax.process_count(), 0, _CHUNK
    while start < longest:
        part = np.frombuffer(data[start : start + _CHUNK].ljust(_CHUNK, b"\0"), np.uint8)
        with jax.set_mesh(mesh_of_all()):  # the mesh in force may have other devices
            rows = multihost_utils.process_allgather(part)
        texts = [text + row.tobytes() for text, row in zip(texts, rows, strict=True)]
        longest = max(_HEAD + _size(text) for text in texts)
        start += _CHUNK
    return [json.loads(text[_HEAD : _HEAD + _size(text)]) for text in texts]


@functools.cache
def mesh_of_all() -> Mesh:
    """A mesh of all devices of all processes, with one axis."""
    return Mesh(np.array(jax.devices()), ("device",))


def _size(text: bytes) -> int:
    return int.from_bytes(text[:_HEAD], "little")


def by_first(action: Callable[[], T]) -> T:
    """Runs an action in the first process; all get what it returns, or raise what it raises."""
    # JSON has to be able to hold what it returns.
    if not are_several():
        return action()
    found, failed = _tried(action) if jax.process_index() == 0 else (None, None)
    found, error = gather([found, _as_json(failed)])[0]
    if error is not None:
        raise failed or _raised_in(0, error)
    return found


def in_all(action: Callable[[], T]) -> T:
    """Runs an action in each process; where it fails in one of them, it fails in all."""
    if not are_several():
        return action()
    found, failed = _tried(action)
    everywhere = gather(_as_json(failed))
    if failed is not None:
        raise failed
    for number, error in enumerate(everywhere):
        if error is not None:
            raise _raised_in(number, error)
    return found


def _tried(action: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What an action returns, or the error that it raises."""
    try:
        return action(), None
    except Exception as error:
        return None, error


def _as_json(error: Exception | None) -> list[Any] | None:
    if error is None:
        return None
    number = error.errno if isinstance(error, CheckpointWriteError) else None
    return [type(error).__name__, number, str(error)]


def _raised_in(process: int, facts: list[Any]) -> Exception:
    """The error of another process, of the same class if that is one of Linnet's."""
    name, number, text = facts
    cls: Any = getattr(errors, name, None)
    if cls is CheckpointWriteError:
        error = CheckpointWriteError(number, text)
    elif isinstance(cls, type) and issubclass(cls, Exception):
        error = cls(text)
    else:
        error = LinnetError(f"{name}: {text}")
    error.add_note(f"It was raised in process {process} of {jax.process_count()}.")
    return error


def agree(what: str, facts: Callable[[], Mapping[str, str]], fix: str) -> None:
    """Refuses facts that are not the same in all processes, and names those that differ."""
    if not are_several():
        return
    own = in_all(lambda: dict(facts()))
    digest = hashlib.sha256(repr(sorted(own.items())).encode()).hexdigest()
    if len(set(gather(digest))) == 1:
        return
    everywhere = gather(own)
    lines = []
    for name in dict.fromkeys(name for found in everywhere for name in found):
        texts = [found.get(name, _ABSENT) for found in everywhere]
        if len(set(texts)) > 1:
            parts = ", ".join(f"{text} in process {n}" for n, text in enumerate(texts))
            lines.append(f"{name}: {parts}")
    raise ProcessMismatchError(misfit_text({what: lines}, fix=fix))


def replicated(leaf: Any) -> Any:
    """An array that every process has on its own devices, as one array of all processes."""
    if not are_several() or not isinstance(leaf, jax.Array) or not leaf.is_fully_addressable:
        return leaf
    return spread(leaf, NamedSharding(Mesh(_first_devices(), ("process",)), PartitionSpec()))


def spread(array: Any, sharding: Sharding) -> jax.Array:
    """An array that every process has, in a sharding over the devices of all of them."""
    # Unlike `jax.device_put` this does not compare the processes, which might wait forever.
    numbers = np.asarray(raw_data(array))
    whole = jax.make_array_from_callback(numbers.shape, sharding, lambda index: numbers[index])
    if not is_key(array):
        return whole
    mesh = getattr(sharding, "mesh", None)
    with jax.set_mesh(mesh) if isinstance(mesh, Mesh) else contextlib.nullcontext():
        return jax.random.wrap_key_data(whole, impl=jax.random.key_impl(array))


def _first_devices() -> np.ndarray:
    """The first device of each process."""
    firsts = {device.process_index: device for device in reversed(jax.devices())}
    return np.array([firsts[number] for number in sorted(firsts)])
