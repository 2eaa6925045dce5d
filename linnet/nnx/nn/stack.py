"""Stack: equal layers stored as one layer with stacked Variables, and run by scan.

``stack.stacked`` is one layer whose Variables have a leading axis for the layers. Compile time then
does not grow with the depth, and the stack can still be used like a list of layers.
"""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from linnet.errors import (
    AxisError,
    CarryError,
    DroppedWriteWarning,
    LayerArgumentError,
    RngsError,
    list_paths,
    misfit_text,
    path_string,
    type_text,
)
from linnet.nnx.graphlib import (
    clone,
    find_duplicates,
    iter_graph,
    merge,
    set_metadata,
    split,
)
from linnet.nnx.graphlib.update import update_same_types
from linnet.nnx.modules.containers import takes_rngs
from linnet.nnx.modules.module import Module
from linnet.nnx.nn.params import layer_name
from linnet.nnx.nn.stack_states import (
    changed_paths,
    differ,
    first_axis,
    is_read_anew,
    leaves_of,
    map_leaf,
    name_of_layers,
    same_arrays,
    stack_states,
    state_at,
    values_of,
)
from linnet.nnx.pytreelib.kinds import is_node
from linnet.nnx.pytreelib.objects import Pytree, fix_data
from linnet.nnx.pytreelib.tracing import same_trace
from linnet.nnx.rnglib.splitting import with_rngs
from linnet.nnx.rnglib.streams import Rngs
from linnet.nnx.statelib import State, from_flat_state, to_flat_state
from linnet.nnx.transforms import Carry, remat, vmap
from linnet.nnx.transforms.carry import check_same_type
from linnet.nnx.transforms.eager import compiled_outside
from linnet.nnx.transforms.loops import scan_layers
from linnet.nnx.transforms.partition import PARTITION_NAME
from linnet.nnx.transforms.retrace import differences
from linnet.nnx.variablelib.variable import Variable, stored_value


