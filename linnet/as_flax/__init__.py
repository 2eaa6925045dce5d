"""Programs written for Flax run on Linnet, without a change.

``python -m linnet program.py`` runs one. ``pytest -p linnet.as_flax`` tests one, ``%load_ext
linnet`` is for notebooks, and ``install()`` does it from code. From then on ``import flax`` and
everything below it gives Linnet's modules, in child processes too, whether Flax is installed or
not; libraries that import Flax get the same classes. See docs/unchanged.md.

``names``      which module of Linnet stands for which of Flax, and what is said of missing names
``finder``     the import finder that gives Linnet's modules under Flax's names
``facade``     the module ``flax`` itself and its parts; ``version`` is ``flax.version``, ``files``
               is ``flax.io``
``exclusion``  the real Flax for libraries that are excluded by name
``children``   how child processes inherit it; ``for_children`` is what they run first
``program``    running a script, module or text as ``python`` would
``check``      reading a program for Flax names that Linnet lacks

pytest imports this as a plugin, and must not rewrite it, as its workers load it before:
PYTEST_DONT_REWRITE
"""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from linnet.as_flax import children
from linnet.as_flax.exclusion import Exclusion, flax_modules
from linnet.as_flax.finder import FlaxFinder, LentModule
from linnet.as_flax.names import FLAX_VERSION as FLAX_VERSION
from linnet.errors import FlaxLoadedError, misfit_text

_finder = FlaxFinder()
_exclusion = Exclusion(_finder)


def install(exclude: Iterable[str] = ()) -> None:
    """Makes ``import flax`` give Linnet from here on, in child processes too.

    Installing twice is the same as once; libraries to exclude add up.

    Args:
      exclude: names of packages whose import statements get the real Flax, which has to be
        installed then. Objects of the two libraries do not mix.

    Raises:
      FlaxLoadedError: the real Flax is loaded already, by a module that the error names.

    Example:
      >>> from linnet import as_flax, nnx
      >>> as_flax.install()
      >>> from flax.nnx import Linear
      >>> Linear is nnx.Linear
      True
      >>> as_flax.uninstall()
    """
    if _finder not in sys.meta_path:
        if flax_modules():
            what = (
                "Linnet cannot stand in for Flax: Flax is loaded already, and there would be two "
                "sets of classes. These modules imported it"
            )
            fix = (
                "start the program with `python -m linnet`, or call linnet.as_flax.install() "
                "before anything imports Flax (in a notebook, restart the kernel first)."
            )
            raise FlaxLoadedError(misfit_text({what: _who_loaded_flax()}, fix=fix))
        sys.meta_path.insert(0, _finder)
    _exclusion.add(exclude)
    children.hand_down(_exclusion.excluded)


def uninstall() -> None:
    """Undoes ``install``: imports find Flax again, if it is installed.

    What was imported before stays as it is.

    Example:
      >>> from linnet import as_flax
      >>> as_flax.install()
      >>> as_flax.uninstall()
      >>> as_flax.is_installed()
      False
    """
    if _finder not in sys.meta_path:
        return
    sys.meta_path.remove(_finder)
    for name, module in flax_modules().items():
        del sys.modules[name]
        if type(module) is LentModule:
            module.__class__ = ModuleType  # pyright: ignore[reportAttributeAccessIssue]
    _exclusion.end()
    children.take_back()


@contextlib.contextmanager
def installed(exclude: Iterable[str] = ()) -> Iterator[None]:
    """``install`` inside of a ``with`` statement; afterwards all is as it was.

    What a program imported stays usable, but it has to do its imports inside.

    Args:
      exclude: as for ``install``.

    Returns:
      A context manager.

    Raises:
      FlaxLoadedError: the real Flax is loaded already, by a module that the error names.

    Example:
      >>> from linnet import as_flax
      >>> with as_flax.installed():
      ...     from flax import nnx
      >>> nnx.__name__, as_flax.is_installed()
      ('linnet.nnx', False)
    """
    before = is_installed()
    install(exclude)
    try:
        yield
    finally:
        if not before:
            uninstall()


def is_installed() -> bool:
    """Whether ``import flax`` gives Linnet.

    Returns:
      True between ``install`` and ``uninstall``.

    Example:
      >>> from linnet import as_flax
      >>> as_flax.is_installed()
      False
    """
    return _finder in sys.meta_path


def install_in_child() -> None:
    """``install`` in a child process, with the exclusions of its parent."""
    install(exclude=children.excluded_in_environment())


def pytest_addoption(parser: Any) -> None:
    """``pytest -p linnet.as_flax``; pytest calls this at once, before it loads any test file."""
    install_in_child()


def _who_loaded_flax() -> list[str]:
    """A line for each module that holds the real Flax or something of it."""
    holders = {}
    for name, module in sys.modules.copy().items():
        if name.partition(".")[0] in ("flax", "linnet") or not isinstance(module, ModuleType):
            continue
        for held in list(vars(module).values()):
            if isinstance(held, (ModuleType, type, FunctionType)):
                attribute = "__name__" if isinstance(held, ModuleType) else "__module__"
                origin = str(getattr(held, attribute, ""))
                if origin.partition(".")[0] == "flax":
                    holders.setdefault(name, origin)
    if not holders:
        return ["none that still holds it; it was imported inside a function"]
    return [f"{name} (uses {origin})" for name, origin in holders.items()]
