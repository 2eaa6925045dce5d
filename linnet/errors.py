"""The errors Linnet raises on purpose, and how a path is printed in them.

Every message says what went wrong, where (the path of the module or Variable), what was found there
and how to mend it. Each error is a subclass of the builtin that programs already catch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

Path = tuple[Hashable, ...]


def path_string(path: Iterable[Any], root: str = "") -> str:
    """Prints a path the way Python would spell the access.

    Args:
      path: attribute names, list positions and dict keys, outermost first.
      root: what stands before the first step, such as the name of an argument.

    Returns:
      The text, for example ``model.blocks[3].kernel``.

    Example:
      >>> path_string(("blocks", 3, "kernel"), root="model")
      'model.blocks[3].kernel'
      >>> path_string(("scores", "top 5"))
      ".scores['top 5']"
    """
    steps = []
    for step in path:
        if isinstance(step, str) and step.isidentifier():
            steps.append(f".{step}")
        else:
            steps.append(f"[{step!r}]")
    return root + "".join(steps)


_MOST_LISTED = 10


def list_lines(lines: Iterable[str], most: int = _MOST_LISTED) -> str:
    """One indented line for each of the first ones, and how many more there are.

    Example:
      >>> print(list_lines(f"layer {n}" for n in range(12)).splitlines()[-1])
        - and 2 more
    """
    lines = list(lines)
    more = len(lines) - most
    shown = [*lines[:most], f"and {more} more"] if more > 0 else lines
    return "\n".join(f"  - {line}" for line in shown)


def list_paths(paths: Iterable[Any]) -> str:
    """The first ten paths, one indented line each, for the body of a message."""
    return list_lines(path_string(path) or "(the root)" for path in paths)


def name_some(names: Iterable[str]) -> str:
    """The first ten names in one line, and how many more there are.

    Example:
      >>> name_some("abc"), name_some("abcdefghijkl")
      ('a, b, c', 'a, b, c, d, e, f, g, h, i, j and 2 more')
    """
    names = list(names)
    more = len(names) - _MOST_LISTED
    return ", ".join(names[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


def integer_hint(key: Any, known: Iterable[Any]) -> str:
    """What to say of a key that is the text of an integer among those that are known."""
    if not isinstance(key, str) or not key.isdecimal() or int(key) not in known:
        return ""
    return f"the key is the integer {key}; nnx.restore_int_paths turns text into integers"


class LinnetError(Exception):
    """The base of the errors that are not also a plain ``ValueError`` or ``TypeError``."""


FlaxError = LinnetError


class TraceContextError(LinnetError):
    """A Variable or an object was changed from another trace than the one it belongs to."""


class StateMismatchError(ValueError):
    """A state does not fit the structure it was given for."""


class MissingEntryError(KeyError):
    """A state has no entry of that name."""

    def __str__(self) -> str:
        return str(self.args[0])


class SharedReferenceError(ValueError):
    """An object or a Variable stands in two places where only a tree is allowed."""


class CyclicReferenceError(SharedReferenceError, RecursionError):
    """An object that holds itself was given to JAX, which knows only trees."""


class AbstractValueError(TypeError):
    """A value was asked of a Variable that has only a shape and a dtype."""


class UntraceableError(TypeError):
    """An argument of a compiled function is no array."""


class FilterError(ValueError):
    """Something that is not a filter, or filters that do not cover what they must."""


class HiddenDataWarning(UserWarning):
    """Variables or modules in a container that modules do not look into."""


class LostVariableWarning(UserWarning):
    """A plain array took the place of a Variable."""


class StaticDataError(ValueError):
    """An array, a Variable or a module was put into a static attribute."""


class StorageError(ValueError):
    """A Variable's storage (a JAX ref) cannot hold what it was asked to hold."""


class MissingStreamAttributeError(AttributeError):
    """No random stream of that name, and no default stream to stand in for it."""


class MissingStreamKeyError(KeyError):
    """The same, asked for with square brackets."""

    def __str__(self) -> str:
        return str(self.args[0])


class SharedNoiseWarning(UserWarning):
    """Every example of a mapped axis draws the same random numbers."""


