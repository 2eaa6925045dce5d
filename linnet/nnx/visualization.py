"""Looking at objects: Treescope in notebooks and HTML files, text elsewhere."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

from linnet.nnx.reprlib import array_size, count_variables, size_text


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
    return (
        rendering_parts.RenderableAndLineAnnotations(renderable=node, annotations=note)
        if not isinstance(node, rendering_parts.RenderableAndLineAnnotations)
        else rendering_parts.RenderableAndLineAnnotations(
            renderable=node.renderable, annotations=rendering_parts.siblings(node.annotations, note)
        )
    )
