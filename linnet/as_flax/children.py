"""Child processes run on Linnet, too: variables in the environment, and a folder on the path.

A child of the same interpreter imports ``sitecustomize`` when it starts, and finds the one in the
folder ``for_children``, which installs Linnet as Flax and then runs the one that would have been
found without it. Nothing is written anywhere. Interpreters that ignore the environment (``-E``,
``-I``) or leave out ``site`` (``-S``) are not reached.
"""

import os
import sys
from collections.abc import Iterable

INTERPRETER = "LINNET_AS_FLAX"
EXCLUDED = "LINNET_AS_FLAX_EXCLUDE"
FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "for_children")


def hand_down(excluded: Iterable[str]) -> None:
    """Writes into the environment what children shall do."""
    os.environ[INTERPRETER] = this_interpreter()
    os.environ[EXCLUDED] = ",".join(sorted(excluded))
    os.environ["PYTHONPATH"] = os.pathsep.join([FOLDER, *_other_folders()])


def take_back() -> None:
    """Leaves the environment as it was before."""
    os.environ.pop(INTERPRETER, None)
    os.environ.pop(EXCLUDED, None)
    if others := _other_folders():
        os.environ["PYTHONPATH"] = os.pathsep.join(others)
    else:
        os.environ.pop("PYTHONPATH", None)


def this_interpreter() -> str:
    """What a child compares, to know whether it runs on the interpreter of its parent."""
    return f"{sys.prefix}:{sys.implementation.cache_tag}"


def excluded_in_environment() -> list[str]:
    """The libraries that the environment excludes."""
    return [name for name in os.environ.get(EXCLUDED, "").split(",") if name]


def _other_folders() -> list[str]:
    text = os.environ.get("PYTHONPATH", "")
    return [folder for folder in text.split(os.pathsep) if folder != FOLDER] if text else []
