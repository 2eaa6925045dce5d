"""Tracing, checking and shapes alone: ``make_jaxpr``, ``checkify``, ``eval_shape``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from linnet.errors import SharedReferenceError, path_string
from linnet.nnx.graphlib.traverse import find_duplicates
from linnet.nnx.transforms.arguments import refuse_bound_method
from linnet.nnx.transforms.effects import Outcome, with_arrays
from linnet.nnx.transforms.engine import Opened, close, open_tree, output_place, variables_in
from linnet.nnx.transforms.option_types import R
from linnet.nnx.transforms.run import Call, transform
from linnet.nnx.variablelib.placement import mesh_in_force, placed_shapes
from linnet.nnx.variablelib.variable import Variable


def make_jaxpr(
    f: Any = None,
    *,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    static_argnums: int | tuple[int, ...] = (),
) -> Any:
    """A function that gives the jaxpr of a function of objects.

    Args:
      f: the function; left out, the call is a decorator.
      graph, graph_updates: by default as ``set_graph_mode`` and ``set_graph_updates`` say.
      static_argnums: positional arguments that are not traced.

    Returns:
      A function of the same arguments that returns the jaxpr; its inputs are the Variables' values
      and then the other arrays, its outputs what the function returns and, with graph updates, the
      values it changed.

    Raises:
      SharedReferenceError: without graph updates, an object stands twice among the arguments.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> jaxpr = nnx.make_jaxpr(lambda v, x: v * x)(nnx.Param(jnp.array(2.0)), jnp.array(3.0))
      >>> [equation.primitive.name for equation in jaxpr.eqns]
      ['mul']
    """

    def lifted(call: Call) -> Any:
        _refuse_sharing(call)

        def pure(values: Any, plain: Any) -> Any:
            outcome = call.outcome(values, plain)
            return outcome.plain, outcome.new, outcome.written if call.updates else ()

        return jax.make_jaxpr(call.named(pure))(call.slot_values, call.plain)

    return transform("make_jaxpr", lifted, f, graph, graph_updates, static_argnums=static_argnums)


def checkify(
    f: Any,
    errors: Any = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """``jax.experimental.checkify.checkify`` for functions of objects.

    Args:
      f: the function.
      errors: which errors to look for; by default the user's own checks.
      graph, graph_updates: as for ``jit``.

    Returns:
      A function that returns ``(error, output)``; ``error.throw()`` raises if there was one.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax.experimental import checkify
      >>> from linnet import nnx
      >>> def scale(v, x):
      ...     checkify.check(x > 0, "x must be positive, but is {x}", x=x)
      ...     return v * x
      >>> error, y = nnx.checkify(scale)(nnx.Param(jnp.array(2.0)), jnp.array(-1.0))
      >>> error.get().splitlines()[0]
      'x must be positive, but is -1.0 (`check` failed)'
    """

    def lifted(call: Call) -> Any:
        from jax.experimental import checkify as jax_checkify

        chosen = jax_checkify.user_checks if errors is None else errors
        checked = jax_checkify.checkify(call.outcome, errors=chosen)
        error, outcome = checked(*call.fill(runs_once=True))
        return error, call.close(with_arrays(outcome))

    return transform("checkify", lifted, f, graph, graph_updates)


def eval_shape(
    f: Callable[..., R],
    *args: Any,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    **kwargs: Any,
) -> R:
    """Runs a function on shapes alone, such as the constructor of a model too big to build.

    Args:
      f: the function; what it returns may contain modules and Variables.
      *args: its arguments; modules among them are not changed.
      graph: allow shared references; by default as ``set_graph_mode`` says.
      graph_updates: without, no object may stand twice among the arguments, or come in and go out;
        by default as ``set_graph_updates`` says.
      **kwargs: more arguments.

    Returns:
      What ``f`` returns, with ``jax.ShapeDtypeStruct`` in place of arrays; under a mesh, with the
      shardings of Variables.

    Raises:
      ValueError: ``f`` is a bound method of a module.
      SharedReferenceError: something is shared in tree mode; both paths are named.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> class Table(nnx.Module):
      ...     def __init__(self, rows):
      ...         self.w = nnx.Param(jnp.zeros((rows, 10**6)))
      >>> nnx.eval_shape(lambda: Table(10**6)).w.value
      ShapeDtypeStruct(shape=(1000000, 1000000), dtype=float32)
    """
    api = "eval_shape"
    refuse_bound_method(f, api)
    call = Call(f, args, kwargs, api, graph, graph_updates)
    _refuse_sharing(call)
    call.after.append(lambda _, out: open_tree(out, call.graph, api, where=output_place))
    with call.naming_arguments():
        outcome = jax.eval_shape(call.outcome, call.slot_values, call.plain)
    out = close_shapes(call.opened, outcome, api)
    mesh = mesh_in_force()
    for path, variable in variables_in(out):
        shapes = shapes_on_mesh(variable, mesh, path)
        variable.set_raw_value(shapes, _unsafe_bypass_check=True)
    return out


def shapes_on_mesh(variable: Variable[Any], mesh: Any, path: Any) -> Any:
    """The stored value of a Variable, with shardings on the shapes in it if there is a mesh."""
    metadata = variable.get_metadata()
    mesh = metadata.get("mesh") or mesh
    if mesh is None or mesh.empty:
        return variable.raw_value
    name = f"{type(variable).__name__} at {path_string(path)}" if path else type(variable).__name__
    return placed_shapes(variable.raw_value, metadata, mesh, lambda: f"The {name}")


def _refuse_sharing(call: Call) -> None:
    """Raises, without graph updates, for what stands in two places among the arguments."""
    shared = [] if call.updates else find_duplicates(call.opened.tree)
    for first, second, *_ in shared:
        raise SharedReferenceError(
            f"nnx.{call.api}: what stands at {call.where(second)} was already seen at "
            f"{call.where(first)}, and without graph updates nothing may stand twice.\n"
            "Fix: give each place its own, or pass graph=True, graph_updates=True."
        )


def close_shapes(opened: Opened, outcome: Outcome, api: str) -> Any:
    """The output for an outcome of shapes alone; the arguments stay as they are."""
    shapes = jax.eval_shape(lambda values: values, opened.slot_values)
    copies = opened.structure.enter(shapes, opened.plain)
    return close(open_tree(copies.tree, True, api), outcome)
