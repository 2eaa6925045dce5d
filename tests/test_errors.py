"""The errors, what they are to programs that catch them, and how a path is printed."""

import inspect
import pickle

import pytest

from linnet import errors
from linnet.errors import general

# Those of Linen word their messages themselves; they are in tests/linen/test_errors.py.
CLASSES = [
    cls
    for _, cls in inspect.getmembers(general, inspect.isclass)
    if issubclass(cls, Exception) and cls.__module__ == errors.__name__
]


@pytest.mark.parametrize(
    ("path", "root", "text"),
    [
        ((), "", ""),
        ((), "model", "model"),
        (("blocks", 3, "kernel"), "model", "model.blocks[3].kernel"),
        (("kernel",), "", ".kernel"),
        (("a b", "c-d", ""), "m", "m['a b']['c-d']['']"),
        ((0, ("x", 1), None), "", "[0][('x', 1)][None]"),
        (iter(["a", "b"]), "", ".a.b"),
    ],
)
def test_paths_print_as_python_would_spell_them(path, root, text):
    assert errors.path_string(path, root) == text


def test_lists_of_paths():
    assert errors.list_paths([("a", 0), (), ("b c",)]) == "  - .a[0]\n  - (the root)\n  - ['b c']"


@pytest.mark.parametrize(
    ("error", "builtins"),
    [
        ("TraceContextError", ()),
        ("StateMismatchError", (ValueError,)),
        ("SharedReferenceError", (ValueError,)),
        ("FilterError", (ValueError,)),
        ("StaticDataError", (ValueError,)),
        ("StorageError", (ValueError,)),
        ("InPlaceError", (ValueError, NotImplementedError)),
        ("MissingStreamAttributeError", (AttributeError,)),
        ("MissingStreamKeyError", (KeyError,)),
        ("SharedNoiseWarning", (UserWarning,)),
        ("DroppedWriteWarning", (UserWarning,)),
    ],
)
def test_programs_that_catch_builtins_still_do(error, builtins):
    cls = getattr(errors, error)
    assert issubclass(cls, builtins or errors.LinnetError)
    assert errors.FlaxError is errors.LinnetError


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_errors_print_their_text_and_pickle(cls):
    error = cls("what is wrong.\nFix: this.")
    assert str(error) == "what is wrong.\nFix: this."
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (cls, str(error))
    assert cls.__doc__


def test_long_lists_are_cut():
    text = errors.list_paths(("layers", n) for n in range(100))
    lines = text.splitlines()
    assert len(lines) == 11
    assert lines[0] == "  - .layers[0]"
    assert lines[9:] == ["  - .layers[9]", "  - and 90 more"]
    assert errors.list_lines(map(str, range(10))).count("\n") == 9


def test_one_more_than_fits_is_counted():
    assert errors.first_lines("abc", 3) == ["a", "b", "c"]
    assert errors.first_lines("abcd", 3) == ["a", "b", "c", "and 1 more"]
    assert errors.name_some("abcd", 3) == "a, b, c and 1 more"
    assert errors.name_some("abcd", 3, ", ...") == "a, b, c, ..."
    assert errors.name_some("abc", 3, ", ...") == "a, b, c"


def test_entries_are_compared_in_their_order():
    wanted, given = {("b",): 1, ("a",): 2, ("c",): 3}, {("x",): 0, ("a",): 5, ("b",): 4}
    found = errors.compare_entries(wanted, given, lambda path, a, b: f"{path[0]}: {a}, not {b}")
    assert found == ([("c",)], [("x",)], ["b: 1, not 4", "a: 2, not 5"])
    assert found.under("Missing", "New") == {"Missing": [".c"], "New": [".x"]}
    assert errors.compare_entries(wanted, given).differ == []
    assert not any(errors.compare_entries(wanted, wanted, lambda *_: False))


def test_the_message_has_each_list_under_its_title():
    lists = {"Missing": [".a", ".b"], "New": [], "Of another shape": [".c: (2,)"]}
    text = errors.misfit_text(lists, summary="These do not fit.", fix="pass others.", most=1)
    assert text.splitlines() == [
        "These do not fit.",
        "Missing:",
        "  - .a",
        "  - and 1 more",
        "Of another shape:",
        "  - .c: (2,)",
        "Fix: pass others.",
    ]
