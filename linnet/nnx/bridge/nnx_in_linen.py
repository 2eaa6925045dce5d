"""ToLinen: an NNX module as a Linen module, which holds nothing itself.

Each call builds the NNX module anew, fills it with the variables of the scope, runs it, and puts
what it changed into the collections that can be written.

The module gets an ``nnx.Rngs`` with one key from each random stream of Linen; in ``apply`` streams
that were not given draw from ``nnx.Rngs(0)``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, TypeVar

from linnet import linen
from linnet.core import meta
from linnet.errors import DroppedWriteWarning, UnknownVariableWarning, list_paths
from linnet.frozen_dict import FrozenDict
from linnet.linen.submodules import unspecified_parent
from linnet.nnx.bridge.linen_in_nnx import ToNNX, store_collections
from linnet.nnx.bridge.variables import (
    Path,
    as_position,
    flat_entries,
    put_at,
    to_linen_var,
    to_nnx_var,
)
from linnet.nnx.graphlib import state, update
from linnet.nnx.modules.module import Module, iter_modules
from linnet.nnx.pytreelib import kinds, locate
from linnet.nnx.rnglib.streams import Rngs, RngState, shared_noise_allowed
from linnet.nnx.statelib import iter_flat
from linnet.nnx.variablelib.names import variable_name_from_type
from linnet.nnx.variablelib.variable import Param, Variable

M = TypeVar("M", bound=Module)

ARRAYS = "ArrayImpl"  # the collection of arrays that are attributes without a Variable


def linen_rngs_dict(linen_module: linen.Module, add_default: bool = False) -> dict[str, Any]:
    """A new key of each random stream of a Linen module, for ``nnx.Rngs``.

    Args:
      linen_module: a bound module.
      add_default: give the seed 0 for ``default``, if there is no such stream.

    Returns:
      Keys by the names of the streams.
    """
    keys = {name: linen_module.make_rng(name) for name in linen_module.scope.rngs}
    return {**keys, "default": 0} if add_default and "default" not in keys else keys


class ToLinen(linen.Module):
    """An NNX module as a Linen module.

    Every call constructs the module, and fills it with the given variables. Each type of Variable
    is a collection, by the names of ``nnx.register_variable_name``; arrays that are attributes
    without a Variable are in the collection ``ArrayImpl``. Random streams are not stored, and all
    other attributes are made anew in every call. Methods of the NNX class are methods of this
    module.

    Args:
      nnx_class: the class, or a function that returns a module.
      args: positional arguments of the constructor.
      kwargs: keyword arguments of the constructor.
      skip_rng: the constructor takes no ``rngs``.
      metadata_fn: converts a Variable to what Linen stores; None for its value alone. By default
        values with metadata are in boxes (``NNXMeta``, ``Partitioned``).

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import nnx
      >>> model = nnx.bridge.ToLinen(nnx.Linear, args=(2, 3))
      >>> variables = model.init(jax.random.key(0), jnp.ones((1, 2)))
      >>> model.apply(variables, jnp.ones((1, 2))).shape, list(variables)
      ((1, 3), ['params'])
    """

    nnx_class: Callable[..., Module]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = FrozenDict({})
    skip_rng: bool = False
    metadata_fn: Callable[[Variable[Any]], Any] | None = to_linen_var

    @linen.compact
    def __call__(
        self,
        *args: Any,
        nnx_method: Callable[..., Any] | str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs a method of the NNX module on the variables.

        Args:
          *args: positional arguments of the method.
          nnx_method: the method, or its name; by default ``__call__``.
          **kwargs: keyword arguments of the method.

        Returns:
          What the method returns.
        """
        module = _construct(self)
        before = _leaves(module)
        if self.is_initializing():
            _put(self, before)
        else:
            _fill(self, module, before)
            before = _leaves(module)
        held = {path: _raw(leaf) for path, leaf in before.items()}
        method = "__call__" if nnx_method is None else nnx_method
        run: Any = getattr(type(module), method) if isinstance(method, str) else method
        out = run(module, *args, **kwargs)
        after = _leaves(module)
        if self.is_initializing():
            _put(self, _made_by_linen(module, held, after))
        else:
            new = {path: leaf for path, leaf in after.items() if _raw(leaf) is not held.get(path)}
            _warn_of_dropped(self, [path for path in new if path in held], new)
            in_refs = {p: x for p, x in after.items() if isinstance(x, Variable) and _is_ref(x)}
            _put(self, {**new, **in_refs, **_not_there(self, after)})
        return out

    def __getattr__(self, name: str) -> Any:
        cls = self.__dict__.get("nnx_class")
        cls = cls.func if isinstance(cls, functools.partial) else cls
        if not name.startswith("_") and callable(getattr(cls, name, None)):
            return MethodType(_method_named(name), self)
        return super().__getattr__(name)


def _method_named(name: str) -> Callable[..., Any]:
    """A function of a ToLinen that runs a method of its NNX module."""

    def method(self: ToLinen, *args: Any, **kwargs: Any) -> Any:
        return self(*args, nnx_method=name, **kwargs)

    return method


