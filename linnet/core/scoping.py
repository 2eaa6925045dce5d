"""Scope: the variables, random keys and names of one place in a model.

A scope is a view on the nested dicts of all collections: a child scope is one level deeper in each
of them. Collections that may change in a call are copied when the root scope is made and written in
place from then on; the others are the caller's own dicts and are only read.

- Names are reserved, so that no two things of one scope share a name; ``rewound`` gives the scope
  without its reservations, for a second run of the same code.
- Random keys are drawn by the path of the scope and a counter of each stream (see ``rng``). The
  counters of children are kept with those of their parent, so that a child that is made twice goes
  on counting.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import jax

from linnet import config
from linnet.core import meta, tracers
from linnet.core.filters import CollectionFilter, in_filter
from linnet.core.rng import LazyRng
from linnet.errors import (
    InvalidRngError,
    InvalidScopeError,
    ModifyScopeVariableError,
    ScopeCollectionNotFound,
    ScopeParamNotFoundError,
    ScopeParamShapeError,
    ScopeVariableNotFoundError,
)
from linnet.frozen_dict import FrozenDict, freeze
from linnet.typing import (
    Collection,
    MutableCollection,
    MutableVariableDict,
    PRNGKey,
    VariableDict,
)

T = TypeVar("T")

_NO_FLAG = object()
_EMPTY: Mapping[str, Any] = {}


class Variable(Generic[T]):
    """One variable of a scope: reading and setting ``value`` reads and writes the collection.

    Args:
      scope: the scope.
      collection: the collection.
      name: the variable's name.
      unbox: take values out of their metadata, and put written values into the metadata there.

    Example:
      >>> from linnet import core
      >>> scope = core.bind({"counts": {"n": 1}}, mutable="counts")
      >>> n = scope.variable("counts", "n")
      >>> n.value += 1
      >>> scope.variables()
      {'counts': {'n': 2}}
    """

    def __init__(self, scope: Scope, collection: str, name: str, unbox: bool):
        self.scope = scope
        self.collection = collection
        self.name = name
        self.unbox = unbox

    @property
    def value(self) -> T:
        """The value, without metadata if ``unbox`` is set."""
        value: Any = self.scope.get_variable(self.collection, self.name)
        return meta.unbox(value) if self.unbox else value

    @value.setter
    def value(self, value: T) -> None:
        if self.unbox:
            held = self.scope.get_variable(self.collection, self.name)
            value = meta.replace_boxed(held, value)
        self.scope.put_variable(self.collection, self.name, value)

    def is_mutable(self) -> bool:
        """Whether the collection can be written in this call."""
        return self.scope.is_mutable_collection(self.collection)


class Scope:
    """The variables, random keys and names of one place in a model.

    Args:
      variables: the collections. Those that ``mutable`` takes are written in place.
      rngs: a random key for each stream.
      name: the scope's name in its parent; None for a root.
      mutable: a filter of the collections that can be written.
      parent: the scope that this one is in.
      path: the names from the root to this scope.
      debug_path: the same, as error messages print it; by default ``path``.
      flags: values that hold for the whole call, such as ``initializing``.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import core
      >>> scope = core.bind({"params": {"dense": {"bias": jnp.ones(2)}}})
      >>> scope.push("dense").get_variable("params", "bias")
      Array([1., 1.], dtype=float32)
    """

    def __init__(
        self,
        variables: MutableVariableDict,
        rngs: Mapping[str, Any] | None = None,
        name: str | None = None,
        mutable: CollectionFilter = False,
        parent: Scope | None = None,
        path: Iterable[str] = (),
        debug_path: Iterable[str] = (),
        flags: Mapping[str, Any] | None = None,
    ):
        self._variables = variables
        self.parent = parent
        self.name = name
        self.path = tuple(path)
        self.debug_path = tuple(debug_path) or self.path
        self.rngs = {k: LazyRng.create(rng) for k, rng in rngs.items()} if rngs else {}
        self.mutable = mutable
        self.flags = flags if isinstance(flags, FrozenDict) else freeze(flags or {})
        self._root = parent.root if parent is not None else None
        self.trace_level = tracers.current_trace() if parent is None else parent.trace_level
        self.rng_counters: dict[Any, Any] = dict.fromkeys(self.rngs, 0)
        self.reservations: dict[str, set[str | None]] = collections.defaultdict(set)
        self._invalid = False

    # ---- where it is, and whether it may be used ------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Scope):
            return NotImplemented
        if self is other:
            return True
        return (
            self.root._variables is other.root._variables
            and self.path == other.path
            and self.rng_counters is other.rng_counters
        )

    def __hash__(self) -> int:
        return hash((id(self.root._variables), self.path, id(self.rng_counters)))

    @property
    def root(self) -> Scope:
        """The scope without a parent that this one is in, or itself."""
        return self._root if self._root is not None else self

    @property
    def path_text(self) -> str:
        """The path as error messages print it: ``/encoder/dense``."""
        return "/" + "/".join(self.debug_path)

    @property
    def invalid(self) -> bool:
        """Whether the call that the scope belonged to is over."""
        return self._invalid

    def invalidate(self) -> None:
        """Ends the scope: nothing can be written, drawn or pushed any more."""
        self._invalid = True

    def _check_usable(self) -> None:
        if self._invalid:
            raise InvalidScopeError(self.path_text)

    @contextlib.contextmanager
    def temporary(self) -> Iterator[Scope]:
        """Ends the scope at the end of a ``with`` block."""
        try:
            yield self
        finally:
            self.invalidate()

    def has_flag(self, key: str) -> bool:
        """Whether a flag was given for this call."""
        return key in self.flags

    def get_flag(self, key: str, default: Any = _NO_FLAG) -> Any:
        """The value of a flag.

        Args:
          key: the flag.
          default: what to return without it.

        Returns:
          The value.

        Raises:
          ValueError: there is neither the flag nor a default.
        """
        if key not in self.flags and default is _NO_FLAG:
            flags = ", ".join(self.flags) or "none"
            raise ValueError(
                f'The scope "{self.path_text}" has no flag "{key}"; it has {flags}.\n'
                "Fix: give a default, or the flag to init or apply."
            )
        return self.flags.get(key, default)

    # ---- names and child scopes -----------------------------------------------------------------

    def reserve(self, name: str, col: str | None = None) -> None:
        """Takes a name, so that nothing else of this scope can have it.

        Args:
          name: the name.
          col: the collection it is taken in; None for a child scope, which is in all of them.

        Raises:
          ValueError: the name is taken.
        """
        if not isinstance(name, str):
            raise TypeError(
                f'Names in scope "{self.path_text}" are text, but got {name!r} '
                f"({type(name).__name__})."
            )
        if self.name_reserved(name, col):
            raise ValueError(
                f'Duplicate use of scope name: "{name}" in scope "{self.path_text}".\n'
                "Fix: give one of the two another name, or push(name, reuse=True) for the same "
                "scope."
            )
        self.reservations[name].add(col)

    def name_reserved(self, name: str, col: str | None = None) -> bool:
        """Whether a name is taken, in one collection or by a child scope.

        Args:
          name: the name.
          col: the collection; None for any of them.

        Returns:
          True if it is.
        """
        taken = self.reservations.get(name)
        return bool(taken) and (col is None or None in taken or col in taken)

    def default_name(self, prefix: str) -> str:
        """The first of ``prefix0``, ``prefix1``, ... that is not reserved."""
        number = 0
        while f"{prefix}{number}" in self.reservations:
            number += 1
        return f"{prefix}{number}"

    def push(self, name: str | None = None, prefix: str = "", reuse: bool = False) -> Scope:
        """Makes a child scope.

        Args:
          name: its name; by default the prefix with a number.
          prefix: the start of an automatic name.
          reuse: the name may be taken already.

        Returns:
          The child.

        Raises:
          ValueError: the name is taken.
          InvalidScopeError: the scope has ended.

        Example:
          >>> from linnet import core
          >>> core.bind({}).push(prefix="Dense_").path
          ('Dense_0',)
        """
        self._check_usable()
        if name is None:
            name = self.default_name(prefix)
        if not reuse or not self.name_reserved(name):
            self.reserve(name)
        child = Scope(
            {},
            name=name,
            rngs={k: LazyRng.create(rng, name) for k, rng in self.rngs.items()},
            parent=self,
            mutable=self.mutable,
            path=(*self.path, name),
            debug_path=(*self.debug_path, name),
            flags=self.flags,
        )
        child.rng_counters = self.rng_counters.setdefault(("child", name), child.rng_counters)
        return child

    def child(
        self,
        fn: Callable[..., Any],
        name: str | None = None,
        prefix: str | None = None,
        named_call: bool = True,
        **partial_kwargs: Any,
    ) -> Callable[..., Any]:
        """Binds a function of a scope to a child of this one.

        Args:
          fn: a function whose first parameter is a scope.
          name: the child's name; by default the prefix with a number.
          prefix: the start of an automatic name; by default the function's name.
          named_call: name the function's operations in the compiled program.
          **partial_kwargs: keyword arguments of the function.

        Returns:
          The function without its first parameter.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> from linnet import core
          >>> def dense(scope, x):
          ...     return x * scope.param("scale", jax.nn.initializers.ones, (2,))
          >>> core.init(lambda scope: scope.child(dense)(jnp.ones(2)))(jax.random.key(0))[1]
          {'params': {'dense_0': {'scale': Array([1., 1.], dtype=float32)}}}
        """
        if name is None:
            if prefix is None:
                prefix = f"{getattr(fn, '__name__', 'fn')}_"
            name = self.default_name(prefix)
        scope = self.push(name)
        if named_call:
            fn = jax.named_scope(name)(fn)

        @functools.wraps(fn)
        def bound(*args: Any, **kwargs: Any) -> Any:
            return fn(scope.rewound(), *args, **{**partial_kwargs, **kwargs})

        return bound

    def rewound(self, rewind_rngs: bool = False) -> Scope:
        """The same scope with all names free again, for running the same code once more.

        Args:
          rewind_rngs: draw the same random keys again; otherwise new ones.

        Returns:
          A scope with the same variables.

        Example:
          >>> from linnet import core
          >>> scope = core.bind({})
          >>> scope.push("dense").name, scope.rewound().push("dense").name
          ('dense', 'dense')
        """
        self._check_usable()
        scope = Scope(
            self._variables,
            self.rngs,
            self.name,
            self.mutable,
            self.parent,
            path=self.path,
            debug_path=self.debug_path,
            flags=self.flags,
        )
        scope.trace_level = self.trace_level
        if not rewind_rngs:
            scope.rng_counters = self.rng_counters
        return scope

    # ---- random keys ----------------------------------------------------------------------------

    def has_rng(self, name: str) -> bool:
        """Whether a key was given for a random stream."""
        return name in self.rngs

    def make_rng(self, name: str = "params") -> PRNGKey:
        """Draws a new key from a random stream.

        Args:
          name: the stream; one that was not given falls back to ``params``.

        Returns:
          The key: that of the stream with the path of the scope and the number of the draw folded
          in.

        Raises:
          InvalidRngError: there is neither the stream nor ``params``.

        Example:
          >>> import jax
          >>> from linnet import core
          >>> scope = core.bind({}, rngs={"dropout": jax.random.key(0)})
          >>> scope.make_rng("dropout") == scope.make_rng("dropout")
          Array(False, dtype=bool)
        """
        self._check_usable()
        if name not in self.rngs:
            if "params" not in self.rngs:
                streams = ", ".join(map(repr, self.rngs)) or "none"
                raise InvalidRngError(
                    f'Scope "{self.path_text}" needs a random key for "{name}", but the streams '
                    f"given are: {streams}.\n"
                    f'Fix: pass rngs={{"{name}": jax.random.key(0)}} to init or apply; inside a '
                    "lifted transform, name it in split_rngs too."
                )
            name = "params"
        self.rng_counters[name] += 1
        return LazyRng.create(self.rngs[name], self.rng_counters[name]).as_jax_rng()

    # ---- collections ----------------------------------------------------------------------------

    def is_mutable_collection(self, col: str) -> bool:
        """Whether a collection can be written in this call."""
        return in_filter(self.mutable, col)

    def is_collection_empty(self, col: str) -> bool:
        """Whether a collection has nothing, at any place."""
        return not self.root._collection(col)

    def _collection(self, col: str) -> Collection:
        """What a collection has at this place; an empty mapping if it has nothing."""
        found = self._variables.get(col)
        if found is None and self.parent is not None and self.name is not None:
            found = self.parent._collection(col).get(self.name)
            if isinstance(found, Mapping):
                self._variables[col] = found  # pyright: ignore[reportArgumentType]
        return found if isinstance(found, Mapping) else _EMPTY

    def _mutable_collection(self, col: str) -> MutableCollection:
        """The dict of a mutable collection at this place, made on the way if it is missing."""
        found = self._variables.get(col)
        if found is None:
            if self.parent is None or self.name is None:
                found = {}
            else:
                above = self.parent._mutable_collection(col)
                found = above.get(self.name)
                if not isinstance(found, dict):
                    found = above[self.name] = {}
            self._variables[col] = found
        return found

    def _populate_collections(self) -> None:
        for col in list(self.root._variables):
            self._collection(col)

    def mutable_variables(self) -> VariableDict:
        """The collections that can be written in this call, at this place."""
        self._populate_collections()
        found = {k: v for k, v in self._variables.items() if in_filter(self.mutable, k)}
        return freeze(found) if config.flax_return_frozendict else found

    def variables(self) -> VariableDict:
        """All collections, at this place."""
        self._populate_collections()
        return freeze(self._variables) if config.flax_return_frozendict else self._variables

    def has_variable(self, col: str, name: str) -> bool:
        """Whether a collection has a variable at this place."""
        return name in self._collection(col)

    def get_variable(self, col: str, name: str, default: Any = None) -> Any:
        """The value of a variable, with its metadata.

        Args:
          col: the collection.
          name: the variable.
          default: what to return without it.

        Returns:
          The value.
        """
        return self._collection(col).get(name, default)

    def put_variable(self, col: str, name: str, value: Any) -> None:
        """Writes a variable.

        Args:
          col: the collection.
          name: the variable.
          value: its new value.

        Raises:
          ModifyScopeVariableError: the collection cannot be written in this call.
          InvalidScopeError: the scope has ended.
        """
        self._check_usable()
        if not self.is_mutable_collection(col):
            raise ModifyScopeVariableError(col, name, self.path_text)
        if tracers.current_trace() != self.trace_level:
            what = f'"{name}" of collection "{col}" in scope "{self.path_text}"'
            tracers.check_no_leak(self.trace_level, value, what)
        _put(self._mutable_collection(col), name, value)

    def variable(
        self,
        col: str,
        name: str,
        init_fn: Callable[..., Any] | None = None,
        *init_args: Any,
        unbox: bool = True,
        **init_kwargs: Any,
    ) -> Variable[Any]:
        """A variable, made if it is missing and its collection can be written.

        Args:
          col: the collection.
          name: the variable.
          init_fn: makes its first value.
          *init_args: positional arguments of ``init_fn``.
          unbox: take values out of their metadata.
          **init_kwargs: keyword arguments of ``init_fn``.

        Returns:
          The variable.

        Raises:
          ValueError: the name is taken.
          ScopeCollectionNotFound: the collection is empty and cannot be written.
          ScopeVariableNotFoundError: the variable is missing and cannot be made.
        """
        self.reserve(name, col)
        if not self.has_variable(col, name):
            if not self.is_mutable_collection(col) or init_fn is None:
                if self.is_collection_empty(col):
                    raise ScopeCollectionNotFound(col, name, self.path_text)
                raise ScopeVariableNotFoundError(name, col, self.path_text)
            self.put_variable(col, name, init_fn(*init_args, **init_kwargs))
        return Variable(self, col, name, unbox)

    def param(
        self,
        name: str,
        init_fn: Callable[..., Any],
        *init_args: Any,
        unbox: bool = True,
        **init_kwargs: Any,
    ) -> Any:
        """A parameter, made if it is missing and ``params`` can be written.

        Args:
          name: the parameter.
          init_fn: makes its first value from a random key.
          *init_args: further positional arguments of ``init_fn``.
          unbox: take the value out of its metadata.
          **init_kwargs: keyword arguments of ``init_fn``.

        Returns:
          The value.

        Raises:
          ValueError: the name is taken.
          ScopeParamShapeError: the value has another shape than ``init_fn`` gives.
          ScopeParamNotFoundError: the parameter is missing and cannot be made.
          ScopeCollectionNotFound: there are no parameters at all.
        """
        self.reserve(name, "params")
        if self.has_variable("params", name):
            value = self.get_variable("params", name)
            self._check_shapes(name, value, functools.partial(init_fn, **init_kwargs), init_args)
        else:
            if not self.is_mutable_collection("params"):
                if self.is_collection_empty("params"):
                    raise ScopeCollectionNotFound("params", name, self.path_text)
                raise ScopeParamNotFoundError(name, self.path_text)
            value = init_fn(self.make_rng("params"), *init_args, **init_kwargs)
            self.put_variable("params", name, value)
        return meta.unbox(value) if unbox else value

    def _check_shapes(
        self, name: str, value: Any, init_fn: Callable[..., Any], init_args: tuple[Any, ...]
    ) -> None:
        """Compares the shapes of a parameter with those that its initializer gives."""
        leaves = jax.tree.leaves(meta.unbox(value))
        if init_args and [getattr(leaf, "shape", None) for leaf in leaves] == [init_args[0]]:
            return  # the shape that the initializer is asked for: tracing it would cost most
        given = jax.eval_shape(lambda key: init_fn(key, *init_args), _abstract_key())
        for leaf, want in zip(leaves, jax.tree.leaves(meta.unbox(given)), strict=False):
            if hasattr(leaf, "shape") and leaf.shape != want.shape:
                raise ScopeParamShapeError(name, self.path_text, leaf.shape, want.shape)


@functools.cache
def _abstract_key() -> Any:
    """The type of a random key, without an operation in the trace that asks for it."""
    return jax.eval_shape(lambda: jax.random.key(0))


def _put(target: dict[str, Any], key: str, value: Any) -> None:
    """Writes a value; a dict is written into the dict that child scopes hold."""
    if key in target and isinstance(target[key], dict) and isinstance(value, Mapping):
        for k, v in value.items():
            _put(target[key], k, v)
    else:
        target[key] = value
