"""Tables of models as text: sizes and types of arrays, counted operations, and the drawing."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_MOST_LINES = 4
_MOST_CHARACTERS = 16
_WIDTH = 120  # where there is no terminal


def size_text(size: int, nbytes: int) -> str:
    """``67,084,290 (268.3 MB)``.

    Example:
      >>> size_text(8190, 32760)
      '8,190 (32.8 KB)'
    """
    if nbytes < 1000:
        return f"{size:,} ({nbytes} B)"
    return f"{size:,} ({_scaled(nbytes)}B)"


def _scaled(number: int) -> str:
    power = min((len(str(number)) - 1) // 3, 5)
    return f"{number / 1000**power:.1f} {' KMGTP'[power]}"


def array_size(value: Any) -> tuple[int, int]:
    """Elements and bytes of all arrays in ``value``, abstract ones included."""
    size = nbytes = 0
    for leaf in jax.tree_util.tree_leaves(value):
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            count = int(np.prod(leaf.shape))
            size += count
            nbytes += count * leaf.dtype.itemsize
    return size, nbytes


def count_flops(f: Callable[..., Any], avals: Any) -> int | None:
    """Floating point operations by XLA's own count; None where it gives none."""

    def arrays(values: Any) -> Any:
        return [x for x in jax.tree_util.tree_leaves(f(values)) if hasattr(x, "dtype")]

    analysis = jax.jit(arrays).lower(avals).cost_analysis()
    found = analysis.get("flops") if isinstance(analysis, dict) else None
    return None if found is None else max(int(found), 0)


def with_gradients(f: Callable[..., Any], arrays: list[Any], chosen: Sequence[int]) -> Any:
    """The floating-point outputs of ``f(arrays)``, and their gradients with respect to some arrays.

    ``chosen`` are the positions of these arrays.
    """

    def outputs(primals: list[Any]) -> list[Any]:
        filled = list(arrays)
        for position, primal in zip(chosen, primals, strict=True):
            filled[position] = primal
        return [x for x in jax.tree_util.tree_leaves(f(filled)) if is_inexact(x)]

    out, pullback = jax.vjp(outputs, [arrays[position] for position in chosen])
    return out, pullback([jnp.ones_like(x) for x in out])


def is_inexact(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def abstract(x: Any) -> Any:
    """The shape and dtype of an array; anything else is returned as it is."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "dtype") else x


_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def short_type(x: Any) -> str:
    """The type of an array in few letters, as JAX prints it: ``f32[4,8]``."""
    name = str(x.dtype)
    bare = name.rstrip("0123456789")
    return f"{_SHORT.get(bare, bare)}{name[len(bare) :]}[{','.join(map(str, x.shape))}]"


def describe(tree: Any) -> list[str]:
    """One line for each leaf of arguments or outputs, with its name if it has one.

    None and empty containers are leaves too.
    """
    lines = []
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_empty)[0]:
        text = short_type(leaf) if hasattr(leaf, "dtype") else _clipped(str(leaf))
        names = [key.key for key in keys if isinstance(getattr(key, "key", None), str)]
        lines.append(f"{names[-1]}: {text}" if names else text)
    return lines


def _is_empty(tree: Any) -> bool:
    return tree is None or (isinstance(tree, (tuple, list, dict)) and not tree)


def _clipped(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"


def joined_lines(lines: Sequence[str], most: int = _MOST_LINES) -> str:
    if len(lines) > most:
        lines = [*lines[: most - 1], f"… {len(lines) - most + 1} more"]
    return "\n".join(lines)


def number_text(value: int | None) -> str:
    """A count, exact as long as it is short."""
    if value is None:
        return ""
    if value < 10**5:
        return f"{value:,}"
    return _scaled(value)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of texts as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def make_console(options: Mapping[str, Any]) -> Any:
    from rich.console import Console

    width = shutil.get_terminal_size((_WIDTH, 24)).columns
    settings = {"width": width, "force_terminal": sys.stdout.isatty(), "file": io.StringIO()}
    return Console(**{**settings, **options})


def draw(
    title: str,
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    total: Sequence[str],
    *,
    styles: Mapping[str, Mapping[str, Any]],
    remarks: Sequence[str],
    table_kwargs: Mapping[str, Any],
    column_kwargs: Mapping[str, Any],
    console: Any,
) -> str:
    """A table as text, as it prints on a console: rows, and below them a row of totals."""
    import rich.box
    import rich.table
    from rich.text import Text

    drawn = rich.table.Table(**{"title": title, "box": rich.box.ROUNDED, **table_kwargs})
    for name in names:
        style = styles.get(name, {"justify": "left", "overflow": "fold"})
        drawn.add_column(name, **{**style, **column_kwargs})
    for cells in rows:
        drawn.add_row(*map(Text, cells))
    drawn.add_section()
    drawn.add_row(*map(Text, total), style="bold")
    if remarks:
        drawn.caption = "\n".join(remarks)
    with console.capture() as captured:
        console.print(drawn)
    return "\n".join(line.rstrip() for line in captured.get().rstrip().split("\n"))
