"""How objects, Variables, states and graph definitions print, as text and with Treescope.

A class that prints itself derives from ``Representable`` and returns a ``PrintedForm``; ``pretty``
renders these as nested text. ``Counts`` sums elements and bytes by the type of Variable,
``display`` and ``to_html`` show objects in notebooks, and Treescope calls the ``render_...``
functions.
"""

from __future__ import annotations

import pathlib
import reprlib
import sys
from collections.abc import Iterable, Mapping
from types import MethodType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from linnet import config
from linnet.nnx.pytreelib import kinds
from linnet.tables import array_size, size_text


class PrintedForm(NamedTuple):
    """One thing to print: ``head`` item, item ``tail``, with a comment on the first line."""

    head: str
    items: Iterable[tuple[str, Any]]
    tail: str
    comment: str = ""
    short_arrays: bool = False
    on_one_line: bool = False  # where every item fits on one


class Representable:
    """Prints itself from the parts that ``_printed_form`` names."""

    __slots__ = ()

    def _printed_form(self) -> PrintedForm:
        raise NotImplementedError(f"{type(self).__name__} does not say how it prints")

    def __treescope_repr__(self, path: Any, subtree_renderer: Any) -> Any:
        return render_text(self, path, subtree_renderer)

    @reprlib.recursive_repr()  # a cycle may lead through things that print themselves
    def __repr__(self) -> str:
        return pretty(self)


def pretty(value: Any, *, short_arrays: bool = False, _open: tuple[int, ...] = ()) -> str:
    """The text of ``value``, nested parts indented by two spaces."""
    if isinstance(value, Representable):
        form = value._printed_form()
    elif type(value) in (list, tuple, dict, set) and kinds.holds_data(value):
        form = _container_form(value)
    elif short_arrays and isinstance(value, (*kinds.ARRAY_TYPES, jax.ShapeDtypeStruct)):
        return _array(value)
    elif isinstance(value, type):
        return value.__name__
    elif isinstance(value, MethodType) and isinstance(value.__self__, Representable):
        return f"<bound method {value.__func__.__qualname__}>"
    else:
        return repr(value[...] if isinstance(value, jax.Ref) else value)
    deepest = config.flax_max_repr_depth
    if id(value) in _open or (deepest is not None and len(_open) >= deepest):
        return f"{form.head}...{form.tail}"
    short_arrays = short_arrays or form.short_arrays
    parts = []
    for label, item in form.items:
        text = pretty(item, short_arrays=short_arrays, _open=(*_open, id(value)))
        parts.append(f"{label}{text}")
    lone = "," if isinstance(value, tuple) and len(parts) == 1 else ""
    if not parts or (form.on_one_line and not any("\n" in part for part in parts)):
        return form.head + ", ".join(parts) + lone + form.tail
    comment = f" # {form.comment}" if form.comment else ""
    lines = ",\n".join("  " + part.replace("\n", "\n  ") for part in parts)
    return f"{form.head}{comment}\n{lines}{lone}\n{form.tail}"


def _container_form(value: Any) -> PrintedForm:
    if isinstance(value, dict):
        items = [(f"{key!r}: ", item) for key, item in value.items()]
        return PrintedForm("{", items, "}", on_one_line=True)
    head, tail = ("[", "]") if isinstance(value, list) else ("(", ")")
    return PrintedForm(head, [("", item) for item in value], tail, on_one_line=True)


class _NestedMapping(Representable):
    """Prints a nested dict as part of a State."""

    def __init__(self, mapping: Mapping[Any, Any]):
        self.mapping = mapping

    def _printed_form(self) -> PrintedForm:
        return PrintedForm("{", mapping_items(self.mapping), "}")


