"""What type checkers are told of the transforms: their options, and that signatures are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, ParamSpec, Protocol, Required, TypedDict, TypeVar

from linnet.nnx.filterlib import Filter

P = ParamSpec("P")
R = TypeVar("R")


class Decorator(Protocol):
    """A transform without a function: it keeps the signature of the one it is given."""

    def __call__(self, f: Callable[P, R], /) -> Callable[P, R]: ...


class GradDecorator(Protocol):
    """``nnx.grad`` without a function."""

    def __call__(self, f: Callable[P, Any], /) -> Callable[P, Any]: ...


class ValueAndGradDecorator(Protocol):
    """``nnx.value_and_grad`` without a function."""

    def __call__(self, f: Callable[P, R], /) -> Callable[P, tuple[R, Any]]: ...


class GraphOptions(TypedDict, total=False):
    """The options that all transforms have; like the classes below, for type checkers."""

    graph: bool | None
    graph_updates: bool | None


class JitOptions(GraphOptions, total=False):
    """The options of ``jit``."""

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


class DerivativeOptions(GraphOptions, total=False):
    """The options that ``grad`` and ``accumulate_gradients`` share."""

    argnums: Any
    has_aux: bool
    wrt: Filter | None


class GradOptions(DerivativeOptions, total=False):
    """The options of ``grad`` and ``value_and_grad``."""

    holomorphic: bool
    allow_int: bool
    reduce_axes: Sequence[Any]


class AccumulateOptions(DerivativeOptions, total=False):
    """The options of ``accumulate_gradients``."""

    micro_batches: Required[int]
    in_axes: Any
    reduction: Literal["mean", "sum"]
    dtype: Any


class RematOptions(GraphOptions, total=False):
    """The options of ``remat``."""

    prevent_cse: bool
    static_argnums: int | tuple[int, ...]
    policy: Callable[..., bool] | None


class AxisOptions(GraphOptions, total=False):
    """The options that ``vmap``, ``pmap`` and ``scan`` share."""

    in_axes: Any
    out_axes: Any
    transform_metadata: dict[str, Any] | None


class VmapOptions(AxisOptions, total=False):
    """The options of ``vmap``."""

    axis_name: Any
    axis_size: int | None
    spmd_axis_name: Any


class PmapOptions(AxisOptions, total=False):
    """The options of ``pmap``."""

    axis_name: Any
    axis_size: int | None
    static_broadcasted_argnums: int | tuple[int, ...]
    devices: Any
    backend: str | None
    donate_argnums: int | tuple[int, ...]


class ShardMapOptions(GraphOptions, total=False):
    """The options of ``shard_map``."""

    mesh: Required[Any]
    in_specs: Required[Any]
    out_specs: Required[Any]
    axis_names: Any
    check_vma: bool


class ScanOptions(AxisOptions, total=False):
    """The options of ``scan``."""

    length: int | None
    reverse: bool
    unroll: int | bool
    _split_transpose: bool
