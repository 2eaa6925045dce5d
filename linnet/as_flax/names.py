"""Which module of Linnet stands for which of Flax, and what is said of a name that is not there."""

import sys
from importlib.util import find_spec
from opcode import opmap

# The version whose API Linnet offers. `linnet.__version__` is Linnet's own.
FLAX_VERSION = "0.12.8"

# What `flax` has. The other modules are Linnet's own; `linnet.io` is not what `flax.io` is.
PARTS = frozenset(
    (
        "config configurations core cursor errors experimental ids jax_utils linen nnx "
        "serialization struct training traverse_util typing version"
    ).split()
)

# Modules that have another name in Linnet.
RENAMED = {
    "flax.configurations": "linnet.config",
    "flax.io": "linnet.as_flax.files",
    "flax.nnx.ids": "linnet.ids",
    "flax.version": "linnet.as_flax.version",
}

_IMPORT_FROM = opmap["IMPORT_FROM"]


def linnet_name_of(flax_name: str) -> str | None:
    """The module of Linnet that stands for a module of Flax, or None.

    Looking for it loads the packages that it is in, as ``importlib.util.find_spec`` does.

    Example:
      >>> for name in ("flax.nnx.nn.linear", "flax.nnx.nowhere", "flax.functional"):
      ...     print(linnet_name_of(name))
      linnet.nnx.nn.linear
      None
      None
    """
    if flax_name in RENAMED:
        return RENAMED[flax_name]
    _, part, *_ = [*flax_name.split("."), ""]
    if part not in PARTS:
        return None
    home = f"linnet{flax_name.removeprefix('flax')}"
    try:
        return home if find_spec(home) is not None else None
    except ModuleNotFoundError:  # the module that it would be in is missing, or no package
        return None


def flax_name_of(module: str) -> str:
    """The name under which Flax has a module of Linnet."""
    renamed = {home: flax_name for flax_name, home in RENAMED.items()}
    _, dot, rest = module.partition(".")
    return renamed.get(module, f"flax{dot}{rest}")


def lacking(flax_name: str) -> str:
    """What is said when a program asks for something that Linnet does not have."""
    return (
        f"Linnet has no {flax_name}, and stands in for Flax here "
        f"(it offers the API of Flax {FLAX_VERSION}).\n"
        "Fix: python -m linnet --check PROGRAM lists all names that are missing; a library that "
        "must have Flax itself is left out with --exclude LIBRARY."
    )


def missing_name(module: str, name: str) -> Exception:
    """The error for a name that a module lacks, to be raised by its ``__getattr__``.

    ``from module import name`` wants an ImportError, ``module.name`` an AttributeError. Python
    words the first one itself unless the lookup raises it.
    """
    frame = sys._getframe(2)  # the code that asked for the name
    text = (
        f"module {module!r} has no attribute {name!r}: {lacking(f'{flax_name_of(module)}.{name}')}"
    )
    position = frame.f_lasti
    if position >= 0 and frame.f_code.co_code[position] == _IMPORT_FROM:
        return ImportError(text, name=module)
    return AttributeError(text, name=name, obj=sys.modules.get(module))
