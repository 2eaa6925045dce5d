"""Optimizer: an Optax transformation with its state, over the Variables of a model.

Optax sees nested dicts of plain arrays, named as in the model, so every transformation that goes by
names or shapes works as it does by hand. One whose masks or labels are States sees States.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.tree_util import DictKey

from linnet.errors import (
    FilterError,
    PrecisionError,
    StateMismatchError,
    TransformationError,
    check_entries,
    path_string,
)
from linnet.functional.dtypes import Policy, context, scope_of_call
from linnet.nnx.filterlib import All, Filter, Not
from linnet.nnx.graphlib.split_merge import state
from linnet.nnx.graphlib.update import update_same_types
from linnet.nnx.modules.freezing import frozen
from linnet.nnx.modules.module import POLICY
from linnet.nnx.pytreelib import statics, watch
from linnet.nnx.pytreelib.kinds import Path, key_name
from linnet.nnx.pytreelib.objects import Pytree
from linnet.nnx.statelib import State, as_state, from_flat_state, iter_flat, plain_mapping
from linnet.nnx.variablelib.placement import mesh_in_force, put, spec_of
from linnet.nnx.variablelib.variable import (
    OptArray as OptArray,
    OptState as OptState,
    OptVariable as OptVariable,
    Param,
    Variable,
    is_variable,
    stored_value,
)

M = TypeVar("M")


class Optimizer(Pytree, Generic[M]):
    """An Optax transformation, its state, and a count of steps.

    What ``nnx.freeze`` froze is not optimized, whatever ``wrt`` selects. If the precision policy of
    the model, or the one in force, has ``masters``, the transformation works on copies of narrower
    parameters in that dtype, which are part of the state, and the parameters are rounded from them.

    Args:
      model: the model to optimize.
      tx: an Optax transformation. It sees nested dicts of arrays, named as in the model, or a State
        of arrays if its masks or labels are States.
      wrt: a filter for the Variables that are optimized. Left out, the optimizer keeps the model
        and ``update`` takes the gradients alone, as older programs do.
      graph: allow shared references in the model; by default as ``set_graph_mode`` says.

    Raises:
      FilterError: ``wrt`` selects nothing that trains.
      TransformationError: ``tx`` is no Optax transformation.
      TypeError: ``model`` is a class.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from linnet import nnx
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
      >>> grads = nnx.grad(lambda model: model(jnp.ones((1, 2))).sum())(model)
      >>> updates = optimizer.update(model, grads)
      >>> float(model.bias.value[0]), int(optimizer.step.value)
      (-0.10000000149011612, 1)
    """

    __slots__ = ("_is_handed_out",)

    def __init__(self, model: M, tx: Any, wrt: Filter = None, *, graph: bool | None = None):
        _check_transformation(model, tx)
        self.graph = graph
        self.step = OptState(jnp.zeros((), jnp.uint32))
        self.wrt = Param if wrt is None else wrt
        targets = self._targets(model)
        if not targets:
            raise FilterError(_nothing_to_train(model, self.wrt, graph))
        dtype = _dtype_of_masters(model)
        tx = tx if dtype is None else MasterWeights(tx, dtype)
        params = _place(_values(targets), targets, "opt_sharding")
        opt_state, takes_states = _first_state(tx, params)
        self.transformation = Transformation(tx, tuple(_shapes(targets).items()), takes_states)
        self.opt_state = _wrap(opt_state, targets)
        object.__setattr__(self, "_is_handed_out", False)
        self.model = model if wrt is None else None

    # The state has about as many containers as the model has modules, and comparing them all before
    # each compiled step would cost time. They are compared only once somebody could change them:
    # after the state was read from outside.

    @property
    def opt_state(self) -> Any:
        """The state of the transformation: its own structure, with Variables for arrays."""
        self._pytree_hand_out()
        return self._own_state

    @opt_state.setter
    def opt_state(self, state: Any) -> None:
        vars(self)["opt_state"] = state
        object.__setattr__(self, "_is_handed_out", True)

    @property
    def _own_state(self) -> Any:
        return vars(self)["opt_state"]

    def _pytree_hand_out(self) -> None:
        """Notes that others may change ``opt_state`` now, so that plans must compare it."""
        if self._pytree_private():
            object.__setattr__(self, "_is_handed_out", True)
            watch.announce_content(self)

    def _pytree_has_handed_out(self) -> bool:
        return getattr(self, "_is_handed_out", False)

    def _pytree_private(self) -> tuple[str, ...]:
        return () if self._pytree_has_handed_out() else ("opt_state",)

    def __getstate__(self) -> Any:
        self._pytree_hand_out()  # a copy may share the containers
        return super().__getstate__()

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self._pytree_hand_out()

    @property
    def tx(self) -> Any:
        """The Optax transformation; with masters, ``tx.tx`` is the one that was given."""
        return self.transformation.tx

    @tx.setter
    def tx(self, tx: Any) -> None:
        if isinstance(self.tx, MasterWeights) and not isinstance(tx, MasterWeights):
            tx = self.tx._replace(tx=tx)
        self.transformation = dataclasses.replace(self.transformation, tx=tx)

    def _targets(self, model: Any) -> dict[Path, Any]:
        """The Variables (and arrays) of a model that are optimized, by path."""
        wanted = All(self.wrt, Not(frozen))
        return by_path(state(model, wanted, graph=self.graph))

    def update(self, model: Any, grads: Any = None, /, **kwargs: Any) -> State:
        """Updates the model and the optimizer's state by gradients, both in place.

        Args:
          model: the model; left out by programs that built the optimizer without ``wrt``.
          grads: the gradients, as ``nnx.grad`` gave them. Those of Variables of the model that are
            not optimized, because ``wrt`` does not select them or they are frozen, are ignored.
          **kwargs: passed on to ``tx.update``; States among them in the form of the parameters.

        Returns:
          What Optax added to the parameters, or to their masters.

        Raises:
          StateMismatchError: the gradients are for other Variables, or the model has others than
            the one that the optimizer was built for; the paths are listed.
          PrecisionError: the model was given a policy with masters after the optimizer was built.
          TypeError: the model or the gradients are missing, or they are the wrong way round.
        """
        import optax

        model, grads = self._arguments(model, grads)
        targets = self._targets(model)
        self.transformation.check(targets)
        self._check_policy(model)
        given = self.transformation.given
        params = given(_place(_values(targets), targets, "opt_sharding"))
        gradients = _gradients(grads, targets, model, self.graph)
        gradients = given(_place(gradients, targets, "opt_sharding"))
        before = jax.tree_util.tree_map(stored_value, self._own_state, is_leaf=is_variable)
        extra = {name: _extra_argument(value, given) for name, value in kwargs.items()}
        updates, after = self.tx.update(gradients, before, params, **extra)
        if isinstance(self.tx, MasterWeights):
            moved = self.tx.rounded(params, updates, after)
        else:
            moved = optax.apply_updates(params, updates)
        moved = _place(plain_mapping(moved), targets, "out_sharding")
        self._write(model, targets, moved, before, after)
        return State(updates, _copy=False) if type(updates) is dict else updates

    def _check_policy(self, model: Any) -> None:
        policy = _own_policy(model)
        if policy is None or policy.masters is None or isinstance(self.tx, MasterWeights):
            return
        raise PrecisionError(
            f"The model has {policy}, but the optimizer was built before and keeps no masters, so "
            "small updates would be lost.\nFix: build the optimizer after nnx.set_precision."
        )

    def _arguments(self, model: Any, grads: Any) -> tuple[Any, Any]:
        if isinstance(model, State) and isinstance(grads, Pytree):
            # The shapes may fit: the gradients would then be updated instead of the model.
            raise TypeError(
                "Optimizer.update takes the model first and the gradients second, but got a State "
                f"first and then a {type(grads).__name__}.\nFix: optimizer.update(model, grads)."
            )
        if grads is not None:
            return model, grads
        if self.model is None:
            raise TypeError(
                "Optimizer.update takes the model and the gradients, but got one argument.\n"
                "Fix: optimizer.update(model, grads); or build nnx.ModelAndOptimizer(model, tx), "
                "which keeps its model and takes update(grads)."
            )
        return self.model, model

    def _write(self, model: Any, targets: Any, values: Any, before: Any, after: Any) -> None:
        """Writes the new parameters and the new state of Optax."""
        if jax.tree_util.tree_structure(before) != jax.tree_util.tree_structure(after):
            raise StateMismatchError(
                "tx.update returned a state of another structure than tx.init: "
                f"{jax.tree_util.tree_structure(after)}, "
                f"not {jax.tree_util.tree_structure(before)}.\n"
                "Fix: have the transformation return a state like the one it was given."
            )
        self.step.value = self.step.value + 1
        arrays = {}
        for path, target in targets.items():
            value = functools.reduce(operator.getitem, path, values)
            if isinstance(target, Variable):  # Optax got, and returns, what is stored
                target.set_raw_value(value)
            else:
                arrays[path] = value
        if arrays:
            update_same_types(model, from_flat_state(arrays))
        kept, structure = jax.tree_util.tree_flatten(self._own_state, is_leaf=is_variable)
        arrays_after = jax.tree_util.tree_leaves(after)
        if any(map(_has_opt_sharding, targets.values())):
            arrays_after = list(map(_place_state, kept, arrays_after))
        for leaf, value in zip(kept, arrays_after, strict=True):
            if isinstance(leaf, Variable):
                leaf.set_raw_value(value)
        if not all(map(is_variable, kept)):  # a plain array was put there
            pairs = zip(kept, arrays_after, strict=True)
            made = [x if isinstance(x, Variable) else OptArray(new) for x, new in pairs]
            self.opt_state = structure.unflatten(made)


class ModelAndOptimizer(Optimizer[M]):
    """An optimizer that keeps its model: ``update(grads)``.

    Args:
      model: the model to optimize.
      tx: an Optax transformation.
      wrt: a filter for the Variables that are optimized.

    Raises:
      FilterError, TransformationError, TypeError: as for ``Optimizer``.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from linnet import nnx
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.ModelAndOptimizer(model, optax.sgd(0.1))
      >>> grads = nnx.grad(lambda model: model(jnp.ones((1, 2))).sum())(optimizer.model)
      >>> updates = optimizer.update(grads)
      >>> float(model.bias.value[0])
      -0.10000000149011612
    """

    def __init__(self, model: M, tx: Any, wrt: Filter = Param):
        super().__init__(model, tx, wrt=wrt)
        self.model = model

    def update(self, grads: Any, /, **kwargs: Any) -> State:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Applies gradients to the model that the optimizer keeps; see ``Optimizer.update``."""
        return super().update(self.model, grads, **kwargs)


