"""A call of a model as a function of its weights by name, for programs that know no objects."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey

from linnet.errors import ExportError
from linnet.io import tensor_header
from linnet.nnx.graphlib import as_pure, merge, split, state
from linnet.nnx.pytreelib.kinds import OBJECT, VARIABLE, key_name, kind_of
from linnet.nnx.pytreelib.tracing import EAGER, current_trace, reading
from linnet.nnx.statelib import State

_CONTAINERS = (dict, list, tuple, set)


class PureCall:
    """A function of weights by name and of inputs; returns the outputs and the changed weights.

    Args:
      f: a model, a method of one, or a function of models and inputs.
      args: its example arguments; models among them are no inputs.

    Raises:
      ExportError: ``f`` cannot be called, or an entry cannot be stored.
    """

    def __init__(self, f: Any, args: Sequence[Any]):
        self.args = list(args)
        self.inputs = [arg for arg in args if not _is_object(arg)]
        self.names = _argument_names(f, len(args))
        self.model, self.f = _model_and_function(f, {id(arg) for arg in args})
        self.objects = {} if self.model is None else {"model": self.model}
        self.objects |= {self.names[n]: arg for n, arg in enumerate(args) if _is_object(arg)}
        self._is_alone = len(self.objects) == 1 and self.model is not None
        self.graphdef, values = split(self.objects, graph=True)
        found, self.treedef = jax.tree_util.tree_flatten_with_path(values)
        self.leaves: dict[str, Any] = {}
        for steps, leaf in found:
            if (name := self._name(steps)) in self.leaves:
                raise ExportError(
                    f"Two entries of the model would have the name {name}.\n"
                    "Fix: rename one of them; a dot in a key is as good as a step."
                )
            self.leaves[name] = leaf
        for name, leaf in self.leaves.items():
            _check_leaf(name, leaf)

    def _name(self, steps: Sequence[Any]) -> str:
        # A Variable is a step of its own in the tree, and none in the name.
        texts = [str(key_name(step)) for step in steps if not isinstance(step, GetAttrKey)]
        return ".".join(texts[1:] if self._is_alone else texts) or "value"

    def specs(self) -> dict[str, Any]:
        """The types of the weights."""
        return {name: _spec(leaf) for name, leaf in self.leaves.items()}

    @property
    def nbytes(self) -> int:
        """The size of the weights."""
        return sum(np.dtype(spec.dtype).itemsize * spec.size for spec in self.specs().values())

    def __call__(self, weights: dict[str, Any], *inputs: Any) -> Any:
        """The outputs, and the weights that have changed.

        Raises:
          ExportError: the call adds or removes Variables.
        """
        before = {name: _unraw(weights[name], leaf) for name, leaf in self.leaves.items()}
        objects = merge(self.graphdef, self.treedef.unflatten(before.values()))
        rest = iter(inputs)
        args = [
            objects[name] if _is_object(arg) else next(rest)
            for name, arg in zip(self.names, self.args, strict=True)
        ]
        if self.model is not None:
            args = [objects["model"], *args]
        with reading() as read:  # whatever way the function came by them
            outputs = as_pure(self.f(*args))
        if read and current_trace() is not EAGER:
            raise _holds_a_model(self.f)
        found = jax.tree_util.tree_flatten_with_path(split(objects, graph=True)[1])[0]
        after = {self._name(steps): leaf for steps, leaf in found}
        if after.keys() != before.keys():
            changed = ", ".join(sorted(after.keys() ^ before.keys())[:5])
            raise ExportError(
                f"The call adds or removes Variables ({changed}), which a program cannot do.\n"
                "Fix: make them before the export, or leave out sow and the like."
            )
        return outputs, {name: raw(x) for name, x in after.items() if x is not before[name]}


def _is_object(value: Any) -> bool:
    return kind_of(value) in (OBJECT, VARIABLE) or isinstance(value, State)


def _model_and_function(f: Any, passed: set[int]) -> tuple[Any, Any]:
    """The model that is called, if it is one, and a function that takes it first."""
    if inspect.ismethod(f) and _is_object(f.__self__):
        return f.__self__, f.__func__
    if not callable(f):
        raise ExportError(
            f"A {type(f).__name__} cannot be called.\nFix: pass a model, or a function."
        )
    if _is_object(f):
        return f, type(f).__call__
    if any(id(held) not in passed and _has_weights(held) for held in _held_by(f, set())):
        raise _holds_a_model(f)
    if isinstance(f, functools.partial):
        model, function = _model_and_function(f.func, passed)
        if model is not None:
            return model, lambda model, *args: function(model, *f.args, *args, **f.keywords)
    return None, f


def _holds_a_model(f: Any) -> ExportError:
    return ExportError(
        f"{getattr(f, '__name__', 'The function')} holds a model that is not among its "
        "arguments; its weights would become constants of the program.\n"
        "Fix: io.export(path, lambda model, x: ..., model, x)."
    )


def _has_weights(held: Any) -> bool:
    return _is_object(held) and bool(jax.tree.leaves(state(held)))


def _held_by(f: Any, seen: set[int]) -> Iterator[Any]:
    """What a function uses besides its arguments: its closure, globals, containers of these."""
    if id(f) in seen:
        return
    seen.add(id(f))
    for held in _parts_of(f):
        yield held
        if not _is_object(held) and (isinstance(held, _CONTAINERS) or callable(held)):
            yield from _held_by(held, seen)


def _parts_of(f: Any) -> list[Any]:
    if isinstance(f, functools.partial):
        is_model = _is_object(getattr(f.func, "__self__", f.func))
        return [*f.args, *f.keywords.values(), *([] if is_model else [f.func])]
    if isinstance(f, dict):
        return list(f.values())
    if isinstance(f, _CONTAINERS):
        return list(f)
    if inspect.ismethod(f):
        return [*getattr(f.__self__, "__dict__", {}).values(), f.__func__]
    function = inspect.unwrap(f)
    if not inspect.isfunction(function):
        return []
    used = inspect.getclosurevars(function)
    home = function.__module__
    # Functions from elsewhere, such as those of JAX, hold no model of this program.
    near = [x for x in used.globals.values() if not inspect.isfunction(x) or x.__module__ == home]
    return [*used.nonlocals.values(), *near]


def _argument_names(f: Any, count: int) -> list[str]:
    """The names of the first parameters of a function, as far as they are known."""
    try:
        found = [
            p.name
            for p in inspect.signature(f).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except (ValueError, TypeError):
        found = []
    return [found[n] if n < len(found) else f"arg{n}" for n in range(count)]


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", int), jax.dtypes.prng_key)


def raw(leaf: Any) -> Any:
    """An array as it is stored: a key as the numbers it consists of."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _unraw(array: Any, like: Any) -> Any:
    if not _is_key(like):
        return array
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(like))


def _spec(leaf: Any) -> Any:
    """The type of a stored leaf, on whatever device; numbers that give way to others still do."""
    stored = jax.eval_shape(raw, leaf)
    weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(stored.shape, stored.dtype, weak_type=weak)


def _check_leaf(name: str, leaf: Any) -> None:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        text = "is abstract: it has a shape and no value"
    elif not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float):
        text = f"is a {type(leaf).__name__}"
    elif not tensor_header.code_of(_spec(leaf).dtype):
        text = f"is {_spec(leaf).dtype}, a dtype that safetensors files do not have"
    else:
        return
    raise ExportError(
        f"{name} {text}, so it cannot be exported.\nFix: give it an array of numbers."
    )
