"""Gradients of functions of objects (``grad``, ``value_and_grad``), and ``remat``.

``Wanted`` decides which slots and plain leaves of a call are differentiated; ``vjp`` uses it too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp

from linnet.errors import GradientTypeError, SharedReferenceError, type_text
from linnet.nnx import filterlib
from linnet.nnx.filterlib import Filter
from linnet.nnx.graphlib.build import Build
from linnet.nnx.graphlib.graphdef import flatten_node
from linnet.nnx.modules.freezing import frozen
from linnet.nnx.pytreelib.kinds import Path, is_node, key_name
from linnet.nnx.statelib import State, from_flat_state, iter_flat, map_state
from linnet.nnx.transforms.effects import Outcome, with_arrays
from linnet.nnx.transforms.engine import variables_in
from linnet.nnx.transforms.option_types import (
    Decorator,
    GradDecorator,
    GradOptions,
    P,
    R,
    RematOptions,
    ValueAndGradDecorator,
)
from linnet.nnx.transforms.run import ALL_PARAMETERS, Call, transform
from linnet.nnx.variablelib.operators import value_of
from linnet.nnx.variablelib.variable import (
    Param,
    Variable,
    is_variable,
    rebuild_variable,
)


@dataclasses.dataclass(frozen=True)
class DiffState:
    """Differentiates with respect to the Variables of an argument that a filter selects.

    Args:
      argnum: the position of the argument.
      filter: which of its Variables.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> state = nnx.State({"a": nnx.Param(jnp.array(3.0)), "b": nnx.BatchStat(jnp.array(2.0))})
      >>> grad = nnx.grad(lambda s: s.a * s.b, argnums=nnx.DiffState(0, nnx.BatchStat))
      >>> float(grad(state).b.value)
      3.0
    """

    argnum: int
    filter: Filter

    def map_prefix(self, path: Any, variable: Any) -> bool:
        """Whether a Variable is differentiated."""
        return filterlib.to_predicate(self.filter)(path, variable)


@overload
def grad(f: Callable[P, Any], **options: Unpack[GradOptions]) -> Callable[P, Any]: ...
@overload
def grad(f: None = None, **options: Unpack[GradOptions]) -> GradDecorator: ...
def grad(
    f: Any = None,
    *,
    argnums: Any = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
    wrt: Filter | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """The gradient of a function of objects.

    Args:
      f: the function; left out, the call is a decorator.
      argnums: the arguments to differentiate: a position, a ``DiffState``, or several. An object is
        differentiated with respect to its ``Param`` Variables; a State, and a Variable that stands
        by itself, as a whole. What ``nnx.freeze`` froze is left out, in objects and States.
      has_aux: the function returns a pair, and only the first is differentiated.
      holomorphic, allow_int: as for ``jax.grad``.
      reduce_axes: accepted for older programs; must be empty.
      wrt: a filter for the Variables of argument ``argnums``, in place of ``DiffState``.
      graph: allow shared references; by default as ``set_graph_mode`` says.
      graph_updates: by default as ``set_graph_updates`` says. Without, all of the argument is
        differentiated, frozen or not, and the gradient has the type of the argument, as with
        ``jax.grad``.

    Returns:
      A function that returns the gradient: a ``State`` for an object, an array for an array, a
      Variable for a Variable. What stands in two places has one gradient, in the first of them; in
      place of a Variable the second holds an empty ``State``.

    Raises:
      SharedReferenceError: a Variable is in an argument that is differentiated and in one that is
        not.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> class Line(nnx.Module):
      ...     def __init__(self):
      ...         self.slope = nnx.Param(jnp.array(2.0))
      >>> grads = nnx.grad(lambda line, x: line.slope * x)(Line(), 3.0)
      >>> float(grads["slope"].value)
      3.0
    """
    refuse_reduce_axes("grad", reduce_axes)
    argnums, options = requested(argnums, wrt), {"holomorphic": holomorphic, "allow_int": allow_int}
    return gradients_of(f, "grad", argnums, has_aux, graph, graph_updates, **options)


@overload
def value_and_grad(
    f: Callable[P, R], **options: Unpack[GradOptions]
) -> Callable[P, tuple[R, Any]]: ...
@overload
def value_and_grad(f: None = None, **options: Unpack[GradOptions]) -> ValueAndGradDecorator: ...
def value_and_grad(
    f: Any = None,
    *,
    argnums: Any = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
    wrt: Filter | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """The value and the gradient of a function of objects.

    Args:
      f: the function; left out, the call is a decorator.
      argnums, has_aux, holomorphic, allow_int, reduce_axes, wrt: as for ``grad``.
      graph, graph_updates: as for ``grad``.

    Returns:
      A function that returns ``(value, gradient)``, or ``((value, aux), gradient)``.

    Raises:
      SharedReferenceError: as for ``grad``.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> model = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
      >>> x = jnp.array([[1.0, 2.0]])
      >>> loss, grads = nnx.value_and_grad(lambda model, x: model(x).sum())(model, x)
      >>> loss.shape, grads["kernel"].value.ravel().tolist()
      ((), [1.0, 2.0])
    """
    refuse_reduce_axes("value_and_grad", reduce_axes)
    argnums, options = requested(argnums, wrt), {"holomorphic": holomorphic, "allow_int": allow_int}
    return gradients_of(f, "value_and_grad", argnums, has_aux, graph, graph_updates, **options)


@overload
def remat(f: Callable[P, R], **options: Unpack[RematOptions]) -> Callable[P, R]: ...
@overload
def remat(f: None = None, **options: Unpack[RematOptions]) -> Decorator: ...
def remat(
    f: Any = None,
    *,
    prevent_cse: bool = True,
    static_argnums: int | tuple[int, ...] = (),
    policy: Callable[..., bool] | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Recomputes a function of objects in the backward pass instead of keeping what it computed.

    What the function writes to Variables is written once.

    Args:
      f: the function; left out, the call is a decorator.
      prevent_cse, policy: as for ``jax.checkpoint``.
      static_argnums: positional arguments that are not traced.
      graph, graph_updates: as for ``jit``.

    Returns:
      The function.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> block = nnx.remat(lambda layer, x: nnx.relu(layer(x)))
      >>> layer, x = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jnp.ones((1, 2))
      >>> grads = nnx.grad(lambda layer, x: block(layer, x).sum())(layer, x)
      >>> list(grads)
      ['bias', 'kernel']
    """
    options = {"prevent_cse": prevent_cse, "policy": policy}

    def lifted(call: Call) -> Any:
        outcome = jax.checkpoint(call.outcome, **options)(call.slot_values, call.plain)
        return call.close(with_arrays(outcome))

    return transform("remat", lifted, f, graph, graph_updates, static_argnums=static_argnums)


