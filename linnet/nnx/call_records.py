"""Which methods of a model's parts a call runs, on what shapes, and what they cost.

The call is traced on shapes alone, on a copy whose classes write down every call. So nothing is
computed, the model is not changed, and it may be abstract.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

from linnet.nnx.graphlib.graphdef import flatten_node
from linnet.nnx.graphlib.split_merge import merge
from linnet.nnx.graphlib.traverse import iter_graph
from linnet.nnx.modules.capture import own_methods
from linnet.nnx.modules.containers import Dict, List
from linnet.nnx.modules.freezing import trainable
from linnet.nnx.pytreelib.objects import Pytree
from linnet.nnx.statelib import from_flat_state, iter_flat, plain_mapping, to_pure_dict
from linnet.nnx.transforms.engine import is_node
from linnet.nnx.variablelib.variable import Variable, from_refs

Path = tuple[Any, ...]

# A static attribute, so that copies inside transforms have it too. It tells runs apart: a function
# that was compiled in one would not be traced in the next.
_PATH = "_summary_path"
_run_ids = itertools.count()
_records: ContextVar[Any] = ContextVar("records", default=None)


@dataclasses.dataclass
class CallInfo:
    """One call of a part of a model; a row of the summary.

    Args:
      call_order: its number, in the order in which the calls began.
      object_id: identifies the part.
      type: its class.
      path: where it is in the model; a method other than ``__call__`` is the last step.
      inputs: the arguments by position and those by name, shapes in place of arrays.
      outputs: what it returned, likewise.
      flops: floating point operations forward, if asked for.
      vjp_flops: those forward and backward, if asked for.
    """

    call_order: int
    object_id: int
    type: type
    path: Path
    inputs: tuple[Any, Any] = ((), {})
    outputs: Any = None
    flops: int | None = None
    vjp_flops: int | None = None
    place: Path = ()  # the path of the part itself

    @property
    def inputs_repr(self) -> str:
        """The arguments as text, one a line."""
        return "\n".join(line for part in self.inputs for line in describe(part))


class Shapes:
    """A pytree with objects and arrays taken out: their shapes, and how to put values back.

    Args:
      tree: the pytree; what is neither an array nor an object stays in it.
    """

    def __init__(self, tree: Any):
        leaves, self.treedef = jax.tree_util.tree_flatten(tree, is_leaf=is_node)
        self.parts: list[tuple[str, Any]] = []
        self.avals: list[Any] = []
        self.trains: list[Any] = []  # for each of avals, whether a training step differentiates it
        for leaf in leaves:
            if is_node(leaf):
                graphdef, mapping = flatten_node(leaf, True, "tabulate")
                self.parts.append(("node", graphdef))
                self.avals.append(jax.tree_util.tree_map(_abstract, to_pure_dict(mapping)))
                self.trains.append(_flags(mapping))
            elif hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
                self.parts.append(("array", None))
                self.avals.append(_abstract(leaf))
                self.trains.append(True)
            else:
                self.parts.append(("other", leaf))

    def fill(self, values: list[Any]) -> Any:
        """The pytree with these values in the places of the arrays."""
        given = iter(values)
        leaves = [
            part if kind == "other" else _rebuilt(part, next(given)) for kind, part in self.parts
        ]
        return jax.tree_util.tree_unflatten(self.treedef, leaves)


def _rebuilt(graphdef: Any, value: Any) -> Any:
    return value if graphdef is None else merge(graphdef, value)


def _abstract(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "dtype") else x


def _flags(mapping: Any) -> Any:
    """Whether each array of a state is part of a parameter that trains."""

    def flag(path: Path, leaf: Any) -> Any:
        value = from_refs(leaf.raw_value) if isinstance(leaf, Variable) else leaf
        return jax.tree_util.tree_map(lambda _: trainable(path, leaf), value)

    return plain_mapping(from_flat_state((p, flag(p, leaf)) for p, leaf in iter_flat(mapping)))


class Records:
    """The calls of one run.

    Args:
      flops: count operations forward.
      vjp_flops: count those forward and backward.
    """

    def __init__(self, flops: bool, vjp_flops: bool):
        self.flops, self.vjp_flops = flops, vjp_flops
        self.run_id = next(_run_ids)
        self.calls: dict[Path, CallInfo] = {}
        self._costs: dict[Path, Callable[[], None]] = {}
        self._running: list[Path] = []

    def run(self, obj: Any, method: str, args: Any, kwargs: Any) -> list[CallInfo]:
        """Calls a method of a copy of an object on shapes, and gives the calls that this made."""
        shapes = Shapes((obj, args, kwargs))

        def traced(values: Any) -> None:
            copy, inner_args, inner_kwargs = shapes.fill(values)
            self._mark(copy)
            token = _records.set(self)
            try:
                getattr(copy, method)(*inner_args, **inner_kwargs)
            finally:
                _records.reset(token)

        jax.eval_shape(traced, shapes.avals)
        for cost in self._costs.values():
            cost()
        identity = {path: id(part) for path, part in iter_graph(obj, graph=True)}
        for call in self.calls.values():
            call.object_id = identity.get(call.place, 0)
        return list(self.calls.values())

    def _mark(self, root: Any) -> None:
        """Tells every part of a model where it is, and has it write down its calls."""
        parts = [(path, part) for path, part in iter_graph(root, graph=True) if is_part(part)]
        for path, part in parts:
            object.__setattr__(part, _PATH, (self.run_id, path))
            object.__setattr__(part, "__class__", _recording_class(type(part)))

    def call(self, part: Any, name: str, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a method and writes it down: of each part the first ``__call__``, or else the first
        method, and none that the part calls itself."""
        run, place = part.__dict__.get(_PATH, (None, ()))
        path = place if name == "__call__" else (*place, name)
        if run != self.run_id or not self._is_news(place, path):
            return method(part, *args, **kwargs)
        known = self.calls.get(place)
        order = known.call_order if known else len(self.calls)
        call = self.calls[place] = CallInfo(order, 0, _own_class(part), path, place=place)
        call.inputs = _shapes_of((args, kwargs))
        if self.flops or self.vjp_flops:
            shapes = Shapes((part, args, kwargs))
            self._costs[place] = functools.partial(self._count, call, shapes, method)
        self._running.append(place)
        try:
            out = method(part, *args, **kwargs)
        finally:
            self._running.remove(place)
        call.outputs = _shapes_of(out)
        return out

    def _is_news(self, place: Path, path: Path) -> bool:
        known = self.calls.get(place)
        better = known is None or (known.path != place and path == place)
        return better and place not in self._running

    def _count(self, call: CallInfo, shapes: Shapes, method: Callable[..., Any]) -> None:
        def forward(values: Any) -> Any:
            part, args, kwargs = shapes.fill(values)
            return method(part, *args, **kwargs)

        if self.flops:
            call.flops = _flops(forward, shapes.avals)
        if self.vjp_flops:
            call.vjp_flops = _flops(functools.partial(_vjp, forward, shapes.trains), shapes.avals)


