"""``ToNNX`` and ``ToLinen`` under the module name that Flax has for them, and ``functional``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from linnet.errors import BridgeError
from linnet.nnx.bridge.linen_in_nnx import (
    ToNNX as ToNNX,
    current_linen_module as current_linen_module,
    lazy_init as lazy_init,
)
from linnet.nnx.bridge.nnx_in_linen import (
    ToLinen as ToLinen,
    linen_rngs_dict as linen_rngs_dict,
    to_linen as to_linen,
    to_linen_class as to_linen_class,
)
from linnet.nnx.graphlib import GraphDef, split
from linnet.nnx.modules.module import Module
from linnet.nnx.rnglib.streams import Rngs
from linnet.nnx.statelib import State

M = TypeVar("M", bound=Module)


@dataclasses.dataclass
class Functional(Generic[M]):
    """An NNX class with the arguments of its constructor, used as Linen modules are.

    Args:
      module_type: the class.
      graphdef: the structure of the module, once ``init`` has made it.
      args: positional arguments of the constructor.
      kwargs: keyword arguments of the constructor.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> layer = nnx.bridge.functional(nnx.Linear)(2, 3)
      >>> state = layer.init(rngs=nnx.Rngs(0))
      >>> y, (graphdef, state) = layer.apply(state)(jnp.ones((1, 2)))
      >>> y.shape
      (1, 3)
    """

    module_type: type[M]
    graphdef: GraphDef[M] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def init(self, *, rngs: Rngs | None = None) -> State:
        """Makes the module.

        Args:
          rngs: random streams for the constructor, if it takes some.

        Returns:
          Its state.
        """
        streams = {} if rngs is None else {"rngs": rngs}
        self.graphdef, made = split(self.module_type(*self.args, **self.kwargs, **streams))
        return made

    def apply(self, *states: Any) -> Any:
        """Something to call in the place of the module.

        Args:
          *states: the states of the module.

        Returns:
          A callable that returns the output and ``(graphdef, state)``; so do its methods.

        Raises:
          BridgeError: ``init`` has not been called.
        """
        if self.graphdef is None:
            raise BridgeError(
                f"The {self.module_type.__name__} has no structure before init was called.\n"
                "Fix: state = functional.init(rngs=nnx.Rngs(0)) first."
            )
        return self.graphdef.apply(*states)


def functional(cls: type[M]) -> Callable[..., Functional[M]]:
    """Makes an NNX class usable as Linen modules are: construct, ``init``, ``apply``.

    Args:
      cls: the class.

    Returns:
      A function of the constructor's arguments that returns a ``Functional``.

    Example:
      >>> from linnet import nnx
      >>> list(nnx.bridge.functional(nnx.Linear)(2, 3).init(rngs=nnx.Rngs(0)))
      ['bias', 'kernel']
    """

    def construct(*args: Any, **kwargs: Any) -> Functional[M]:
        return Functional(cls, None, args, kwargs)

    return construct