def gradients_of(
    f: Any,
    api: str,
    argnums: Any,
    has_aux: bool,
    graph: bool | None,
    graph_updates: bool | None,
    **options: Any,
) -> Any:
    """``grad`` if that is the ``api``, otherwise ``value_and_grad``; errors name the ``api``."""

    def lifted(call: Call) -> Any:
        wanted = Wanted(call, argnums)

        def loss(diff: Any) -> Any:
            out, outcome = wanted.run(diff, has_aux)
            _check_scalar(out, api)
            return out, outcome

        try:
            (_, outcome), diff = jax.value_and_grad(loss, has_aux=True, **options)(wanted.values())
        except TypeError as error:
            wanted.refuse_integers(error)
            raise
        out = call.close(outcome)
        grads = wanted.gradients(diff)
        if api == "grad":
            return (grads, out[1]) if has_aux else grads
        return out, grads

    return transform(api, lifted, f, graph, graph_updates, own_specs=count_specs_for(argnums))


def requested(argnums: Any, wrt: Filter | None) -> Any:
    """``argnums`` with the filter ``wrt`` in it."""
    if wrt is None:
        return argnums
    if not isinstance(argnums, int):
        raise ValueError(
            f"wrt={wrt!r} is for one argument, but argnums={argnums!r}.\n"
            "Fix: pass argnums as an integer, or give each argument an nnx.DiffState."
        )
    return DiffState(argnums, wrt)


def count_specs_for(argnums: Any) -> int:
    """How many arguments need a position, so that ``argnums`` finds them."""
    given = argnums if isinstance(argnums, Sequence) else (argnums,)
    numbers = [n.argnum if isinstance(n, DiffState) else n for n in given]
    numbers = [n for n in numbers if isinstance(n, int)]
    if any(n < 0 for n in numbers):  # counted from the last parameter, whether it is given or not
        return ALL_PARAMETERS
    return max(numbers, default=-1) + 1


def refuse_reduce_axes(api: str, reduce_axes: Sequence[Any]) -> None:
    """Raises for an option that JAX no longer has."""
    if reduce_axes:
        raise NotImplementedError(
            f"nnx.{api}: reduce_axes is gone from JAX.\nFix: sum over the axis yourself with "
            "jax.lax.psum."
        )


