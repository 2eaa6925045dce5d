"""Loops, branches and recurrent layers outside of all traces: compiled, though called eagerly.

Outside of all traces ``jax.lax.cond`` and the loops compile whenever they are given functions they
have not met, and the functions that Linnet gives them are made for one call. There are two ways to
compile only once:

- ``compiled_outside`` is ``nnx.jit`` for functions of the library: recurrent layers and stacks. It
  is used only where no code of the user's runs in them (``library_code``).
- A branch or loop of ``Written.run`` is traced at each call, so that the user's functions read
  globals, closures, modules and Variables as they are now. The result is a jaxpr in which every
  captured array is an argument, and two calls share compiled code if their jaxprs are equal,
  equation by equation.

``Written`` finds the slots that a loop or branch writes to, which JAX must know beforehand.
"""

from __future__ import annotations

import collections
import functools
import itertools
import operator
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import eval_jaxpr

from linnet.functional import fusing
from linnet.nnx.graphlib.traverse import iter_graph
from linnet.nnx.graphlib.walk import HashedDefinition
from linnet.nnx.pytreelib import locate, statics
from linnet.nnx.pytreelib.kinds import is_node
from linnet.nnx.pytreelib.watch import changed_classes
from linnet.nnx.transforms.arguments import NO_STATIC, Given, flatten_with_gaps
from linnet.nnx.transforms.errors import is_traceable
from linnet.nnx.transforms.jit import JitFunction
from linnet.nnx.transforms.library_code import is_of_libraries
from linnet.nnx.transforms.option_types import P, R
from linnet.nnx.transforms.plan import are_same, definition_of
from linnet.nnx.transforms.run import Call, Run

# ---- compiled by arguments ----------------------------------------------------------------------

_MOST_TRACES = 64


class _CallsInProgress(threading.local):
    def __init__(self) -> None:
        self.arguments: list[Any] = []  # of each call that may compile, the innermost last


_calls = _CallsInProgress()


def compiled_outside(fun: Callable[P, R]) -> Callable[P, R]:
    """Compiles a function of the library's where it is called outside of all traces.

    It runs as it is inside a trace, while JAX's contractions are intercepted, and where the
    arguments hold code of the user's (``library_code``). Arrays and objects among its arguments are
    traced; flags, numbers and functions are static.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> scaled = compiled_outside(lambda layer, x, *, times: times * layer(x))
      >>> layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
      >>> scaled(layer, jnp.ones((1, 2)), times=3).shape
      (1, 2)
    """
    compiled = _CompiledOutside(fun)

    @functools.wraps(fun)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # It names nothing of this module: cloudpickle takes it for a function of the user's.
        return (compiled if compiled.is_used_here() else fun)(*args, **kwargs)

    return call


class _CompiledOutside(JitFunction):
    """A compiled function whose arguments are static, except for arrays and objects."""

    def __init__(self, fun: Callable[..., Any]):
        # Always with graph updates: the function itself knows what it refuses, and a change of
        # structure, or an argument that it returns, must reach the caller.
        super().__init__(_standing_for_its_arguments(fun), "jit", True, True, {})
        self._run_as_it_is = fun
        # How many classes had been changed at the latest call that could be compiled, and the
        # definitions of its objects: they hold nothing of the user's, so no model is kept alive.
        self._known: tuple[int, list[HashedDefinition]] = (0, [])

    def is_used_here(self) -> bool:
        return not fusing.are_intercepted() and not fusing.is_tracing()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, treedef = flatten_with_gaps((args, kwargs))
        are_nodes = tuple(map(is_node, leaves))
        are_traced = tuple(map(operator.or_, are_nodes, map(_is_array, leaves)))
        options = list(itertools.compress(leaves, map(operator.not_, are_traced)))
        if not self._is_known(itertools.compress(leaves, are_nodes), options, treedef):
            return self._run_as_it_is(*args, **kwargs)
        if self.traces.count > _MOST_TRACES:
            self.clear_cache()
            self.traces.count = 0
        static = NO_STATIC
        if options:
            pairs = zip(leaves, are_traced, strict=True)
            fixed = statics.StaticValue(tuple(None if is_traced else x for x, is_traced in pairs))
            static = static._replace(leaves=fixed)
            treedef = _with_gaps(treedef, are_traced)
            leaves = list(itertools.compress(leaves, are_traced))
            are_nodes = tuple(itertools.compress(are_nodes, are_traced))
        _calls.arguments.append((args, kwargs))
        try:
            return self._call(Given(leaves, treedef, static, are_nodes))
        finally:
            _calls.arguments.pop()

    def _is_known(self, nodes: Iterable[Any], options: list[Any], treedef: Any) -> bool:
        """Whether the function would run code of the libraries alone."""
        try:
            definitions = [definition_of(node) for node in nodes]
        except Exception:
            return False  # the call itself will say what is wrong
        changes = len(changed_classes)
        if self._known[0] == changes and are_same(definitions, self._known[1]):
            definitions = []
        if not is_of_libraries(definitions, options) or not _has_plain_containers(treedef):
            return False
        if definitions:
            self._known = changes, definitions
        return True


@functools.lru_cache(maxsize=256)
def _with_gaps(treedef: Any, are_traced: tuple[bool, ...]) -> Any:
    """The tree of arguments of which some leaves, and what was None, are None instead."""
    leaves = [0 if is_traced else None for is_traced in are_traced]
    return jax.tree_util.tree_structure(treedef.unflatten(leaves))


def _has_plain_containers(treedef: Any) -> bool:
    """Whether arguments are in plain containers, whose classes have no code of the user's."""
    data = treedef.node_data()
    is_known = data is None or data[0] in (tuple, list, dict, type(None))
    return is_known and all(map(_has_plain_containers, treedef.children()))


def _standing_for_its_arguments(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with errors that name the objects outside instead of their copies."""

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        outside = _calls.arguments[-1] if _calls.arguments else ()
        with locate.standing_for(_parts((args, kwargs)), _parts(outside)):
            return fun(*args, **kwargs)

    return run


def _parts(tree: Any) -> list[Any]:
    return [value for _, value in iter_graph(tree, graph=True)]


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray))


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
    return compiles and not fusing.is_tracing()


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
