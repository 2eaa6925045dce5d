"""What Python runs first in a child process; see ``linnet/as_flax/children.py``."""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

FOLDER = os.path.dirname(os.path.abspath(__file__))
HOME = os.path.dirname(os.path.dirname(os.path.dirname(FOLDER)))


def run_the_other() -> None:
    """Runs the ``sitecustomize`` that stands behind this one on the path, if there is one."""
    other = PathFinder.find_spec("sitecustomize", sys.path)
    if other is not None and other.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(other)
        other.loader.exec_module(module)


if __name__ == "sitecustomize":
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != FOLDER]
    parent = os.environ.get("LINNET_AS_FLAX")
    if parent == f"{sys.prefix}:{sys.implementation.cache_tag}":
        if importlib.util.find_spec("linnet") is None:  # the parent found it beside its program
            sys.path.append(HOME)
        importlib.import_module("linnet.as_flax").install_in_child()
    run_the_other()
