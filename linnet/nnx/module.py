"""Module: a Pytree with the conveniences of a neural-network layer."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import FunctionType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from linnet.nnx import filterlib
from linnet.nnx.calling import surrounded
from linnet.nnx.filterlib import Filter
from linnet.nnx.graphlib.traverse import children_for, walk_for
from linnet.nnx.pytreelib import Pytree
from linnet.nnx.variable_names import variable_type_from_name
from linnet.nnx.variablelib import Perturbation, Variable

M = TypeVar("M", bound="Module")
Path = tuple[Any, ...]


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
            cls.__call__ = surrounded(call)

    def sow(
        self,
        variable_type: type[Variable[Any]] | str,
        name: str,
        value: Any,
        reduce_fn: Callable[[Any, Any], Any] = _append,
        init_fn: Callable[[], Any] = tuple,
    ) -> bool:
        """Keeps a value under an attribute, for ``nnx.pop`` or ``nnx.capture`` to collect.

        Args:
          variable_type: the kind of Variable, such as ``nnx.Intermediate``, or its name.
          name: the attribute.
          value: the value.
          reduce_fn: joins what is kept so far with the value; by default a tuple grows.
          init_fn: what is kept before the first value.

        Returns:
          True.

        Raises:
          ValueError: the attribute is something else, or a Variable of another kind.
        """
        variable_type = _announce(self, name, variable_type)
        if name not in self._pytree_items():
            _keep(self, name, variable_type(reduce_fn(init_fn(), value)))
            return True
        kept = self._pytree_items()[name]
        if not isinstance(kept, Variable):
            raise ValueError(
                f"Expected '{name}' to be a Variable, got {type(kept).__name__}: "
                f"{type(self).__name__}.{name} cannot take a sown value.\nFix: sow another name."
            )
        if not isinstance(kept, variable_type):
            raise ValueError(
                f"Expected '{name}' to be of type '{variable_type.__name__}', got "
                f"'{type(kept).__name__}' in {type(self).__name__}.\nFix: sow another name."
            )
        kept.value = reduce_fn(kept.value, value)
        return True

    def perturb(
        self, name: str, value: Any, variable_type: type[Variable[Any]] | str = Perturbation
    ) -> Any:
        """Adds a zero Variable to a value; the gradient of the Variable is that of the value.

        Args:
          name: the attribute that keeps the Variable.
          value: the value.
          variable_type: the kind of Variable, or its name.

        Returns:
          The sum.

        Raises:
          ValueError: the attribute is something else, or a Variable of another kind.
        """
        variable_type = _announce(self, name, variable_type)
        if name not in self._pytree_items():
            _keep(self, name, variable_type(jax.tree_util.tree_map(jnp.zeros_like, value)))
        kept = self._pytree_items()[name]
        if not isinstance(kept, variable_type):
            raise ValueError(
                f"Expected '{name}' to be of type '{variable_type.__name__}', got "
                f"'{type(kept).__name__}' in {type(self).__name__}.\nFix: perturb another name."
            )
        return jax.tree_util.tree_map(jnp.add, kept.value, value)

    def iter_modules(self) -> Iterator[tuple[Path, Module]]:
        """Every module below this one, and itself last; see ``nnx.iter_modules``."""
        return modules_for(self, None, "Module.iter_modules")

    def iter_children(self) -> Iterator[tuple[Any, Module]]:
        """The modules directly below; see ``nnx.iter_module_children``."""
        return _children_of(self, None, "Module.iter_children")

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
        predicate = filterlib.to_predicate(filters or ...)
        missing = dict(attributes)
        # All are found before the first is changed.
        for path, module in [*modules_for(self, graph, "Module.train, eval or set_attributes")]:
            if predicate(path, module):
                for name, value in attributes.items():
                    if hasattr(module, name):
                        setattr(module, name, value)
                        missing.pop(name, None)
        if missing and raise_if_not_found:
            raise_not_found(missing, self)

    def train(self, **attributes: Any) -> None:
        """Switches to training: ``deterministic=False`` and ``use_running_average=False`` below.

        Args:
          **attributes: more attributes to set where modules have them.
        """
        self.set_attributes(
            deterministic=False,
            use_running_average=False,
            raise_if_not_found=False,
            **attributes,
        )

    def eval(self, **attributes: Any) -> None:
        """Switches to evaluation: ``deterministic=True`` and ``use_running_average=True`` below.

        Args:
          **attributes: more attributes to set where modules have them.
        """
        self.set_attributes(
            deterministic=True,
            use_running_average=True,
            raise_if_not_found=False,
            **attributes,
        )


def _announce(module: Module, name: str, kind: type[Variable[Any]] | str) -> type[Variable[Any]]:
    """Tells a run of ``nnx.capture`` what is about to be sown; returns the kind, given by name."""
    if isinstance(kind, str):
        kind = variable_type_from_name(kind, allow_register=True)
    run = capture_run.get()
    if run is not None:
        run.make_room(module, name, kind)
    return kind


def _keep(module: Module, name: str, variable: Variable[Any]) -> None:
    run = capture_run.get()
    if run is None or not run.keep(module, name, variable):
        module._pytree_set(name, variable)


def raise_not_found(names: Any, node: Any) -> None:
    """Raises for attributes that no module has."""
    raise ValueError(
        f"Could not find at least one instance of the following attributes: {list(names)} in "
        f"{type(node).__name__}.\nFix: check the spelling, or pass raise_if_not_found=False."
    )


def iter_modules(module: Any, /, *, graph: bool | None = None) -> Iterator[tuple[Path, Module]]:
    """Every module in an object, with its path.

    Args:
      module: a module, or any pytree of modules.
      graph: allow shared references, each visited once; by default as ``set_graph_mode`` says.

    Yields:
      ``(path, module)``; what is inside comes before what it is in.
    """
    return modules_for(module, graph, "iter_modules")


def modules_for(node: Any, graph: bool | None, api: str) -> Iterator[tuple[Path, Module]]:
    """``iter_modules`` for another function, which an error names as ``api``."""
    for path, value in walk_for(node, graph, api):
        if isinstance(value, Module):
            yield path, value


def iter_module_children(
    node: Any, /, *, graph: bool | None = None
) -> Iterator[tuple[Any, Module]]:
    """The modules directly below an object, with their keys.

    Args:
      node: a module, or any pytree of modules.
      graph: allow the same child twice, visited once; by default as ``set_graph_mode`` says.

    Yields:
      ``(key, module)``.
    """
    return _children_of(node, graph, "iter_module_children")


def _children_of(node: Any, graph: bool | None, api: str) -> Iterator[tuple[Any, Module]]:
    for key, child in children_for(node, graph, api):
        if isinstance(child, Module):
            yield key, child


_ELSEWHERE = {"views": ("view", "view_info", "with_attributes"), "capturing": ("capture",)}


def __getattr__(name: str) -> Any:
    # Users know these as part of this module; their files import it.
    for file, names in _ELSEWHERE.items():
        if name in names:
            return getattr(importlib.import_module(f"linnet.nnx.{file}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
