"""The finder that makes ``import flax.X`` give the module ``linnet.X`` itself.

Python asks the finders of ``sys.meta_path`` for a module that is not in ``sys.modules``. This one
is the first in the list, so an installed Flax is never looked at. There is one module object with
two entries in ``sys.modules``, and so one set of classes: what a library makes of
``flax.nnx.Linear`` is an instance of ``linnet.nnx.Linear``. The module keeps its own ``__name__``
and ``__spec__``, so that classes print, pickle and reload as Linnet's.
"""

import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from linnet.as_flax.names import FLAX_VERSION, flax_name_of, lacking, linnet_name_of, missing_name

FACADE = Path(__file__).with_name("facade.py")


class FlaxFinder(MetaPathFinder):
    """Finds ``flax``, its modules and its version."""

    def __init__(self) -> None:
        self.sleeping = False  # while an excluded library imports the real Flax

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root, _, rest = fullname.partition(".")
        if root != "flax" or self.sleeping:
            return None
        if not rest:
            spec = spec_from_file_location("flax", FACADE)
            assert spec is not None
            # No folders: what this finder does not find under flax, nobody does.
            spec.submodule_search_locations = []
            return spec
        home = linnet_name_of(fullname)
        if home is not None:
            return ModuleSpec(fullname, _SameModule(home), origin=home)
        # An import gets our message; importlib.util.find_spec, which only looks, gets None.
        if sys._getframe(2).f_code.co_name == "_find_and_load_unlocked":
            text = f"No module named {fullname!r}: {lacking(fullname)}"
            raise ModuleNotFoundError(text, name=fullname)
        return None

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        """Answers ``importlib.metadata.version("flax")``, whether Flax is installed or not."""
        name = None if context is None else context.name
        return [_Offered()] if name is None or name.lower() == "flax" else []


class _SameModule(Loader):
    """Gives the module of Linnet itself to an import of a name of Flax."""

    def __init__(self, home: str):
        self.home = home
        self.spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self.home)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # the import system has put the spec of Flax's name there
        _lend(module)
        for name, inner in sys.modules.copy().items():
            if name.startswith(f"{self.home}."):
                sys.modules.setdefault(flax_name_of(name), inner)
                _lend(inner)


def _lend(module: ModuleType) -> None:
    if type(module) is ModuleType:  # linnet.config has a class of its own
        module.__class__ = LentModule


class LentModule(ModuleType):
    """A module of Linnet that programs see under a name of Flax, too."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        inner = f"{flax_name_of(self.__name__)}.{name}"
        if hasattr(self, "__path__") and linnet_name_of(inner) is not None:
            return import_module(inner)  # in Flax another module would have imported it by now
        raise missing_name(self.__name__, name)


class _Offered(Distribution):
    """What package metadata says of Flax: the version whose API is offered."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return (
            f"Metadata-Version: 2.1\nName: flax\nVersion: {FLAX_VERSION}\n"
            "Summary: Linnet, which stands in for Flax here\n"
        )

    def locate_file(self, path: Any) -> Path:
        return FACADE.parents[2] / path
