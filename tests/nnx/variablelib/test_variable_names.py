"""Names for types of Variables."""

import pytest

from linnet import nnx
from linnet.nnx import variablelib
from linnet.nnx.variablelib import names

NAMES = {
    "params": nnx.Param,
    "batch_stats": nnx.BatchStat,
    "cache": nnx.Cache,
    "intermediates": nnx.Intermediate,
    "perturbations": nnx.Perturbation,
}


@pytest.fixture(autouse=True)
def only_the_first_names(monkeypatch):
    kept = {name: kind for name, kind in names._types.items() if name in NAMES}
    monkeypatch.setattr(names, "_types", kept)


@pytest.mark.parametrize(("name", "kind"), NAMES.items())
def test_names_that_are_there(name, kind):
    assert nnx.variable_type_from_name(name) is kind
    assert nnx.variable_name_from_type(kind) == name


def test_registering():
    @nnx.register_variable_name("counters")
    class Counter(nnx.Variable):
        pass

    class Other(nnx.Variable):
        pass

    assert nnx.variable_type_from_name("counters") is Counter
    assert nnx.register_variable_name("counters", Counter) is Counter
    with pytest.raises(ValueError) as error:
        nnx.register_variable_name("counters", Other)
    assert str(error.value) == (
        "The name 'counters' already stands for Counter.\n"
        "Fix: choose another name, or pass overwrite=True."
    )
    nnx.register_variable_name("counters", Other, overwrite=True)
    assert nnx.variable_type_from_name("counters") is Other


def test_unknown_kinds():
    class Unnamed(nnx.Variable):
        pass

    with pytest.raises(ValueError) as error:
        nnx.variable_name_from_type(Unnamed)
    assert str(error.value) == (
        "Unnamed has no registered name.\n"
        "Fix: nnx.register_variable_name('unnamed', Unnamed), or pass allow_register=True."
    )
    assert nnx.variable_name_from_type(Unnamed, allow_register=True) == "Unnamed"
    assert nnx.variable_type_from_name("Unnamed") is Unnamed


def test_unknown_names():
    with pytest.raises(ValueError) as error:
        nnx.variable_type_from_name("losses")
    assert str(error.value) == (
        "No type of Variable is registered as 'losses'; there are ['batch_stats', 'cache', "
        "'intermediates', 'params', 'perturbations'].\n"
        "Fix: nnx.register_variable_name('losses', YourVariable), or pass allow_register=True."
    )
    made = nnx.variable_type_from_name("losses", base=nnx.Cache, allow_register=True)
    assert (made.__name__, made.__bases__) == ("losses", (nnx.Cache,))
    assert made(1.0).value == 1.0
    assert nnx.variable_type_from_name("losses") is made


def test_variablelib_has_the_functions_too():
    assert variablelib.variable_type_from_name is nnx.variable_type_from_name
    assert variablelib.register_variable_name is nnx.register_variable_name
    with pytest.raises(AttributeError, match=r"'linnet.nnx.variablelib' has no attribute 'nope'"):
        _ = variablelib.nope
