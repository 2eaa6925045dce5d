"""ToNNX: a Linen module as an NNX module, which holds its variables as NNX Variables.

Each call runs ``apply`` on them and writes the mutable collections back. In each call one key is
drawn from each random stream, and Linen derives all other keys from these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from linnet import linen
from linnet.errors import BridgeError, CollectionError, ScopeCollectionNotFound
from linnet.linen.context import context as linen_context
from linnet.nnx.bridge import module as bridge_module
from linnet.nnx.bridge.variables import linen_vars_to_nnx_attrs, nnx_attrs_to_linen_vars
from linnet.nnx.modules.module import Module
from linnet.nnx.pytreelib import kinds, locate, watch
from linnet.nnx.rnglib.streams import Rngs, as_key, shared_noise_allowed
from linnet.nnx.variablelib.variable import Variable

_OWN = "to_nnx__"  # the prefix of those attributes of a ToNNX that are not variables

# True while lazy_init runs: Linen modules then make their variables.
_initializing: ContextVar[bool] = ContextVar("initializing", default=False)


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
      rngs: its random streams, which are forked; or a random key for ``params``, or a dict of keys.

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
        if module.scope is not None:  # made in a method of a Linen module, to which it is bound
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
        is_field = name in getattr(module, "__dataclass_fields__", ())
        method = None if is_field or name.startswith("_") else getattr(type(module), name, None)
        if callable(method):
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
            store_collections(self, variables)
            return out
        if mutable is None:
            running = _running_module()
            mutable = False if running is None else running.scope.mutable
        variables = self._variables()
        try:
            out = self.module.apply(
                variables, *args, rngs=keys, method=method, mutable=mutable, **kwargs
            )
        except ScopeCollectionNotFound as error:
            if not variables:
                error.add_note(
                    f"{locate.describe(self) or 'The module'} (ToNNX) has no variables yet.\n"
                    "Fix: model.lazy_init(inputs), or nnx.bridge.lazy_init(model, inputs)."
                )
            raise
        if mutable is not False:
            out, updates = out
            store_collections(self, updates)
        return out

    def _makes_variables(self) -> bool:
        """Whether this call is to make the variables."""
        if _initializing.get():
            return True
        running = _running_module()
        return running is not None and running.is_initializing() and not self._variables()

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


def store_collections(model: ToNNX, variables: Mapping[str, Any]) -> None:
    """Writes collections into the Variables of a ToNNX, and adds those that it does not have."""
    for name, new in linen_vars_to_nnx_attrs(variables).items():
        old = model.__dict__.get(name)
        kept = _updated(old, new)
        if isinstance(getattr(ToNNX, name, None), property):  # setattr would call the property
            model.__dict__[name] = kept
            watch.announce_content(model)
        elif kept is not old:
            setattr(model, name, kept)


def _updated(old: Any, new: Any) -> Any:
    """Writes the values of new Variables, or of nested dicts of them, into the old ones.

    Returns ``old`` itself where every Variable was there before.
    """
    if isinstance(old, Variable) and type(old) is type(new):
        if old.get_metadata() == new.get_metadata():
            old.set_raw_value(new.raw_value)  # the structure stays the same
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
        with shared_noise_allowed():  # most Linen modules do not use them all
            keys = {name: stream() for name, stream in rngs.items()}
        if "params" not in keys and "default" in keys:
            keys["params"] = keys.pop("default")
        return keys
    if isinstance(rngs, Mapping):
        return {name: as_key(key) for name, key in rngs.items()}
    return {"params": as_key(rngs)}


def _running_module() -> Any:
    """The bridge or Linen module whose method is running, if it is bound, or None."""
    running: Any = bridge_module.current_module() or current_linen_module()
    return None if running is None or running.scope is None else running
