"""Compiled programs for functions that are traced anew at each call.

Outside of all traces ``jax.lax.cond`` and the loops compile whenever they are given functions they
have not met, and the functions that Linnet gives them are made for one call. Here a call is traced,
so that its functions run and read whatever they read as it is now: globals, closures, modules,
Variables. What comes of it is a jaxpr, in which every array from around is an argument. Two calls
share compiled code if their jaxprs are equal, equation by equation.
"""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
from jax.core import eval_jaxpr

from linnet.nnx.tracing import EAGER, current_trace

_MOST_PROGRAMS = 128

# Beside what they compute these have rules for derivatives, which nobody asks for where nothing is
# traced.
_WITH_RULES = ("custom_jvp_call", "custom_vjp_call")
_BESIDE_RULES = ("call_jaxpr", "num_consts", "symbolic_zeros")


class _Programs:
    """Compiled programs by what they compute, the latest last."""

    def __init__(self) -> None:
        self.known: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()
        self.lock = threading.Lock()

    def program(self, form: Hashable, jaxpr: Any) -> Any:
        """The program of that form, made from the jaxpr if there is none."""
        with self.lock:
            found = self.known.get(form)
            if found is None:
                found = jax.jit(functools.partial(_evaluate, _without_rules(jaxpr)))
                self.known[form] = found
                if len(self.known) > _MOST_PROGRAMS:
                    self.known.popitem(last=False)
            self.known.move_to_end(form)
        return found


_programs = _Programs()


def _evaluate(jaxpr: Any, constants: Any, arguments: Any) -> Any:
    return eval_jaxpr(jaxpr, constants, *arguments)


def is_outside() -> bool:
    """Whether nothing is being traced, and JAX compiles."""
    compiles = not jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
    return compiles and current_trace() is EAGER


def run(
    f: Callable[..., Any], *args: Any, before_running: Callable[[], None] = lambda: None
) -> Any:
    """``f(*args)``, compiled where it is called outside of all traces.

    Args:
      f: a function of arrays that calls one of JAX's.
      *args: pytrees of arrays.
      before_running: called where ``f`` has been traced and is about to be run; it may raise.

    Returns:
      What it returns.

    Example:
      >>> import jax.numpy as jnp
      >>> for step in (1, 2):
      ...     print(run(lambda x: jax.lax.fori_loop(0, 3, lambda _, x: x + step, x), jnp.array(0)))
      3
      6
    """
    if not is_outside():
        return f(*args)
    arguments = jax.tree_util.tree_leaves(args)
    try:
        closed, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
    except TypeError:
        if all(map(_is_array, arguments)):
            raise
        return f(*args)  # its own error speaks of what the user gave
    before_running()
    try:
        form = _form(closed.jaxpr)
    except _NoFormError:
        flat = _evaluate(closed.jaxpr, closed.consts, arguments)
    else:
        flat = _programs.program(form, closed.jaxpr)(closed.consts, arguments)
    return jax.tree_util.tree_structure(shapes).unflatten(flat)


def _is_array(leaf: Any) -> bool:
    try:
        jax.typeof(leaf)
    except TypeError:
        return False
    return True


class _NoFormError(Exception):
    """Internal: what a jaxpr computes cannot be told from the outside."""


def _form(jaxpr: Any) -> Hashable:
    """What a jaxpr computes: equal for two that compute the same from equal arguments."""
    if jaxpr.effects:
        raise _NoFormError
    numbers: dict[Any, int] = {}

    def new(variables: Any) -> Hashable:
        for variable in variables:
            numbers[variable] = len(numbers)
        return tuple(variable.aval for variable in variables)

    def read(atom: Any) -> Hashable:
        return _literal(atom) if hasattr(atom, "val") else numbers[atom]

    arguments = new(jaxpr.constvars), new(jaxpr.invars)
    equations = []
    for equation in jaxpr.eqns:
        inputs = tuple(map(read, equation.invars))
        equations.append((*_operation(equation), inputs, new(equation.outvars)))
    return arguments, tuple(equations), tuple(map(read, jaxpr.outvars))


def _literal(atom: Any) -> Hashable:
    if isinstance(atom.val, jax.Array):
        raise _NoFormError  # an array from around that is no argument
    value = np.asarray(atom.val)
    return atom.aval, type(atom.val), value.dtype, value.tobytes()


def _operation(equation: Any) -> tuple[Hashable, ...]:
    """The primitive of an equation, its parameters, and the settings it was made under."""
    primitive, params = equation.primitive, equation.params
    if primitive.name == "pure_callback":
        raise _NoFormError  # it would keep the user's function
    names = _BESIDE_RULES if primitive.name in _WITH_RULES else sorted(params)
    if not params.keys() >= set(names):
        raise _NoFormError  # another version of JAX
    return primitive, equation.ctx, tuple((name, _parameter(params[name])) for name in names)


def _parameter(value: Any) -> Hashable:
    if hasattr(value, "eqns"):
        if getattr(value, "consts", ()):
            raise _NoFormError  # a compiled function with arrays of its own
        return _form(_open(value))
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_parameter, value))
    if isinstance(value, float):
        return float, value.hex()  # tells the signs of zero apart
    try:
        hash(value)
    except TypeError as error:
        raise _NoFormError from error
    return type(value), value


def _open(jaxpr: Any) -> Any:
    """A jaxpr apart from its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def _without_rules(jaxpr: Any) -> Any:
    """The jaxpr with other rules for derivatives: those of the user may hold on to a model."""
    bare = _open(jaxpr)
    equations = [equation.replace(params=_params_without_rules(equation)) for equation in bare.eqns]
    made = bare.replace(eqns=equations)
    return made if type(jaxpr) is type(bare) else jaxpr.replace(jaxpr=made)


def _params_without_rules(equation: Any) -> dict[str, Any]:
    params = {
        name: jax.tree_util.tree_map(
            lambda x: _without_rules(x) if hasattr(x, "eqns") else x,
            value,
            is_leaf=lambda x: not isinstance(x, (tuple, list)),
        )
        for name, value in equation.params.items()
    }
    if equation.primitive.name not in _WITH_RULES:
        return params
    kept = {name: params[name] for name in _BESIDE_RULES}
    return {**_rules()[equation.primitive.name], **kept}


@functools.cache
def _rules() -> dict[str, dict[str, Any]]:
    """For each primitive with rules, the parameters of one that has none of the user's."""
    by_vjp = jax.custom_vjp(lambda x: x)
    by_vjp.defvjp(lambda x: (x, None), lambda _, g: (g,))
    by_jvp = jax.custom_jvp(lambda x: x)
    by_jvp.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    jaxpr = jax.make_jaxpr(lambda x: by_vjp(by_jvp(x)))(0.0)
    return {equation.primitive.name: equation.params for equation in jaxpr.eqns}
