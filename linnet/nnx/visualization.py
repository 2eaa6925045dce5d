"""Looking at objects in notebooks and HTML files."""

from linnet.nnx.pytreelib.printing import (
    display,
    render_mapping,
    render_object,
    render_text,
    render_variable,
    to_html,
)

__all__ = [
    "display",
    "render_mapping",
    "render_object",
    "render_text",
    "render_variable",
    "to_html",
]
