"""Loss scaling for float16, as a pytree that a training state can hold."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from linnet import struct
from linnet.functional import losses


class DynamicScale(struct.PyTreeNode):
    """A scale for losses that adjusts itself, so that gradients fit into float16.

    For live modules and ``nnx.Optimizer`` there is ``nnx.LossScale``.

    Args:
      growth_factor: what the scale is multiplied with to grow.
      backoff_factor: what it is multiplied with when a gradient is not finite.
      growth_interval: how many finite steps in a row come before the one in which the scale grows.
      fin_steps: how many finite steps since the scale changed.
      scale: the scale.
      minimum_scale: the scale does not shrink below this; None for no limit.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from linnet.training.dynamic_scale import DynamicScale
      >>> state = DynamicScale(scale=1024.0)
      >>> x = jnp.array([1.0, 2.0])
      >>> state, finite, loss, grads = state.value_and_grad(lambda x: (x**2).sum())(x)
      >>> x = jax.tree.map(lambda x, g: jnp.where(finite, x - 0.1 * g, x), x, grads)
      >>> float(loss), grads, x
      (5.0, Array([2., 4.], dtype=float32), Array([0.8, 1.6], dtype=float32))
    """

    growth_factor: float = struct.field(pytree_node=False, default=2.0)
    backoff_factor: float = struct.field(pytree_node=False, default=0.5)
    growth_interval: int = struct.field(pytree_node=False, default=2000)
    fin_steps: Any = 0
    scale: Any = 65536.0
    minimum_scale: float | None = struct.field(pytree_node=False, default=losses.SMALLEST)

    def value_and_grad(
        self,
        fun: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        axis_name: str | None = None,
    ) -> "Callable[..., DynamicScaleResult]":
        """``jax.value_and_grad`` of a loss that is scaled before it is differentiated.

        Args:
          fun: the function; its value is a scalar.
          argnums: what to differentiate with respect to.
          has_aux: the function returns ``(value, aux)``.
          axis_name: a mapped axis to average the gradients over.

        Returns:
          A function of the same arguments that returns a ``DynamicScaleResult``. Gradients are in
          at least float32.
        """
        scaled = losses.scaled_loss(fun, self.scale, has_aux)
        differentiate = jax.value_and_grad(scaled, argnums, has_aux=True)

        def run(*args: Any, **kwargs: Any) -> "DynamicScaleResult":
            (_, out), grads = differentiate(*args, **kwargs)
            grads = losses.unscaled(grads, self.scale, axis_name)
            finite = losses.all_finite(grads)
            scale, steps = losses.next_scale(self.scale, self.fin_steps, finite, self)
            new = self.replace(fin_steps=steps, scale=scale)
            return DynamicScaleResult(new, finite, out, grads)

        return run


# After DynamicScale: Python evaluates the annotations of a NamedTuple when the class is defined.
class DynamicScaleResult(NamedTuple):
    """What ``DynamicScale.value_and_grad`` gives.

    Args:
      dynamic_scale: the scale of the next step.
      finite: whether all gradients are finite; if not, leave the step out.
      aux: the value of the function, or ``(value, aux)``.
      grad: the gradients, the scale taken out again.
    """

    dynamic_scale: DynamicScale
    finite: Any
    aux: Any
    grad: Any
