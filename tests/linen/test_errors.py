"""Every error of Linen: it is told by facts, says how to fix it, and can be pickled."""

import inspect
import pickle

import pytest

from linnet import errors
from linnet.errors import linen as linen_errors

FACTS = {
    "AlreadyExistsError": ("ckpt_3",),
    "ApplyModuleInvalidMethodError": (3,),
    "ApplyScopeInvalidVariablesStructureError": ({"params": {"params": {}}},),
    "AssignSubModuleError": ("Dense",),
    "InvalidCheckpointError": ("ckpt_3", 2),
    "InvalidFilterError": (3,),
    "InvalidRngError": ("no key.\nFix: give one.",),
    "InvalidScopeError": ("/enc",),
    "ImmutableVariableError": ("written.\nFix: do not.",),
    "LazyInitError": ("w",),
    "MPACheckpointingRequiredError": ("ckpt", 3),
    "MPARestoreDataCorruptedError": (3, "ckpt"),
    "MPARestoreTargetRequiredError": ("ckpt", 3, "w"),
    "ModifyScopeVariableError": ("params", "w", "/enc"),
    "NameInUseError": ("param", "w", "Dense"),
    "PartitioningUnspecifiedError": ("w",),
    "ReservedModuleAttributeError": ({"parent": None},),
    "ScopeCollectionNotFound": ("params", "w", "/enc"),
    "ScopeParamNotFoundError": ("w", "/enc"),
    "ScopeParamShapeError": ("w", "/enc", (2,), (3,)),
    "ScopeVariableNotFoundError": ("w", "stats", "/enc"),
    "SetAttributeFrozenModuleError": ("Dense", "w", 3),
    "TransformTargetError": (3,),
    "TransformedMethodReturnValueError": ("encode",),
    "TraverseTreeError": (None, None),
    "UnboundModuleError": ("not bound.\nFix: bind it.",),
}

CLASSES = [
    cls
    for _, cls in inspect.getmembers(linen_errors, inspect.isclass)
    if issubclass(cls, Exception) and cls is not errors.LinnetError
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_says_how_to_fix_it_and_pickles(cls):
    facts = FACTS.get(cls.__name__, ())
    error = cls(*facts)
    text = str(error)
    assert "\nFix: " in text and text.endswith((".", ")"))
    for fact in facts:
        assert isinstance(fact, dict | type(None)) or str(fact) in text
    assert isinstance(error, errors.FlaxError) or cls is errors.UnboundModuleError
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is cls and str(copied) == text
    assert getattr(errors, cls.__name__) is cls and cls.__module__ == "linnet.errors"


def test_facts_are_for_errors_that_exist():
    assert set(FACTS) <= {cls.__name__ for cls in CLASSES}
