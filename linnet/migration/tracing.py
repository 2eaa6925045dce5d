"""Sizes from an example call: the program's module is imported, and its model is traced once.

No parameter is made: the call runs under ``jax.eval_shape``.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from linnet import as_flax, linen
from linnet.errors import LayerArgumentError


@dataclasses.dataclass
class TracedExample:
    """What an example call showed.

    The keys are the name of a class and that of a submodule or variable in it; those of the model
    itself are an empty text and the name of its class.
    """

    inputs: dict[tuple[str, str], list[dict[Any, Any]]] = dataclasses.field(default_factory=dict)
    """The shapes of the arguments of each call, by name and position."""
    shapes: dict[tuple[str, str], tuple[int, ...] | None] = dataclasses.field(default_factory=dict)
    """The shape of each variable; None where it has several."""


def trace(source: str, example: str, folder: str | None = None) -> TracedExample:
    """What the submodules of a model are called with.

    Args:
      source: the program.
      example: a call of a model with example inputs, as ``Model(...)(x)`` or
        ``Model(...).init(key, x)``; names of the program, ``jax`` and ``jnp`` may be used.
      folder: where the program stands, so that it can import what is beside it.

    Returns:
      The shapes of the arguments of each call, and of the variables.

    Raises:
      LayerArgumentError: the example is no call of a Linen module.
    """
    # The program's own imports of Flax, some of them late, give Linnet.
    with as_flax.installed():
        model, arguments, keywords = _evaluate(example, _load(source, folder))
        if not isinstance(model, linen.Module):
            raise LayerArgumentError(
                f"the example {example!r} calls {model!r}, which is no Linen module.\n"
                "Fix: write a call of a model, as 'Model(10)(jnp.ones((1, 28, 28, 1)))'."
            )
        return _trace(model, arguments, keywords)


def _trace(model: linen.Module, arguments: list[Any], keywords: dict[str, Any]) -> TracedExample:
    found = TracedExample()
    owners: dict[tuple[str, ...], list[str]] = {}

    def note(function, args, kwargs, context):
        _note(found, owners, context, args, kwargs)
        return function(*args, **kwargs)

    def initialise():
        keys = {"params": jax.random.key(0)}
        with linen.intercept_methods(note):
            return model.init(keys, *arguments, **keywords)

    variables = jax.eval_shape(initialise)
    for path, leaf in jax.tree_util.tree_leaves_with_path(variables):
        names = tuple(str(getattr(part, "key", getattr(part, "name", part))) for part in path)[1:]
        names = names[:-1] if names and names[-1] == "value" and names[:-2] in owners else names
        for owner in owners.get(names[:-1], ()):
            key = (owner, names[-1])
            is_same = found.shapes.get(key, leaf.shape) == leaf.shape
            found.shapes[key] = leaf.shape if is_same else None
    return found


def _load(source: str, folder: str | None) -> dict[str, Any]:
    """What a program defines when it is imported."""
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "linnet_example.py"
        path.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location("linnet_example", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["linnet_example"] = module
        added = [folder] if folder is not None and folder not in sys.path else []
        sys.path[:0] = added
        try:
            spec.loader.exec_module(module)
        finally:
            del sys.path[: len(added)]
            del sys.modules["linnet_example"]
    return {"jax": jax, "jnp": jnp, **vars(module)}


def _evaluate(example: str, namespace: Mapping[str, Any]) -> tuple[Any, list[Any], dict[str, Any]]:
    """The model, the arguments and the keyword arguments of a call."""
    call = ast.parse(example, mode="eval").body
    if not isinstance(call, ast.Call):
        raise LayerArgumentError(
            f"the example {example!r} is no call.\n"
            "Fix: write a call of a model, as 'Model(10)(jnp.ones((1, 28, 28, 1)))'."
        )
    function, arguments = call.func, call.args
    if isinstance(function, ast.Attribute) and function.attr in ("init", "init_with_output"):
        function, arguments = function.value, arguments[1:]

    def value(node: ast.expr) -> Any:
        return eval(compile(ast.Expression(node), "example", "eval"), dict(namespace))

    keywords = {keyword.arg: value(keyword.value) for keyword in call.keywords if keyword.arg}
    return value(function), [value(argument) for argument in arguments], keywords


def _note(found: TracedExample, owners: dict, context: Any, args: Any, kwargs: Any) -> None:
    module = context.module
    path = tuple(module.path)
    names = [cls.__name__ for cls in type(module).__mro__ if cls is not linen.Module]
    owners[path] = names
    if context.method_name == "setup":
        return
    shapes: dict[Any, Any] = {i: shape for i, arg in enumerate(args) if (shape := _shape(arg))}
    method = getattr(type(module), context.method_name)
    parameters = list(inspect.signature(method).parameters)[1:]
    for name, argument in [*zip(parameters, args, strict=False), *kwargs.items()]:
        shapes[name] = _shape(argument)
        if isinstance(argument, tuple):
            shapes |= {(name, i): _shape(item) for i, item in enumerate(argument)}
    if not path:
        found.inputs.setdefault(("", names[0]), []).append(shapes)
        return
    for owner in owners.get(path[:-1], ()):
        found.inputs.setdefault((owner, path[-1]), []).append(shapes)


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if hasattr(value, "shape") else None
