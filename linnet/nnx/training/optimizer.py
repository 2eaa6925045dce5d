"""Optimizer: an Optax transformation with its state, over the Variables of a model.

Optax sees nested dicts of plain arrays, named as in the model, so every transformation that goes by
names or shapes works as it does by hand.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from linnet.errors import FilterError, StateMismatchError, TransformationError
from linnet.nnx.filterlib import All, Filter, Not
from linnet.nnx.graphlib.split_merge import state
from linnet.nnx.graphlib.update import update as update_node
from linnet.nnx.modules.freezing import frozen
from linnet.nnx.pytreelib import watch
from linnet.nnx.pytreelib.objects import Pytree
from linnet.nnx.statelib import State, from_flat_state, iter_flat, plain_mapping
from linnet.nnx.training.gradients import refuse_gradients
from linnet.nnx.training.opt_state import Transformation, move_for_optax, move_home, wrap
from linnet.nnx.variablelib.variable import OptArray as OptArray
from linnet.nnx.variablelib.variable import OptState as OptState
from linnet.nnx.variablelib.variable import OptVariable as OptVariable
from linnet.nnx.variablelib.variable import Param, Variable, from_refs

Path = tuple[Any, ...]


class Optimizer(Pytree):
    """An Optax transformation, its state, and a count of steps.

    What ``nnx.freeze`` froze is not optimized, whatever ``wrt`` selects.

    Args:
      model: the model to optimize.
      tx: an Optax transformation. It sees nested dicts of arrays, named as in the model.
      wrt: a filter for the Variables that are optimized. Left out, the optimizer keeps the model
        and ``update`` takes the gradients alone, as older programs do.
      graph: allow shared references in the model; by default as ``set_graph_mode`` says.

    Raises:
      FilterError: ``wrt`` selects nothing that trains.

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

    def __init__(self, model: Any, tx: Any, wrt: Filter = None, *, graph: bool | None = None):
        _check_transformation(model, tx)
        self.graph = graph
        self.step = OptState(jnp.zeros((), jnp.uint32))
        self.wrt = Param if wrt is None else wrt
        targets = self._targets(model)
        if not targets:
            raise FilterError(_nothing_to_train(model, self.wrt, graph))
        self.transformation = Transformation.of(tx, targets)
        self.opt_state = wrap(tx.init(move_for_optax(_values(targets), targets)), targets)
        object.__setattr__(self, "_is_handed_out", False)
        self.model = model if wrt is None else None

    # The state has about as many containers as the model has modules, and comparing them all before
    # each compiled step would show. Nobody changes them who was not given them.

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
        if self._pytree_private():
            object.__setattr__(self, "_is_handed_out", True)
            watch.announce(self)

    def _pytree_private(self) -> tuple[str, ...]:
        return () if getattr(self, "_is_handed_out", False) else ("opt_state",)

    def __getstate__(self) -> Any:
        self._pytree_hand_out()  # a copy may share the containers
        return super().__getstate__()

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self._pytree_hand_out()

    @property
    def tx(self) -> Any:
        """The Optax transformation."""
        return self.transformation.tx

    @tx.setter
    def tx(self, tx: Any) -> None:
        self.transformation = Transformation(tx, self.transformation.shapes)

    def _targets(self, model: Any) -> dict[Path, Any]:
        """The Variables (and arrays) of a model that are optimized, by path."""
        wanted = All(self.wrt, Not(frozen))
        return dict(iter_flat(plain_mapping(state(model, wanted, graph=self.graph))))

    def update(self, model: Any, grads: Any = None, /, **kwargs: Any) -> State:
        """Applies gradients to the model and moves the optimizer's state on, both in place.

        Args:
          model: the model; left out by programs that built the optimizer without ``wrt``.
          grads: the gradients, as ``nnx.grad`` gave them. Those of frozen Variables are ignored.
          **kwargs: passed on to ``tx.update``; States among them as nested dicts of arrays.

        Returns:
          What Optax added to the parameters.

        Raises:
          StateMismatchError: the gradients are for other Variables, or the model has others than
            the one that the optimizer was built for; the paths are listed.
          TypeError: the model or the gradients are missing, or they are the wrong way round.
        """
        import optax

        model, grads = self._arguments(model, grads)
        targets = self._targets(model)
        self.transformation.check(targets)
        params = move_for_optax(_values(targets), targets)
        pure = move_for_optax(_gradients(grads, targets, model, self.graph), targets)
        before = jax.tree_util.tree_map(_value, self._own_state, is_leaf=_is_variable)
        extra = {name: _plain(value) for name, value in kwargs.items()}
        updates, after = self.tx.update(pure, before, params, **extra)
        moved = move_home(optax.apply_updates(params, updates), targets)
        self._write(model, targets, moved, before, after)
        return State(updates, _copy=False) if type(updates) is dict else updates

    def _arguments(self, model: Any, grads: Any) -> tuple[Any, Any]:
        if isinstance(model, State) and isinstance(grads, Pytree):
            # The gradients of a plain model would fit, be changed, and be thrown away.
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
        """Puts new parameters and the new state of Optax in their places."""
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
            if isinstance(target, Variable):
                target.set_value(value)
            else:
                arrays[path] = value
        if arrays:
            update_node(model, from_flat_state(arrays))
        kept, structure = jax.tree_util.tree_flatten(self._own_state, is_leaf=_is_variable)
        values = jax.tree_util.tree_leaves(after)
        for leaf, value in zip(kept, values, strict=True):
            if isinstance(leaf, Variable):
                leaf.set_value(value)
        if not all(map(_is_variable, kept)):  # a plain array was put there
            pairs = zip(kept, values, strict=True)
            made = [x if isinstance(x, Variable) else OptArray(new) for x, new in pairs]
            self.opt_state = structure.unflatten(made)