def _vjp(forward: Callable[..., Any], trains: Any, values: Any) -> Any:
    """The output and the gradients of all that trains and of the inputs."""
    leaves, treedef = jax.tree_util.tree_flatten(values)
    flags = treedef.flatten_up_to(trains)
    moving = [
        n
        for n, (leaf, flag) in enumerate(zip(leaves, flags, strict=True))
        if flag and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
    ]

    def outputs(moved: list[Any]) -> Any:
        filled = list(leaves)
        for n, value in zip(moving, moved, strict=True):
            filled[n] = value
        out = forward(jax.tree_util.tree_unflatten(treedef, filled))
        return [x for x in jax.tree_util.tree_leaves(out) if _is_inexact(x)]

    out, pull = jax.vjp(outputs, [leaves[n] for n in moving])
    return out, pull([jnp.ones_like(x) for x in out])


def _is_inexact(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def _flops(f: Callable[..., Any], avals: Any) -> int | None:
    """Floating point operations by XLA's own count; None where it gives none."""

    def arrays(values: Any) -> Any:
        return [x for x in jax.tree_util.tree_leaves(f(values)) if hasattr(x, "dtype")]

    analysis = jax.jit(arrays).lower(avals).cost_analysis()
    found = analysis.get("flops") if isinstance(analysis, dict) else None
    return None if found is None else max(int(found), 0)


def is_part(x: Any) -> bool:
    """Whether something is a part of a model that may have a row: an object, and no container."""
    return isinstance(x, Pytree) and type(x) not in (List, Dict)


@functools.cache
def _recording_class(cls: type[Pytree]) -> type[Pytree]:
    """A subclass of ``cls`` whose methods write down that they are called."""

    def recording(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            records = _records.get()
            if records is None:
                return method(self, *args, **kwargs)
            return records.call(self, name, method, args, kwargs)

        return wrapper

    methods = {name: recording(name, method) for name, method in own_methods(cls).items()}
    named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_recorded": cls}
    return type(cls.__name__, (cls,), {**methods, **named})


def _own_class(part: Any) -> type:
    return getattr(type(part), "_recorded", type(part))


def _shapes_of(tree: Any) -> Any:
    """A pytree with shapes in place of arrays and class names in place of objects."""

    def shape(x: Any) -> Any:
        return _own_class(x).__name__ if is_node(x) else _abstract(x)

    return jax.tree_util.tree_map(shape, tree, is_leaf=is_node)


SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def short_type(x: Any) -> str:
    """The type of an array in few letters, as JAX prints it.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> short_type(jax.ShapeDtypeStruct((4, 8), jnp.float32))
      'f32[4,8]'
    """
    name = str(x.dtype)
    bare = name.rstrip("0123456789")
    return f"{SHORT.get(bare, bare)}{name[len(bare) :]}[{','.join(map(str, x.shape))}]"


def describe(tree: Any) -> list[str]:
    """One line for each leaf of arguments or outputs, with its name if it has one."""
    lines = []
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        text = short_type(leaf) if hasattr(leaf, "dtype") else _clipped(str(leaf))
        names = [key.key for key in keys if isinstance(getattr(key, "key", None), str)]
        lines.append(f"{names[-1]}: {text}" if names else text)
    return lines


def _clipped(text: str, most: int = 16) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