def by_path(state: Any) -> dict[Path, Any]:
    """The leaves of a State, or of nested dicts, by path."""
    return dict(iter_flat(plain_mapping(state)))


def _values(flat: dict[Path, Any]) -> Any:
    """Nested dicts of plain arrays."""
    return plain_mapping(from_flat_state((path, stored_value(leaf)) for path, leaf in flat.items()))


def _extra_argument(value: Any, given: Callable[[Any], Any]) -> Any:
    """An extra argument for Optax: states as parameters are given, the rest as it is."""
    if isinstance(value, (State, Variable, Pytree)):
        return given(_values(_flat(value, None)))
    return value


def _flat(tree: Any, graph: bool | None) -> dict[Path, Any]:
    return by_path(tree if isinstance(tree, Mapping) else state(tree, graph=graph))


# ---- gradients ----------------------------------------------------------------------------------


def _gradients(grads: Any, targets: dict[Path, Any], model: Any, graph: bool | None) -> Any:
    """Returns gradients as nested dicts of arrays; raises if they are not those of the targets."""
    given = _flat(grads, graph)
    if any(path not in targets for path in given):
        left_out = by_path(state(model, graph=graph)).keys() - targets.keys()
        given = {path: x for path, x in given.items() if path not in left_out}
    _check_shapes(
        "the Variables that the optimizer was built for",
        *({path: _shape(leaf) for path, leaf in flat.items()} for flat in (targets, given)),
        fix="differentiate with respect to all that the optimizer's wrt selects.",
    )
    return _values({path: given[path] for path in targets})


