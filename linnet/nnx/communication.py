"""What a compiled function sends between devices, read from the program that XLA made of it."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

from linnet.nnx.transforms.jit import jit
from linnet.nnx.transforms.lowering import Compiled
from linnet.tables import aligned

_OPERATIONS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "ragged-all-to-all",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (.*?) ([a-z][\w-]*)\(")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|branch_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%?[\w.-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_ARGUMENT = re.compile(r"\b(values|arrays|plain|donated_values\[\d+\])\[(\d+)\]")
_OP_NAME = re.compile(r'op_name="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a compiled program.

    Args:
      operation: what it does, as XLA calls it, such as ``"all-gather"``.
      types: the types of its results on one device, such as ``"f32[16,64]"``; XLA joins the
        collectives of several arrays.
      count: how often it runs in one call: more than once in a loop.
      bytes: the size of the results on one device, of all runs.
      where: the argument that it gathers, or the modules and operations that it belongs
        to; which of the two is XLA's choice.
    """

    operation: str
    types: tuple[str, ...]
    count: int
    bytes: int
    where: str


@dataclasses.dataclass(frozen=True)
class CollectivesReport:
    """The collective operations of a compiled program; printed, a table.

    Args:
      entries: one for each operation of the program.
    """

    entries: tuple[Collective, ...]

    @property
    def bytes(self) -> int:
        """What one device gets from all of them in a call."""
        return sum(entry.bytes for entry in self.entries)

    @property
    def rows(self) -> dict[str, tuple[int, int, int]]:
        """For each kind of operation: how many run, on how many arrays, and bytes."""
        found: dict[str, tuple[int, int, int]] = {}
        for entry in sorted(self.entries, key=lambda entry: entry.operation):
            count, arrays, size = found.get(entry.operation, (0, 0, 0))
            more = entry.count * len(entry.types)
            found[entry.operation] = (count + entry.count, arrays + more, size + entry.bytes)
        return found

    def types(self, operation: str) -> list[str]:
        """The types of the arrays that one kind of operation makes, in order of their names."""
        return sorted(
            type_name
            for entry in self.entries
            if entry.operation == operation
            for type_name in entry.types * entry.count
        )

    def __str__(self) -> str:
        if not self.entries:
            return "no collectives"
        rows = [("operation", "count", "arrays", "bytes per device")]
        rows += [(name, *(f"{n:,}" for n in numbers)) for name, numbers in self.rows.items()]
        return "\n".join(aligned(rows))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(\n{self}\n)"


def collectives(f: Any, *args: Any, **kwargs: Any) -> CollectivesReport:
    """Lists what a step sends between devices, from its compiled program.

    The table tells whether a model is sharded as it was meant: data parallelism reduces gradients
    and gathers nothing, FSDP gathers each sharded parameter as well, one device does neither. A
    reduction whose result is cut into shards is a ``reduce-scatter`` on accelerators; on the CPU it
    is an ``all-reduce``, of which each device keeps a part.

    Args:
      f: a function under ``nnx.jit`` or ``jax.jit``, or a plain one, which is compiled for these
        arguments and not run; or what ``.trace``, ``.lower`` or ``.compile`` of one returned.
      *args: the arguments of a call, where ``f`` is a function.
      **kwargs: likewise.

    Returns:
      The operations with their numbers and sizes, as a table if printed. Inside a loop they count
      once for each round, if the number of rounds is known when the program is compiled. Of the
      branches of a condition all are counted.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import nnx
      >>> model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
      >>> print(nnx.collectives(nnx.jit(lambda model, x: model(x)), model, jnp.ones((2, 4))))
      no collectives
    """
    compiled = _compiled(f, args, kwargs)
    found = _collectives_in(compiled.as_text())
    if isinstance(compiled, Compiled):
        found = (_with_paths(collective, compiled) for collective in found)
    return CollectivesReport(tuple(found))


def _compiled(f: Any, args: Any, kwargs: Any) -> Any:
    """The compiled stage of ``f``, which has the text of the program."""
    stage: Any = f
    if callable(f) and not hasattr(f, "as_text"):
        function: Any = f if hasattr(f, "lower") else jit(f)
        stage = function.lower(*args, **kwargs)
    elif hasattr(f, "lower"):
        stage = stage.lower()
    return stage.compile() if hasattr(stage, "compile") else stage


def _with_paths(collective: Collective, compiled: Compiled) -> Collective:
    """A collective with the paths of arguments in place of the names that JAX has for them."""

    def path(match: re.Match[str]) -> str:
        return compiled.argument_name(match[1], int(match[2]))

    where = _ARGUMENT.sub(path, collective.where)
    return dataclasses.replace(collective, where=where)


def _collectives_in(text: str) -> Iterator[Collective]:
    """The collectives of a program in XLA's text form, in the order in which they stand there."""
    computations, entry = _computations(text)
    times = _times(computations, entry)
    for name, lines in computations.items():
        for line in lines if times[name] else ():
            found = _INSTRUCTION.match(line)
            # Where an operation is divided in two, its end has the type of the result.
            operation = found[2].removesuffix("-done") if found else ""
            if found is None or operation not in _OPERATIONS:
                continue
            arrays = _ARRAY.findall(found[1])
            size = sum(_bytes(*array) for array in arrays) * times[name]
            types = tuple(f"{dtype}[{shape}]" for dtype, shape in arrays)
            where = _OP_NAME.search(line)
            yield Collective(operation, types, times[name], size, where[1] if where else "")


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each function of a program, by its name, and the name of its entry function."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    entry = ""
    for line in text.splitlines():
        start = _COMPUTATION.match(line)
        if start:
            lines = found.setdefault(start[2], [])
            entry = start[2] if start[1] else entry
        else:
            lines.append(line)
    return found, entry


def _times(computations: dict[str, list[str]], entry: str) -> collections.Counter[str]:
    """How often each function of a program runs in one call of it."""
    times: collections.Counter[str] = collections.Counter()
    pending = [(entry, 1)]
    while pending:
        name, count = pending.pop()
        times[name] += count
        for line in computations.get(name, ()):
            found = _INSTRUCTION.match(line)
            if found is None or found[2].endswith("-done"):
                continue
            trips = _TRIPS.search(line) if found[2] == "while" else None
            for group in _CALLED.findall(line):
                for called in re.findall(r"[\w.-]+", group):
                    pending.append((called, count * int(trips[1]) if trips else count))
    return times


def _bytes(dtype: str, shape: str) -> int:
    """The size of an array, by its type in XLA's text form."""
    bits = re.search(r"\d+", dtype)
    size = math.prod(int(n) for n in shape.split(",") if n)
    return (size * int(bits[0]) + 7) // 8 if bits else size