class Stack(Module):
    """Equal layers, applied one after the other by scan, with their parameters stacked.

    A call does what ``for layer in layers: x = layer(x, *args, **kwargs)`` does, at a compile time
    that does not grow with the depth. What a layer writes to its Variables, and what it sows, is
    kept for each layer; its random streams differ from layer to layer.

    ``stack[i]`` is a copy of a layer and ``stack[i:j]`` of a part of the stack. Both are read-only,
    so that a write cannot get lost: their Variables take no values, and nothing else can take the
    place of a Variable, an array or a module in them. Flags can be set. To write, say
    ``stack[i] = layer``, ``with stack.borrow(i) as layer:`` or ``for layer in stack:``, where each
    layer is borrowed for its turn.

    Args:
      layer_factory: makes one layer, as ``layer_factory(rngs=rngs)``, or without arguments where
        there are no ``rngs``. It is called once, for all layers.
      length: the number of layers.
      rngs: where the keys come from; each layer gets its own. The layers are those that
        ``nnx.split_rngs(splits=length)`` around ``nnx.vmap`` makes: one key is drawn from each
        stream and split.
      remat: compute each layer again in the backward pass instead of keeping what it computed;
        True, or a policy of ``jax.checkpoint_policies`` that says what to keep.
      unroll: how many layers to put into one iteration of the loop, or True for all of them. A
        loop copies what its backward pass needs into stacked arrays: without ``remat``, True takes
        less time and memory to train on a GPU, and longer to compile.
      partition: the name of the layers' axis in the sharding metadata; by default it has none
        until a Variable is given one, as ``nnx.fsdp`` may do.

    Raises:
      LayerArgumentError: ``length`` is less than 1, or ``layer_factory`` is a layer, or does not
        take ``rngs``.
      RngsError: ``rngs`` is not an ``nnx.Rngs``.

    Example:
      >>> import functools
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> stack = nnx.Stack(functools.partial(nnx.Linear, 4, 4), 12, rngs=nnx.Rngs(0))
      >>> stack(jnp.ones((1, 4))).shape
      (1, 4)
      >>> len(stack), stack.stacked.kernel.shape, stack[-1].kernel.shape
      (12, (12, 4, 4), (4, 4))
    """

    def __init__(
        self,
        layer_factory: Callable[..., Any],
        length: int,
        *,
        rngs: Any = None,
        remat: bool | Callable[..., Any] = False,
        unroll: int | bool = 1,
        partition: str | None = None,
    ):
        self._set_up(length, remat, unroll, partition)
        self.stacked = _make_stacked(layer_factory, length, rngs, partition)

    def _set_up(self, length: int, remat: Any, unroll: int | bool, partition: str | None) -> None:
        if length < 1:
            raise LayerArgumentError(
                f"Stack wants at least one layer, but got length={length}.\n"
                "Fix: leave the stack out of the model where there are no layers."
            )
        self.length = length
        self.remat = remat
        self.unroll = unroll
        self.partition = partition

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Applies the layers, each to the output of the one before.

        An input of another floating-point dtype than the layers return is converted to theirs.

        Args:
          x: the input of the first layer: an array or a pytree of arrays.
          *args, **kwargs: passed on to every layer: arrays, objects such as ``nnx.Rngs``, flags.

        Returns:
          The output of the last layer.

        Raises:
          CarryError: a layer returns something else than it takes.
        """
        return _run(self, x, args, kwargs)

    def scan(
        self,
        f: Callable[..., Any],
        carry: Any,
        xs: Any = None,
        *args: Any,
        reverse: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """Runs a function over the layers, for what a call of the stack cannot do.

        Args:
          f: takes ``(layer, carry, x, *args, **kwargs)`` and returns the next carry and an output.
          carry: the first carry.
          xs: what differs from layer to layer: a pytree of arrays with a leading axis for the
            layers.
          *args, **kwargs: the same for every layer.
          reverse: begin with the last layer.

        Returns:
          The last carry, and the outputs stacked, in the order of the layers.

        Raises:
          CarryError: the carry changes its structure, shape or dtype.
          AxisError: ``xs`` has a leading axis of another size.

        Example:
          >>> import functools
          >>> import jax.numpy as jnp
          >>> from linnet import nnx
          >>> stack = nnx.Stack(functools.partial(nnx.Linear, 4, 4), 12, rngs=nnx.Rngs(0))
          >>> def step(layer, x, scale):
          ...     y = x + scale * layer(x)
          ...     return y, y.mean()
          >>> x, means = stack.scan(step, jnp.ones((1, 4)), jnp.linspace(1.0, 0.1, 12))
          >>> x.shape, means.shape
          ((1, 4), (12,))
        """

        def step(layer: Any, carry: Any, x: Any, args: Any, kwargs: Any) -> Any:
            return f(layer, carry, x, *args, **kwargs)

        loop = scan_layers(
            self._recomputed(step) if self.remat else step,
            length=self.length,
            reverse=reverse,
            unroll=self.unroll,
            in_axes=(0, Carry, 0, None, None),
            out_axes=(Carry, 0),
            transform_metadata={PARTITION_NAME: name_of_layers(self.partition)},
        )
        return loop(self.stacked, carry, xs, args, kwargs)

    def _recomputed(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Rematerialises a step in the backward pass; flags among its arguments stay static."""
        policy = None if self.remat is True else self.remat
        unrolled = self.unroll is True or self.unroll > 1
        # Two loops keep the two computations apart. Steps outside of a loop need a barrier, and so
        # does a loop of one step, which the compiler replaces by its body.
        prevent_cse = unrolled or self.length == 1

        def run(layer: Any, carry: Any, x: Any, args: Any, kwargs: Any) -> Any:
            leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_node)
            objects = [leaf if is_node(leaf) else None for leaf in leaves]

            def inner(layer: Any, carry: Any, x: Any, objects: list[Any]) -> Any:
                given = [
                    leaf if obj is None else obj for leaf, obj in zip(leaves, objects, strict=True)
                ]
                return step(layer, carry, x, *structure.unflatten(given))

            inner = remat(inner, prevent_cse=prevent_cse, policy=policy)
            return inner(layer, carry, x, objects)

        return run

    # ---- as a list ------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            copy = self._slice(index)
        else:
            copy = self._layer(self._position(index))
        _make_read_only(copy)
        return copy

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice):
            positions: Sequence[int] = range(self.length)[index]
            layers = value.to_list() if isinstance(value, Stack) else list(value)
            if len(layers) != len(positions):
                raise LayerArgumentError(
                    f"{layer_name(self)}: a slice of {len(positions)} layers cannot take "
                    f"{len(layers)}; a stack keeps its length.\n"
                    "Fix: nnx.Stack.from_list(layers) makes a new stack."
                )
        else:
            positions, layers = [self._position(index)], [value]
        for position, layer in zip(positions, layers, strict=True):
            before = _writable_copy(self._layer(position))
            self._put(position, before, _writable_copy(layer))

    def __iter__(self) -> Iterator[Any]:
        return self._in_turn(range(self.length))

    def __reversed__(self) -> Iterator[Any]:
        return self._in_turn(reversed(range(self.length)))

    def _in_turn(self, positions: Iterable[int]) -> Iterator[Any]:
        for position in positions:
            with self.borrow(position) as layer:
                yield layer

    @contextlib.contextmanager
    def borrow(self, index: int) -> Iterator[Any]:
        """Lends one layer; when the block ends, what was changed in it is written into the stack.

        Several layers can be borrowed at a time.

        Args:
          index: the position of the layer.

        Yields:
          The layer. After the block it is a read-only copy.

        Raises:
          LayerArgumentError: the layer now differs from the others in more than its values, or a
            Variable that was changed in it was changed in the stack, too.

        Example:
          >>> import functools
          >>> from linnet import nnx
          >>> stack = nnx.Stack(functools.partial(nnx.Linear, 2, 2), 3, rngs=nnx.Rngs(0))
          >>> with stack.borrow(1) as layer:
          ...     layer.bias[...] += 1.0
          >>> stack.stacked.bias[:, 0].tolist()
          [0.0, 1.0, 0.0]
        """
        position = self._position(index)
        layer = self._layer(position)
        loan = _Loan(self, position, layer)
        _loans.append(loan)
        try:
            yield layer
            self._put(position, loan.lent, layer, loan)
            _make_read_only(layer)
        except GeneratorExit:
            # A loop over the layers was left, by `break` or an error, perhaps some time ago: the
            # layer is written if the stack has not changed since.
            if same_trace(self._pytree_trace):
                self._put_late(loan, layer)
                _make_read_only(layer)
            raise
        finally:
            _loans.remove(loan)

    def _put_late(self, loan: _Loan, layer: Any) -> None:
        """Writes the layer at which a loop was left, or warns if the stack has changed since."""
        if not loan.conflicts(loan.whole):
            self._put(loan.position, loan.lent, layer, loan)
            return
        lost = list_paths(changed_paths(*map(leaves_of, (loan.lent, layer))))
        if lost:
            warnings.warn(
                f"{layer_name(self)}: a loop over the layers was left at layer {loan.position}, "
                "and the stack was changed before the layer was written. These changes of it are "
                f"not kept:\n{lost}\n"
                "Fix: change a layer, or the stack, but not both, before leaving the loop.",
                DroppedWriteWarning,
                stacklevel=2,
            )

    def _position(self, index: Any) -> int:
        position = operator.index(index)
        if not -self.length <= position < self.length:
            raise IndexError(f"{layer_name(self)} has {self.length} layers, but got [{position}].")
        return position % self.length

    def _layer(self, position: int) -> Any:
        """A copy of one layer."""
        graphdef, whole = self._split()
        return merge(graphdef, state_at(whole, position, self.partition))

    def _slice(self, index: slice) -> Stack:
        """A copy of some layers, as a stack."""
        graphdef, whole = self._split()
        parts = {path: map_leaf(lambda x: x[index], leaf) for path, leaf in to_flat_state(whole)}
        length = len(range(self.length)[index])
        return self._with_layers(merge(graphdef, from_flat_state(parts)), length, self)

    @classmethod
    def _with_layers(cls, stacked: Any, length: int, like: Any) -> Any:
        new = cls.__new__(cls)
        new._set_up(length, like.remat, like.unroll, like.partition)
        new.stacked = stacked
        return new

    def _split(self) -> tuple[Any, State]:
        graphdef, whole = split(self.stacked, graph=True)
        for path, leaf in to_flat_state(whole):
            for x in jax.tree.leaves(stored_value(leaf)):
                if jnp.shape(x)[:1] != (self.length,):
                    raise AxisError(
                        f"{layer_name(self)} has {self.length} layers, but stacked"
                        f"{path_string(path)} is {type_text(x)}.\n"
                        "Fix: keep the layers' axis first; inside nnx.vmap other axes are gone."
                    )
        return graphdef, whole

    def _apply_to_layers(self, f: Callable[[Any], None]) -> None:
        """Runs a function on each layer; it may change flags and make Variables."""
        found = {*map(first_axis, jax.tree.leaves(values_of(self.stacked)))}
        if len(found) > 1 or any(size != self.length for size, _ in found):
            # Seen from outside of nnx.vmap, or sharded by explicit axes in several ways.
            f(self.stacked)
            return
        names = {PARTITION_NAME: name_of_layers(self.partition)}
        options: Any = {"axis_size": self.length, "graph": True, "graph_updates": True}
        vmap(f, transform_metadata=names, **options)(self.stacked)

    def _put(self, position: int, before: Any, after: Any, loan: _Loan | None = None) -> None:
        """Writes a layer into the stack where its values are not those of ``before``."""
        found = differences(before, after)
        if found:
            what = (
                f"{layer_name(self)} holds equal layers, but the layer for position {position} "
                "differs from the others"
            )
            fix = "change the values of Variables only, or keep the layers in an nnx.List."
            raise LayerArgumentError(misfit_text({what: found}, fix=fix))
        old, new, whole = map(leaves_of, (before, after, self.stacked))
        paths = changed_paths(old, new)
        lost = [] if loan is None else loan.conflicts(paths)
        if lost:
            raise LayerArgumentError(
                f"{layer_name(self)}: these were changed in layer {position} while it was borrowed "
                "and at the same time in the stack, or in the layer borrowed once more:\n"
                f"{list_paths(lost)}\n"
                "Fix: end the block of stack.borrow, or the turn of the loop, before changing them "
                "elsewhere."
            )
        if not paths:
            return
        written = {
            path: map_leaf(lambda x, y: jnp.asarray(x).at[position].set(y), whole[path], new[path])
            for path in paths
        }
        current = [other for other in _loans if other.stack is self and other.position != position]
        kept = [(other, set(paths) - set(other.conflicts(paths))) for other in current]
        update_same_types(self.stacked, from_flat_state(written))
        now = leaves_of(self.stacked)
        for other, same_paths in kept:
            other.whole.update({path: stored_value(now[path]) for path in same_paths})

    # ---- lists and states -----------------------------------------------------------------------

    @classmethod
    def from_list(
        cls,
        layers: Iterable[Any],
        *,
        remat: bool | Callable[..., Any] = False,
        unroll: int | bool = 1,
        partition: str | None = None,
    ) -> Any:
        """Makes a stack from copies of existing layers.

        Args:
          layers: the layers, equal but for the values of their Variables and arrays.
          remat, unroll, partition: as for the constructor.

        Returns:
          The stack.

        Raises:
          LayerArgumentError: there are no layers, they differ, or they share something; the paths
            are listed.

        Example:
          >>> from linnet import nnx
          >>> rngs = nnx.Rngs(0)
          >>> layers = [nnx.Linear(2, 2, rngs=rngs) for _ in range(3)]
          >>> stack = nnx.Stack.from_list(layers)
          >>> bool((stack[1].kernel[...] == layers[1].kernel[...]).all())
          True
        """
        new = cls.__new__(cls)
        layers = list(layers)
        new._set_up(len(layers), remat, unroll, partition)
        copies = [split(layer, graph=True) for layer in _equal_copies(layers)]
        states = [state for _, state in copies]
        new.stacked = merge(copies[0][0], stack_states(states, partition))
        return new

    def to_list(self) -> list[Any]:
        """The layers as separate objects, with Variables of their own."""
        return [self._layer(position) for position in range(self.length)]

    @staticmethod
    def unstack_state(state: Mapping[str, Any], partition: str | None = None) -> State:
        """Converts the state of a stack to the state of the list of its layers.

        For checkpoints: a model with a list of layers can restore what a model with a stack saved.

        Args:
          state: the state of a stack, or any part of one with the same form, such as gradients or
            an optimizer's moments; of Variables, arrays or shapes.
          partition: the name of the layers' axis in the sharding metadata.

        Returns:
          The state of ``nnx.List(stack.to_list())``.

        Example:
          >>> import functools
          >>> from linnet import nnx
          >>> stack = nnx.Stack(functools.partial(nnx.Linear, 2, 2), 3, rngs=nnx.Rngs(0))
          >>> listed = nnx.Stack.unstack_state(nnx.state(stack))
          >>> list(listed), listed[2]["kernel"].shape
          ([0, 1, 2], (2, 2))
        """
        whole = state["stacked"]
        first = next(leaf for _, leaf in to_flat_state(whole))
        length = jax.tree.leaves(stored_value(first))[0].shape[0]
        return State({n: state_at(whole, n, partition) for n in range(length)})

    @staticmethod
    def stack_state(state: Mapping[Any, Any], partition: str | None = None) -> State:
        """Converts the state of a list of layers to the state of a stack.

        Args:
          state: for each position, as an integer or its text, the state of a layer.
          partition: the name of the layers' axis in the sharding metadata.

        Returns:
          The state of ``nnx.Stack.from_list(layers)``.

        Example:
          >>> import jax.numpy as jnp
          >>> from linnet import nnx
          >>> listed = {n: {"kernel": jnp.ones((2, 2))} for n in range(3)}
          >>> nnx.Stack.stack_state(listed)["stacked"]["kernel"].shape
          (3, 2, 2)
        """
        numbered = {int(position): layer for position, layer in state.items()}
        layers = [numbered[position] for position in range(len(numbered))]
        return State({"stacked": stack_states(layers, partition)})


