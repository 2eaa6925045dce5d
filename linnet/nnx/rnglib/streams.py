"""Rngs: named streams of random keys, each a key and a count.

The n-th key of a stream is ``fold_in(key, n)``. Key and count are Variables, so a model that holds
streams can be split, jitted and saved like any other.
"""

from __future__ import annotations

import functools
import operator
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import (
    take_current_trace,
    unsafe_am_i_under_a_vmap_DO_NOT_USE as _under_a_vmap,  # pyright: ignore[reportPrivateImportUsage]
)

from linnet.errors import MissingStreamAttributeError, MissingStreamKeyError, SharedNoiseWarning
from linnet.functional.fusing import fused
from linnet.nnx import filterlib
from linnet.nnx.pytreelib import locate
from linnet.nnx.pytreelib.objects import Pytree, new_object
from linnet.nnx.pytreelib.tracing import EAGER, mapped_tracer
from linnet.nnx.variablelib.metadata import Metadata, complete_metadata, storage_metadata
from linnet.nnx.variablelib.storage import (
    Seed,
    implementation_of_seeds,
    seed_of,
    use_eager_sharding,
)
from linnet.nnx.variablelib.variable import Variable, build_variable

A = TypeVar("A")

_DISTRIBUTIONS = (
    "ball bernoulli beta binomial bits categorical cauchy chisquare choice dirichlet "
    "double_sided_maxwell exponential f gamma generalized_normal geometric gumbel laplace loggamma "
    "logistic lognormal maxwell multinomial multivariate_normal normal orthogonal pareto "
    "permutation poisson rademacher randint rayleigh t triangular truncated_normal uniform wald "
    "weibull_min"
).split()
_INITIALIZERS = (
    "delta_orthogonal glorot_normal glorot_uniform he_normal he_uniform kaiming_normal "
    "kaiming_uniform lecun_normal lecun_uniform variance_scaling xavier_normal xavier_uniform"
).split()


class RngState(Variable[A]):
    """The base type of the two Variables of a random stream, key and count."""

    _count_as = "RngState"


class _MadeWhenRead(RngState[A]):
    """A Variable that stores a seed or a number and makes its array when it is first read."""

    _made_when_read = True

    def _settle(self) -> None:
        raw = self._raw
        if type(raw) not in _UNMADE:
            return
        # A stream that was made outside of all traces gets its array there, wherever it is read.
        with jax.ensure_compile_time_eval() if self._trace is EAGER else nullcontext():
            made = raw.key() if type(raw) is Seed else jnp.asarray(raw)
        self.set_raw_value(made, _unsafe_bypass_check=True)

    def get_value(self, *, index: Any = ...) -> Any:
        """The value, or the part of it at ``index``."""
        self._settle()
        return super().get_value(index=index)

    @property
    def raw_value(self) -> Any:
        """What is stored."""
        self._settle()
        return self._raw

    @raw_value.setter
    def raw_value(self, value: Any) -> None:
        self.set_raw_value(value)

    def get_raw_value(self) -> Any:
        """What is stored."""
        return self.raw_value


_UNMADE = (Seed, np.uint32)


class RngKey(_MadeWhenRead[A]):
    """The key of a stream."""


class RngCount(_MadeWhenRead[A]):
    """How many keys a stream has given."""


class _Samplers:
    """Every ``jax.random`` distribution as a method that draws its own key."""

    __slots__ = ()

    def __call__(self) -> jax.Array:
        """A new key."""
        raise NotImplementedError

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for name in _DISTRIBUTIONS:
            setattr(cls, name, _sampler(getattr(jax.random, name)))
        for name in _INITIALIZERS:
            setattr(cls, name, _initializer(getattr(jax.nn.initializers, name)))