def _construct(wrapper: ToLinen) -> Module:
    if isinstance(wrapper.nnx_class, Module):
        raise TypeError(
            f"ToLinen takes a class, but got an instance of {type(wrapper.nnx_class).__name__}: "
            "the module is made anew in each call.\n"
            "Fix: give the class and the arguments of its constructor, "
            f"nnx.bridge.to_linen({type(wrapper.nnx_class).__name__}, *args, **kwargs)."
        )
    kwargs = FrozenDict(wrapper.kwargs).unfreeze()
    if not wrapper.skip_rng and "rngs" not in kwargs:
        keys = linen_rngs_dict(wrapper, add_default=not wrapper.is_initializing())
        kwargs["rngs"] = Rngs(keys)
    with shared_noise_allowed():  # variables take the place of what is drawn here
        return wrapper.nnx_class(*wrapper.args, **kwargs)


def _leaves(module: Module) -> dict[Path, Any]:
    """The Variables and arrays of a module by path, without random streams."""
    flat = iter_flat(state(module, graph=True).raw_mapping)
    return {path: leaf for path, leaf in flat if not isinstance(leaf, RngState)}


def _raw(leaf: Any) -> Any:
    return leaf.raw_value if isinstance(leaf, Variable) else leaf


def _is_ref(variable: Variable[Any]) -> bool:
    """Whether a Variable stores a JAX ref, which stays the same object when it is written."""
    return variable._metadata.stored_as_ref


def _collection_of(leaf: Any) -> str:
    if not isinstance(leaf, Variable):
        return ARRAYS
    return variable_name_from_type(type(leaf), allow_register=True)