class InPlaceError(ValueError, NotImplementedError):
    """An in-place operator that would give a Variable another shape or dtype."""


class DonatedBufferError(RuntimeError, ValueError):
    """A Variable's buffer was given to an earlier call that was allowed to reuse it."""


class AxisError(ValueError):
    """An axis that an array does not have, or axes whose sizes differ."""


class GradientTypeError(TypeError):
    """A gradient was asked for with respect to something that has none, such as integers."""


class CarryError(TypeError, ValueError):
    """What a loop carries changed its structure, shape or dtype."""


class DroppedWriteWarning(UserWarning):
    """A step of a scan wrote to something that is the same in every step."""


class BranchError(TypeError, ValueError):
    """The branches of a condition do different things to their operands."""


class StaleConstantWarning(UserWarning):
    """A Variable was changed that a compiled function had taken as a constant."""


class FeatureError(TypeError, ValueError):
    """The input of a layer has another size, rank or dtype than the layer was built for."""


class LayerArgumentError(TypeError, ValueError, AssertionError):
    """A layer was built with arguments that do not fit together."""


class RngsError(AttributeError, TypeError, ValueError):
    """A layer needs random keys and was given nothing to draw them from."""


class ModeError(ValueError):
    """A layer was not told whether it trains or evaluates."""


class PrecisionError(ValueError, TypeError):
    """Something that is not a precision policy, or a dtype that none can have."""


class TransformationError(AttributeError, TypeError):
    """An optimizer was built with something that is no Optax transformation."""


class MetricError(TypeError, ValueError):
    """A metric was given arguments that it does not know, or whose shapes do not fit."""


class SummaryError(TypeError, ValueError, KeyError):
    """A summary was asked for of something that is no model, or of what is not there."""

    def __str__(self) -> str:
        return str(self.args[0])


class CacheError(ValueError):
    """The key/value cache of an attention layer is missing, full, or of another shape."""


class DataError(ValueError, TypeError):
    """There are no batches to train on."""


class RecordError(TypeError, ValueError):
    """Something was logged that is not a single number."""


class ShapeChangeWarning(UserWarning):
    """The batches of a training loop have many shapes, and each is compiled."""


class MissingPackageError(ImportError):
    """A package that only an extra brings along is not installed."""


class CheckpointMismatchError(StateMismatchError):
    """A checkpoint does not hold what is to be restored from it.

    Args:
      message: the text.
      problems: each entry that does not fit.
    """

    def __init__(self, message: str, problems: Iterable[Any] = ()):
        super().__init__(message)
        self.problems = list(problems)


class CheckpointNotFoundError(FileNotFoundError):
    """There is no checkpoint where one was looked for."""


class NotACheckpointError(ValueError):
    """A file or folder that some other program wrote."""


class DamagedCheckpointError(ValueError, OSError):
    """A checkpoint whose files are not what was written."""


class DamagedCheckpointWarning(UserWarning):
    """A damaged checkpoint was passed over for an older one."""


class CheckpointWriteError(OSError):
    """A checkpoint could not be written."""

    def __str__(self) -> str:
        return self.strerror or super().__str__()


class CheckpointExistsError(FileExistsError, ValueError):
    """There is something already where a checkpoint was to be written."""


class CheckpointBusyError(BlockingIOError):
    """Another process is saving to the same place."""


class TensorFileError(DamagedCheckpointError):
    """A safetensors file or index that is damaged, or was made to do harm."""


class UnsafePathError(ValueError):
    """A file that leads out of its folder, or that is no regular file."""


class NameMapError(ValueError):
    """A map of names that is none, or that does not fit the model."""


class ExportError(TypeError, ValueError):
    """A model, its arguments or its outputs cannot be exported."""


class CheckpointArgumentError(TypeError, ValueError):
    """An argument of a function of ``linnet.io`` that it cannot use."""


class UnstorableError(TypeError, ValueError):
    """A value that a checkpoint cannot hold."""


class RenameError(ValueError):
    """A map of renamed paths that is no such map, or gives two entries one path."""


class SerializationError(ValueError, TypeError, AssertionError):
    """Bytes that are no serialized tree, or a tree that cannot be serialized."""
