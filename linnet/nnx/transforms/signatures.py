"""What type checkers are told of the transforms: their options, and that signatures are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, ParamSpec, Protocol, Required, TypedDict, TypeVar

from linnet.nnx.filterlib import Filter

P = ParamSpec("P")
R = TypeVar("R")


class Decorator(Protocol):
    """A transform without a function: it keeps the signature of the one it is given."""

    def __call__(self, f: Callable[P, R], /) -> Callable[P, R]:
        """Transforms a function."""
        ...


class GradDecorator(Protocol):
    """``nnx.grad`` without a function."""

    def __call__(self, f: Callable[P, Any], /) -> Callable[P, Any]:
        """The gradient of a function."""
        ...


class ValueAndGradDecorator(Protocol):
    """``nnx.value_and_grad`` without a function."""

    def __call__(self, f: Callable[P, R], /) -> Callable[P, tuple[R, Any]]:
        """The value and the gradient of a function."""
        ...


class JitOptions(TypedDict, total=False):
    """The options of ``jit``, for type checkers."""

    in_shardings: Any
    out_shardings: Any
    static_argnums: int | tuple[int, ...] | None
    static_argnames: str | Iterable[str] | None
    donate_argnums: int | tuple[int, ...] | None
    donate_argnames: str | Iterable[str] | None
    keep_unused: bool
    device: Any
    backend: str | None
    inline: bool
    compiler_options: dict[str, Any] | None
    graph: bool | None
    graph_updates: bool | None


class GradOptions(TypedDict, total=False):
    """The options of ``grad``, for type checkers."""

    argnums: Any
    has_aux: bool
    holomorphic: bool
    allow_int: bool
    reduce_axes: Sequence[Any]
    wrt: Filter | None
    graph: bool | None
    graph_updates: bool | None


class AccumulateOptions(TypedDict, total=False):
    """The options of ``accumulate_gradients``, for type checkers."""

    micro_batches: Required[int]
    in_axes: Any
    reduction: Literal["mean", "sum"]
    argnums: Any
    has_aux: bool
    wrt: Filter | None
    dtype: Any
    graph: bool | None
    graph_updates: bool | None


class RematOptions(TypedDict, total=False):
    """The options of ``remat``, for type checkers."""

    prevent_cse: bool
    static_argnums: int | tuple[int, ...]
    policy: Callable[..., bool] | None
    graph: bool | None
    graph_updates: bool | None


class VmapOptions(TypedDict, total=False):
    """The options of ``vmap``, for type checkers."""

    in_axes: Any
    out_axes: Any
    axis_name: Any
    axis_size: int | None
    spmd_axis_name: Any
    transform_metadata: dict[str, Any] | None
    graph: bool | None
    graph_updates: bool | None


class PmapOptions(TypedDict, total=False):
    """The options of ``pmap``, for type checkers."""

    axis_name: Any
    in_axes: Any
    out_axes: Any
    static_broadcasted_argnums: int | tuple[int, ...]
    devices: Any
    backend: str | None
    axis_size: int | None
    donate_argnums: int | tuple[int, ...]
    transform_metadata: dict[str, Any] | None
    graph: bool | None
    graph_updates: bool | None


class ShardMapOptions(TypedDict, total=False):
    """The options of ``shard_map``, for type checkers."""

    mesh: Required[Any]
    in_specs: Required[Any]
    out_specs: Required[Any]
    axis_names: Any
    check_vma: bool
    graph: bool | None
    graph_updates: bool | None


class ScanOptions(TypedDict, total=False):
    """The options of ``scan``, for type checkers."""

    length: int | None
    reverse: bool
    unroll: int | bool
    _split_transpose: bool
    in_axes: Any
    out_axes: Any
    transform_metadata: dict[str, Any] | None
    graph: bool | None
    graph_updates: bool | None
