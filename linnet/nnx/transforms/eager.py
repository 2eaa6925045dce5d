"""Loops, branches and recurrent layers outside of all traces: compiled, though called eagerly.

Outside of all traces ``jax.lax.cond`` and the loops compile whenever they are given functions they
have not met, and the functions that Linnet gives them are made for one call. There are two ways to
compile only once:

- ``compiled_outside`` is ``nnx.jit`` for functions of the library, such as a scan or a recurrent
  layer. It is used only while the function reads nothing but its arguments, and while the
  ``user_code`` that it runs is the same.
- A branch or loop of ``Written.run`` is traced at each call, so that the user's functions read
  globals, closures, modules and Variables as they are now. The result is a jaxpr in which every
  captured array is an argument, and two calls share compiled code if their jaxprs are equal,
  equation by equation.

``Written`` finds the slots that a loop or branch writes to, which JAX must know beforehand.
"""

from __future__ import annotations

import collections
import functools
import inspect
import itertools
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import eval_jaxpr

from linnet.functional import fusing
from linnet.nnx.graphlib.traverse import iter_graph
from linnet.nnx.pytreelib import kinds, locate, statics
from linnet.nnx.pytreelib.kinds import is_node
from linnet.nnx.pytreelib.tracing import EAGER, current_trace, reading
from linnet.nnx.transforms.arguments import NO_STATIC, Given, flatten_with_gaps
from linnet.nnx.transforms.errors import is_traceable
from linnet.nnx.transforms.jit import JitFunction
from linnet.nnx.transforms.run import Call, Run
from linnet.nnx.transforms.user_code import UserCode

# ---- compiled by arguments ----------------------------------------------------------------------

_MOST_TRACES = 64


class _CallsInProgress(threading.local):
    def __init__(self) -> None:
        self.arguments: list[Any] = []


_calls = _CallsInProgress()


def compiled_outside(fun: Any = None, *, api: str = "jit") -> Any:
    """Compiles a function of objects where it is called outside of all traces.

    It is not compiled inside a trace, nor while JAX's contractions are intercepted, nor once it was
    seen to use arrays that are not among its arguments: they would be constants of the compiled
    code, and a Variable among them would seem never to change. Arrays and objects among its
    arguments are traced; flags, numbers and functions are static. The user's code counts as it is
    now, with the globals and class attributes that it reads.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> traced = []
      >>> @compiled_outside
      ... def scaled(layer, x, *, times):
      ...     traced.append(times)
      ...     return times * layer(x)
      >>> layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
      >>> y, again = (scaled(layer, jnp.ones((1, 2)), times=3) for _ in range(2))
      >>> traced
      [3]
    """

    def make(fun: Any) -> Any:
        compiled = _CompiledOutside(fun, api)

        @functools.wraps(fun)
        def call(*args: Any, **kwargs: Any) -> Any:
            # It names nothing of this module: cloudpickle takes it for a function of the user's.
            return (compiled if compiled.is_used_here() else fun)(*args, **kwargs)

        return call

    return make if fun is None else make(fun)