def _put(wrapper: ToLinen, leaves: Mapping[Path, Any]) -> None:
    """Writes leaves into the collections that can be written."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        col = _collection_of(leaf)
        if not wrapper.is_mutable_collection(col):
            continue
        value = leaf
        if isinstance(leaf, Variable):
            make = wrapper.metadata_fn
            value = leaf.get_value() if make is None else make(leaf)
        put_at(tree.setdefault(col, {}), path, value)
    for col, names in tree.items():
        for name, value in names.items():
            wrapper.put_variable(col, name, value)


_MISSING = object()


def _value_at(tree: Any, path: Path) -> Any:
    """The value at a path of nested mappings; in those of stored files, numbers are text."""
    for key in path:
        if not isinstance(tree, Mapping):
            return _MISSING
        tree = tree.get(key, tree.get(str(key), _MISSING))
    return tree


def _not_there(wrapper: ToLinen, leaves: Mapping[Path, Any]) -> dict[Path, Any]:
    """The leaves for which there is no variable."""
    given = wrapper.variables
    return {
        path: leaf
        for path, leaf in leaves.items()
        if _value_at(given.get(_collection_of(leaf)), path) is _MISSING
    }


def _fill(wrapper: ToLinen, module: Module, leaves: Mapping[Path, Any]) -> None:
    """Fills a new module with the variables that there are."""
    given = wrapper.variables
    known: dict[str, set[Path]] = {}
    values: dict[Any, Any] = {}
    lost = []
    for path, leaf in leaves.items():
        col = _collection_of(leaf)
        known.setdefault(col, set()).add(tuple(map(str, path)))
        value = _value_at(given.get(col), path)
        if value is not _MISSING:
            put_at(values, path, meta.unbox(value))
        elif isinstance(leaf, Param):
            lost.append(path)
    if lost:
        _warn(
            f"{wrapper._where()} was applied without these parameters of its "
            f"{type(module).__name__}, which begin anew in every call:\n{list_paths(lost)}\n"
            "Fix: give all variables that init returned."
        )
    update(module, values)
    unknown = []
    for col, tree in given.items():
        for path, value in flat_entries(tree):
            text = tuple(map(str, path))
            if not any(text[:end] in known.get(col, ()) for end in range(1, len(text) + 1)):
                unknown += [] if _place(module, path, col, value) else [path]
    if unknown:
        _warn(
            f"Found unknown module paths in incoming state: {wrapper._where()} has no place in its "
            f"{type(module).__name__} for\n{list_paths(unknown)}\n"
            "Fix: leave them out, or rename them to the attributes of the module."
        )


def _place(module: Module, path: Path, col: str, value: Any) -> bool:
    """Adds a variable that a new module does not have; returns whether that was possible."""
    holder: Any = module
    *above, name = path
    for depth, key in enumerate(above):
        if isinstance(holder, ToNNX):
            rest: dict[Any, Any] = {}
            put_at(rest, path[depth:], value)
            store_collections(holder, {col: rest})
            return True
        kind = kinds.kind_of(holder)
        if kind not in (kinds.OBJECT, kinds.DICT):
            return False
        items = dict(kinds.items_of(holder, kind))
        holder = items.get(key, items.get(as_position(key)))
    if isinstance(holder, ToNNX):
        store_collections(holder, {col: {name: value}})
        return True
    variable = to_nnx_var(col, value)
    is_free = isinstance(holder, Module) and name not in holder._pytree_items()
    if not is_free or isinstance(variable, Param):  # a parameter is made by the constructor
        return False
    holder._pytree_set(name, variable)
    return True


def _made_by_linen(
    module: Module, before: Mapping[Path, Any], after: Mapping[Path, Any]
) -> dict[Path, Any]:
    """The variables that Linen modules inside have made in a call."""
    inner = {path for path, x in iter_modules(module, graph=True) if isinstance(x, ToNNX)}

    def is_inside(path: Path) -> bool:
        return any(path[:end] in inner for end in range(len(path)))

    return {p: leaf for p, leaf in after.items() if p not in before and is_inside(p)}


def _warn_of_dropped(wrapper: ToLinen, paths: Sequence[Path], leaves: Mapping[Path, Any]) -> None:
    dropped = [p for p in paths if not wrapper.is_mutable_collection(_collection_of(leaves[p]))]
    if not dropped:
        return
    collections = sorted({_collection_of(leaves[path]) for path in dropped})
    warnings.warn(
        f"{wrapper._where()} ran an NNX module that wrote to collections which cannot be written "
        f"in this call; the new values are dropped:\n{list_paths(dropped)}\n"
        f"Fix: apply(..., mutable={collections!r}) and keep what it returns.",
        DroppedWriteWarning,
        stacklevel=locate.outer_level(),
    )


def _warn(text: str) -> None:
    warnings.warn(text, UnknownVariableWarning, stacklevel=locate.outer_level())


def to_linen(
    nnx_class: Callable[..., Module],
    *args: Any,
    metadata_fn: Callable[[Variable[Any]], Any] | None = to_linen_var,
    name: str | None = None,
    skip_rng: bool = False,
    abstract_init: bool = True,
    **kwargs: Any,
) -> ToLinen:
    """Makes an NNX module a Linen module.

    Args:
      nnx_class: the class, or a function that returns a module.
      *args: positional arguments of the constructor.
      metadata_fn: converts a Variable to what Linen stores; None for its value alone.
      name: the name of the Linen module.
      skip_rng: the constructor takes no ``rngs``.
      abstract_init: not used; it is there because Flax takes it.
      **kwargs: keyword arguments of the constructor.

    Returns:
      The ``ToLinen``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import linen, nnx
      >>> class Model(linen.Module):
      ...     @linen.compact
      ...     def __call__(self, x):
      ...         return linen.Dense(2)(nnx.bridge.to_linen(nnx.Linear, 3, 4)(x))
      >>> sorted(Model().init(jax.random.key(0), jnp.ones((1, 3)))["params"])
      ['Dense_0', 'ToLinen_0']
    """
    return ToLinen(
        nnx_class,
        args=args,
        kwargs=FrozenDict(kwargs),
        metadata_fn=metadata_fn,
        skip_rng=skip_rng,
        name=name,
    )


def to_linen_class(
    base_nnx_class: type[M],
    base_metadata_fn: Callable[[Variable[Any]], Any] | None = to_linen_var,
    base_skip_rng: bool = False,
    **partial_kwargs: Any,
) -> type[ToLinen]:
    """A class of Linen modules for one NNX class.

    Args:
      base_nnx_class: the NNX class.
      base_metadata_fn: converts a Variable to what Linen stores; None for its value alone.
      base_skip_rng: the constructor takes no ``rngs``.
      **partial_kwargs: keyword arguments of the constructor that all instances have.

    Returns:
      The class. Its constructor takes the arguments of the NNX class, or those of ``ToLinen``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import nnx
      >>> Linear = nnx.bridge.wrappers.to_linen_class(nnx.Linear, use_bias=False)
      >>> list(Linear(2, 3).init(jax.random.key(0), jnp.ones((1, 2)))["params"])
      ['kernel']
    """

    class ToLinenPartial(ToLinen):
        """The Linen modules of one NNX class."""

    construct: Any = ToLinenPartial.__init__

    def init(
        self: ToLinenPartial,
        *positional: Any,
        nnx_class: Callable[..., Module] = base_nnx_class,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] = FrozenDict({}),
        skip_rng: bool = base_skip_rng,
        metadata_fn: Callable[[Variable[Any]], Any] | None = base_metadata_fn,
        parent: Any = unspecified_parent,
        name: str | None = None,
        **more: Any,
    ) -> None:
        if positional and positional[0] is base_nnx_class:
            positional = positional[1:]
        construct(
            self,
            nnx_class,
            args=positional if args is None else args,
            kwargs=FrozenDict({**partial_kwargs, **kwargs, **more}),
            skip_rng=skip_rng,
            metadata_fn=metadata_fn,
            parent=parent,
            name=name,
        )

    type.__setattr__(ToLinenPartial, "__init__", init)
    return ToLinenPartial
