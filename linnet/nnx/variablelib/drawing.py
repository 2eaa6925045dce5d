"""Values on their way into Variables: initializers with metadata, and draws in shards.

An initializer that JAX or Linnet made depends on its arguments alone. Where the metadata names the
axes of the value and there is a mesh, such an initializer is compiled with the sharding of its
result, so that each device computes its own shard and the whole value exists nowhere. Any other
function is called as it stands, and the Variable moves the value when it is made.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from linnet.errors import AxisError
from linnet.functional.fusing import is_tracing
from linnet.nnx.pytreelib import statics
from linnet.nnx.variablelib.metadata import HOOKS, current_name
from linnet.nnx.variablelib.placement import of_devices, sharding_of
from linnet.nnx.variablelib.storage import using_eager_sharding

_PARTS = "_linnet_parts"  # what a wrapped initializer was made from


@dataclasses.dataclass
class VariableMetadata:
    """A value on its way into a Variable, with the metadata that an initializer adds.

    Args:
      raw_value: the value.
      on_set_value, on_get_value, on_create_value, on_add_axis, on_remove_axis: hook, or a sequence
        of hooks, as on ``Variable``.
      metadata: everything else.

    Example:
      >>> import jax
      >>> from linnet import nnx
      >>> init = nnx.with_metadata(jax.nn.initializers.ones, role="gate")
      >>> made = init(jax.random.key(0), (2,))
      >>> type(made).__name__, made.metadata
      ('VariableMetadata', {'role': 'gate'})
    """

    raw_value: Any
    on_set_value: Any = ()
    on_get_value: Any = ()
    on_create_value: Any = ()
    on_add_axis: Any = ()
    on_remove_axis: Any = ()
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def merged(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Merges into the ``metadata`` of a Variable: entries override it, hooks do not."""
        hooks = {name: getattr(self, name) for name in HOOKS if getattr(self, name)}
        return {**hooks, **metadata, **self.metadata}


def with_metadata(
    initializer: Callable[..., Any],
    on_set_value: Any = (),
    on_get_value: Any = (),
    on_create_value: Any = (),
    on_add_axis: Any = (),
    on_remove_axis: Any = (),
    **metadata: Any,
) -> Callable[..., VariableMetadata]:
    """Wraps an initializer so that the Variable made from its result carries metadata.

    Args:
      initializer: any function that returns a value.
      on_set_value, on_get_value, on_create_value, on_add_axis, on_remove_axis: hook, or a sequence
        of hooks, as on ``Variable``.
      **metadata: the metadata to add.

    Returns:
      A function of the same arguments; pass its result to ``nnx.Param`` or another Variable.

    Example:
      >>> import jax
      >>> from linnet import nnx
      >>> init = nnx.with_metadata(jax.nn.initializers.zeros, role="gate")
      >>> nnx.Param(init(jax.random.key(0), (2,))).role
      'gate'
    """
    hooks = (on_get_value, on_set_value, on_create_value, on_add_axis, on_remove_axis)
    given = {name: hook for name, hook in zip(HOOKS, hooks, strict=True) if hook}

    def annotated(value: Any) -> VariableMetadata:
        if not isinstance(value, VariableMetadata):
            return VariableMetadata(value, metadata=metadata, **given)
        return dataclasses.replace(value, metadata={**value.metadata, **metadata}, **given)

    @functools.wraps(initializer)
    def wrapper(*args: Any, **kwargs: Any) -> VariableMetadata:
        return annotated(draw(initializer, args, kwargs, metadata))

    vars(wrapper)[_PARTS] = (initializer, metadata, annotated)
    return wrapper


# ---- draws --------------------------------------------------------------------------------------


def draw(
    initializer: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    metadata: Mapping[str, Any],
    shape: tuple[int, ...] | None = None,
) -> Any:
    """Calls an initializer for a Variable with this metadata, in its shards where that is possible.

    ``shape`` is that of the Variable where it is another than what the initializer is asked for.
    """
    parts = getattr(initializer, _PARTS, None)
    if parts is not None:
        inner, added, annotated = parts
        return annotated(draw(inner, args, kwargs, {**metadata, **added}, shape))
    sharding = None
    if metadata:
        sharding = _sharding_of_draw(initializer, args, kwargs, metadata, shape)
    if sharding is None:
        return _reshaped(initializer(*args, **kwargs), shape)
    return _drawn_in_shards(initializer, args, kwargs, shape, sharding)


def _reshaped(value: Any, shape: tuple[int, ...] | None) -> Any:
    if shape is None:
        return value
    if isinstance(value, VariableMetadata):
        return dataclasses.replace(value, raw_value=jnp.reshape(value.raw_value, shape))
    return jnp.reshape(value, shape)


