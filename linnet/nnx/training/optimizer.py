"""Optimizer: an Optax transformation with its state, over the Variables of a model."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from linnet.errors import StateMismatchError, list_paths
from linnet.nnx.filterlib import Filter
from linnet.nnx.graphlib.split_merge import state
from linnet.nnx.kinds import OBJECT, kind_of
from linnet.nnx.pytreelib import Pytree
from linnet.nnx.statelib import State, iter_flat, plain_mapping, to_pure_dict
from linnet.nnx.variablelib import OptArray as OptArray
from linnet.nnx.variablelib import OptState as OptState
from linnet.nnx.variablelib import OptVariable as OptVariable
from linnet.nnx.variablelib import Param, Variable


def _is_variable(x: Any) -> bool:
    return isinstance(x, Variable)


def _wrap(tx: Any, opt_state: Any, variables: Any) -> Any:
    """Arrays of an Optax state as Variables; those that belong to a parameter get its metadata."""
    import optax

    def of_parameter(value: Any, variable: Any) -> Any:
        metadata = variable.get_metadata(exclude_required=True)
        kept = {k: v for k, v in metadata.items() if not k.startswith("on_")}
        return OptVariable(value, **kept)

    return optax.tree_map_params(
        tx,
        of_parameter,
        opt_state,
        variables,
        transform_non_params=OptArray,
        is_leaf=_is_variable,
    )


class Optimizer(Pytree):
    """An Optax transformation, its state, and a count of steps.

    Args:
      model: the model to optimize.
      tx: an Optax transformation. It sees nested dicts of arrays, named as in the model.
      wrt: a filter for the Variables that are optimized. Left out, the optimizer keeps the model
        and ``update`` takes the gradients alone, as older programs do.
      graph: allow shared references in the model; by default as ``set_graph_mode`` says.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from linnet import nnx
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
      >>> grads = nnx.grad(lambda model: model(jnp.ones((1, 2))).sum())(model)
      >>> optimizer.update(model, grads)
      >>> float(model.bias.value[0]), int(optimizer.step.value)
      (-0.10000000149011612, 1)
    """

    # Its containers are changed by `update` alone, which keeps their structure.
    _pytree_settled = frozenset({"opt_state"})

    def __init__(self, model: Any, tx: Any, *, wrt: Filter = None, graph: bool | None = None):
        self.graph = graph
        self.step = OptState(jnp.zeros((), jnp.uint32))
        self.tx = tx
        self.wrt = Param if wrt is None else wrt
        variables = plain_mapping(state(model, self.wrt, graph=graph))
        params = to_pure_dict(variables)
        self.opt_state = _wrap(tx, tx.init(params), variables)
        self.model = model if wrt is None else None

    def update(self, model: Any, grads: Any = None, /, **kwargs: Any) -> None:
        """Applies gradients to the model and moves the optimizer's state on, both in place.

        Args:
          model: the model; left out by programs that built the optimizer without ``wrt``.
          grads: the gradients, as ``nnx.grad`` gave them.
          **kwargs: passed on to ``tx.update``.

        Raises:
          StateMismatchError: the gradients are for other Variables; the paths are listed.
        """
        import optax

        if grads is None:
            if self.model is None:
                raise TypeError(
                    "Optimizer.update takes the model and the gradients: "
                    "optimizer.update(model, grads)."
                )
            model, grads = self.model, model
        variables = dict(iter_flat(plain_mapping(state(model, self.wrt, graph=self.graph))))
        params = to_pure_dict(State(_nested(variables), _copy=False))
        pure = _gradients(grads, variables, self.graph)
        before = jax.tree_util.tree_map(_value, self.opt_state, is_leaf=_is_variable)
        updates, after = self.tx.update(pure, before, params, **kwargs)
        new_params = optax.apply_updates(params, updates)
        self.step.value = self.step.value + 1
        for path, value in iter_flat(new_params):
            variables[path].set_value(value)
        kept = jax.tree_util.tree_leaves(self.opt_state, is_leaf=_is_variable)
        for variable, value in zip(kept, jax.tree_util.tree_leaves(after), strict=True):
            variable.set_value(value)


def _nested(flat: dict[Any, Any]) -> dict[Any, Any]:
    nested: dict[Any, Any] = {}
    for path, leaf in flat.items():
        node = nested
        for step in path[:-1]:
            node = node.setdefault(step, {})
        node[path[-1]] = leaf
    return nested


def _value(leaf: Any) -> Any:
    return leaf.get_value() if isinstance(leaf, Variable) else leaf


def _gradients(grads: Any, variables: dict[Any, Any], graph: bool | None) -> Any:
    """Gradients as nested dicts of arrays; refused if they are not those of the variables."""
    mapping = state(grads, graph=graph) if kind_of(grads) == OBJECT else grads
    flat = dict(iter_flat(plain_mapping(mapping)))
    missing = [path for path in variables if path not in flat]
    extra = [path for path in flat if path not in variables]
    if missing or extra:
        parts = ["The gradients are not those of the Variables that the optimizer was built for."]
        parts += [f"Missing:\n{list_paths(missing)}"] if missing else []
        parts += [f"Not optimized:\n{list_paths(extra)}"] if extra else []
        parts.append("Fix: differentiate with respect to the same filter as the optimizer's wrt.")
        raise StateMismatchError("\n".join(parts))
    return _nested({path: _value(leaf) for path, leaf in flat.items()})


class ModelAndOptimizer(Optimizer):
    """An optimizer that keeps its model: ``update(grads)``.

    Args:
      model: the model to optimize.
      tx: an Optax transformation.
      wrt: a filter for the Variables that are optimized.
    """

    def __init__(self, model: Any, tx: Any, *, wrt: Filter = Param):
        super().__init__(model, tx, wrt=wrt)
        self.model = model

    def update(self, grads: Any, /, **kwargs: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Applies gradients to the model that the optimizer keeps; see ``Optimizer.update``."""
        super().update(self.model, grads, **kwargs)
