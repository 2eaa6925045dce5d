"""The errors that are not about Linen, and how messages print paths and types."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

Path = tuple[Hashable, ...]


def path_string(path: Iterable[Any], root: str = "") -> str:
    """Formats a path as Python would write the access.

    Args:
      path: attribute names, list positions and dict keys, outermost first.
      root: the text before the first step, such as the name of an argument.

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


def integer_hint(key: Any, known: Iterable[Any]) -> str:
    """A hint for a key that is the text of a known integer key; otherwise empty.

    Args:
      key: the key that was not found.
      known: the keys that there are.

    Returns:
      The hint, or an empty text.

    Example:
      >>> integer_hint("3", [3, 4])
      'the key is the integer 3; nnx.restore_int_paths turns text into integers'
    """
    if not isinstance(key, str) or not key.isdecimal() or int(key) not in known:
        return ""
    return f"the key is the integer {key}; nnx.restore_int_paths turns text into integers"


def type_text(value: Any) -> str:
    """Formats what was given: ``float32[3,4]`` for an array, type and value for the rest.

    Args:
      value: anything.

    Returns:
      The text.

    Example:
      >>> import numpy as np
      >>> type_text(np.ones((3, 4))), type_text(2)
      ('float64[3,4]', 'the Python int 2')
    """
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    return f"the Python {type(value).__name__} {value!r}"


class LinnetError(Exception):
    """The base of the errors that are a ``FlaxError`` in Flax, which is another name for it here.

    Args:
      message: the text.
    """

    def __init__(self, message: str):
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        # Subclasses take facts and word the message themselves: what is pickled is the message.
        return _with_message, (type(self), self.args), self.__dict__


def _with_message(cls: type[LinnetError], args: tuple[Any, ...]) -> LinnetError:
    return cls.__new__(cls, *args)


FlaxError = LinnetError


class TraceContextError(LinnetError):
    """A Variable or an object was changed from another trace than the one it belongs to."""


class CapturedObjectError(TraceContextError, ValueError):
    """A transformed function returned an object or a Variable that it captured from outside."""


class StateMismatchError(ValueError):
    """A state does not fit the structure it was given for."""


class _PlainKeyError(KeyError):
    def __str__(self) -> str:
        return str(self.args[0])  # where a KeyError would print quotation marks around it


class MissingEntryError(_PlainKeyError):
    """A state has no entry of that name."""


class SharedReferenceError(ValueError):
    """An object or a Variable is referenced twice where only a tree is allowed."""


class CyclicReferenceError(SharedReferenceError, RecursionError):
    """An object that contains itself was given to JAX, which accepts only trees."""


class AbstractValueError(TypeError):
    """A value was asked of a Variable that has only a shape and a dtype."""


class UntraceableError(TypeError):
    """An argument of a compiled function is no array."""


class FilterError(ValueError):
    """Something is no filter, or filters select nothing or not everything they must."""


class HiddenDataWarning(UserWarning):
    """Variables, modules or traced arrays where modules do not look for them."""


class LostVariableWarning(UserWarning):
    """A plain array took the place of a Variable."""


class UnequalCopyWarning(UserWarning):
    """A static value is not equal to a copy of itself, so that every call compiles."""


class IgnoredArgumentWarning(UserWarning):
    """An argument that has no effect."""


class StaticDataError(ValueError):
    """An array, a Variable or a module was put into a static attribute."""


class StorageError(ValueError):
    """A Variable's storage (a JAX ref) cannot hold what it was asked to hold."""


class MissingStreamAttributeError(AttributeError):
    """There is no random stream of that name and no default stream."""


class MissingStreamKeyError(_PlainKeyError):
    """``MissingStreamAttributeError`` for a stream asked for with square brackets."""


class SharedNoiseWarning(UserWarning):
    """Every example of a mapped axis draws the same random numbers."""


class InPlaceError(ValueError, NotImplementedError):
    """An in-place operator that would give a Variable another shape or dtype."""


class DonatedBufferError(RuntimeError, ValueError):
    """A Variable's buffer was given to an earlier call that was allowed to reuse it."""


class AxisError(ValueError):
    """An axis that an array does not have, or axes whose sizes differ."""


class ShardingError(AxisError):
    """A Variable that cannot be placed on a mesh as its metadata says."""


