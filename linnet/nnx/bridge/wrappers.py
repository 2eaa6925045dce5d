"""Linen modules as NNX modules, and NNX modules as Linen modules.

``ToNNX`` holds the variables of a Linen module as NNX Variables: each call runs ``apply`` on them
and writes back what could be written. ``ToLinen`` holds nothing, as Linen modules do: each call
builds the NNX module anew, fills it with the variables of the scope, runs it, and puts what it
changed into the collections that can be written.

Random keys: a ``ToNNX`` draws one key from each of its streams for each call, and Linen makes all
others of them. A ``ToLinen`` makes one key of each stream that Linen has, and ``Rngs`` of them; in
``apply`` streams that were not given draw from ``nnx.Rngs(0)``.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from types import MethodType
from typing import Any, Generic, TypeVar

from linnet import linen
from linnet.core import meta
from linnet.core.frozen_dict import FrozenDict
from linnet.errors import (
    BridgeError,
    CollectionError,
    DroppedWriteWarning,
    UnknownVariableWarning,
    list_paths,
)
from linnet.linen.context import context as linen_context
from linnet.linen.submodules import unspecified_parent
from linnet.nnx.bridge import module as bridge_module
from linnet.nnx.bridge.variables import (
    Path,
    flat_variables,
    linen_vars_to_nnx_attrs,
    nnx_attrs_to_linen_vars,
    put_at,
    to_linen_var,
    to_nnx_var,
)
from linnet.nnx.graphlib import GraphDef, split, state, update
from linnet.nnx.modules.module import Module, iter_modules
from linnet.nnx.pytreelib import kinds, locate
from linnet.nnx.rnglib.streams import Rngs, RngState, as_key
from linnet.nnx.statelib import State, iter_flat
from linnet.nnx.variablelib.names import variable_name_from_type
from linnet.nnx.variablelib.variable import Param, Variable

M = TypeVar("M", bound=Module)

ARRAYS = "ArrayImpl"  # the collection of arrays that stand in a module without a Variable
_OWN = "to_nnx__"  # how the attributes of a ToNNX begin that are no variables

# Whether Linen modules make their variables, wherever lazy_init is running.
_initializing: ContextVar[bool] = ContextVar("initializing", default=False)


# ---- NNX modules as functions of their states ---------------------------------------------------


@dataclasses.dataclass
class Functional(Generic[M]):
    """An NNX class with the arguments of its constructor, used as Linen modules are.

    Args:
      module_type: the class.
      graphdef: the structure of the module, once ``init`` has made it.
      args: positional arguments of the constructor.
      kwargs: keyword arguments of the constructor.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> layer = nnx.bridge.functional(nnx.Linear)(2, 3)
      >>> state = layer.init(rngs=nnx.Rngs(0))
      >>> y, (graphdef, state) = layer.apply(state)(jnp.ones((1, 2)))
      >>> y.shape
      (1, 3)
    """

    module_type: type[M]
    graphdef: GraphDef[M] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def init(self, *, rngs: Rngs | None = None) -> State:
        """Makes the module.

        Args:
          rngs: random streams for the constructor, if it takes some.

        Returns:
          Its state.
        """
        streams = {} if rngs is None else {"rngs": rngs}
        self.graphdef, made = split(self.module_type(*self.args, **self.kwargs, **streams))
        return made

    def apply(self, *states: Any) -> Any:
        """Something to call in the place of the module.

        Args:
          *states: the states of the module.

        Returns:
          A callable that returns the output and ``(graphdef, state)``, with methods that do.

        Raises:
          BridgeError: ``init`` has not been called.
        """
        if self.graphdef is None:
            raise BridgeError(
                f"The {self.module_type.__name__} has no structure before init was called.\n"
                "Fix: state = functional.init(rngs=nnx.Rngs(0)) first."
            )
        return self.graphdef.apply(*states)


def functional(cls: type[M]) -> Callable[..., Functional[M]]:
    """Makes an NNX class usable as Linen modules are: construct, ``init``, ``apply``.

    Args:
      cls: the class.

    Returns:
      A function of the constructor's arguments that returns a ``Functional``.
    """

    def construct(*args: Any, **kwargs: Any) -> Functional[M]:
        return Functional(cls, None, args, kwargs)

    return construct


# ---- Linen in NNX -------------------------------------------------------------------------------


def current_linen_module() -> linen.Module | None:
    """The Linen module whose method is running, or None."""
    return linen_context.module_stack[-1]  # pyright: ignore[reportReturnType]


def lazy_init(fn: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes the variables of the Linen modules in an NNX module, by running it once.

    Args:
      fn: a module, or a method of one.
      *args: what to call it with.
      **kwargs: more of what to call it with.

    Returns:
      ``fn``.

    Raises:
      BridgeError: ``fn`` is neither a module nor a method of one.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import linen, nnx
      >>> class Model(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.dense = nnx.bridge.ToNNX(linen.Dense(3), rngs=rngs)
      ...     def __call__(self, x):
      ...         return self.dense(x)
      >>> model = nnx.bridge.lazy_init(Model(nnx.Rngs(0)), jnp.ones((1, 2)))
      >>> model.dense.kernel.shape
      (2, 3)
    """
    called = fn.func if isinstance(fn, functools.partial) else fn
    if not isinstance(getattr(called, "__self__", called), Module):
        raise BridgeError(
            f"lazy_init takes an NNX module or a method of one: {fn!r} needs to be a method of an "
            "NNX Module.\nFix: lazy_init(model, ...), or lazy_init(model.method, ...)."
        )
    before = _initializing.set(True)
    try:
        fn(*args, **kwargs)
    finally:
        _initializing.reset(before)
    return fn


