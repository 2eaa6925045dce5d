"""The real Flax for libraries that are excluded by name.

``sys.modules`` has one entry for each name, so the modules of the real Flax stand in it only while
an excluded library, or the real Flax itself, imports some of them; for everybody else Linnet's
stand there. ``builtins.__import__`` is the one place that sees who imports. It is replaced only if
a library is excluded, because it is called for every import statement.

So an import statement in a module of the library gets the real Flax, at the top of a file or in a
function. What looks in ``sys.modules`` itself, such as ``importlib.import_module`` and ``pickle``,
gets Linnet's.
"""

import builtins
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from linnet.as_flax.finder import FlaxFinder


def flax_modules() -> dict[str, ModuleType]:
    """The entries of ``sys.modules`` under Flax's name."""
    loaded = sys.modules.copy()
    return {name: module for name, module in loaded.items() if name.partition(".")[0] == "flax"}


class Exclusion:
    """An import function that gives the real Flax to some importers.

    Args:
      finder: the finder that sleeps while the real Flax is imported.
    """

    def __init__(self, finder: FlaxFinder):
        self.excluded: frozenset[str] = frozenset()
        self._finder = finder
        self._aside: dict[str, ModuleType] = {}  # Flax's or Linnet's, not in sys.modules
        self._import = builtins.__import__
        self._lock = threading.RLock()

    def add(self, packages: Iterable[str]) -> None:
        """Excludes packages, with their submodules, from here on."""
        before = self.excluded
        self.excluded |= frozenset(packages)
        if self.excluded and not before:
            self._import = builtins.__import__
            builtins.__import__ = self.import_

    def end(self) -> None:
        """Excludes nothing any more; the real Flax, where it was loaded, takes its place again."""
        self.excluded = frozenset()
        if builtins.__import__ == self.import_:
            builtins.__import__ = self._import
        sys.modules.update(self._aside)
        self._aside = {}

    def import_(
        self,
        name: str,
        globals: Any = None,
        locals: Any = None,
        fromlist: Any = (),
        level: int = 0,
    ) -> ModuleType:
        """``builtins.__import__``, which gives the real Flax to excluded importers."""
        importer = self._importer(globals)
        by_flax = importer.partition(".")[0] == "flax"
        if name.partition(".")[0] != "flax" and not (level and by_flax):
            return self._import(name, globals, locals, fromlist, level)
        real = by_flax or any(f"{importer}.".startswith(f"{one}.") for one in self.excluded)
        with self._lock, self._set_in_force(real):
            return self._import(name, globals, locals, fromlist, level)

    def _importer(self, namespace: Any) -> str:
        """The name of the module that imports."""
        # An importer called flax is the real Flax, or the facade: Linnet's other modules keep their
        # own names.
        namespace = namespace or {}
        name = namespace.get("__name__") or ""
        return (namespace.get("__package__") or "") if name == "__main__" else name

    @contextmanager
    def _set_in_force(self, real: bool) -> Iterator[None]:
        """Has the real Flax's modules or Linnet's in ``sys.modules`` for the length of a block."""
        if self._finder.sleeping == real:
            yield
            return
        self._exchange(real)
        try:
            yield
        finally:
            self._exchange(not real)

    def _exchange(self, real: bool) -> None:
        aside = flax_modules()
        for name in aside:
            del sys.modules[name]
        sys.modules.update(self._aside)
        self._aside = aside
        self._finder.sleeping = real
