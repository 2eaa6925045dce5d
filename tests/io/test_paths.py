"""Paths of entries as text and as names in a format that knows text alone."""

import pytest

from linnet.io.paths import folded, is_position, storage_names, text_of


def test_text_and_folding_treat_integers_and_digits_alike():
    assert text_of(("model", "layers", 0, "kernel")) == "model/layers/0/kernel"
    assert folded(("a", 0)) == folded(("a", "0")) == ("a", "0")


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, True), (12, True), ("3", True), (-1, False), ("a", False), ("", False)],
)
def test_is_position(step, expected):
    assert is_position(step) is expected


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        ([("a", 0), ("a", 1)], [("a", "0"), ("a", "1")]),
        ([("a", 0), ("a", "0")], [("a", "0"), ("a", "0%2")]),
        ([("a.b",), ("a", "b")], [("a.b",), ("a", "b%2")]),
        ([(0,), ("0", "k")], [("0",), ("0%2", "k")]),
        ([("0", "k"), (0,)], [("0", "k"), ("0%2",)]),
        ([("a/b",), ("..",), ("",), ("50%",)], [("a%2Fb",), ("%2E%2E",), ("%",), ("50%25",)]),
        ([("a", 0), ("a", "0"), ("a", "0%2")], [("a", "0"), ("a", "0%2"), ("a", "0%252")]),
    ],
)
def test_storage_names_are_unique_and_harmless(paths, names):
    found = storage_names(paths)
    assert list(found.values()) == names
    joined = [".".join(name) for name in found.values()]
    assert len(set(joined)) == len(joined)
    assert not any(
        "/" in step or step in ("", ".", "..") for name in found.values() for step in name
    )