class _CompiledOutside(JitFunction):
    """A compiled function whose arguments are static, except for arrays and objects."""

    def __init__(self, fun: Callable[..., Any], api: str):
        # Always with graph updates: the function itself knows what it refuses, and a change of
        # structure, or an argument that it returns, must reach the caller.
        super().__init__(self._standing_for_its_arguments(fun), api, True, True, {})
        self._made_from = (fun, api)
        self._code = UserCode(inspect.unwrap(fun))
        self.can_be_used = True  # while the result depends on the arguments alone
        self._numbers = itertools.count()
        self._forget()

    def is_used_here(self) -> bool:
        usable = self.can_be_used and not fusing.are_intercepted()
        return usable and current_trace() is EAGER

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _calls.arguments.append((args, kwargs))
        try:
            if self._unseen:
                self._look(args, kwargs)
            count = self.traces.count
            run = super().__call__ if self.can_be_used else self.fun
            result = run(*args, **kwargs)
            self._unseen += self.traces.count - count
        finally:
            _calls.arguments.pop()
        if not self.can_be_used or self.traces.count > _MOST_TRACES:
            self._forget()
        return result

    def _look(self, args: Any, kwargs: Any) -> None:
        """Checks whether the trace for these arguments reads anything else than them."""
        if _refers_to_objects(inspect.unwrap(self.fun)):
            self.can_be_used = False  # their flags may change, which no trace shows
            return
        count = self.traces.count
        jaxpr = self.trace(*args, **kwargs).jaxpr
        if any(jaxpr is seen for seen in self._seen):
            return
        self._seen.append(jaxpr)
        self.can_be_used = self.can_be_used and not _has_captured(jaxpr)
        # A trace that was made by looking was looked at at once. Only the first one settles what
        # ``_forget`` counts in advance.
        if not self._seen[1:] or self.traces.count == count:
            self._unseen -= 1

    def _standing_for_its_arguments(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with errors that name the objects outside instead of their copies."""
        itself = weakref.ref(self)

        @functools.wraps(fun)
        def run(*args: Any, **kwargs: Any) -> Any:
            copies = locate.standing_for(_parts((args, kwargs)), _parts(_calls.arguments[-1]))
            # ``reading`` and not ``compiling``: code with constants is not used again, so a later
            # write to them needs no warning.
            with copies, reading() as read:
                out = fun(*args, **kwargs)
            compiled = itself()
            if compiled is not None:
                if read:
                    compiled.can_be_used = False  # the jaxpr does not show a Variable with a number
                compiled._note_version()
            return out

        return run

    def _forget(self) -> None:
        self.clear_cache()
        self.traces.count = 0
        self._unseen = 1  # traces that were not looked at; the first is yet to come
        self._seen: list[Any] = []
        self._versions: dict[Any, int] = {}
        self._last_version: tuple[Any, int] = (None, 0)

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        given = super()._flatten(args, kwargs)
        static = NO_STATIC._replace(types=(self._version(given.leaves),))
        if all(map(_is_traced, given.leaves)):
            return given._replace(static=static)
        leaves, treedef = flatten_with_gaps((args, kwargs))
        fixed = statics.StaticValue(tuple(None if _is_traced(leaf) else leaf for leaf in leaves))
        moving = treedef.unflatten([leaf if _is_traced(leaf) else None for leaf in leaves])
        given = super()._flatten(*moving)
        return given._replace(static=static._replace(leaves=fixed))

    def _note_version(self) -> None:
        """Gives the key that the code has after a trace the number it had before, since tracing may
        change a list that the code reads, such as a record of its calls."""
        leaves = jax.tree_util.tree_leaves(_calls.arguments[-1], is_leaf=is_node)
        number = self._last_version[1]
        self._last_version = (self._code.key(leaves), number)
        self._versions[self._last_version[0]] = number

    def _version(self, leaves: Iterable[Any]) -> int:
        """A number for the user's code as it is now; the same for code with the same key."""
        key = self._code.key(leaves)
        last_key, number = self._last_version
        if key is not last_key and key != last_key:  # numbers, because the hash of code takes long
            number = self._versions.setdefault(key, next(self._numbers))
            self._last_version = (key, number)
        return number


def _refers_to_objects(function: Any) -> bool:
    """Whether a function can reach objects of the model that are not among its arguments."""
    pending, met = [function], set()
    while pending:
        function = pending.pop()
        if not isinstance(function, types.FunctionType) or function in met:
            continue
        met.add(function)
        closed_over = statics.closed_over(function).values()
        read = [function.__globals__.get(name) for name in _names_in(function.__code__)]
        found = [item for value in (*closed_over, *read) for item in kinds.data_inside(value)]
        if any(kinds.kind_of(item) != kinds.ARRAY for item in found):
            return True
        pending += closed_over  # functions among them
    return False


def _names_in(code: types.CodeType) -> list[str]:
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return [*code.co_names, *(name for part in inner for name in _names_in(part))]


def _has_captured(jaxpr: Any) -> bool:
    """Whether a jaxpr holds arrays from outside; those made while tracing are no ``jax.Array``."""
    literals = [getattr(x, "val", None) for equation in jaxpr.eqns for x in equation.invars]
    if any(isinstance(x, jax.Array) for x in (*getattr(jaxpr, "consts", ()), *literals)):
        return True
    inner = jax.tree.leaves([tuple(equation.params.values()) for equation in jaxpr.eqns])
    return any(_has_captured(x) for x in inner if hasattr(x, "eqns"))


def _parts(tree: Any) -> list[Any]:
    return [value for _, value in iter_graph(tree, graph=True)]


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray)) or is_node(leaf)


# ---- compiled by jaxpr --------------------------------------------------------------------------

_MOST_PROGRAMS = 128

# These primitives hold rules for derivatives, which nobody needs where nothing is traced.
_WITH_RULES = ("custom_jvp_call", "custom_vjp_call")
_BESIDE_RULES = ("call_jaxpr", "num_consts", "symbolic_zeros")


class _Programs:
    """Compiled programs by the key of their jaxpr, the latest last."""

    def __init__(self) -> None:
        self.by_key: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()
        self.lock = threading.Lock()

    def program(self, key: Hashable, jaxpr: Any) -> Any:
        """The program with that key, made from the jaxpr if there is none."""
        with self.lock:
            found = self.by_key.get(key)
            if found is None:
                found = jax.jit(functools.partial(_evaluate, _without_rules(jaxpr)))
                self.by_key[key] = found
                if len(self.by_key) > _MOST_PROGRAMS:
                    self.by_key.popitem(last=False)
            self.by_key.move_to_end(key)
        return found


_programs = _Programs()


def _evaluate(jaxpr: Any, constants: Any, arguments: Any) -> Any:
    return eval_jaxpr(jaxpr, constants, *arguments)


def is_outside() -> bool:
    """Whether nothing is being traced, and JAX may compile."""
    compiles = not jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
    return compiles and current_trace() is EAGER


