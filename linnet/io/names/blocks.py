"""Rules that several maps share: for layers that are the same in all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from linnet.io.names.rules import Rule

FUSED_HEADS = "(head dim)+ width -> width head dim"
_OUT_IN = "out in -> in out"


def linear(stored: str, path: str, *, is_transposed: bool = True) -> Iterator[Rule]:
    """A PyTorch ``Linear``, or with ``is_transposed=False`` a ``Conv1D`` of GPT-2."""
    yield Rule(
        f"{stored}.weight", f"{path}/kernel", _OUT_IN if is_transposed else "in out -> in out"
    )
    yield Rule(f"{stored}.bias", f"{path}/bias", "out -> out")


def norm(stored: str, path: str) -> Iterator[Rule]:
    """A normalisation with a weight and, perhaps, a bias."""
    yield Rule(f"{stored}.weight", f"{path}/scale")
    yield Rule(f"{stored}.bias", f"{path}/bias")


def embedding(stored: str, path: str) -> Iterator[Rule]:
    """A table of embeddings."""
    yield Rule(f"{stored}.weight", f"{path}/embedding")


def head_projection(stored: str, path: str) -> Iterator[Rule]:
    """A ``Linear`` to heads, where the model has an axis for the heads or where it does not."""
    yield Rule(f"{stored}.weight", f"{path}/kernel", "(head dim) width -> width head dim")
    yield Rule(f"{stored}.bias", f"{path}/bias", "(head dim) -> head dim")
    yield from linear(stored, path)


def from_heads(stored: str, path: str) -> Iterator[Rule]:
    """A ``Linear`` from heads, where the model has an axis for the heads or where it does not."""
    yield Rule(f"{stored}.weight", f"{path}/kernel", "width (head dim) -> head dim width")
    yield from linear(stored, path)


def fused_heads(stored: str, paths: Sequence[str], *, is_transposed: bool = True) -> Iterator[Rule]:
    """One ``Linear`` (or ``Conv1D``) to the heads of query, key and value."""
    axes = FUSED_HEADS if is_transposed else "width (head dim)+ -> width head dim"
    yield Rule(f"{stored}.weight", [f"{path}/kernel" for path in paths], axes)
    yield Rule(f"{stored}.bias", [f"{path}/bias" for path in paths], "(head dim)+ -> head dim")
    flat = "out+ in -> in out" if is_transposed else "in out+ -> in out"
    yield Rule(f"{stored}.weight", [f"{path}/kernel" for path in paths], flat)
    yield Rule(f"{stored}.bias", [f"{path}/bias" for path in paths], "out+ -> out")