class _Loan:
    """One borrowed layer: as it was lent, and the values of the stack that it may overwrite.

    These are from when it was lent; writes to other layers since then are added.
    """

    def __init__(self, stack: Stack, position: int, layer: Any):
        self.stack, self.position = stack, position
        self.lent = clone(layer, graph=True)
        self.whole = values_of(stack.stacked)

    def conflicts(self, paths: Iterable[Any]) -> list[Any]:
        """Those of the paths where the stack now has something else for the layer."""
        now = leaves_of(self.stack.stacked)
        return [
            path
            for path in paths
            if path not in now or path not in self.whole or self._differs(path, now[path])
        ]

    def _differs(self, path: Any, leaf: Any) -> bool:
        then, now = self.whole[path], stored_value(leaf)
        if same_arrays(then, now):
            return False
        return differ(then, now, when_traced=not is_read_anew(leaf), index=self.position)


_loans: list[_Loan] = []  # those that are not over


@compiled_outside
def _run(stack: Stack, x: Any, args: Any, kwargs: Any) -> Any:
    found: list[Any] = []

    def apply(layer: Any, x: Any, _: None, *args: Any, **kwargs: Any) -> tuple[Any, None]:
        out = layer(x, *args, **kwargs)
        found.append(jax.tree.map(jax.typeof, out))
        _check_step(layer, x, out)
        return out, None

    try:
        return stack.scan(apply, x, None, *args, **kwargs)[0]
    except CarryError:
        # Often only the input of the first layer has another dtype than the layers return.
        fitting = _as_returned(x, found[0]) if found else None
        if fitting is None:
            raise
        return stack.scan(apply, fitting, None, *args, **kwargs)[0]


