"""List, Dict and Sequential: containers that are modules, with an identity of their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from typing import Any, TypeVar, overload

from linnet.errors import LayerArgumentError
from linnet.nnx.modules.module import Module
from linnet.nnx.pytreelib import locate, watch
from linnet.nnx.pytreelib.objects import Pytree, check_mutable, unwrap_mark
from linnet.nnx.pytreelib.printing import PrintedForm

A = TypeVar("A")


class List(MutableSequence[A], Module):
    """A list whose elements are data or static one by one, and that can be shared.

    Args:
      it: the first elements.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> layers = nnx.List([nnx.Param(jnp.ones(2))])
      >>> layers.append("a label")
      >>> len(layers), layers[-1]
      (2, 'a label')
    """

    __slots__ = ("_elements",)

    def __init__(self, it: Iterable[A] | None = None, /):
        object.__setattr__(self, "_elements", [])
        for value in () if it is None else it:
            self.append(value)

    def _pytree_items(self) -> dict[Any, Any]:
        items: dict[Any, Any] = dict(enumerate(self._elements))
        items.update(self.__dict__)
        return items

    def _pytree_restore(self, items: dict[Any, Any]) -> None:
        positions = sorted(key for key in items if isinstance(key, int))
        object.__setattr__(self, "_elements", [items[key] for key in positions])
        self.__dict__.update((k, v) for k, v in items.items() if not isinstance(k, int))

    def _pytree_store(self, key: Any) -> Any:
        return self._elements if isinstance(key, int) else self.__dict__

    def _change(self, elements: list[Any], marks: list[bool | None]) -> None:
        object.__setattr__(self, "_elements", elements)
        kept = {k: v for k, v in (self._pytree_marks or {}).items() if not isinstance(k, int)}
        kept.update((i, mark) for i, mark in enumerate(marks) if mark is not None)
        object.__setattr__(self, "_pytree_marks", kept or None)
        watch.announce_content(self)

    def _with_marks(self) -> tuple[list[Any], list[bool | None]]:
        marks = self._pytree_marks or {}
        return list(self._elements), [marks.get(i) for i in range(len(self._elements))]

    @overload
    def __getitem__(self, index: int) -> A: ...
    @overload
    def __getitem__(self, index: slice) -> list[A]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._elements[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        check_mutable(self, index)
        elements, marks = self._with_marks()
        if isinstance(index, slice):
            pairs = [unwrap_mark(self, index, item) for item in value]
            elements[index] = [item for item, _ in pairs]
            marks[index] = [mark for _, mark in pairs]
        else:
            elements[index], mark = unwrap_mark(self, index, value)
            marks[index] = marks[index] if mark is None else mark
        self._change(elements, marks)

    def __delitem__(self, index: Any) -> None:
        check_mutable(self, index)
        elements, marks = self._with_marks()
        del elements[index], marks[index]
        self._change(elements, marks)

    def insert(self, index: int, value: A) -> None:
        """Puts ``value`` before the element at ``index``."""
        check_mutable(self, index)
        elements, marks = self._with_marks()
        value, mark = unwrap_mark(self, index, value)
        elements.insert(index, value)
        marks.insert(index, mark)
        self._change(elements, marks)

    def append(self, value: A) -> None:
        """Puts ``value`` at the end."""
        self.insert(len(self._elements), value)

    def __len__(self) -> int:
        return len(self._elements)

    def __iter__(self) -> Iterator[A]:
        return iter(self._elements)

    def __add__(self, other: Iterable[A]) -> List[A]:
        return List([*self, *other])

    def _printed_form(self) -> PrintedForm:
        items = [("", value) for value in self._elements]
        items += [(f"{name}=", value) for name, value in self.__dict__.items()]
        return PrintedForm(f"{type(self).__name__}([", items, "])", "", short_arrays=True)


class Dict(MutableMapping[Any, A], Module):
    """A dict whose values are data or static one by one, and that can be shared.

    Entries are read as items or as attributes.

    Args:
      *args: a mapping or pairs, as for ``dict``.
      **kwargs: more entries.

    Example:
      >>> from linnet import nnx
      >>> heads = nnx.Dict({"left": nnx.Param(1.0)}, name="heads")
      >>> heads["left"] is heads.left, heads.name
      (True, 'heads')
    """

    __slots__ = ("_entries",)
    # A mapping has no hash, but an object may be a static argument.
    __hash__ = Module.__hash__  # pyright: ignore[reportAssignmentType]
    _pytree_ordered = True

    def __init__(self, *args: Any, **kwargs: Any):
        object.__setattr__(self, "_entries", {})
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def _pytree_items(self) -> dict[Any, Any]:
        return self._entries

    def _pytree_restore(self, items: dict[Any, Any]) -> None:
        object.__setattr__(self, "_entries", dict(items))

    def _pytree_store(self, key: Any) -> Any:
        return self._entries

    def __getitem__(self, key: Any) -> A:
        return self._entries[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        check_mutable(self, key)
        value, mark = unwrap_mark(self, key, value)
        self._entries[key] = value
        if mark is not None:
            self._pytree_mark(key, mark)
        watch.announce_content(self)

    def __delitem__(self, key: Any) -> None:
        check_mutable(self, key)
        del self._entries[key]
        self._pytree_unmark(key)
        watch.announce_content(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _SLOTS_OF_DICT:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return self._entries[name]
        except KeyError:
            known = ", ".join(map(repr, self._entries)) or "nothing"
            raise AttributeError(f"No entry {name!r} in {type(self).__name__}: {known}.") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            super().__setattr__(name, value)
        else:
            self[name] = value

    def __delattr__(self, name: str) -> None:
        if name not in self._entries:
            raise AttributeError(f"No entry {name!r} in {type(self).__name__}.")
        del self[name]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __or__(self, other: Mapping[Any, A]) -> Dict[A]:
        return Dict({**self, **other})

    def _printed_form(self) -> PrintedForm:
        items = [(f"{key!r}: ", value) for key, value in self._entries.items()]
        return PrintedForm(f"{type(self).__name__}({{", items, "})", "", short_arrays=True)


_SLOTS_OF_DICT = frozenset((*Dict.__slots__, *Pytree.__slots__))


class _UnlessEntry:
    """A method of Module on a Dict; an entry of the same name hides it."""

    def __init__(self, name: str):
        self.name = name
        self.method = getattr(Module, name)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is not None and self.name in instance._entries:
            return instance._entries[self.name]
        return self.method.__get__(instance, owner)


for _name in vars(Module):
    if not _name.startswith("_"):
        setattr(Dict, _name, _UnlessEntry(_name))


class Sequential(Module):
    """Applies modules and functions in order, each to the output of the one before.

    A tuple is passed on as positional arguments, a dict as keyword arguments.

    Args:
      *fns: modules or functions.

    Example:
      >>> from linnet import nnx
      >>> nnx.Sequential(lambda x: x + 1, lambda x: (x, 2), lambda x, y: x * y)(3)
      8
    """

    def __init__(self, *fns: Callable[..., Any]):
        self.layers = List(fns)

    def __call__(self, *args: Any, rngs: Any = None, **kwargs: Any) -> Any:
        """Runs the layers; without layers, returns the input, and None if there is none.

        Args:
          *args: the input of the first layer.
          rngs: passed to every layer that takes it.
          **kwargs: more input of the first layer.

        Returns:
          The output of the last layer.

        Raises:
          LayerArgumentError: a layer cannot be called.
        """
        output: Any = _as_output(args, kwargs) if args or kwargs else None
        for position, layer in enumerate(self.layers):
            if not callable(layer):
                _refuse_layer(self, position, layer)
            if position > 0:
                args, kwargs = _as_arguments(output)
            if rngs is not None and takes_rngs(layer):
                kwargs = {**kwargs, "rngs": rngs}
            output = layer(*args, **kwargs)
        return output


def _refuse_layer(model: Sequential, position: int, layer: Any) -> None:
    fix, got = "pass the module or the function itself, such as nnx.relu", repr(layer)
    if isinstance(layer, (list, tuple)):
        fix, got = "nnx.Sequential(*layers)", f"a {type(layer).__name__} of {len(layer)}"
    place = locate.describe(model) or "Sequential"
    raise LayerArgumentError(
        f"{place}.layers[{position}] is not callable: Sequential applies modules and functions, "
        f"but got {got}.\nFix: {fix}."
    )


def _as_output(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kwargs if not args else args[0] if len(args) == 1 else args


def _as_arguments(output: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(output, tuple):
        return output, {}
    return ((), output) if isinstance(output, dict) else ((output,), {})


def takes_rngs(function: Callable[..., Any]) -> bool:
    """Whether a module or function takes an argument called ``rngs``."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.name == "rngs" or p.kind is p.VAR_KEYWORD for p in parameters)