class Wanted:
    """The slots and plain leaves that ``argnums`` selects, and gradients with respect to them.

    ``numbers`` are theirs among the ``inputs`` of the call.
    """

    def __init__(self, call: Call, argnums: Any):
        self.call = call
        # Whether the gradient of an object is an object of its type; otherwise it is a State.
        self.own_type = not (call.graph and call.updates)
        self.single = not isinstance(argnums, Sequence)
        given = (argnums,) if self.single else argnums
        self.requests = dict(self._request(argnum) for argnum in given)
        if len(self.requests) < len(given):
            raise ValueError(
                f"nnx.{call.api}: one argument is repeated in argnums={argnums!r}.\n"
                "Fix: ask for each argument once, with one filter for all that is wanted of it."
            )
        self._node_paths = set(call.opened.node_paths)
        # A run may sow on an object, so its definition and state are those from before it.
        objects = [x for x in call.opened.nodes if self.own_type and not isinstance(x, Variable)]
        self._before = {id(node): flatten_node(node, True, "grad") for node in objects}
        slots = enumerate(zip(call.paths, call.opened.slot_leaves, strict=True))
        plain = enumerate(call.opened.plain_paths, start=len(call.slot_values))
        self.numbers = [n for n, (path, leaf) in slots if self._is_wanted(path, leaf)]
        self.numbers += [n for n, path in plain if self._is_asked(path)]
        self._check_sharing()

    def _request(self, argnum: Any) -> tuple[int, Any]:
        """The position of an argument, and the entry of ``argnums`` for it; raises if it is bad."""
        count = len(self.call.opened.tree[0])
        number = argnum.argnum if isinstance(argnum, DiffState) else argnum
        if not isinstance(number, int) or not -count <= number < count:
            raise TypeError(
                f"nnx.{self.call.api}: argnums={argnum!r} is out of range for a call with {count} "
                "positional arguments.\nFix: differentiate an argument that has a position."
            )
        if isinstance(argnum, DiffState) and self.own_type:
            raise ValueError(
                f"nnx.{self.call.api}: DiffState needs graph mode and graph updates.\n"
                "Fix: pass graph=True, graph_updates=True, or split the model and differentiate "
                "the state of parameters."
            )
        return number % count, argnum

    def _is_asked(self, path: Any) -> bool:
        """Whether a path is in an argument that is differentiated."""
        return path[0] == 0 and path[1] in self.requests

    def _is_wanted(self, path: Any, leaf: Any) -> bool:
        """Whether a Variable or array with this path is differentiated."""
        if not self._is_asked(path):
            return False
        request = self.requests[path[1]]
        # Filters select within objects and States; a Variable outside of them is always wanted.
        in_object = path not in self._node_paths
        in_state = isinstance(self.call.opened.tree[0][path[1]], State)
        if self.own_type or not (in_object or in_state):
            return True
        if frozen(path, leaf):
            return False
        if isinstance(request, DiffState):
            return request.map_prefix(path[2:], leaf)
        return not in_object or isinstance(leaf, Param)

    def _check_sharing(self) -> None:
        """Raises for a Variable that is differentiated in one argument and fixed in another."""
        opened = self.call.opened
        if len(opened.node_paths) < 2:
            return
        all_paths: dict[int, list[Any]] = {}
        for prefix, node in zip(opened.node_paths, opened.nodes, strict=True):
            for path, variable in variables_in(node):
                all_paths.setdefault(id(variable), []).append((*prefix, *path))
        for variable in opened.variables:
            paths = all_paths[id(variable)]
            wanted = [path for path in paths if self._is_wanted(path, variable)]
            others = [path for path in paths if not self._is_asked(path)]
            if wanted and others:
                raise SharedReferenceError(
                    f"{type(variable).__name__} at {self.call.where(others[0])} was already seen "
                    f"at {self.call.where(wanted[0])}, and nnx.{self.call.api} is asked to "
                    "differentiate the one and not the other.\n"
                    "Fix: pass a copy (nnx.clone) as one of them, or use it from one argument only."
                )

    def values(self) -> list[Any]:
        """The values of the wanted slots, and the wanted plain leaves."""
        return [self.call.inputs[n] for n in self.numbers]

    def refuse_integers(self, error: TypeError) -> None:
        """Raises ``GradientTypeError`` if JAX refused an integer, and names its path."""
        if "real- or complex-valued inputs" not in str(error):
            return
        call = self.call
        for number in self.numbers:
            for leaf in jax.tree_util.tree_leaves(call.inputs[number]):
                if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
                    where = call.where(call.input_paths[number])
                    raise GradientTypeError(
                        f"nnx.{call.api} requires real- or complex-valued inputs, but {where} is "
                        f"{type_text(leaf)}.\n"
                        f"Fix: {_CHOOSE if number < len(call.slot_values) else _PASS_FLOAT}"
                    ) from error

    def run(self, diff: Any, has_aux: bool) -> tuple[Any, Outcome]:
        """Runs the function on tracers; returns what is differentiated, and the outcome."""
        run = self.call.run(*self.call.fill((self.numbers, diff), runs_once=True))
        return main_output(run.out, has_aux, self.call.api), run.outcome()

    def gradients(self, diff: Any) -> Any:
        """The gradients, each in the structure of its argument."""
        by_number = dict(zip(self.numbers, diff, strict=True))
        made = [self._argument(argnum, by_number) for argnum in self.requests]
        return made[0] if self.single else tuple(made)

    def _argument(self, argnum: int, by_number: dict[int, Any]) -> Any:
        """One argument with gradients in place of values; objects become States."""
        opened, paths = self.call.opened, self.call.input_paths
        leaves = opened.slot_leaves
        numbers = {id(v): n for n, v in enumerate(opened.variables)}
        wanted = {paths[n]: n for n in by_number}

        def gradient(path: Any, leaf: Any) -> Any:
            if isinstance(leaf, Variable):
                return with_value(leaf, by_number[numbers[id(leaf)]])
            return by_number[wanted[path]]

        def answer(prefix: Path, leaf: Any) -> Any:
            if not is_node(leaf):
                return gradient(prefix, leaf)
            if isinstance(leaf, Variable):
                everywhere = self.own_type or self.call.api == "vjp"
                return gradient(prefix, leaf) if everywhere or prefix in wanted else State({})
            if self.own_type:
                graphdef, mapping = self._before[id(leaf)]
                made = map_state(lambda path, x: gradient((*prefix, *path), x), mapping)
                return Build().unflatten(graphdef.definition, made.raw_mapping)
            found = below(prefix, wanted)
            return from_flat_state(
                (path, gradient((*prefix, *path), leaves[n])) for path, n in found.items()
            )

        arg = opened.tree[0][argnum]
        if isinstance(arg, State):
            return from_flat_state(
                (path, gradient((0, argnum, *path), leaf))
                for path, leaf in iter_flat(arg.raw_mapping)
                if not isinstance(leaf, Variable) or numbers[id(leaf)] in by_number
            )
        return map_argument(answer, self.call, argnum)