def _run_as_program(f: Callable[..., Any], *args: Any, before_running: Callable[[], None]) -> Any:
    """``f(*args)`` for pytrees of arrays, compiled if nothing is being traced.

    ``before_running`` is called when ``f`` has been traced and is about to run; it may raise.
    """
    if not is_outside():
        return f(*args)
    arguments = jax.tree_util.tree_leaves(args)
    try:
        closed, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
    except TypeError:
        if all(map(is_traceable, arguments)):
            raise
        return f(*args)  # raises an error that names what the user gave
    before_running()
    try:
        key = _key(closed.jaxpr)
    except _NoKeyError:
        flat = _evaluate(closed.jaxpr, closed.consts, arguments)
    else:
        flat = _programs.program(key, closed.jaxpr)(closed.consts, arguments)
    return jax.tree_util.tree_structure(shapes).unflatten(flat)


class _NoKeyError(Exception):
    """Internal: two jaxprs of this kind cannot be compared."""


def _key(jaxpr: Any) -> Hashable:
    """A cache key: equal for jaxprs that compute the same from equal arguments."""
    if jaxpr.effects:
        raise _NoKeyError
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
        raise _NoKeyError  # a captured array that is no argument
    value = np.asarray(atom.val)
    return atom.aval, type(atom.val), value.dtype, value.tobytes()


def _operation(equation: Any) -> tuple[Hashable, ...]:
    """The primitive of an equation, its parameters, and the settings it was made under."""
    primitive, params = equation.primitive, equation.params
    if primitive.name == "pure_callback":
        raise _NoKeyError  # it would keep the user's function
    names = _BESIDE_RULES if primitive.name in _WITH_RULES else sorted(params)
    if not params.keys() >= set(names):
        raise _NoKeyError  # another version of JAX
    return primitive, equation.ctx, tuple((name, _parameter(params[name])) for name in names)


def _parameter(value: Any) -> Hashable:
    if hasattr(value, "eqns"):
        if getattr(value, "consts", ()):
            raise _NoKeyError  # a compiled function with arrays of its own
        return _key(getattr(value, "jaxpr", value))
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_parameter, value))
    if isinstance(value, float):
        return float, value.hex()  # tells the signs of zero apart
    try:
        hash(value)
    except TypeError as error:
        raise _NoKeyError from error
    return type(value), value


def _without_rules(jaxpr: Any) -> Any:
    """The jaxpr without the user's derivative rules, which may keep a model alive."""
    bare = getattr(jaxpr, "jaxpr", jaxpr)  # apart from its constants
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
    """For each primitive with derivative rules, parameters with trivial rules."""
    by_vjp = jax.custom_vjp(lambda x: x)
    by_vjp.defvjp(lambda x: (x, None), lambda _, g: (g,))
    by_jvp = jax.custom_jvp(lambda x: x)
    by_jvp.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    jaxpr = jax.make_jaxpr(lambda x: by_vjp(by_jvp(x)))(0.0)
    return {equation.primitive.name: equation.params for equation in jaxpr.eqns}


# ---- the slots that are written to --------------------------------------------------------------

_MOST_REMEMBERED = 1024

# The slots that functions wrote to before, by their code and the structure of their arguments.
_written_before: dict[Hashable, set[int]] = {}


class _UnexpectedWrite(Exception):
    """Internal: the functions write to slots that were not expected."""


class Written:
    """The slots that one call writes to.

    The slots that ``functions`` with the same code wrote to in an earlier call are expected from
    the start. That only saves a trace: a slot that is expected in vain keeps its value.
    """

    def __init__(self, call: Call, functions: Sequence[Any] = ()):
        self._missing: set[int] = set()
        self._outside = is_outside()
        self._key: Hashable = None
        if self._outside and functions:
            codes = tuple(getattr(f, "__code__", type(f)) for f in functions)
            self._key = (codes, hash(call.opened.structure), len(call.slot_values))

    def settle(self, attempt: Callable[[set[int]], Any], expected: Iterable[int] = ()) -> Any:
        """Calls ``attempt`` with the expected slots, and again with more until none is missing.

        An attempt calls ``check`` after each run of a user's function, and ``run`` in place of the
        function that it would give to JAX.
        """
        expected = set(expected) | _written_before.get(self._key, set())
        while True:
            try:
                return attempt(expected)
            except _UnexpectedWrite:
                expected = expected | self._missing
                self._missing = set()
                if self._key is not None:
                    if len(_written_before) >= _MOST_REMEMBERED:
                        _written_before.clear()
                    _written_before[self._key] = expected

    def check(self, run: Run, expected: set[int]) -> None:
        """Notes the slots that a run wrote to and that were not expected."""
        self._missing |= run.changed - expected
        if not self._outside:
            self._start_over()

    def run(self, f: Callable[..., Any], *args: Any) -> Any:
        """Runs a function of arrays that calls ``check``."""
        # Where nothing else is traced the trace ends before it is thrown away: JAX keeps the
        # arrays that an interrupted one met.
        return _run_as_program(f, *args, before_running=self._start_over)

    def _start_over(self) -> None:
        if self._missing:
            raise _UnexpectedWrite
