"""Precision policies of models."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from linnet.errors import PrecisionError
from linnet.functional.precision import Policy as Policy
from linnet.functional.precision import as_policy
from linnet.functional.precision import precision as precision
from linnet.nnx.calling import POLICY
from linnet.nnx.graphlib.traverse import iter_graph
from linnet.nnx.module import iter_modules
from linnet.nnx.variablelib import Param


def set_precision(model: Any, policy: Any) -> None:
    """Gives a model a precision policy, in place; see ``nnx.precision`` for what it means.

    Every module below carries it from now on, as the static attribute ``precision_policy``, and
    obeys it however it is called. Inside of the model's call, ``with nnx.precision(...)`` and
    modules that were given another policy later count. The floating-point parameters are brought to
    ``params``; make the optimizer afterwards.

    Args:
      model: a module, or any pytree of modules.
      policy: an ``nnx.Policy`` or a short form of one; None to have none.

    Raises:
      PrecisionError: it is no policy, or there is no module to call in ``model``.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> rngs = nnx.Rngs(0)
      >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=rngs), nnx.LayerNorm(3, rngs=rngs))
      >>> nnx.set_precision(model, "compute=bfloat16,output=float32")
      >>> model(jnp.ones((1, 2))).dtype
      dtype('float32')
      >>> model.precision_policy
      Policy(compute=bfloat16, output=float32)
    """
    new = None if policy is None else as_policy(policy)
    modules = [module for _, module in iter_modules(model, graph=True) if callable(module)]
    if not modules:
        raise PrecisionError(
            f"set_precision found no module that can be called in {type(model).__name__}.\n"
            "Fix: pass a module, or a list or dict of modules."
        )
    for module in modules:
        if new is not None:
            setattr(module, POLICY, new)
        elif POLICY in vars(module):
            delattr(module, POLICY)
    if new is not None and new.params is not None:
        _bring_parameters(model, modules, new.params)


def _bring_parameters(model: Any, modules: list[Any], dtype: Any) -> None:
    for _, variable in iter_graph(model, graph=True):
        if isinstance(variable, Param) and jnp.issubdtype(variable.dtype, jnp.floating):
            variable.set_value(variable.get_value().astype(dtype))
    for module in modules:
        if hasattr(module, "param_dtype") and jnp.dtype(module.param_dtype) != dtype:
            module.param_dtype = dtype
