"""TrainState: parameters, an optimizer and a count of steps as one immutable value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

from linnet import struct
from linnet.errors import TransformationError
from linnet.nnx.training.optimizer import check_gradients

# A collection of Linen whose gradients are its new values, such as the scales of 8-bit products.
OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"


class TrainState(struct.PyTreeNode):
    """Parameters, the function that uses them, an Optax transformation, and a count of steps.

    Subclasses add fields, such as other variables of the model.

    Args:
      step: the count of steps.
      apply_fn: the function, such as ``model.apply`` or ``graphdef.apply``.
      params: the parameters, any pytree.
      tx: an Optax transformation.
      opt_state: its state.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import optax
      >>> from linnet.training.train_state import TrainState
      >>> state = TrainState.create(
      ...     apply_fn=lambda params, x: params["w"] * x,
      ...     params={"w": jnp.array(2.0)},
      ...     tx=optax.sgd(0.5),
      ... )
      >>> grads = jax.grad(lambda params: state.apply_fn(params, 3.0))(state.params)
      >>> state = state.apply_gradients(grads=grads)
      >>> float(state.params["w"]), state.step
      (0.5, 1)
    """

    step: Any
    apply_fn: Callable[..., Any] = struct.field(pytree_node=False)
    params: Any = struct.field(pytree_node=True)
    tx: Any = struct.field(pytree_node=False)
    opt_state: Any = struct.field(pytree_node=True)

    @classmethod
    def create(cls, *, apply_fn: Any, params: Any, tx: Any, **kwargs: Any) -> Self:
        """A train state at step 0.

        Args:
          apply_fn: the function that uses the parameters.
          params: the parameters.
          tx: an Optax transformation.
          **kwargs: the fields that a subclass adds.

        Returns:
          The train state.

        Raises:
          TransformationError: ``tx`` is no Optax transformation.
        """
        if not hasattr(tx, "init") or not hasattr(tx, "update"):
            raise TransformationError(
                "TrainState takes an Optax transformation with init and update as tx, but got "
                f"{getattr(tx, '__name__', None) or type(tx).__name__}.\n"
                "Fix: TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))."
            )
        opt_state = tx.init(_optimized(params))
        return cls(step=0, apply_fn=apply_fn, params=params, tx=tx, opt_state=opt_state, **kwargs)

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> Self:
        """The train state after one step.

        Args:
          grads: the gradients of ``params``.
          **kwargs: fields to replace as well.

        Returns:
          The new train state.

        Raises:
          StateMismatchError: the gradients are not those of ``params``; the paths are listed.
        """
        import optax

        check_gradients(self.params, grads)
        params = _optimized(self.params)
        updates, opt_state = self.tx.update(_optimized(grads), self.opt_state, params)
        new = optax.apply_updates(params, updates)
        if _is_divided(self.params):
            new = {"params": new, OVERWRITE_WITH_GRADIENT: grads[OVERWRITE_WITH_GRADIENT]}
        return self.replace(step=self.step + 1, params=new, opt_state=opt_state, **kwargs)


def _is_divided(params: Any) -> bool:
    return isinstance(params, Mapping) and OVERWRITE_WITH_GRADIENT in params


def _optimized(params: Any) -> Any:
    return params["params"] if _is_divided(params) else params