def _shape(leaf: Any) -> Any:
    shapes = [jnp.shape(x) for x in jax.tree_util.tree_leaves(stored_value(leaf))]
    return shapes[0] if len(shapes) == 1 else shapes


def check_gradients(params: Any, grads: Any) -> None:
    """Raises ``StateMismatchError`` if structure or shapes of gradients are not the parameters'."""
    trees = map(jax.tree_util.tree_flatten_with_path, (params, grads))
    _check_shapes(
        "the parameters",
        *({tuple(map(key_name, keys)): jnp.shape(x) for keys, x in leaves} for leaves, _ in trees),
        fix="differentiate with respect to all of params, and pass what jax.grad returned.",
    )


def _check_shapes(of: str, wanted: dict[Path, Any], given: dict[Path, Any], *, fix: str) -> None:
    check_entries(
        wanted,
        given,
        lambda path, want, got: (
            want != got and f"{path_string(path)}: the gradient is {got}, the parameter {want}"
        ),
        summary=f"The gradients are not those of {of}.",
        titles=("Missing", "Not optimized", "Of another shape"),
        fix=fix,
    )


# ---- what an optimizer is built from ------------------------------------------------------------


def _check_transformation(model: Any, tx: Any) -> None:
    if isinstance(model, type):
        raise TypeError(
            f"nnx.Optimizer takes a model, but got the class {model.__name__}.\n"
            f"Fix: make one first, model = {model.__name__}(..., rngs=nnx.Rngs(0))."
        )
    if hasattr(tx, "init") and hasattr(tx, "update"):
        return
    fix = "nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)"
    if hasattr(model, "init") and hasattr(model, "update"):
        fix = f"the model comes first, {fix}"
    elif callable(tx) and hasattr(tx, "__name__"):
        fix = f"call it, {tx.__name__}(...), as in {fix}"
    got = getattr(tx, "__name__", None) or type(tx).__name__
    raise TransformationError(
        f"nnx.Optimizer takes an Optax transformation with init and update as tx, but got {got}.\n"
        f"Fix: {fix}."
    )