def mapping_items(mapping: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    """The entries of nested dicts, for a ``PrintedForm``."""
    return [
        (f"{key!r}: ", _NestedMapping(value) if type(value) is dict else value)
        for key, value in mapping.items()
    ]


class PrintedPair(NamedTuple):
    """A path and what stands there; it prints as a tuple."""

    path: tuple[Any, ...]
    value: Any

    def __repr__(self) -> str:
        return f"({self.path!r}, {self.value!r})"


def _array(value: Any) -> str:
    if isinstance(value, (Tracer, jax.ShapeDtypeStruct)) or np.size(value) <= 1:
        return repr(value)
    name = "ArrayRef" if isinstance(value, jax.Ref) else "Array"
    return f"{name}(shape={value.shape}, dtype={value.dtype!r})"


class Counts(dict[str, tuple[int, int]]):
    """Elements and bytes by the name of the type of Variable."""

    def add(self, variable_type: str, size: int, nbytes: int) -> None:
        """Adds to one type."""
        before = self.get(variable_type, (0, 0))
        self[variable_type] = (before[0] + size, before[1] + nbytes)

    def __str__(self) -> str:
        parts = [f"{name}: {size_text(*count)}" for name, count in self.items() if count[0]]
        if len(parts) > 1:
            sizes, nbytes = zip(*self.values(), strict=True)
            parts.append(f"Total: {size_text(sum(sizes), sum(nbytes))}")
        return ", ".join(parts)


def count_variables(value: Any) -> Counts:
    """Elements and bytes of every Variable under ``value``, each counted once."""
    counts, seen = Counts(), set()
    for _, part in kinds.places(value, _as_printed, plain=False, methods=False):
        if kinds.kind_of(part) == kinds.VARIABLE and id(part) not in seen:
            seen.add(id(part))
            counts.add(part._count_as or type(part).__name__, *array_size(part.raw_value))
    return counts


def _as_printed(value: Any, kind: int) -> Iterable[tuple[Any, Any]]:
    is_sorted = kind == kinds.OBJECT and not value._pytree_ordered
    return kinds.children_of(value, kind) if is_sorted else kinds.items_of(value, kind)


def display(*args: Any, file: str | pathlib.Path | None = None) -> None:
    """Shows objects: interactively in a notebook, as text elsewhere.

    Args:
      *args: modules, Variables, states, graphdefs, or anything else.
      file: write a self-contained HTML page there instead.

    Example:
      >>> from linnet import nnx
      >>> nnx.display(nnx.Param(1.0))
      Param(
        value=1.0
      )
    """
    if file is not None:
        pathlib.Path(file).write_text(to_html(*args), encoding="utf-8")
        return
    for value in args:
        if _in_notebook():
            import treescope

            treescope.display(value)
        else:
            print(repr(value))


def to_html(*args: Any) -> str:
    """The objects as one self-contained HTML page.

    Args:
      *args: what to show, one below the other.

    Returns:
      The page.
    """
    import treescope

    # Not compressed: the names in the page can be searched, and are there without JavaScript.
    body = "\n".join(treescope.render_to_html(value, compressed=False) for value in args)
    head = '<!doctype html>\n<html><head><meta charset="utf-8"></head><body>'
    return f"{head}\n{body}\n</body></html>\n"


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in getattr(shell, "config", {})


def render_object(obj: Any, path: Any, subtree_renderer: Any) -> Any:
    """A module for Treescope: its attributes, with counts beside the name."""
    items = {str(key): value for key, value in obj._pytree_items().items()}
    return _render_constructor(obj, items, str(count_variables(obj)), path, subtree_renderer)


def render_variable(variable: Any, path: Any, subtree_renderer: Any) -> Any:
    """A Variable for Treescope: its value and metadata."""
    items = {"value": variable.get_value(), **variable._metadata.shown()}
    size, nbytes = array_size(items["value"])
    comment = size_text(size, nbytes) if size else ""
    return _render_constructor(variable, items, comment, path, subtree_renderer)


def render_mapping(state: Any, path: Any, subtree_renderer: Any) -> Any:
    """A State for Treescope: a dictionary inside its name."""
    from treescope import repr_lib

    return repr_lib.render_dictionary_wrapper(
        object_type=type(state),
        wrapped_dict=dict(state.raw_mapping),
        path=path,
        subtree_renderer=subtree_renderer,
    )


def render_text(value: Any, path: Any, subtree_renderer: Any) -> Any:
    """Anything for Treescope as it prints, folded to its first line."""
    from treescope import rendering_parts

    lines = repr(value).splitlines()
    text = rendering_parts.on_separate_lines([rendering_parts.text(line) for line in lines])
    folded = rendering_parts.text(f"{lines[0]}...{lines[-1].strip()}")
    return rendering_parts.build_custom_foldable_tree_node(
        contents=rendering_parts.summarizable_condition(summary=folded, detail=text), path=path
    )


def _render_constructor(
    obj: Any, items: dict[str, Any], comment: str, path: Any, subtree_renderer: Any
) -> Any:
    from treescope import rendering_parts, repr_lib

    node = repr_lib.render_object_constructor(
        object_type=type(obj),
        attributes=items,
        path=path,
        subtree_renderer=subtree_renderer,
        roundtrippable=False,
    )
    if not comment:
        return node
    note = rendering_parts.comment_color(rendering_parts.text(f"  # {comment}"))
    if isinstance(node, rendering_parts.RenderableAndLineAnnotations):
        node, note = node.renderable, rendering_parts.siblings(node.annotations, note)
    return rendering_parts.RenderableAndLineAnnotations(renderable=node, annotations=note)
