"""Loss scaling for float16 over live modules."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from linnet.functional import losses
from linnet.nnx.graphlib.split_merge import state
from linnet.nnx.graphlib.update import update_same_types
from linnet.nnx.pytreelib.objects import Pytree
from linnet.nnx.statelib import from_flat_state
from linnet.nnx.training.optimizer import by_path
from linnet.nnx.transforms.grad import value_and_grad
from linnet.nnx.variablelib.variable import OptState, stored_value


class LossScale(Pytree):
    """A scale for losses that adjusts itself, so that gradients fit into float16.

    Small gradients are zero in float16. The loss is multiplied by the scale before it is
    differentiated and the gradients are divided by it; where they are not finite, the scale was too
    large: the step is left out and the scale shrinks.

    Args:
      scale: the scale to begin with.
      growth_factor: what the scale is multiplied with to grow.
      backoff_factor: what it is multiplied with when a gradient is not finite.
      growth_interval: how many finite steps in a row come before the one in which the scale grows.
      minimum_scale: the scale does not shrink below this; None for no limit.

    Raises:
      ValueError: the scale is not positive and finite.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from linnet import nnx
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> nnx.set_precision(model, "mixed_float16")
      >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
      >>> loss_scale = nnx.LossScale()
      >>> @nnx.jit
      ... def train_step(model, optimizer, loss_scale, x):
      ...     loss_fn = lambda model: (model(x) ** 2).mean()
      ...     loss, grads = loss_scale.value_and_grad(loss_fn)(model)
      ...     finite = loss_scale.update(optimizer, model, grads)
      ...     return loss, finite
      >>> loss, finite = train_step(model, optimizer, loss_scale, jnp.ones((1, 2)))
      >>> bool(finite), int(optimizer.step.value), float(loss_scale.scale.value)
      (True, 1, 65536.0)
    """

    def __init__(
        self,
        scale: float = 65536.0,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        minimum_scale: float | None = float(losses.SMALLEST),
    ):
        if isinstance(scale, numbers.Real) and not 0 < scale < math.inf:
            raise ValueError(
                f"LossScale got scale={scale}, which is not positive and finite: losses are "
                "multiplied by it and gradients divided.\nFix: nnx.LossScale(65536.0)."
            )
        self.scale = OptState(jnp.asarray(scale, jnp.float32))
        self.fin_steps = OptState(jnp.zeros((), jnp.int32))
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.minimum_scale = minimum_scale

    def value_and_grad(
        self,
        fun: Callable[..., Any],
        *,
        has_aux: bool = False,
        axis_name: str | None = None,
        **options: Any,
    ) -> Callable[..., Any]:
        """``nnx.value_and_grad`` of a loss that is scaled before it is differentiated.

        Args:
          fun: the function; its value is a scalar.
          has_aux: the function returns ``(value, aux)``.
          axis_name: a mapped axis to average the gradients over.
          **options: as for ``nnx.value_and_grad``, ``argnums`` among them.

        Returns:
          A function of the same arguments that returns ``(value, grads)``, or ``((value, aux),
          grads)``: the value as ``fun`` gave it, and the gradients with the scale taken out again,
          in at least float32.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            scale = self.scale.get_value()
            scaled = losses.scaled_loss(fun, scale, has_aux)
            differentiate = value_and_grad(scaled, has_aux=True, **options)
            (_, out), grads = differentiate(*args, **kwargs)
            return out, losses.unscaled(grads, scale, axis_name)

        return run

    def update(self, optimizer: Any, model: Any, grads: Any = None, /, **kwargs: Any) -> jax.Array:
        """Takes a step of an optimizer if the gradients are finite, and adjusts the scale.

        Args:
          optimizer: an ``nnx.Optimizer``, or anything with its ``update``.
          model: the model; left out for an optimizer that keeps its model.
          grads: the gradients.
          **kwargs: passed on to ``optimizer.update``.

        Returns:
          Whether the gradients are finite. If not, all that ``optimizer.update`` changes stays as
          it was.
        """
        given = (model,) if grads is None else (model, grads)
        finite = losses.all_finite(given[-1])
        changing = (optimizer, *given[:-1])
        before = _values(changing)
        optimizer.update(*given, **kwargs)
        after = _values(changing)
        moved = {path: value for path, value in after.items() if value is not before[path]}
        kept = {path: before[path] for path in moved}
        update_same_types(changing, from_flat_state(losses.where_finite(finite, moved, kept)))
        held = (self.scale.get_value(), self.fin_steps.get_value())
        scale, steps = losses.next_scale(*held, finite, self)
        self.scale.set_value(scale)
        self.fin_steps.set_value(steps)
        return finite


def _values(objects: Any) -> dict[Any, Any]:
    """The current arrays of objects by path."""
    return {path: stored_value(leaf) for path, leaf in by_path(state(objects)).items()}