def filter_name(wanted: Filter) -> str:
    """A filter as messages name it."""
    return wanted.__name__ if isinstance(wanted, type) else repr(wanted)


def type_names(found: dict[Path, Any]) -> str:
    """The types of the Variables that were found, for messages."""
    return ", ".join(sorted({type(leaf).__name__ for leaf in found.values()})) or "no Variables"


def _nothing_to_train(model: Any, wrt: Filter, graph: bool | None) -> str:
    found, selected = (by_path(state(model, *only, graph=graph)) for only in ((), (wrt,)))
    name = filter_name(wrt)
    if selected:
        return (
            f"All {len(selected)} Variables that wrt={name} selects are frozen, so there is "
            "nothing to optimize.\nFix: nnx.unfreeze what shall train; nnx.what_trains(model) "
            "prints it."
        )
    return (
        f"wrt={name} selects nothing in this {type(model).__name__}, so there is nothing to "
        f"optimize. It has {type_names(found)}.\n"
        "Fix: pass a filter for the Variables that shall train, such as wrt=nnx.Param."
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Transformation:
    """The static part of an optimizer: its Optax transformation and the shapes it was built for.

    Its key is computed when it is made: Optax's schedules change what they close over when they are
    first called, and a key computed later would retrace every step once.
    """

    tx: Any
    shapes: tuple[tuple[Path, Any], ...]  # of the Variables, by path
    takes_states: bool = False  # instead of nested dicts

    def __post_init__(self) -> None:
        # Objects such as optax.MultiSteps compare by identity; their attributes do not.
        is_object = not isinstance(self.tx, tuple) and type(self.tx).__module__.startswith("optax.")
        tx_key = statics.key_of(vars(self.tx) if is_object else self.tx)
        key = (tx_key, self.shapes, self.takes_states)
        object.__setattr__(self, "_key", key)
        object.__setattr__(self, "_hash", hash(key))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Transformation)
            and type(self.tx) is type(other.tx)
            and self.__dict__["_key"] == other.__dict__["_key"]
        )

    def __hash__(self) -> int:
        return self.__dict__["_hash"]

    def __repr__(self) -> str:
        return f"{type(self.tx).__name__} for {len(self.shapes)} Variables"

    def __reduce__(self) -> Any:
        return (Transformation, (self.tx, self.shapes, self.takes_states))

    def __copy__(self) -> Transformation:
        return self  # immutable

    def __deepcopy__(self, memo: Any) -> Transformation:
        return self

    def given(self, tree: Any) -> Any:
        """Nested dicts of arrays as the transformation takes them."""
        return as_state(tree) if self.takes_states else tree

    def check(self, targets: dict[Path, Any]) -> None:
        """Raises ``StateMismatchError`` if a model's Variables are others than these."""
        built, given = dict(self.shapes), _shapes(targets)
        if given == built:
            return
        check_entries(
            built,
            given,
            lambda path, want, got: (
                want != got and f"{path_string(path)}: {_text(got)}, built for {_text(want)}"
            ),
            summary="This is not the model that the optimizer was built for.",
            titles=(
                "No longer there, or frozen since",
                "New, or no longer frozen",
                "Of another shape",
            ),
            fix="build the optimizer after the model has taken its shape and what stays fixed is "
            "frozen, or pass the model that it was built for.",
        )