def map_argument(answer: Callable[[Path, Any], Any], call: Call, argnum: int) -> Any:
    """Replaces each leaf or object ``x`` of an argument by ``answer(path, x)``."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: answer((0, argnum, *map(key_name, keys)), leaf),
        call.opened.tree[0][argnum],
        is_leaf=is_node,
    )


def below(prefix: Path, by_path: dict[Path, Any]) -> dict[Path, Any]:
    """The entries below ``prefix``, by the rest of their paths."""
    count = len(prefix)
    return {path[count:]: x for path, x in by_path.items() if path[:count] == prefix}


_CHOOSE = (
    "keep it in a Variable that is no nnx.Param, or choose what to differentiate with "
    "argnums=nnx.DiffState(0, filter); or pass allow_int=True."
)
_PASS_FLOAT = "pass a floating-point number, such as 3.0."


def main_output(out: Any, has_aux: bool, api: str) -> Any:
    """The part of an output that is differentiated, with values in place of Variables."""
    if has_aux and (not isinstance(out, tuple) or len(out) != 2):
        raise TypeError(
            f"nnx.{api} with has_aux=True expects the function to return a pair (output, aux), "
            f"but got {type(out).__name__}.\nFix: return both, or leave out has_aux."
        )
    return plain_values(out[0] if has_aux else out)


def _check_scalar(out: Any, api: str) -> None:
    """Raises if the function that is differentiated did not return one number."""
    if jax.tree_util.all_leaves([out]) and jnp.ndim(out) == 0:
        return
    if isinstance(out, jax.Array):
        got, fix = type_text(out), "take the mean or the sum"
    else:
        got = f"a {type(out).__name__}"
        fix = f"return the loss alone, or (loss, aux) with nnx.{api}(..., has_aux=True)"
    raise TypeError(
        f"nnx.{api}: Gradient only defined for scalar-output functions, but the function "
        f"returned {got}.\nFix: {fix}."
    )


def plain_values(tree: Any) -> Any:
    """Replaces the Variables in a tree by their values."""
    return jax.tree_util.tree_map(value_of, tree, is_leaf=is_variable)


def stored_plainly(metadata: Any) -> Any:
    """The metadata without storage as a ref, for a Variable that holds a derivative."""
    return metadata.stored_plainly() if metadata.stored_as_ref else metadata


def with_value(variable: Variable[Any], value: Any) -> Variable[Any]:
    """A Variable of the same type with another value, such as its gradient."""
    return rebuild_variable(type(variable), value, stored_plainly(variable._metadata))