def _sharding_of_draw(
    initializer: Any, args: Any, kwargs: Any, metadata: Mapping[str, Any], shape: Any
) -> NamedSharding | None:
    """The sharding that a draw can be made in, or None where it is made whole."""
    named = {current_name(name): value for name, value in metadata.items()}
    names = named.get("out_sharding")
    eager = named.get("eager_sharding")
    if names is None or not (using_eager_sharding() if eager is None else eager):
        return None
    key = args[0] if args else None
    has_key = isinstance(key, jax.Array) and not isinstance(key, Tracer)
    if is_tracing() or not has_key or not _is_pure(initializer):
        return None
    drawn = jax.eval_shape(lambda key: initializer(key, *args[1:], **kwargs), key)
    if not isinstance(drawn, jax.ShapeDtypeStruct) or named.get("on_create_value"):
        return None
    final = jax.ShapeDtypeStruct(drawn.shape if shape is None else shape, drawn.dtype)
    try:
        there = of_devices(sharding_of(names, named, final, str))
    except AxisError:  # the Variable says what is wrong, and knows more
        return None
    return there if isinstance(there, NamedSharding) else None


def _is_pure(initializer: Any) -> bool:
    """Whether an initializer is known to depend on its arguments alone."""
    if isinstance(initializer, functools.partial):
        return _is_pure(initializer.func)
    module = getattr(initializer, "__module__", None) or ""
    return module.split(".")[0] in ("jax", "linnet") and not hasattr(initializer, "__wrapped__")


def _drawn_in_shards(
    initializer: Any, args: Any, kwargs: Any, shape: Any, sharding: NamedSharding
) -> jax.Array:
    key, *rest = args
    # Explicit axes would make each step of the draw a whole array on each device.
    mesh: Any = sharding.mesh
    types = (AxisType.Auto,) * len(mesh.axis_names)
    auto = Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    there = NamedSharding(auto, sharding.spec)
    if getattr(key, "committed", False):
        key = jax.device_put(key, NamedSharding(auto, PartitionSpec()))
    arguments_key = statics.key_of((initializer, tuple(rest), dict(kwargs)))
    compiled = _compiled(_Draw(arguments_key, initializer, tuple(rest), dict(kwargs), shape), there)
    with jax.set_mesh(auto):
        drawn = compiled(key)
    return jax.device_put(drawn, sharding)


class _Draw:
    """One draw; equal to another of the same initializer and the same arguments but the key."""

    def __init__(self, arguments_key: Any, initializer: Any, rest: Any, kwargs: Any, shape: Any):
        self.key = (arguments_key, shape)
        self.initializer, self.rest, self.kwargs, self.shape = initializer, rest, kwargs, shape

    def __call__(self, key: Any) -> Any:
        return _reshaped(self.initializer(key, *self.rest, **self.kwargs), self.shape)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Draw) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@functools.lru_cache(maxsize=1024)
def _compiled(draw: _Draw, sharding: NamedSharding) -> Callable[[Any], Any]:
    """A draw as a compiled function of its key."""
    return jax.jit(step_by_step(draw), out_shardings=sharding)


def step_by_step(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that gives, compiled, the numbers that ``f`` gives outside of ``jit``.

    Within one compiled function XLA joins a product with the next and turns a division by a
    constant into a product, and the last bit changes. Here it sees the steps of ``f`` one by one
    and their constants as inputs, as it does when each step is compiled by itself.
    """
    barrier = jax.lax.optimization_barrier

    def stepwise(key: Any) -> Any:
        closed = jax.make_jaxpr(f)(key)
        jaxpr = closed.jaxpr
        known = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        known[jaxpr.invars[0]] = key

        def value(v: Any) -> Any:
            if not isinstance(v, Literal):
                return known[v]
            aval: Any = v.aval
            return barrier(jnp.asarray(v.val, aval.dtype))

        for step in jaxpr.eqns:
            out = barrier(_outputs(jaxpr, step, value))
            known.update(zip(step.outvars, out, strict=True))
        return value(jaxpr.outvars[0])

    return stepwise


def _outputs(jaxpr: Any, step: Any, value: Callable[[Any], Any]) -> Any:
    """What one step of a jaxpr gives for the values of its inputs."""
    inner = step.params.get("jaxpr")
    if step.primitive.name in ("jit", "pjit"):
        return jax.jit(jaxpr_as_fun(inner))(*map(value, step.invars))
    if any(isinstance(x, (ClosedJaxpr, Jaxpr)) for x in step.params.values()):
        inputs = list(dict.fromkeys(v for v in step.invars if not isinstance(v, Literal)))
        alone = jaxpr.replace(constvars=[], invars=inputs, outvars=step.outvars, eqns=[step])
        return jaxpr_as_fun(ClosedJaxpr(alone, ()))(*map(value, inputs))
    out = step.primitive.bind(*map(value, step.invars), **step.params)
    return out if step.primitive.multiple_results else [out]