def _shapes(targets: dict[Path, Any]) -> dict[Path, Any]:
    return {
        path: tuple(getattr(x, "shape", ()) for x in jax.tree_util.tree_leaves(leaf))
        for path, leaf in targets.items()
    }


def _text(shapes: tuple[Any, ...]) -> str:
    return ", ".join(map(str, shapes))


# ---- masters ------------------------------------------------------------------------------------


def _dtype_of_masters(model: Any) -> Any:
    """The dtype that the precision policy of the model, or the one in force, has for masters."""
    scope = scope_of_call(context.value, _own_policy(model))
    return None if scope is None else scope.policy.masters


def _own_policy(model: Any) -> Policy | None:
    return vars(model).get(POLICY) if isinstance(model, Pytree) else None


class MastersState(NamedTuple):
    """Copies of the parameters in a wider dtype, and the state of the transformation for them."""

    masters: Any  # None for a parameter that is wide enough itself, or not a real number
    inner: Any


class MasterWeights(NamedTuple):
    """An Optax transformation of copies of the parameters in a wider dtype, the masters.

    Its updates are those of the masters; ``rounded`` gives the parameters after them. Numbers of a
    parameter that somebody wrote since the last step are no longer their masters rounded, and
    become the masters.
    """

    tx: Any
    dtype: Any

    def init(self, params: Any) -> MastersState:
        masters = jax.tree_util.tree_map(self._master, params)
        return MastersState(masters, self.tx.init(_wide(masters, params)))

    def _master(self, value: Any) -> Any:
        is_real = jnp.issubdtype(value.dtype, jnp.floating)
        is_narrow = is_real and jnp.finfo(value.dtype).bits < jnp.finfo(self.dtype).bits
        return value.astype(self.dtype) if is_narrow else None

    def update(self, grads: Any, state: MastersState, params: Any, **extra: Any) -> Any:
        import optax

        masters = jax.tree_util.tree_map(_current, state.masters, params, is_leaf=_is_none)
        wide = _wide(masters, params)
        grads = jax.tree_util.tree_map(lambda g, w: g.astype(w.dtype), grads, wide)
        update = optax.with_extra_args_support(self.tx).update
        updates, inner = update(grads, state.inner, wide, **extra)
        moved = optax.apply_updates(wide, updates)
        masters = jax.tree_util.tree_map(
            lambda old, new: None if old is None else new, masters, moved, is_leaf=_is_none
        )
        return updates, MastersState(masters, inner)

    def rounded(self, params: Any, updates: Any, state: MastersState) -> Any:
        """The parameters after an update: masters rounded, and the others with their updates."""
        import optax

        return jax.tree_util.tree_map(
            lambda master, old, update: (
                optax.apply_updates(old, update) if master is None else master.astype(old.dtype)
            ),
            state.masters,
            params,
            updates,
            is_leaf=_is_none,
        )


def _is_none(value: Any) -> bool:
    return value is None


