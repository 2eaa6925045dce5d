"""Splitting, forking, reseeding and restoring the random streams that an object holds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from linnet.errors import path_string
from linnet.nnx import filterlib
from linnet.nnx.filterlib import Filter
from linnet.nnx.graphlib.graphdef import graph_modes
from linnet.nnx.graphlib.traverse import iter_objects, map as map_leaves
from linnet.nnx.pytreelib.kinds import STATIC, Path, kind_of
from linnet.nnx.rnglib.streams import RngStream, by_filter

Derive = Callable[[Path, RngStream], RngStream | None]


def iter_streams(node: Any, graph: bool | None, api: str) -> Iterator[tuple[Path, RngStream]]:
    """The streams below ``node``, with their paths; an error says ``api``."""
    return iter_objects(node, RngStream, graph, api)


class SplitBackups(list[tuple[RngStream, Any, Any]]):
    """Streams with the key and count they held; leaving the ``with`` block puts these back."""

    def __enter__(self) -> SplitBackups:
        return self

    def __exit__(self, *error: Any) -> None:
        restore_rngs(self)


def restore_rngs(backups: Any) -> None:
    """Puts streams back as they were before ``split_rngs`` or ``fork_rngs``.

    Args:
      backups: what that function returned.

    Example:
      >>> from linnet import nnx
      >>> rngs = nnx.Rngs(0)
      >>> backups = nnx.split_rngs(rngs, splits=4)
      >>> rngs.default.key.shape
      (4,)
      >>> nnx.restore_rngs(backups)
      >>> rngs.default.key.shape
      ()
    """
    for stream, key, count in backups:
        _fill(stream, key, count)


def _fill(stream: RngStream, key: Any, count: Any) -> None:
    stream.key.set_raw_value(key)
    stream.count.set_raw_value(count)


def backup_keys(node: Any, /, *, graph: bool | None = None) -> SplitBackups:
    """Remembers what the streams of an object hold, for ``restore_rngs``.

    Args:
      node: what holds the streams.
      graph: allow shared references; by default as ``set_graph_mode`` says.

    Returns:
      The backups.
    """
    return SplitBackups(_backup(stream) for _, stream in iter_streams(node, graph, "backup_keys"))


def _backup(stream: RngStream) -> tuple[RngStream, Any, Any]:
    return stream, stream.key.raw_value, stream.count.raw_value


def _derive_in_place(node: Any, derive: Derive, graph: bool | None, api: str) -> SplitBackups:
    backups = SplitBackups()
    pairs = [(stream, derive(path, stream)) for path, stream in iter_streams(node, graph, api)]
    for stream, derived in pairs:
        if derived is not None:
            backups.append(_backup(stream))
            _fill(stream, derived.key.raw_value, derived.count.raw_value)
    return backups


def _derive_copy(node: Any, derive: Derive, graph: bool | None, api: str) -> Any:
    """A copy with derived streams; the original counts the keys that were drawn from it.

    All other Variables are those of the original, so that no write is lost.
    """
    drawn: dict[int, Any] = {}
    for path, stream in iter_streams(node, graph, api):
        derived = derive(path, stream)
        if derived is not None:
            for old, new in ((stream.key, derived.key), (stream.count, derived.count)):
                drawn[id(old)] = old.copy()
                drawn[id(old)].set_raw_value(new.raw_value)
    replace = lambda path, leaf: drawn.get(id(leaf), leaf)  # noqa: E731
    return map_leaves(replace, node, graph=graph, recreate_variables=False)


def _decorated(f: Callable[..., Any], apply: Callable[[Any], Any]) -> Callable[..., Any]:
    """A function that derives the streams of its arguments for the length of each call."""

    @functools.wraps(f)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        derived = apply((args, kwargs))
        if isinstance(derived, SplitBackups):
            with derived:
                return f(*args, **kwargs)
        args, kwargs = derived
        return f(*args, **kwargs)

    return wrapper


def _dispatch(
    node: Any, derive: Derive, graph: bool | None, graph_updates: bool | None, api: str
) -> Any:
    def apply(tree: Any) -> Any:
        in_place = graph_modes(graph, graph_updates)[1]
        return (_derive_in_place if in_place else _derive_copy)(tree, derive, graph, api)

    if node is None:
        return functools.partial(_decorated, apply=apply)
    if callable(node) and kind_of(node) == STATIC:
        return _decorated(node, apply)
    return apply(node)


def _selects(filter: Filter) -> filterlib.Predicate:
    """A filter for streams, given for the stream itself or for its two Variables."""
    predicate = filterlib.to_predicate(filter)

    def select(path: Path, stream: Any) -> bool:
        variables = [((*path, name), getattr(stream, name)) for name in ("key", "count")]
        return predicate(path, stream) or all(predicate(*place) for place in variables)

    return select


def split_rngs(
    node: Any = None,
    /,
    *,
    splits: int | tuple[int, ...],
    only: Filter = ...,
    squeeze: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Gives each random stream of an object several keys, for an axis that is mapped over.

    Args:
      node: what holds the streams; left out, the call is a decorator for functions whose arguments
        hold them.
      splits: how many keys, or a shape of them.
      only: a filter for the streams.
      squeeze: with ``splits=1``, drop the axis again.
      graph: allow shared references; by default as ``set_graph_mode`` says.
      graph_updates: change the streams in place; by default as ``set_graph_updates`` says.
        If False, or in tree mode, a copy with new streams is returned, whose other Variables are
        those of the original.

    Returns:
      Backups for ``restore_rngs``, also a context manager that restores; without graph updates the
      copy; or the decorator.

    Raises:
      ValueError: ``squeeze`` with more than one split.

    Example:
      >>> import jax
      >>> from linnet import nnx
      >>> rngs = nnx.Rngs(0)
      >>> with nnx.split_rngs(rngs, splits=3):
      ...     rngs.default.key.shape
      (3,)
      >>> rngs.default.key.shape
      ()
    """
    if squeeze and splits != 1:
        raise ValueError(
            f"squeeze=True is only for splits=1, but got splits={splits}.\n"
            "Fix: leave out squeeze, or pass splits=1."
        )
    selects = _selects(only)

    def derive(path: Path, stream: RngStream) -> RngStream | None:
        if not selects(path, stream):
            return None
        derived = stream.split(splits)
        return RngStream(derived.key.raw_value[0], tag=stream.tag) if squeeze else derived

    return _dispatch(node, derive, graph, graph_updates, "split_rngs")