def _sampler(sample: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(sample)
    def method(self: _Samplers, *args: Any, **kwargs: Any) -> Any:
        return sample(self(), *args, **kwargs)

    method.__doc__ = f"``jax.random.{sample.__name__}`` with a new key of this stream."
    return method


def _initializer(make: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: _Samplers, *args: Any, **kwargs: Any) -> Any:
        initialize = make(*args, **kwargs)
        return lambda *shape, **options: initialize(self(), *shape, **options)

    method.__name__ = make.__name__
    method.__doc__ = (
        f"``jax.nn.initializers.{make.__name__}`` that draws its keys from this stream."
    )
    return method


class RngStream(_Samplers, Pytree):
    """One stream of keys.

    Args:
      key: a seed, a JAX key, or another stream to take the key from.
      tag: the name of the stream, by which filters select it.

    Example:
      >>> from linnet import nnx
      >>> stream = nnx.RngStream(0, tag="dropout")
      >>> first, second = stream(), stream()
      >>> int(stream.count.value)
      2
    """

    def __init__(self, key: Any, *, tag: str):
        implementation = implementation_of_seeds() if self._pytree_trace is EAGER else None
        seed = seed_of(implementation, key)
        stored: Any = as_key(key) if seed is None else seed
        count: Any = jnp.zeros(stored.shape, jnp.uint32) if seed is None else _ZERO
        self.tag = tag
        self.key = RngKey(stored, tag=tag)
        self.count = RngCount(count, tag=tag)

    def __call__(self) -> jax.Array:
        """The next key.

        Returns:
          The key.

        Raises:
          ValueError: the stream was split, and holds several keys.
        """
        key, count = self.key.value, self.count.value
        if jnp.ndim(key):
            raise ValueError(
                f"fold_in accepts a single key, but the stream {self.tag!r} holds keys of shape "
                f"{jnp.shape(key)}: it was split for nnx.vmap or nnx.scan.\n"
                "Fix: draw inside the mapped function, or restore the stream with "
                "nnx.restore_rngs(backups)."
            )
        drawn, self.count.value = _draw(key, count)
        _warn_if_shared(self.tag, drawn)
        return drawn

    def last(self) -> jax.Array:
        """The key that was drawn last."""
        return jax.random.fold_in(self.key.value, self.count.value - 1)

    def _with_key(self, key: jax.Array) -> RngStream:
        return type(self)(key, tag=self.tag)

    def split(self, k: int | tuple[int, ...]) -> RngStream:
        """A stream of ``k`` different keys, for an axis that is mapped over."""
        return self._with_key(jax.random.split(self(), k))

    def broadcast(self, k: int | tuple[int, ...]) -> RngStream:
        """A stream of one new key repeated ``k`` times."""
        shape = (k,) if isinstance(k, int) else tuple(k)
        return self._with_key(jnp.broadcast_to(self(), shape))

    def fork(self, *, split: int | tuple[int, ...] | None = None) -> RngStream:
        """A new stream that starts from a new key; with ``split``, a stream of that many keys."""
        return self._with_key(self()) if split is None else self.split(split)


@fused
def _draw(key: Any, count: Any) -> tuple[jax.Array, jax.Array]:
    """The key of this number, and the next number."""
    return jax.random.fold_in(key, count), count + 1


_ZERO = np.uint32(0)  # the count of a stream that was not used yet


@functools.lru_cache(maxsize=256)
def _metadata_of_stream(tag: str, eager_sharding: bool) -> Metadata:
    return complete_metadata({"tag": tag}, storage_metadata(False, False, eager_sharding))


def _unused_stream(seed: Seed, tag: str) -> RngStream:
    """A stream made without its constructor, for speed: programs make Rngs in every step."""
    stream = new_object(RngStream, None, EAGER)
    metadata = _metadata_of_stream(tag, use_eager_sharding.context.value)
    stream.__dict__.update(
        tag=tag,
        key=build_variable(RngKey, seed, metadata, EAGER),
        count=build_variable(RngCount, _ZERO, metadata, EAGER),
    )
    return stream


class Rngs(_Samplers, Pytree):
    """Named streams of random keys. Calling it draws from ``default``.

    Args:
      default: a seed or key for the default stream, which stands in for streams that are not named;
        or a mapping of all streams.
      **rngs: a seed or key for each named stream.

    Example:
      >>> from linnet import nnx
      >>> rngs = nnx.Rngs(0, dropout=1)
      >>> rngs.dropout.tag, rngs.params.tag
      ('dropout', 'default')
      >>> rngs.uniform((2,)).shape
      (2,)
    """

    def __init__(self, default: Any = None, **rngs: Any):
        if type(default) is int:  # the usual case, and the test for a Mapping takes a while
            rngs["default"] = default
        elif isinstance(default, (Mapping, Rngs)):
            rngs = {**dict(default.items()), **rngs}
        elif default is not None:
            rngs["default"] = default
        implementation = implementation_of_seeds() if self._pytree_trace is EAGER else None
        for name, key in rngs.items():
            seed = seed_of(implementation, key)
            if seed is None or type(self) is not Rngs:
                setattr(self, name, RngStream(key, tag=name))
            else:
                self.__dict__[name] = _unused_stream(seed, name)

    def _streams(self) -> dict[str, RngStream]:
        return {name: x for name, x in self.__dict__.items() if isinstance(x, RngStream)}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if "default" in self.__dict__:
            return self.__dict__["default"]
        raise MissingStreamAttributeError(self._missing(name))

    def _missing(self, name: str) -> str:
        known = ", ".join(self._streams()) or "none"
        return (
            f"No RngStream named {name!r} found in Rngs; there are: {known}.\n"
            f"Fix: nnx.Rngs(..., {name}=seed), or give a default: nnx.Rngs(seed, ...)."
        )

    def __getitem__(self, name: str) -> Any:
        streams = self._streams()
        if name not in streams and "default" not in streams:
            raise MissingStreamKeyError(self._missing(name))
        return streams.get(name) or streams["default"]

    def __call__(self) -> jax.Array:
        """A new key of the default stream.

        Returns:
          The key.

        Raises:
          MissingStreamAttributeError: there is no default stream.
        """
        if "default" not in self.__dict__:
            raise MissingStreamAttributeError(self._missing("default"))
        return self.__dict__["default"]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._streams())

    def __len__(self) -> int:
        return len(self._streams())

    def __contains__(self, name: Any) -> bool:
        return name in self._streams()

    def items(self) -> Iterator[tuple[str, RngStream]]:
        """The names and streams."""
        return iter(self._streams().items())

    def _derive(
        self,
        sizes: Any,
        derive: Callable[[RngStream, Any], RngStream],
        otherwise: Callable[[RngStream], RngStream] = lambda x: x._with_key(x.key.value),
    ) -> Rngs:
        """Rngs with ``derive(stream, size)`` where a filter of ``sizes`` selects the stream."""
        table = [(filterlib.to_predicate(key), k) for key, k in by_filter(sizes).items()]
        derived = type(self)()
        for name, stream in self._streams().items():
            chosen = next((k for predicate, k in table if predicate((name,), stream)), None)
            left_alone = chosen is None and isinstance(sizes, Mapping)
            setattr(derived, name, otherwise(stream) if left_alone else derive(stream, chosen))
        return derived

    def split(self, k: Any) -> Rngs:
        """Streams of ``k`` different keys each.

        Args:
          k: how many, a shape, or a dict from filter to either; a stream that no filter selects,
            or that has None, keeps its key and counts from zero.

        Returns:
          The new Rngs.
        """
        return self._derive(k, RngStream.split)

    def broadcast(self, k: Any) -> Rngs:
        """Streams of one new key repeated ``k`` times; ``k`` as for ``split``."""
        return self._derive(k, RngStream.broadcast)

    def fork(self, *, split: Any = None) -> Rngs:
        """New streams, each from a new key; those that ``split`` selects are split instead."""
        sizes = {} if split is None else split
        return self._derive(sizes, lambda stream, k: stream.fork(split=k), RngStream.fork)


