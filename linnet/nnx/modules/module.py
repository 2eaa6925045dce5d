"""Module: a Pytree with the methods of a layer, and the scope and policy that its call runs in.

While a transform traces, a call of a module runs in a ``jax.named_scope`` with the module's name.
It always runs under the module's precision policy, and an error from it says where the module is.
Outside of transforms and without policies, both cost one check of a flag.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from types import FunctionType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from linnet import errors
from linnet.errors import PrecisionError, name_some, type_text
from linnet.functional import dtypes
from linnet.functional.dtypes import Policy, as_policy, cast_floating, scope_of_call
from linnet.nnx import filterlib
from linnet.nnx.filterlib import Filter
from linnet.nnx.graphlib.explain import refuse_abstract, refuse_donated
from linnet.nnx.graphlib.traverse import iter_children, iter_graph, iter_objects
from linnet.nnx.pytreelib import kinds, locate, statics, tracing
from linnet.nnx.pytreelib.kinds import Path
from linnet.nnx.pytreelib.objects import Pytree
from linnet.nnx.pytreelib.tracing import scope_name
from linnet.nnx.variablelib.names import VariableType, variable_type_from_name
from linnet.nnx.variablelib.variable import Param, Perturbation, Variable

F = TypeVar("F", bound=Callable[..., Any])
M = TypeVar("M", bound="Module")  # part of the API: nnx.M
POLICY = "precision_policy"  # the attribute that holds a module's policy

statics.add_type_without_key(Policy)

# The run of nnx.capture that is going on, which is told of all that is sown.
capture_run: ContextVar[Any] = ContextVar("capture_run", default=None)


def _append(values: Any, value: Any) -> Any:
    return (*values, value)


class Module(Pytree):
    """The base class of layers and models.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> class Linear(nnx.Module):
      ...     def __init__(self, din, dout, *, rngs):
      ...         self.w = nnx.Param(rngs.uniform((din, dout)))
      ...         self.b = nnx.Param(jnp.zeros((dout,)))
      ...     def __call__(self, x):
      ...         return x @ self.w + self.b[None]
      >>> Linear(2, 5, rngs=nnx.Rngs(0))(jnp.ones((1, 2))).shape
      (1, 5)
    """

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        call = cls.__dict__.get("__call__")
        if isinstance(call, FunctionType):
            cls.__call__ = with_scope_and_policy(call)

    def sow(
        self,
        variable_type: VariableType | str,
        name: str,
        value: Any,
        reduce_fn: Callable[[Any, Any], Any] = _append,
        init_fn: Callable[[], Any] = tuple,
    ) -> bool:
        """Keeps a value under an attribute, for ``nnx.pop`` or ``nnx.capture`` to collect.

        Args:
          variable_type: the type of Variable, such as ``nnx.Intermediate``, or its name.
          name: the attribute.
          value: the value.
          reduce_fn: joins what is kept so far with the value; by default a tuple grows.
          init_fn: what is kept before the first value.

        Returns:
          True.

        Raises:
          ValueError: the attribute is something else, or a Variable of another type.
        """
        module = _captured_copy(self)
        variable_type = _announce(module, name, variable_type)
        if name not in module._pytree_items():
            _keep(module, name, variable_type(reduce_fn(init_fn(), value)))
            return True
        kept = module._pytree_items()[name]
        if not isinstance(kept, Variable):
            raise ValueError(
                f"Expected '{name}' to be a Variable, got {type(kept).__name__}: "
                f"{type(module).__name__}.{name} cannot take a sown value.\nFix: sow another name."
            )
        _check_type(module, name, variable_type, "sow")
        kept.value = reduce_fn(kept.value, value)
        return True

    def perturb(
        self, name: str, value: Any, variable_type: VariableType | str = Perturbation
    ) -> Any:
        """Adds a zero Variable to a value; the gradient of the Variable is that of the value.

        Args:
          name: the attribute that keeps the Variable.
          value: the value.
          variable_type: the type of Variable, or its name.

        Returns:
          The sum.

        Raises:
          ValueError: the attribute is something else, or a Variable of another type.
        """
        module = _captured_copy(self)
        variable_type = _announce(module, name, variable_type)
        if name not in module._pytree_items():
            _keep(module, name, variable_type(jax.tree_util.tree_map(jnp.zeros_like, value)))
        _check_type(module, name, variable_type, "perturb")
        return jax.tree_util.tree_map(jnp.add, module._pytree_items()[name].value, value)

    @property
    def __captures__(self) -> tuple[Variable[Any], ...]:
        """What ``nnx.capture`` has collected from this module so far, while it runs.

        One read-only Variable for each type that is collected, with a dict from name to value.

        Raises:
          AttributeError: no capture is running.
        """
        run = capture_run.get()
        if run is None:
            raise AttributeError(
                f"'{type(self).__name__}' object has no attribute '__captures__': nnx.capture is "
                "not running.\nFix: read it in a call under nnx.capture(model, nnx.Intermediate)."
            )
        return run.collected_from(_captured_copy(self))

    def iter_modules(self) -> Iterator[tuple[Path, Module]]:
        """Every module below this one, and itself last; see ``nnx.iter_modules``."""
        return iter_objects(self, Module, None, "Module.iter_modules")

    def iter_children(self) -> Iterator[tuple[Any, Any]]:
        """The objects and Variables directly below; see ``nnx.iter_children``."""
        return iter_children(self)

    def set_attributes(
        self,
        *filters: Filter,
        raise_if_not_found: bool = True,
        graph: bool | None = None,
        **attributes: Any,
    ) -> None:
        """Sets attributes wherever a module has them already, here and below.

        Args:
          *filters: which modules, by type, path or predicate; by default all.
          raise_if_not_found: an attribute that no module has is an error.
          graph: allow shared references; by default as ``set_graph_mode`` says.
          **attributes: the attributes and their values.

        Raises:
          ValueError: no module has one of the attributes.

        Example:
          >>> from linnet import nnx
          >>> class Noise(nnx.Module):
          ...     def __init__(self):
          ...         self.deterministic = False
          >>> model = nnx.List([Noise(), Noise()])
          >>> model.set_attributes(deterministic=True)
          >>> model[1].deterministic
          True
        """
        # All are found before the first is changed.
        modules = [*iter_objects(self, Module, graph, "Module.train, eval or set_attributes")]
        set_where_present(modules, filters or ..., attributes, self if raise_if_not_found else None)

    def train(self, **attributes: Any) -> None:
        """Switches to training: ``deterministic=False`` and ``use_running_average=False`` below.

        Args:
          **attributes: more attributes to set where modules have them.
        """
        self.set_attributes(
            deterministic=False, use_running_average=False, raise_if_not_found=False, **attributes
        )

    def eval(self, **attributes: Any) -> None:
        """Switches to evaluation: ``deterministic=True`` and ``use_running_average=True`` below.

        Args:
          **attributes: more attributes to set where modules have them.
        """
        self.set_attributes(
            deterministic=True, use_running_average=True, raise_if_not_found=False, **attributes
        )


def _captured_copy(module: Module) -> Module:
    """The copy of a module that the running ``nnx.capture`` works on; without one, the module."""
    run = capture_run.get()
    return module if run is None else run.copy_of(module)


def _announce(module: Module, name: str, variable_type: VariableType | str) -> VariableType:
    """Tells a run of ``nnx.capture`` what is about to be sown; resolves a type given by name."""
    if isinstance(variable_type, str):
        variable_type = variable_type_from_name(variable_type, allow_register=True)
    run = capture_run.get()
    if run is not None:
        run.begin_sowing(module, name, variable_type)
    return variable_type


def _check_type(module: Module, name: str, variable_type: VariableType, verb: str) -> None:
    kept = module._pytree_items()[name]
    if not isinstance(kept, variable_type):
        raise ValueError(
            f"Expected '{name}' to be of type '{variable_type.__name__}', got "
            f"'{type(kept).__name__}' in {type(module).__name__}.\nFix: {verb} another name."
        )


def _keep(module: Module, name: str, variable: Variable[Any]) -> None:
    run = capture_run.get()
    if run is None or not run.keep(module, name, variable):
        module._pytree_set(name, variable)


def set_where_present(
    modules: Iterable[tuple[Path, Module]], only: Filter, attributes: dict[str, Any], node: Any
) -> None:
    """Sets attributes on the modules that have them; raises, naming ``node``, if none has one."""
    predicate = filterlib.to_predicate(only)
    missing = dict(attributes)
    for path, module in modules:
        for name, value in attributes.items() if predicate(path, module) else ():
            if hasattr(module, name):
                setattr(module, name, value)
                missing.pop(name, None)
    if missing and node is not None:
        raise ValueError(
            f"Could not find at least one instance of the following attributes: {list(missing)} in "
            f"{type(node).__name__}.\nFix: check the spelling, or pass raise_if_not_found=False."
        )


def iter_modules(module: Any, /, *, graph: bool | None = None) -> Iterator[tuple[Path, Module]]:
    """Every module in an object, with its path.

    Args:
      module: a module, or any pytree of modules.
      graph: allow shared references, each visited once; by default as ``set_graph_mode`` says.

    Yields:
      ``(path, module)``; what is inside comes before what it is in.

    Example:
      >>> from linnet import nnx
      >>> model = nnx.Sequential(nnx.Dropout(0.5), nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
      >>> for path, module in nnx.iter_modules(model):
      ...     print(path, type(module).__name__)
      ('layers', 0) Dropout
      ('layers', 1) Linear
      ('layers',) List
      () Sequential
    """
    return iter_objects(module, Module, graph, "iter_modules")


def iter_module_children(
    node: Any, /, *, graph: bool | None = None
) -> Iterator[tuple[Any, Pytree]]:
    """The modules and other objects directly below an object, with their keys.

    Args:
      node: a module, or any pytree of modules.
      graph: makes no difference, as for ``iter_children``.

    Yields:
      ``(key, object)``; ``iter_children`` gives the Variables too.

    Example:
      >>> from linnet import nnx
      >>> [key for key, _ in nnx.iter_module_children(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))]
      ['rngs']
    """
    for key, child in iter_children(node, graph=graph):
        if isinstance(child, Pytree):
            yield key, child


# ---- the call of a module -----------------------------------------------------------------------


def with_scope_and_policy(call: F) -> F:
    """Wraps ``__call__`` so that it runs under the module's policy and, in traces, in its scope.

    The scope is named after the module's attribute; the outermost call under a precision policy
    casts its output to the policy's dtype.
    """

    # cloudpickle takes along what the wrapper names; modules, classes and functions go by name, so
    # settings and what is known of the running trace are read through their modules.
    @functools.wraps(call)
    def wrapper(self: Module, *args: Any, **kwargs: Any) -> Any:
        if Policy.any_made:
            outer = dtypes.context.value
            inner = scope_of_call(outer, self.__dict__.get(POLICY))
            if inner is not outer:
                return _under_policy(outer, inner, call, self, args, kwargs)
        try:
            if tracing.running.names:
                return _in_named_scope(call, self, args, kwargs)
            return call(self, *args, **kwargs)
        except Exception as error:
            _explain(self, error)
            raise

    return wrapper  # pyright: ignore[reportReturnType]


def _explain(module: Module, error: Exception) -> None:
    """Adds a note to an error from a module's call: the path of the module and its Variables."""
    about_sharding = type(error).__name__ == _SHARDING_ERROR
    if not isinstance(error, (TypeError, ValueError, RuntimeError)) and not about_sharding:
        return
    if isinstance(error, TypeError):
        refuse_abstract(module, error)
    refuse_donated(module, error)
    if isinstance(error, RuntimeError):
        return
    known = any(note.startswith(_PLACE) for note in getattr(error, "__notes__", ()))
    if known or type(error).__module__ == errors.__name__:
        return
    items = module._pytree_items()
    values = [(name, items[name]) for name in kinds.sort_keys(items)]
    own = [(name, value.raw_value) for name, value in values if isinstance(value, Variable)]
    held = name_some(f"{name} {type_text(x)}" for name, x in own if hasattr(x, "dtype"))
    error.add_note(
        f"{_PLACE}{locate.describe(module) or 'a module'} ({type(module).__name__})"
        + (f", which holds {held}." if held else ".")
        + (_CHOOSE_SHARDING if about_sharding else "")
    )