def fork_rngs(
    node: Any = None,
    /,
    *,
    split: Any = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Gives each random stream of an object a new key of its own.

    Args:
      node: what holds the streams; left out, the call is a decorator for functions whose arguments
        hold them.
      split: how many keys, a shape, or a dict from filter to either; then only the streams that a
        filter selects are touched.
      graph: allow shared references; by default as ``set_graph_mode`` says.
      graph_updates: as for ``split_rngs``.

    Returns:
      Backups for ``restore_rngs``, also a context manager that restores; without graph updates the
      copy; or the decorator.

    Example:
      >>> from linnet import nnx
      >>> rngs = nnx.Rngs(params=0, dropout=1)
      >>> with nnx.fork_rngs(rngs, split={"dropout": 3}):
      ...     rngs.params.key.shape, rngs.dropout.key.shape
      ((), (3,))
      >>> rngs.dropout.key.shape, int(rngs.dropout.count.value)
      ((), 1)
    """
    table = [(_selects(filter), size) for filter, size in by_filter(split).items()]

    def derive(path: Path, stream: RngStream) -> RngStream | None:
        for selects, size in table:
            if selects(path, stream):
                return stream.fork(split=size)
        return None

    return _dispatch(node, derive, graph, graph_updates, "fork_rngs")


def with_rngs(
    node: Any = None,
    /,
    *,
    split: Any = None,
    fork: Filter = None,
    broadcast: Any = None,
    only: Filter = ...,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """A copy of an object with new random streams; the original's counts move on.

    The copy has new objects and new streams; all other Variables are those of the original.

    Args:
      node: what holds the streams; left out, the call is a decorator for functions whose arguments
        hold them.
      split: how many keys, a shape, or a dict from filter to either.
      fork: a filter for streams that get one new key.
      broadcast: as ``split``, with one new key repeated.
      only: a filter for the streams this is about.
      graph: allow shared references; by default as ``set_graph_mode`` says.
      graph_updates: accepted for symmetry; a copy is made either way.

    Returns:
      The copy, or the decorator.

    Raises:
      ValueError: two of the three name the same stream; ``...`` only stands for the rest.

    Example:
      >>> from linnet import nnx
      >>> model = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=0))
      >>> many = nnx.with_rngs(model, split={"dropout": 3})
      >>> many.rngs.key.shape, model.rngs.key.shape
      ((3,), ())
    """
    del graph_updates
    allowed = filterlib.to_predicate(only)
    given = (("split", split, RngStream.split), ("broadcast", broadcast, RngStream.broadcast))
    rules = [
        _StreamRule(name, key, size, method)
        for name, sizes, method in given
        if sizes is not None
        for key, size in by_filter(sizes).items()
    ]
    rules.append(_StreamRule("fork", fork, None, lambda stream, _: stream.fork()))

    def derive(path: Path, stream: RngStream) -> RngStream | None:
        if not allowed(path, stream):
            return None
        chosen: dict[str, _StreamRule] = {}
        for rule in rules:
            if rule.selects(path, stream):
                chosen.setdefault(rule.name, rule)
        _check_one_rule(path, chosen.values())
        first = next(iter(chosen.values()), None)
        return first and first.method(stream, first.size)

    return _dispatch(node, derive, graph, False, "with_rngs")


class _StreamRule:
    """One entry of ``split``, ``broadcast`` or ``fork``."""

    def __init__(self, name: str, key: Filter, size: Any, method: Callable[..., RngStream]):
        self.name, self.key, self.size, self.method = name, key, size, method
        self.selects = filterlib.to_predicate(key)


def _check_one_rule(path: Path, chosen: Iterable[_StreamRule]) -> None:
    named = [rule for rule in chosen if rule.key is not ... and rule.key is not True]
    if len(named) > 1:
        matches = "\n".join(f"  - {rule.name} matches filter {rule.key!r}" for rule in named)
        raise ValueError(
            f"The RngStream at {path_string(path)} matches multiple rules:\n{matches}\n"
            "Fix: name each stream once; `...` stands for those that nothing else names."
        )


def reseed(
    node: Any,
    /,
    *,
    graph: bool | None = None,
    policy: Any = "scalars_only",
    **stream_keys: Any,
) -> None:
    """Starts the streams of an object anew, in place.

    The streams of one tag get different keys, drawn from the seed given for that tag.

    Args:
      node: what holds the streams.
      graph: allow shared references; by default as ``set_graph_mode`` says.
      policy: what to do with streams that were split: ``"scalars_only"`` refuses them,
        ``"match_shape"`` splits the new key, or a function of ``(path, key, shape)`` makes the
        keys.
      **stream_keys: a seed or key for each tag; of a stream, its key is taken.

    Raises:
      ValueError: a stream was split and the policy is ``"scalars_only"``, or the policy is unknown.

    Example:
      >>> from linnet import nnx
      >>> a, b = nnx.Rngs(0), nnx.Rngs(1)
      >>> nnx.reseed([a], default=7)
      >>> nnx.reseed([b], default=7)
      >>> bool(a() == b())
      True
    """
    policies = {"scalars_only": _scalars_only, "match_shape": _match_shape}
    make: Any = policy if callable(policy) else policies.get(policy)
    if make is None:
        raise ValueError(
            f'policy must be "scalars_only", "match_shape" or a callable, got {policy!r}.'
        )
    sources = {tag: RngStream(key, tag=tag) for tag, key in stream_keys.items()}
    seeded = [
        (stream, make(path, sources[stream.tag](), jnp.shape(stream.key.value)))
        for path, stream in iter_streams(node, graph, "reseed")
        if stream.tag in sources
    ]
    for stream, key in seeded:
        stream.key.value = key
        stream.count.value = jnp.zeros(key.shape, jnp.uint32)


def _scalars_only(path: Path, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if shape:
        raise ValueError(
            f"Cannot reseed the stream at {path_string(path)}: it holds keys of shape {shape}.\n"
            'Fix: policy="match_shape" if every key shall be different, or a function of '
            "(path, key, shape)."
        )
    return key


def _match_shape(path: Path, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.split(key, shape) if shape else key