def by_filter(sizes: Any) -> Mapping[Any, Any]:
    """The size that each filter stands for; one size alone is for every stream."""
    return sizes if isinstance(sizes, Mapping) else {...: sizes}


def as_key(value: Any) -> jax.Array:
    """A JAX key from a seed, a key, raw key data or a stream; a ValueError for anything else."""
    if isinstance(value, RngStream):
        return value.key.value
    if isinstance(value, Variable):
        value = value.value
    if hasattr(value, "dtype"):
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return value
        if value.dtype == jnp.uint32 and jnp.ndim(value):
            return jax.random.wrap_key_data(jnp.asarray(value))
        if jnp.issubdtype(value.dtype, jnp.integer) and jnp.ndim(value) == 0:
            return jax.random.key(value)
    elif not isinstance(value, bool):
        try:
            return jax.random.key(operator.index(value))
        except TypeError:
            pass
    raise ValueError(
        f"Invalid rng value: {value!r}, expected a jax.Array of jax.dtypes.prng_key sub-dtype or "
        "an integer seed.\nFix: nnx.Rngs(0), or nnx.Rngs(jax.random.key(0))."
    )


@functools.cache
def _trace_types() -> tuple[type, type]:
    """The classes of a vmap's and of a jit's trace, found by making one of each."""
    found: list[type] = []
    jax.vmap(lambda x: found.append(_running_trace_type()) or x)(jnp.zeros(1))
    jax.eval_shape(lambda: found.append(_running_trace_type()))
    return found[0], found[1]


def _running_trace_type() -> type:
    with take_current_trace() as trace:
        return type(trace)


def _vmaps_at_hand() -> list[Any]:
    """The traces of the vmaps around this point, innermost first.

    A jit ends the list: inside of it nothing tells whether a key came in mapped.
    """
    mapping, staging = _trace_types()
    found = []
    with take_current_trace() as trace:
        while trace is not None and type(trace) is not staging:
            if type(trace) is mapping:
                found.append(trace)
            trace = getattr(trace, "parent_trace", None)
    return found


def _times_mapped(key: Any) -> int:
    """How many vmaps a key differs along."""
    times = 0
    while isinstance(key, Tracer):
        times += isinstance(key, mapped_tracer())
        key = getattr(key, "val", getattr(key, "primal", None))
    return times


_warned: weakref.WeakSet[Any] = weakref.WeakSet()  # one warning is enough for each vmap


_may_share: ContextVar[bool] = ContextVar("may_share", default=False)


@contextmanager
def shared_noise_allowed() -> Iterator[None]:
    """Keys drawn in this block may be the same for every example: they are not used as noise."""
    before = _may_share.set(True)
    try:
        yield
    finally:
        _may_share.reset(before)


def _warn_if_shared(tag: str, drawn: Any) -> None:
    if not _under_a_vmap() or _may_share.get():
        return
    vmaps = _vmaps_at_hand()
    if _times_mapped(drawn) >= len(vmaps) or any(vmap in _warned for vmap in vmaps):
        return
    _warned.update(vmaps)
    warnings.warn(
        f"The random stream {tag!r} is broadcast by a vmap, so every example draws the same "
        "numbers. Give each its own with nnx.split_rngs(splits=n) or rngs.split(n) and map over "
        "axis 0 of the streams; if the same numbers are wanted, rngs.broadcast(n) says so.",
        SharedNoiseWarning,
        stacklevel=locate.outer_level(),
    )
