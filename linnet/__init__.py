"""Linnet: neural networks on JAX.

- ``nnx``, ``linen`` (on ``core``): models as Python objects, and models as descriptions.
- ``functional``: the maths of the layers, for both. ``errors``: all errors and warnings.
- ``training``: the loop around a model. ``io``: checkpoints, weights files, exported programs.
- ``as_flax``: programs that import Flax. ``migration``: Linen source rewritten for NNX.
- ``config``, ``typing``, ``ids``, ``tables``, ``cursor``, ``frozen_dict``: what the others share.
- ``struct``, ``serialization``, ``traverse_util``, ``jax_utils``, ``experimental``: under the names
  that programs import.

The parts load when they are first used, as ``linnet.nnx`` or by an import; ``migration``,
``tables`` and ``frozen_dict`` only by an import. ``python -m linnet program.py`` therefore loads
JAX no earlier than the program does, which may have settings of its own for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from linnet import as_flax as as_flax

if TYPE_CHECKING:
    from linnet import (
        config as config,
        core as core,
        cursor as cursor,
        errors as errors,
        experimental as experimental,
        functional as functional,
        ids as ids,
        io as io,
        jax_utils as jax_utils,
        linen as linen,
        nnx as nnx,
        serialization as serialization,
        struct as struct,
        training as training,
        traverse_util as traverse_util,
        typing as typing,
    )

__version__ = "0.1.0"

_PARTS = (
    "config core cursor errors experimental functional ids io jax_utils linen nnx serialization "
    "struct training traverse_util typing"
).split()


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return import_module(f"linnet.{name}")
    raise AttributeError(f"module 'linnet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PARTS})


def load_ipython_extension(ipython: Any) -> None:
    """``%load_ext linnet``: from here on the notebook's Flax programs run on Linnet."""
    as_flax.install()


def unload_ipython_extension(ipython: Any) -> None:
    """``%unload_ext linnet``: imports of Flax find Flax again, if it is installed."""
    as_flax.uninstall()
