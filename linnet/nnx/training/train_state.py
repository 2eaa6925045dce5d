"""TrainState: a split model and its optimizer as one immutable value, for functional loops."""

from __future__ import annotations

from typing import Any, Generic, Self, TypeVar

import jax.numpy as jnp

from linnet import struct
from linnet.nnx.graphlib.graphdef import GraphDef
from linnet.nnx.statelib import State
from linnet.nnx.training.optimizer import check_gradients

M = TypeVar("M")


class TrainState(struct.PyTreeNode, Generic[M]):
    """A model that was split, an Optax transformation, its state, and a count of steps.

    Subclasses add fields for other states of the split.

    Args:
      graphdef: the structure of the model.
      params: the state that is optimized.
      opt_state: the state of ``tx``.
      step: the count of steps.
      tx: an Optax transformation.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import optax
      >>> from linnet import nnx
      >>> graphdef, params = nnx.split(nnx.Linear(2, 1, rngs=nnx.Rngs(0)))
      >>> train = nnx.TrainState.create(graphdef, params=params, tx=optax.sgd(0.1))
      >>> def loss(params):
      ...     y, _ = train.apply(params)(jnp.ones((1, 2)))
      ...     return y.sum()
      >>> train = train.apply_gradients(jax.grad(loss)(train.params))
      >>> float(train.params.bias[0]), int(train.step)
      (-0.10000000149011612, 1)
    """

    graphdef: GraphDef[M]
    params: State
    opt_state: Any
    step: Any
    tx: Any = struct.field(pytree_node=False)

    @classmethod
    def create(
        cls, graphdef: GraphDef[M], *, params: Any, tx: Any, step: int = 0, **kwargs: Any
    ) -> Self:
        """A train state at its first step.

        Args:
          graphdef, params, tx: as for the class.
          step: the count to start from.
          **kwargs: the fields that a subclass adds.

        Returns:
          The train state.
        """
        return cls(
            graphdef=graphdef,
            params=params,
            tx=tx,
            opt_state=tx.init(params),
            step=jnp.asarray(step),
            **kwargs,
        )

    def apply(self, state: Any, *states: Any) -> Any:
        """Calls the model that states make, or a method of it.

        Args:
          state: a state, or the name of a field that holds one, such as ``"params"``.
          *states: more of them.

        Returns:
          A proxy; call it, or a method of it, for ``(output, (graphdef, state))``.
        """
        found = (getattr(self, s) if isinstance(s, str) else s for s in (state, *states))
        return self.graphdef.apply(*found)

    def apply_gradients(self, grads: Any, **kwargs: Any) -> Self:
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
        updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
        params = optax.apply_updates(self.params, updates)
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **kwargs)
