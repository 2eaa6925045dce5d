"""Scopes under the path that programs import, and init and apply for functions of a scope."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from linnet.core.filters import (
    CollectionFilter as CollectionFilter,
    DenyList as DenyList,
    Filter as Filter,
    PRNGSequenceFilter as PRNGSequenceFilter,
    filter_to_set as filter_to_set,
    group_collections as group_collections,
    in_filter as in_filter,
    intersect_filters as intersect_filters,
    is_filter_empty as is_filter_empty,
    subtract_filters as subtract_filters,
    union_filters as union_filters,
)
from linnet.core.partial_eval import lazily
from linnet.core.rng import LazyRng as LazyRng, is_valid_rng
from linnet.core.scoping import Scope as Scope, Variable as Variable
from linnet.errors import (
    ApplyScopeInvalidVariablesStructureError,
    ApplyScopeInvalidVariablesTypeError,
    InvalidRngError,
)
from linnet.frozen_dict import (
    FrozenDict as FrozenDict,
    freeze as freeze,
    unfreeze as unfreeze,
)
from linnet.typing import (
    Array as Array,
    Collection as Collection,
    FrozenVariableDict as FrozenVariableDict,
    MutableCollection as MutableCollection,
    MutableVariableDict as MutableVariableDict,
    PRNGFoldable as PRNGFoldable,
    PRNGKey as PRNGKey,
    RNGSequences as RNGSequences,
    VariableDict as VariableDict,
    has_shape_dtype,
)


def bind(
    variables: VariableDict,
    rngs: RNGSequences | PRNGKey | None = None,
    mutable: CollectionFilter = False,
    flags: Mapping[str, Any] | None = None,
) -> Scope:
    """Makes a root scope of variables and random keys.

    Args:
      variables: the collections; they are not changed.
      rngs: a random key for each stream, or one for ``params``.
      mutable: a filter of the collections that can be written.
      flags: values that hold for the whole call.

    Returns:
      The scope.

    Raises:
      ApplyScopeInvalidVariablesTypeError: the variables are no dict of dicts with string keys.
      InvalidRngError: something among ``rngs`` is no key.

    Example:
      >>> from linnet import core
      >>> core.bind({"params": {"w": 1.0}}).variables()
      {'params': {'w': 1.0}}
    """
    if not _are_collections(variables):
        raise ApplyScopeInvalidVariablesTypeError
    if rngs is not None and not isinstance(rngs, Mapping):
        rngs = {"params": rngs}
    if rngs is not None and not _are_rngs(rngs):
        raise InvalidRngError(
            f"rngs must be a dict of names to random keys, but got {_shown(rngs)}.\n"
            'Fix: rngs={"dropout": jax.random.key(0)}.'
        )
    own: dict[str, Any] = {
        col: _own_copy(xs) if in_filter(mutable, col) else xs for col, xs in variables.items()
    }
    return Scope(own, rngs=rngs, mutable=mutable, flags=flags)


def _own_copy(xs: Any) -> Any:
    """A collection, or a part of it, that may be written to: as ``unfreeze``, and a mapping of
    another type, such as an ``nnx.State``, is a new one of its type."""
    if isinstance(xs, (dict, FrozenDict)):
        return {key: _own_copy(value) for key, value in xs.items()}
    return jax.tree_util.tree_map(lambda x: x, xs) if isinstance(xs, Mapping) else xs


def apply(
    fn: Callable[..., Any],
    mutable: CollectionFilter = False,
    flags: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Makes a function of a scope a function of variables.

    Args:
      fn: a function whose first parameter is a scope.
      mutable: a filter of the collections that can be written.
      flags: values that hold for the whole call.

    Returns:
      A function of variables, the other arguments, and ``rngs``. It returns what ``fn`` returns,
      and if ``mutable`` is not False the collections that could be written too.

    Raises:
      ApplyScopeInvalidVariablesTypeError: the variables are no dict of dicts with string keys.
      ApplyScopeInvalidVariablesStructureError: they have a layer ``params`` too many.
      InvalidRngError: something among ``rngs`` is no key.

    Example:
      >>> from linnet import core
      >>> def count(scope):
      ...     n = scope.variable("counts", "n")
      ...     n.value += 1
      >>> core.apply(count, mutable="counts")({"counts": {"n": 1}})
      (None, {'counts': {'n': 2}})
    """

    @functools.wraps(fn)
    def applied(
        variables: VariableDict,
        *args: Any,
        rngs: PRNGKey | RNGSequences | None = None,
        **kwargs: Any,
    ) -> Any:
        if rngs is not None:
            rngs = _as_streams(rngs, "The rngs given to apply")
        params = variables.get("params") if isinstance(variables, Mapping) else None
        if isinstance(params, Mapping) and "params" in params:
            raise ApplyScopeInvalidVariablesStructureError(variables)
        with bind(variables, rngs=rngs, mutable=mutable, flags=flags).temporary() as root:
            y = fn(root, *args, **kwargs)
        return (y, root.mutable_variables()) if mutable is not False else y

    return applied