def _check_step(layer: Any, x: Any, out: Any) -> None:
    before, after = (jax.tree.map(lambda _: "x", tree) for tree in (x, out))
    if before != after:
        raise CarryError(
            f"{layer_name(layer)} is one of a stack, where each layer takes what the one before "
            f"returns, but it takes {before} and returns {after}.\n"
            "Fix: stack.scan(f, x) for layers with more outputs, with f(layer, x, _) returning x "
            "and the rest."
        )
    check_same_type(x, out, f"through {layer_name(layer)}", "Stack")


def _make_stacked(factory: Callable[..., Any], length: int, rngs: Any, partition: Any) -> Any:
    """Makes all layers as one, each with its own keys."""
    if isinstance(factory, Module):
        name = type(factory).__name__
        raise LayerArgumentError(
            f"Stack makes its layers, and wants what makes one, but got a {name}.\n"
            f"Fix: nnx.Stack({name}, length, rngs=rngs); for arguments, lambda rngs: {name}(..., "
            "rngs=rngs); nnx.Stack.from_list(layers) for layers that there are."
        )
    graphdef = keys = None
    if rngs is not None:
        _check_factory(factory, rngs)
        graphdef, keys = split(with_rngs(rngs, split=length, graph=True), graph=True)

    def make(keys: Any) -> Any:
        return factory() if graphdef is None else factory(rngs=merge(graphdef, keys))

    return vmap(make, axis_size=length, transform_metadata={PARTITION_NAME: partition})(keys)


