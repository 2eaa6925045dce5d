"""Low-rank adaptation: adds a product of two small matrices to a layer that is not trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from jax import Array

from linnet.errors import FeatureError, LayerArgumentError, type_text
from linnet.functional import initializers, linear
from linnet.functional.dtypes import default_param_dtype, promote_dtype as default_promote
from linnet.functional.initializers import Initializer
from linnet.functional.shapes import broadcast_together
from linnet.nnx.modules.module import Module
from linnet.nnx.nn.linear import Linear
from linnet.nnx.nn.params import PromoteDtype, check_features, layer_name, next_key
from linnet.nnx.variablelib.variable import Param, Variable

A = TypeVar("A")

default_a_initializer = initializers.he_uniform()
default_b_initializer = initializers.zeros


class LoRAParam(Param[A]):
    """A parameter of a low-rank adaptation, so that it can be trained alone."""


class LoRA(Module):
    """A low-rank map, ``x @ lora_a @ lora_b``, added to a base module or alone.

    Args:
      in_features: the size of the last axis of the input.
      lora_rank: the rank.
      out_features: the size of the last axis of the output.
      base_module: a module or function whose output is added.
      dtype, param_dtype, promote_dtype, rngs: as for ``Linear``.
      a_initializer, b_initializer: the initializers of ``lora_a`` and ``lora_b``.
      lora_param_type: the type of Variable of the parameters.
      a_metadata, b_metadata: metadata of ``lora_a`` and ``lora_b``.

    Raises:
      LayerArgumentError: the rank is less than 1.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> base = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
      >>> layer = nnx.LoRA(3, 2, 4, base_module=base, rngs=nnx.Rngs(1))
      >>> x = jnp.ones((1, 3))
      >>> bool((layer(x) == base(x)).all())
      True
      >>> grads = nnx.grad(lambda m: m(x).sum(), argnums=nnx.DiffState(0, nnx.LoRAParam))(layer)
      >>> list(grads)
      ['lora_a', 'lora_b']
    """

    def __init__(
        self,
        in_features: int,
        lora_rank: int,
        out_features: int,
        *,
        base_module: Callable[..., Any] | None = None,
        dtype: Any = None,
        param_dtype: Any = None,
        a_initializer: Initializer = default_a_initializer,
        b_initializer: Initializer = default_b_initializer,
        lora_param_type: type[Variable[Any]] = LoRAParam,
        promote_dtype: PromoteDtype = default_promote,
        rngs: Any,
        a_metadata: Mapping[str, Any] = {},
        b_metadata: Mapping[str, Any] = {},
    ):
        param_dtype = default_param_dtype(param_dtype)
        self.in_features = in_features
        self.out_features = out_features
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.lora_param_type = lora_param_type
        self.base_module = base_module
        self.promote_dtype = promote_dtype
        if not isinstance(lora_rank, int) or lora_rank < 1:
            raise LayerArgumentError(
                f"LoRA is a map of rank 1 or more, but got lora_rank={lora_rank!r}.\n"
                "Fix: choose a small integer, such as 8."
            )
        a = a_initializer(next_key(rngs), (in_features, lora_rank), param_dtype)
        b = b_initializer(next_key(rngs), (lora_rank, out_features), param_dtype)
        self.lora_a = lora_param_type(a, **a_metadata)
        self.lora_b = lora_param_type(b, **b_metadata)

    def __call__(self, x: Array, **kwargs: Any) -> Array:
        """Applies the layer.

        Args:
          x: ``(..., in_features)``.
          **kwargs: passed on to the base module; ``out_sharding`` holds for the low-rank map too.

        Returns:
          ``(..., out_features)``.

        Raises:
          FeatureError: the last axis has another size, or the output of the base module has.
          LayerArgumentError: the base module cannot be called.
        """
        check_features(self, x, self.in_features, "in_features")
        operands = (x, self.lora_a.get_value(), self.lora_b.get_value())
        values, a, b = self.promote_dtype(operands, dtype=self.dtype)
        sharding = kwargs.get("out_sharding")
        out = linear.low_rank(values, a, b, out_sharding=sharding)
        if self.base_module is None:
            return out
        if not callable(self.base_module):
            raise LayerArgumentError(
                f"`self.base_module` must be callable: {layer_name(self)} has "
                f"{self.base_module!r}.\nFix: pass a module, a function or None."
            )
        base = self.base_module(x, **kwargs)
        if not broadcast_together(np.shape(base), out.shape):
            raise FeatureError(
                f"{layer_name(self)} adds to the output of its base_module, and expected it to "
                f"have shape {out.shape}, but got {type_text(base)}.\n"
                f"Fix: build it with out_features={np.shape(base)[-1]}."
            )
        return out + base


class LoRALinear(Linear):
    """A ``Linear`` layer with a low-rank map added.

    Args:
      in_features, out_features, rngs, **kwargs: as for ``Linear``.
      lora_rank, a_initializer, b_initializer, lora_param_type, a_metadata, b_metadata: as for
        ``LoRA``, which is the attribute ``lora``.
      lora_dtype, lora_param_dtype, lora_promote_dtype: its ``dtype``, ``param_dtype`` and
        ``promote_dtype``.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> layer = nnx.LoRALinear(3, 4, lora_rank=2, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 3))).shape
      (1, 4)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        lora_rank: int,
        lora_dtype: Any = None,
        lora_param_dtype: Any = None,
        a_initializer: Initializer = default_a_initializer,
        b_initializer: Initializer = default_b_initializer,
        lora_param_type: type[Variable[Any]] = LoRAParam,
        lora_promote_dtype: PromoteDtype = default_promote,
        rngs: Any,
        a_metadata: Mapping[str, Any] = {},
        b_metadata: Mapping[str, Any] = {},
        **kwargs: Any,
    ):
        super().__init__(in_features, out_features, rngs=rngs, **kwargs)
        self.lora = LoRA(
            in_features,
            lora_rank,
            out_features,
            dtype=lora_dtype,
            param_dtype=lora_param_dtype,
            a_initializer=a_initializer,
            b_initializer=b_initializer,
            lora_param_type=lora_param_type,
            promote_dtype=lora_promote_dtype,
            rngs=rngs,
            a_metadata=a_metadata,
            b_metadata=b_metadata,
        )

    def __call__(self, x: Array, out_sharding: Any = None) -> Array:
        """Applies the layer; arguments and errors as for ``Linear``."""
        return super().__call__(x, out_sharding) + self.lora(x, out_sharding=out_sharding)