def init(
    fn: Callable[..., Any],
    mutable: CollectionFilter = True,
    flags: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Makes a function of a scope a function that initializes its variables.

    Args:
      fn: a function whose first parameter is a scope.
      mutable: a filter of the collections that can be written.
      flags: values that hold for the whole call; ``initializing`` is added.

    Returns:
      A function of a random key, or a dict of them, and the other arguments. It returns what ``fn``
      returns, and the collections.

    Raises:
      InvalidRngError: the first argument is no random key, nor a dict of them.

    Example:
      >>> import jax
      >>> from linnet import core
      >>> def scaled(scope, x):
      ...     return x * scope.param("scale", jax.nn.initializers.ones, ())
      >>> core.init(scaled)(jax.random.key(0), 2.0)
      (Array(2., dtype=float32), {'params': {'scale': Array(1., dtype=float32)}})
    """

    @functools.wraps(fn)
    def initialized(rngs: PRNGKey | RNGSequences, *args: Any, **kwargs: Any) -> Any:
        streams = _as_streams(rngs, "The first argument of init")
        run = apply(fn, mutable=mutable, flags={**(flags or {}), "initializing": True})
        return run({}, *args, rngs=streams, **kwargs)

    return initialized


def lazy_init(
    fn: Callable[..., Any],
    mutable: CollectionFilter = True,
    flags: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """As ``init``, without computing anything that the variables do not need.

    Args:
      fn: a function whose first parameter is a scope.
      mutable: a filter of the collections that can be written.
      flags: values that hold for the whole call.

    Returns:
      A function as that of ``init``, whose arguments may be ``jax.ShapeDtypeStruct``. It returns
      the collections.

    Raises:
      LazyInitError: a variable depends on an argument that has no values.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import core
      >>> def dense(scope, x):
      ...     return x @ scope.param("kernel", jax.nn.initializers.ones, (x.shape[-1], 1))
      >>> core.lazy_init(dense)(jax.random.key(0), jax.ShapeDtypeStruct((8, 2), jnp.float32))
      {'params': {'kernel': Array([[1.],
             [1.]], dtype=float32)}}
    """

    @functools.wraps(fn)
    def initialized(rngs: PRNGKey | RNGSequences, *args: Any, **kwargs: Any) -> Any:
        run = init(fn, mutable=mutable, flags=flags)
        return lazily(lambda args, kwargs: run(rngs, *args, **kwargs)[1], args, kwargs)

    return initialized


def _are_collections(variables: Any) -> bool:
    return isinstance(variables, Mapping) and all(
        isinstance(name, str)
        and isinstance(col, Mapping)
        and all(isinstance(key, str) for key in col)
        for name, col in variables.items()
    )


def _are_rngs(rngs: Any) -> bool:
    return isinstance(rngs, Mapping) and all(
        isinstance(name, str) and is_valid_rng(rng) for name, rng in rngs.items()
    )


def _as_streams(rngs: Any, what: str) -> dict[str, Any]:
    """Random keys by stream; one key alone is that of ``params``."""
    streams = dict(rngs) if isinstance(rngs, Mapping) else {"params": rngs}
    if not _are_rngs(streams):
        raise InvalidRngError(
            f"{what} should be a random key, or a dict of names to random keys, but got "
            f"{_shown(rngs)}.\nFix: jax.random.key(0), or {{'params': jax.random.key(0)}}."
        )
    return streams


def _shown(rngs: Any) -> str:
    if isinstance(rngs, Mapping):
        return "{" + ", ".join(f"{name!r}: {_shown(rng)}" for name, rng in rngs.items()) + "}"
    if has_shape_dtype(rngs):
        return f"{rngs.dtype}{list(rngs.shape)}"
    return f"{rngs!r} ({type(rngs).__name__})"
