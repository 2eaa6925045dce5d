"""What a recurrent cell is, and what the cells here share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from linnet.errors import FeatureError, RngsError
from linnet.functional import initializers
from linnet.functional.initializers import Initializer
from linnet.nnx.modules.module import Module
from linnet.nnx.nn import keys
from linnet.nnx.nn.params import check_features, layer_name, shape_of
from linnet.nnx.variablelib.variable import type_text

Array = jax.Array
_orthogonal = initializers.orthogonal()


def modified_orthogonal(key: Any, shape: Any, dtype: Any = jnp.float32) -> Array:
    """An orthogonal initializer that computes in at least float32, whatever the dtype."""
    return _orthogonal(key, shape, jnp.promote_types(dtype, jnp.float32)).astype(dtype)


class RNNCellBase(Module):
    """What ``nnx.RNN`` expects of a cell: these three methods.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> class Sum(nnx.RNNCellBase):
      ...     num_feature_axes = 1
      ...     def initialize_carry(self, input_shape, rngs=None, carry_init=None):
      ...         return jnp.zeros(input_shape)
      ...     def __call__(self, carry, inputs):
      ...         return carry + inputs, carry + inputs
      >>> nnx.RNN(Sum())(jnp.ones((1, 3, 1))).ravel()
      Array([1., 2., 3.], dtype=float32)
    """

    def initialize_carry(
        self, input_shape: tuple[int, ...], rngs: Any = None, carry_init: Initializer | None = None
    ) -> Any:
        """The carry before the first step.

        Args:
          input_shape: the shape of one step's input, batch included.
          rngs: where keys come from.
          carry_init: the initializer.

        Returns:
          The carry.
        """
        raise NotImplementedError(_missing(self, "initialize_carry"))

    def __call__(self, carry: Any, inputs: Any) -> tuple[Any, Any]:
        """One step.

        Args:
          carry: what the step before handed on.
          inputs: the step's input.

        Returns:
          ``(carry, output)``.
        """
        raise NotImplementedError(_missing(self, "__call__"))

    @property
    def num_feature_axes(self) -> int:
        """How many axes of one step's input are not batch."""
        raise NotImplementedError(_missing(self, "num_feature_axes"))


def _missing(cell: Any, name: str) -> str:
    return f"{type(cell).__name__} does not define {name}.\nFix: define it, as nnx.RNN needs it."


class HiddenCell(RNNCellBase):
    """What the cells here share: the feature sizes, and a carry of equal arrays.

    ``_carries`` says how many arrays the carry has.
    """

    _carries = 1
    in_features: int
    hidden_features: int
    param_dtype: Any
    carry_init: Initializer | None
    rngs: Any

    @property
    def num_feature_axes(self) -> int:
        """How many axes of one step's input are not batch."""
        return 1

    def initialize_carry(
        self, input_shape: tuple[int, ...], rngs: Any = None, carry_init: Initializer | None = None
    ) -> Any:
        """The carry before the first step.

        Args:
          input_shape: ``(..., in_features)``.
          rngs: where keys come from, stream ``carry``; by default the cell's own.
          carry_init: the initializer; by default the cell's own, or zeros.

        Returns:
          An array ``(..., hidden_features)``, or a pair of them ``(c, h)`` for an LSTM.

        Raises:
          RngsError: the initializer needs a key and there is none.
        """
        init = carry_init or self.carry_init or initializers.zeros
        rngs = self.rngs if rngs is None else rngs
        if rngs is None and init is not initializers.zeros:
            raise RngsError(
                f"{layer_name(self)}: RNGs must be provided to initialize the cell carry, as "
                "carry_init draws.\nFix: pass rngs=nnx.Rngs(0), or build it with keep_rngs=True."
            )
        shape = (*input_shape[:-1], self.hidden_features)
        arrays = []
        for _ in range(self._carries):
            key: Any = None if rngs is None else keys.draw(self, rngs, "carry")
            arrays.append(init(key, shape, self.param_dtype))
        return tuple(arrays) if self._carries > 1 else arrays[0]

    def check(self, carry: Any, inputs: Any) -> tuple[Any, ...]:
        """Refuses a carry or an input that does not fit.

        Args:
          carry: the carry.
          inputs: one step's input, or what stands for its shape and dtype.

        Returns:
          The arrays of the carry.

        Raises:
          FeatureError: one does not fit.
        """
        check_features(self, inputs, self.in_features, "in_features")
        arrays = carry if isinstance(carry, (tuple, list)) else (carry,)
        wanted = (*shape_of(inputs)[:-1], self.hidden_features)
        if [wanted] * self._carries == [shape_of(x) for x in arrays]:
            return tuple(arrays)
        count = "an array" if self._carries == 1 else "a pair (c, h) of arrays"
        got = ", ".join(type_text(x) for x in arrays)
        raise FeatureError(
            f"{layer_name(self)} expected a carry that is {count} of shape {wanted}, but got "
            f"{got}.\nFix: make it with initialize_carry(inputs.shape)."
        )