def _current(master: Any, value: Any) -> Any:
    """The master where the parameter is the master rounded; elsewhere the parameter itself."""
    if master is None:
        return None
    # Bits are compared: compilers may leave the rounding out of a comparison of numbers.
    unsigned = f"uint{jnp.finfo(value.dtype).bits}"
    rounded, now = (
        jax.lax.bitcast_convert_type(x, jnp.dtype(unsigned))
        for x in (master.astype(value.dtype), value)
    )
    return jnp.where(rounded == now, master, value.astype(master.dtype))


def _wide(masters: Any, params: Any) -> Any:
    """What the transformation works on: masters, and the parameters that have none."""
    return jax.tree_util.tree_map(
        lambda master, value: value if master is None else master,
        masters,
        params,
        is_leaf=_is_none,
    )


# ---- Optax's state ------------------------------------------------------------------------------


def _first_state(tx: Any, params: Any) -> tuple[Any, bool]:
    """The state of a transformation, and whether it takes States in place of nested dicts."""
    try:
        return tx.init(params), False
    except (AttributeError, ValueError):  # as from a mask that is a State and fits no dict
        if type(params) is not dict:
            raise
        with contextlib.suppress(AttributeError, ValueError):
            return tx.init(as_state(params)), True
        raise


def _wrap(opt_state: Any, targets: dict[Path, Any]) -> Any:
    """Makes the arrays of an Optax state Variables.

    An array whose path ends with that of a parameter becomes an ``OptVariable`` with the
    parameter's metadata, any other an ``OptArray``.
    """

    def wrapped(keys: Iterable[Any], value: Any) -> Any:
        target = _parameter(list(keys), value, targets)
        if target is None:
            return OptArray(value)
        return OptVariable(value, **_metadata(target, value))

    return jax.tree_util.tree_map_with_path(wrapped, opt_state)


def _parameter(keys: list[Any], value: Any, targets: dict[Path, Any]) -> Any:
    """Returns the Variable that a leaf of an Optax state belongs to, or None."""
    names: list[Any] = []
    for key in reversed(keys):
        if not isinstance(key, DictKey):
            break
        names.insert(0, key.key)
    for start in range(len(names)):
        if tuple(names[start:]) in targets:
            return targets[tuple(names[start:])]
    alone = targets.get(())  # the model is a Variable
    return alone if alone is not None and jnp.shape(value) == alone.shape else None


def _metadata(target: Any, value: Any) -> dict[str, Any]:
    """The parameter's metadata, less its hooks; axis names only for an array of its shape."""
    if not isinstance(target, Variable):
        return {}
    metadata = target.get_metadata()
    own = ("hijax", "ref", "eager_sharding")
    kept = {name: x for name, x in metadata.items() if name[:3] != "on_" and name not in own}
    if "opt_sharding" in kept:
        kept["out_sharding"] = kept.pop("opt_sharding")
    if jnp.shape(value) != target.shape:
        kept.pop("out_sharding", None)
    return {**kept, "eager_sharding": metadata["eager_sharding"]}


def _place(values: Any, targets: dict[Path, Any], name: str) -> Any:
    """Places the arrays of parameters with ``opt_sharding`` by the metadata entry ``name``.

    That is ``opt_sharding`` for what Optax computes with, ``out_sharding`` for what the model gets.
    """
    away = {path: target for path, target in targets.items() if _has_opt_sharding(target)}
    mesh = mesh_in_force() if away else None
    if mesh is None:
        return values

    def move(keys: Iterable[Any], value: Any) -> Any:
        target = away.get(tuple(key.key for key in keys if isinstance(key, DictKey)))
        if target is None:
            return value
        spec = spec_of(target.get_metadata(name, ()), target.get_metadata())
        return put(value, NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(move, values)


def _place_state(leaf: Any, value: Any) -> Any:
    """A new array of Optax's state where the metadata of its Variable says."""
    mesh = mesh_in_force()
    if mesh is None or not isinstance(leaf, Variable) or not leaf.sharding_names:
        return value
    return put(value, NamedSharding(mesh, spec_of(leaf.sharding_names, leaf.get_metadata())))


def _has_opt_sharding(target: Any) -> bool:
    return isinstance(target, Variable) and target.has_metadata("opt_sharding")