class ModelAndOptimizer(Optimizer):
    """An optimizer that keeps its model: ``update(grads)``.

    Args:
      model: the model to optimize.
      tx: an Optax transformation.
      wrt: a filter for the Variables that are optimized.
    """

    def __init__(self, model: Any, tx: Any, wrt: Filter = Param):
        super().__init__(model, tx, wrt=wrt)
        self.model = model

    def update(self, grads: Any, /, **kwargs: Any) -> State:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Applies gradients to the model that the optimizer keeps; see ``Optimizer.update``."""
        return super().update(self.model, grads, **kwargs)


def _is_variable(x: Any) -> bool:
    return isinstance(x, Variable)


def _value(leaf: Any) -> Any:
    return from_refs(leaf.raw_value) if isinstance(leaf, Variable) else leaf


def _values(flat: dict[Path, Any]) -> Any:
    """Nested dicts of plain arrays."""
    nested = from_flat_state((path, _value(leaf)) for path, leaf in flat.items())
    return plain_mapping(nested)


def _plain(value: Any) -> Any:
    """An extra argument for Optax: states as it sees parameters, the rest as it is."""
    if isinstance(value, (State, Variable, Pytree)):
        return _values(_flat(value, None))
    return value


def _flat(grads: Any, graph: bool | None) -> dict[Path, Any]:
    mapping = grads if isinstance(grads, Mapping) else state(grads, graph=graph)
    return dict(iter_flat(plain_mapping(mapping)))


def _gradients(grads: Any, targets: dict[Path, Any], model: Any, graph: bool | None) -> Any:
    """Gradients as nested dicts of arrays; refused if they are not those of the targets."""
    flat = _flat(grads, graph)
    missing = [path for path in targets if path not in flat]
    extra = [path for path in flat if path not in targets]
    if extra:
        known_frozen = dict(iter_flat(plain_mapping(state(model, frozen, graph=graph))))
        extra = [path for path in extra if path not in known_frozen]
    refuse_gradients(
        "the Variables that the optimizer was built for",
        "differentiate with respect to the same filter as the optimizer's wrt.",
        missing,
        extra,
        [
            (path, jnp.shape(_value(flat[path])), jnp.shape(_value(leaf)))
            for path, leaf in targets.items()
            if path in flat and not _same_shape(flat[path], leaf)
        ],
    )
    return _values({path: flat[path] for path in targets})


def _same_shape(gradient: Any, leaf: Any) -> bool:
    pairs = [jax.tree_util.tree_leaves(_value(x)) for x in (gradient, leaf)]
    return [jnp.shape(x) for x in pairs[0]] == [jnp.shape(x) for x in pairs[1]]


def _check_transformation(model: Any, tx: Any) -> None:
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


def _nothing_to_train(model: Any, wrt: Filter, graph: bool | None) -> str:
    found = dict(iter_flat(plain_mapping(state(model, graph=graph))))
    selected = dict(iter_flat(plain_mapping(state(model, wrt, graph=graph))))
    name = wrt.__name__ if isinstance(wrt, type) else repr(wrt)
    if selected:
        return (
            f"All {len(selected)} Variables that wrt={name} selects are frozen, so there is "
            "nothing to optimize.\nFix: nnx.unfreeze what shall train; nnx.what_trains(model) "
            "prints it."
        )
    kinds = ", ".join(sorted({type(leaf).__name__ for leaf in found.values()})) or "no Variables"
    return (
        f"wrt={name} selects nothing in this {type(model).__name__}, so there is nothing to "
        f"optimize. It has {kinds}.\nFix: pass a filter for the Variables that shall train, such "
        "as wrt=nnx.Param."
    )