def _check_factory(factory: Callable[..., Any], rngs: Any) -> None:
    if not isinstance(rngs, Rngs):
        raise RngsError(
            f"Stack draws the keys of its layers from rngs, but got {type_text(rngs)}.\n"
            "Fix: pass rngs=nnx.Rngs(0), or the rngs your own constructor was given."
        )
    if not takes_rngs(factory):
        raise LayerArgumentError(
            f"Stack calls layer_factory(rngs=rngs), but {factory!r} does not take rngs.\n"
            "Fix: lambda rngs: Layer(..., rngs=rngs), or leave rngs out if it needs none."
        )


def _make_read_only(copy: Any) -> None:
    set_metadata(copy, mutable=False)
    for _, module in iter_graph(copy, graph=True):
        if isinstance(module, Pytree):
            fix_data(module)


def _writable_copy(layer: Any) -> Any:
    """Copies a layer with writable Variables, also from a read-only copy out of a stack."""
    copy = clone(layer, graph=True)
    for leaf in leaves_of(copy).values():
        if isinstance(leaf, Variable) and leaf.has_metadata("mutable"):
            leaf.del_metadata("mutable")
    return copy


def _equal_copies(layers: list[Any]) -> list[Any]:
    """Copies layers; refuses those that differ in more than values, or share a Variable."""
    for paths in find_duplicates(layers):
        if len({path[0] for path in paths}) > 1:
            places = " and ".join(path_string(path, "layers") for path in paths[:2])
            raise LayerArgumentError(
                f"Stack keeps the Variables of each layer apart, but {places} are the same.\n"
                "Fix: build the layers with Variables and rngs of their own (rngs.fork()), or pass "
                "what they share to the call."
            )
    copies = [_writable_copy(layer) for layer in layers]
    found = [
        f"layers[0] and layers[{number}] at {text}".replace(" at :", ":")
        for number, other in enumerate(copies)
        for text in differences(copies[0], other)
    ]
    if found:
        what = "Stack takes equal layers, but these differ"
        fix = "build them with the same arguments, or keep them in an nnx.List."
        raise LayerArgumentError(misfit_text({what: found}, fix=fix))
    return copies


def _as_returned(x: Any, types: Any) -> Any:
    """Converts the input to the floating-point dtypes that a layer returns, or returns None."""
    leaves, structure = jax.tree.flatten(x)
    wanted, returned = jax.tree.flatten(types)
    if structure != returned or not all(map(_can_become, leaves, wanted)):
        return None
    pairs = zip(leaves, wanted, strict=True)
    return structure.unflatten([jnp.asarray(a, b.dtype) for a, b in pairs])


def _can_become(leaf: Any, wanted: Any) -> bool:
    dtypes = (jnp.result_type(leaf), wanted.dtype)
    floating = all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)
    return jnp.shape(leaf) == wanted.shape and (floating or dtypes[0] == dtypes[1])