_PLACE = "This was in the call of "
_SHARDING_ERROR = "ShardingTypeError"  # what JAX raises under explicit axes; it has no public name
_CHOOSE_SHARDING = (
    "\nFix: say how the result is sharded (out_sharding= in the call of a layer), or give the "
    "inputs one sharding first (jax.sharding.reshard)."
)


def _under_policy(outer: Any, inner: Any, call: Any, module: Any, args: Any, kwargs: Any) -> Any:
    try:
        with dtypes.context(inner):
            out = _in_named_scope(call, module, args, kwargs)
    except Exception as error:
        _explain(module, error)
        raise
    is_outermost = outer is None or not outer.is_inside
    return cast_floating(out, inner.policy.output) if is_outermost else out


def _in_named_scope(call: Any, module: Any, args: Any, kwargs: Any) -> Any:
    name = scope_name(module)
    if name is None:
        return call(module, *args, **kwargs)
    with jax.named_scope(name):
        return call(module, *args, **kwargs)


def set_precision(model: Any, policy: Any) -> None:
    """Gives a model a precision policy, in place; see ``nnx.precision`` for what it means.

    Every module below carries it from now on, as the static attribute ``precision_policy``, and
    obeys it however it is called. Inside of the model's call, ``with nnx.precision(...)`` and
    modules that were given another policy later count. The floating-point parameters are brought to
    ``params``; make the optimizer afterwards.

    Args:
      model: a module, or any pytree of modules.
      policy: an ``nnx.Policy`` or a short form of one; None to have none.

    Raises:
      PrecisionError: it is no policy, or there is no module to call in ``model``.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> rngs = nnx.Rngs(0)
      >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=rngs), nnx.LayerNorm(3, rngs=rngs))
      >>> nnx.set_precision(model, "compute=bfloat16,output=float32")
      >>> model(jnp.ones((1, 2))).dtype
      dtype('float32')
      >>> model.precision_policy
      Policy(compute=bfloat16, output=float32)
    """
    new = None if policy is None else as_policy(policy)
    modules = [module for _, module in iter_modules(model, graph=True) if callable(module)]
    if not modules:
        raise PrecisionError(
            f"set_precision found no module that can be called in {type(model).__name__}.\n"
            "Fix: pass a module, or a list or dict of modules."
        )
    for module in modules:
        if new is not None:
            setattr(module, POLICY, new)
        elif POLICY in vars(module):
            delattr(module, POLICY)
    if new is not None and new.params is not None:
        _bring_parameters(model, modules, new.params)


def _bring_parameters(model: Any, modules: list[Any], dtype: Any) -> None:
    for _, variable in iter_graph(model, graph=True):
        if isinstance(variable, Param) and jnp.issubdtype(variable.dtype, jnp.floating):
            variable.set_value(variable.get_value().astype(dtype))
    for module in modules:
        if hasattr(module, "param_dtype") and jnp.dtype(module.param_dtype) != dtype:
            module.param_dtype = dtype