class ShardingWarning(UserWarning):
    """A Variable that the compiler may place in another way than its metadata says."""


class GradientTypeError(TypeError):
    """A gradient was asked for with respect to something that has none, such as integers."""


class GradientRuleError(TypeError, ValueError):
    """A custom gradient (``custom_vjp``) does not fit the arguments of the function."""


class MissingRuleError(AttributeError, ValueError):
    """A function of ``custom_vjp`` was called before its gradient was given."""


class CarryError(TypeError, ValueError):
    """What a loop carries changed its structure, shape or dtype."""


class DroppedWriteWarning(UserWarning):
    """A write that is not kept: a step of a scan wrote to what is the same in every step, or a
    module of NNX to a collection of Linen that cannot be written in this call."""


class CollectionError(ValueError, AssertionError):
    """A Linen variable and an NNX Variable do not go together, or two want the same place."""


class UnknownVariableWarning(UserWarning):
    """Linen variables were given that the module has no place for, or some are missing."""


class BridgeError(ValueError, AssertionError):
    """A function of ``nnx.bridge`` was used where, or on what, it does not apply."""


class BranchError(TypeError, ValueError):
    """The branches of a condition do different things to their operands."""


class StaleConstantWarning(UserWarning):
    """A Variable was changed that a compiled function had taken as a constant."""


class FeatureError(TypeError, ValueError, IndexError, AssertionError):
    """The input of a layer has another size, rank or dtype than the layer was built for."""


class LayerArgumentError(TypeError, ValueError, AssertionError, RuntimeError):
    """A layer was built with arguments that do not fit together."""


class RngsError(AttributeError, TypeError, ValueError):
    """A layer needs random keys and was given nothing to draw them from."""


class ModeError(ValueError):
    """A layer was not told whether it trains or evaluates."""


class PrecisionError(ValueError, TypeError):
    """A precision policy is invalid, or was set after the optimizer that it is about was built."""


class TransformationError(AttributeError, TypeError):
    """An optimizer was built with something that is no Optax transformation."""


class MetricError(TypeError, ValueError):
    """A metric lacks an argument, or its arguments, masks or names do not fit."""


class SummaryError(TypeError, ValueError, _PlainKeyError):
    """``nnx.tabulate`` was given something that is no model, or an unknown method or column."""


class CacheError(ValueError):
    """The key/value cache of an attention layer is missing, full, or of another shape."""


class DataError(ValueError, TypeError, OverflowError):
    """A training loop has no batches, or batches that it cannot take, or not as many as other
    processes or the run that it continues; or its arguments are invalid."""


class ProcessMismatchError(ValueError, RuntimeError):
    """The processes of one run are at different steps, or hold different things."""


class RecordError(TypeError, ValueError):
    """Something was logged that is not a single number, or under a name that is taken, or it cannot
    be written to the file of the run."""


class ShapeChangeWarning(UserWarning):
    """The batches of a training loop have many shapes, and each is compiled."""


class MissingPackageError(ImportError):
    """A package is not installed, because only an extra of Linnet requires it."""


class FlaxLoadedError(ImportError):
    """Linnet cannot stand in for Flax, because Flax is loaded."""


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
    """A file or folder is not of the format that was expected."""


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
    """Another process or thread is saving to the same place."""


class TensorFileError(DamagedCheckpointError):
    """A safetensors file or index is damaged or malicious."""


class UnsafePathError(ValueError):
    """A file path leads out of its folder, or is no regular file."""


class NameMapError(ValueError):
    """A map of names is invalid or does not fit the model."""


class ExportError(TypeError, ValueError):
    """A model, its arguments or its outputs cannot be exported."""


class CheckpointArgumentError(TypeError, ValueError):
    """An argument of a function of ``linnet.io`` that it cannot use."""


class UnstorableError(TypeError, ValueError):
    """A value that a checkpoint cannot hold."""


class RenameError(ValueError):
    """A map of renamed paths is invalid, or gives two entries the same path."""


class SerializationError(ValueError, TypeError, AssertionError):
    """Bytes are no serialized tree, or a tree cannot be serialized."""


class MissingStepError(CheckpointNotFoundError, ValueError):
    """There is no checkpoint of that step."""