class ToNNX(Module):
    """A Linen module as an NNX module, which has its variables as attributes.

    Variables of submodules stand in nested dicts: ``model.Dense_0["kernel"]``. Methods of the
    Linen module are methods of this one. The type of a Variable follows from its collection; see
    ``nnx.register_variable_name``.

    Args:
      module: the Linen module.
      rngs: its random streams, which are forked; or a random key for ``params``.

    Raises:
      TypeError: ``module`` is not an instance of a Linen module.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import linen, nnx
      >>> model = nnx.bridge.ToNNX(linen.Dense(3), rngs=nnx.Rngs(0)).lazy_init(jnp.ones((1, 2)))
      >>> model(jnp.ones((1, 2))).shape, model.kernel.shape
      ((1, 3), (2, 3))
    """

    def __init__(self, module: linen.Module, rngs: Any = None):
        if not isinstance(module, linen.Module):
            raise TypeError(
                f"ToNNX takes an instance of a Linen module, but got {module!r} "
                f"({type(module).__name__}).\nFix: nnx.bridge.ToNNX(linen.Dense(3), rngs=rngs)."
            )
        if module.scope is not None:  # made in a method of another one; it is not a part of that
            module = module.clone(name=None, _deep_clone=True, _reset_names=True)
        self.to_nnx__module = module
        self.to_nnx__rngs = _as_streams(rngs)

    @property
    def module(self) -> linen.Module:
        """The Linen module."""
        return self.to_nnx__module

    @property
    def rngs(self) -> Rngs | None:
        """The random streams."""
        return self.to_nnx__rngs

    def lazy_init(self, *args: Any, **kwargs: Any) -> ToNNX:
        """Makes the variables; ``nnx.bridge.lazy_init`` of this module.

        Args:
          *args: what to call it with.
          **kwargs: more of what to call it with; ``rngs`` and ``method`` as for a call.

        Returns:
          The module itself.
        """
        return lazy_init(self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("to_nnx__module")
        if not name.startswith("_") and callable(method := getattr(type(module), name, None)):
            return functools.partial(self, method=method)
        where = locate.describe(self)
        raise AttributeError(
            f"'ToNNX' object has no attribute {name!r}"
            + (f" at {where}" if where else "")
            + f": the Linen module is a {type(module).__name__}.\n"
            "Fix: the variables of a Linen module are there after lazy_init(inputs), its methods "
            "always, and its fields as model.module."
            + (f"{name}." if hasattr(module, name) else "<field>.")
        )

    def __call__(
        self,
        *args: Any,
        rngs: Any = None,
        method: Callable[..., Any] | str | None = None,
        mutable: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Runs a method of the Linen module on the variables.

        Args:
          *args: positional arguments of the method.
          rngs: random streams for this call, a key for ``params``, or a dict of keys; by default
            those that the module was made with.
          method: the method, or its name; by default ``__call__``.
          mutable: a filter of the collections that can be written; what was written is kept. By
            default as in the running Linen or bridge module, and none outside of one.
          **kwargs: keyword arguments of the method.

        Returns:
          What the method returns.
        """
        keys = _keys_of(self.to_nnx__rngs if rngs is None else rngs)
        if self._makes_variables():
            out, variables = self.module.init_with_output(keys, *args, method=method, **kwargs)
            self._keep(variables)
            return out
        if mutable is None:
            mutable = _mutable_around()
        out = self.module.apply(
            self._variables(), *args, rngs=keys, method=method, mutable=mutable, **kwargs
        )
        if mutable is not False:
            out, updates = out
            self._keep(updates)
        return out

    def _makes_variables(self) -> bool:
        """Whether this call is to make the variables."""
        if _initializing.get():
            return True
        around = bridge_module.current_module() or current_linen_module()
        if around is None or around.scope is None or not around.is_initializing():
            return False
        return not self._variables()

    def _variables(self) -> dict[str, Any]:
        attrs = {}
        for name, value in self.__dict__.items():
            is_variable = kinds.kind_of(value) in (kinds.VARIABLE, kinds.DICT, kinds.ARRAY)
            if is_variable and not name.startswith(_OWN):
                attrs[name] = value
        try:
            return nnx_attrs_to_linen_vars(attrs)
        except CollectionError as error:
            error.add_note(f"This was in {locate.describe(self) or 'a module'} (ToNNX).")
            raise

    def _keep(self, variables: Mapping[str, Any]) -> None:
        """Takes over variables: Variables that are there get new values, others are added."""
        for name, new in linen_vars_to_nnx_attrs(variables).items():
            old = self.__dict__.get(name)
            kept = _updated(old, new)
            if kept is not old:
                setattr(self, name, kept)


def _updated(old: Any, new: Any) -> Any:
    """Variables that take over values from others, or dicts of them; ``old`` if none is new."""
    if isinstance(old, Variable) and type(old) is type(new):
        if old.get_metadata() == new.get_metadata():
            old.set_raw_value(new.raw_value)  # the same structure as before
        else:
            old.update_from_state(new)
        return old
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    kept = {**old, **{key: _updated(old.get(key), value) for key, value in new.items()}}
    same = kept.keys() == old.keys() and all(kept[key] is old[key] for key in old)
    return old if same else kept


def _as_streams(rngs: Any) -> Rngs | None:
    """The streams that a ToNNX keeps: its own, whatever was given."""
    if rngs is None:
        return None
    if isinstance(rngs, Rngs):
        return rngs.fork()
    return Rngs(rngs) if isinstance(rngs, Mapping) else Rngs(params=rngs)


def _keys_of(rngs: Any) -> dict[str, Any]:
    """A key of each stream, as Linen takes them; its default stream is ``params``."""
    if rngs is None:
        return {}
    if isinstance(rngs, Rngs):
        keys = {name: stream.draw() for name, stream in rngs.items()}
        if "params" not in keys and "default" in keys:
            keys["params"] = keys.pop("default")
        return keys
    if isinstance(rngs, Mapping):
        return {name: as_key(key) for name, key in rngs.items()}
    return {"params": as_key(rngs)}


def _mutable_around() -> Any:
    """The collections that can be written in the module whose method is running."""
    around = bridge_module.current_module() or current_linen_module()
    return False if around is None or around.scope is None else around.scope.mutable


# ---- NNX in Linen -------------------------------------------------------------------------------


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

    Every call constructs the module, and fills it with the variables there are. Each type of
    Variable is a collection, by the names of ``nnx.register_variable_name``; random streams are
    none. Attributes that are no Variables begin anew in every call. Methods of the NNX class are
    methods of this module.

    Args:
      nnx_class: the class, or a function that returns a module.
      args: positional arguments of the constructor.
      kwargs: keyword arguments of the constructor.
      skip_rng: the constructor takes no ``rngs``.
      metadata_fn: makes what Linen keeps of a Variable; None for its value alone. By default values
        with metadata are in boxes (``NNXMeta``, ``Partitioned``).

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
        if nnx_method is None:
            nnx_method = type(module).__call__
        elif isinstance(nnx_method, str):
            nnx_method = getattr(type(module), nnx_method)
        out = nnx_method(module, *args, **kwargs)  # pyright: ignore[reportCallIssue]
        after = _leaves(module)
        if self.is_initializing():
            made = {path for path in after if path not in held and _is_linen(module, path)}
            _put(self, {path: after[path] for path in made})
        else:
            new = {path: leaf for path, leaf in after.items() if _raw(leaf) is not held.get(path)}
            _warn_of_dropped(self, [path for path in new if path in held], new)
            _put(self, {**new, **_not_there(self, after)})
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
    return wrapper.nnx_class(*wrapper.args, **kwargs)


def _leaves(module: Module) -> dict[Path, Any]:
    """The Variables and arrays of a module by path, without random streams."""
    flat = iter_flat(state(module, graph=True).raw_mapping)
    return {path: leaf for path, leaf in flat if not isinstance(leaf, RngState)}


def _raw(leaf: Any) -> Any:
    return leaf.raw_value if isinstance(leaf, Variable) else leaf


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
    """What stands at a path of nested mappings; stored files have text for numbers."""
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
        for path, value in flat_variables(tree):
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
    """Adds a variable that a new module does not have; whether there was a place for it."""
    holder: Any = module
    for depth, key in enumerate(path):
        if isinstance(holder, ToNNX):
            rest: dict[Any, Any] = {}
            put_at(rest, path[depth:], value)
            holder._keep({col: rest})
            return True
        if depth == len(path) - 1 or kinds.kind_of(holder) not in (kinds.OBJECT, kinds.DICT):
            break
        items = dict(kinds.items_of(holder, kinds.kind_of(holder)))
        holder = items.get(key, items.get(int(key)) if str(key).isdigit() else None)
    is_free = isinstance(holder, Module) and path[-1] not in holder._pytree_items()
    if is_free and depth == len(path) - 1:
        variable = to_nnx_var(col, value)
        if not isinstance(variable, Param):  # a parameter is made by the constructor
            holder._pytree_set(path[-1], variable)
            return True
    return False


def _is_linen(module: Module, path: Path) -> bool:
    """Whether a path leads into a Linen module."""
    inner = {place for place, x in iter_modules(module, graph=True) if isinstance(x, ToNNX)}
    return any(path[:end] in inner for end in range(len(path)))


def _warn_of_dropped(wrapper: ToLinen, paths: Sequence[Path], leaves: Mapping[Path, Any]) -> None:
    dropped = [p for p in paths if not wrapper.is_mutable_collection(_collection_of(leaves[p]))]
    if not dropped:
        return
    collections = sorted({_collection_of(leaves[path]) for path in dropped})
    warnings.warn(
        f"{wrapper._where()} ran an NNX module that wrote to collections which cannot be written in "
        f"this call; the new values are dropped:\n{list_paths(dropped)}\n"
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
      metadata_fn: makes what Linen keeps of a Variable; None for its value alone.
      name: the name of the Linen module.
      skip_rng: the constructor takes no ``rngs``.
      abstract_init: makes no difference; for programs that give it.
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
      base_metadata_fn: makes what Linen keeps of a Variable; None for its value alone.
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
