"""EMA: a smoothed copy of a model's Variables."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from linnet.errors import FilterError, check_entries, path_string
from linnet.nnx.filterlib import Filter
from linnet.nnx.graphlib.split_merge import clone, merge, split, state
from linnet.nnx.pytreelib.kinds import Path
from linnet.nnx.pytreelib.objects import Pytree
from linnet.nnx.statelib import merge_state
from linnet.nnx.training.optimizer import by_path, filter_name, type_names
from linnet.nnx.variablelib.comparing import mismatch
from linnet.nnx.variablelib.variable import Variable

M = TypeVar("M")


class EMA(Pytree):
    """An exponential moving average of a model's Variables, updated in place.

    What cannot be averaged, such as counts and random keys, is taken over as it is.

    Args:
      params: a model, a state, or any pytree of them, with the values to start from.
      decay: how much of the average stays at each update, between 0 and 1.
      only: a filter for the Variables that are averaged.
      graph: allow shared references; by default as ``set_graph_mode`` says.

    Raises:
      TypeError: something to average is not a Variable.
      ValueError: the decay is out of range.
      FilterError: there is nothing to average.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> model = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
      >>> model.kernel.value = jnp.zeros((1, 1))
      >>> ema = nnx.EMA(model, decay=0.75, only=nnx.Param)
      >>> model.kernel.value = jnp.full((1, 1), 4.0)
      >>> ema.update(model)
      >>> smooth = ema.apply_to(model)
      >>> float(smooth.kernel[0, 0]), float(model.kernel[0, 0])
      (1.0, 4.0)
    """

    def __init__(self, params: Any, decay: float, *, only: Filter = ..., graph: bool | None = None):
        if isinstance(decay, (int, float)) and not 0 <= decay <= 1:
            raise ValueError(
                f"EMA got decay={decay}, which is not between 0 and 1.\nFix: nnx.EMA(model, 0.999)."
            )
        self.graph = graph
        self.decay = decay
        self.filter = only
        chosen = _variables(params, only, graph)
        if not by_path(chosen):
            types = type_names(by_path(state(params, graph=graph)))
            raise FilterError(
                f"EMA: only={filter_name(only)} selects nothing in this {type(params).__name__}, "
                f"so there is nothing to average. It has {types}.\n"
                "Fix: pass a filter for the Variables to average, such as only=nnx.Param."
            )
        self.params = clone(chosen)

    def update(self, updates: Any) -> None:
        """Moves the average towards the values of a model, in place.

        Args:
          updates: the model, or a state of it.

        Raises:
          StateMismatchError: it has other Variables than the average; the paths are listed.
        """
        new = by_path(_variables(updates, self.filter, self.graph))
        self._check(new)
        for path, variable in by_path(self.params).items():
            value = new[path].get_value()
            variable.set_value(jax.tree_util.tree_map(self._moved, variable.get_value(), value))

    def _moved(self, old: Any, new: Any) -> Any:
        dtype = jnp.result_type(old)
        if not jnp.issubdtype(dtype, jnp.inexact):
            return new
        return (self.decay * old + (1 - self.decay) * new).astype(dtype)

    def apply_to(self, model: M) -> M:
        """A model like this one with the averages in place of the Variables that have one.

        Args:
          model: the model; it is not changed.

        Returns:
          The model. It has the average's Variables and otherwise the model's own.

        Raises:
          StateMismatchError: it has other Variables than the average; the paths are listed.
        """
        graphdef, variables = split(model, graph=self.graph)
        self._check(by_path(_variables(model, self.filter, self.graph)))
        return merge(graphdef, merge_state(variables, self.params))

    def _check(self, new: dict[Path, Any]) -> None:
        check_entries(
            by_path(self.params),
            new,
            mismatch,
            summary="These are not the Variables that the EMA was made for.",
            titles=("Missing", "New", "Of another type"),
            fix="pass the model that the EMA was made for, or make another EMA.",
        )


def _variables(params: Any, only: Filter, graph: bool | None) -> Any:
    """The Variables to average as a state."""
    found = state(params, only, graph=graph)
    for path, leaf in by_path(found).items():
        if not isinstance(leaf, Variable):
            raise TypeError(
                f"EMA only supports Variable leaves, got {type(leaf).__name__} at path "
                f"{path_string(path) or '(the root)'}.\n"
                "Fix: select Variables with the `only` filter, such as only=nnx.Param."
            )
    return found
