"""The module that programs get as ``flax``: the parts of Linnet under Flax's name and version.

The finder runs this file as the module ``flax``. The parts are Linnet's own modules, not copies:
``flax.nnx is linnet.nnx``.
"""

from importlib import import_module
from typing import Any

from linnet.as_flax.names import FLAX_VERSION, PARTS, missing_name

__version__ = FLAX_VERSION


def __getattr__(name: str) -> Any:
    if name in PARTS:
        return import_module(f"flax.{name}")
    if name.startswith("__"):
        raise AttributeError(f"module 'flax' has no attribute {name!r}")
    raise missing_name("flax", name)


def __dir__() -> list[str]:
    return sorted({"__version__", "__name__", "__file__", "__path__", "__spec__", *PARTS})
