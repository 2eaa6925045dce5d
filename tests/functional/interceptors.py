"""Functions in the place of JAX's contractions, as libraries put them there while a model runs."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

INTERCEPTED = (
    (jax.lax, "dot_general"),
    (jnp, "einsum"),
    (jnp, "matmul"),
    (jax.lax, "conv_general_dilated"),
)


def contractions_in(jaxpr: Any) -> int:
    """How many contractions a trace holds, those in loops once."""
    names = ("dot_general", "conv_general_dilated")
    found = sum(equation.primitive.name in names for equation in jaxpr.eqns)
    inner = [x for equation in jaxpr.eqns for x in jaxprs_in_params(equation.params)]
    return found + sum(map(contractions_in, inner))


@contextlib.contextmanager
def under_their_names(note: Callable[[str], Any]) -> Iterator[None]:
    """Sets functions that give the cosine of what JAX's give, and tell ``note`` their names."""

    def changing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **kwargs: Any) -> Any:
            note(name)
            return jnp.cos(original(*args, **kwargs))

        return changed

    originals = [getattr(module, name) for module, name in INTERCEPTED]
    places = list(zip(INTERCEPTED, originals, strict=True))
    for (module, name), original in places:
        setattr(module, name, changing(name, original))
    try:
        yield
    finally:
        for (module, name), original in places:
            setattr(module, name, original)


@contextlib.contextmanager
def in_their_code(note: Callable[[str], Any]) -> Iterator[None]:
    """The same where functions stay what they are and get another code: all aliases see it."""
    originals: list[tuple[Any, Any]] = []
    is_inside = False

    def changing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            if is_inside:  # one contraction is made of another
                return original(*args, **kwargs)
            is_inside = True
            try:
                note(name)
                return jnp.cos(original(*args, **kwargs))
            finally:
                is_inside = False

        return changed

    for module, name in INTERCEPTED:
        function = getattr(module, name)
        if isinstance(function, types.FunctionType):
            original = _copy(function)
            originals.append((function, original))
            place = f"_stand_in_for_{name}"
            source = f"lambda *args, **kwargs: {place}(*args, **kwargs)"
            function.__globals__[place] = changing(name, original)
            function.__defaults__ = function.__kwdefaults__ = None
            function.__code__ = eval(source).__code__
    try:
        yield
    finally:
        for function, original in originals:
            _become(function, original)
            del function.__globals__[f"_stand_in_for_{function.__name__}"]
        jax.clear_caches()  # what JAX compiled meanwhile has the other code in it


def _copy(function: Any) -> Any:
    copy = types.FunctionType(function.__code__, function.__globals__)
    _become(copy, function)
    return copy


def _become(function: Any, other: Any) -> None:
    function.__code__ = other.__code__
    function.__defaults__, function.__kwdefaults__ = other.__defaults__, other.__kwdefaults__
