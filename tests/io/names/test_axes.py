import numpy as np
import pytest

from linnet.errors import NameMapError
from linnet.io.names import rules as axes
from linnet.io.names.rules import MisfitError, parse


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("a b", "it is not of the form"),
        ("a b -> b a -> a", "it is not of the form"),
        ("(a b -> a b", "it is not of the form"),
        ("((a) b) -> a b", "it is not of the form"),
        ("a a -> a", "a side has a name twice"),
        ("a b -> a c", "b, c stands on one side only"),
        ("a+ b+ -> a b", "it has two +"),
        ("a+ b -> a+ b", "it has more than one + or part"),
        ("(part a)+ -> a", "it has more than one + or part"),
    ],
)
def test_a_pattern_that_is_none_is_refused(pattern, why):
    with pytest.raises(NameMapError) as error:
        parse(pattern)
    assert "does not say how axes are arranged: " + why in str(error.value)
    assert "Fix: name each axis of the stored tensor, then ->, then those of the model's." in str(
        error.value
    )


def test_sizes_follow_from_the_models_shape():
    pattern = parse("(head two half) width -> width head (half two)")
    assert pattern.sizes((5, 3, 8), {"two": 2}) == {"width": 5, "head": 3, "half": 4, "two": 2}
    assert axes.shape_of(pattern.stored, pattern.sizes((5, 3, 8), {"two": 2})) == (24, 5)


@pytest.mark.parametrize(
    ("shape", "known"),
    [((5, 3), {"two": 2}), ((5, 3, 7), {"two": 2}), ((5, 3, 8), {}), ((5, 3, 8), {"two": 0})],
    ids=["rank", "odd", "open", "zero"],
)
def test_a_shape_that_cannot_be_is_a_misfit(shape, known):
    with pytest.raises(MisfitError):
        parse("(head two half) width -> width head (half two)").sizes(shape, known)


def test_a_known_size_has_to_be_that_of_the_shape():
    with pytest.raises(MisfitError):
        parse("a b -> b a").sizes((2, 3), {"a": 2})


def test_moved_is_a_transposition_of_the_reshaped_array():
    pattern = parse("(head dim) width -> width head dim")
    array = np.arange(24).reshape(6, 4)
    sizes = pattern.sizes((4, 2, 3), {})
    there = axes.rearranged(array, pattern.stored, pattern.model, sizes)
    np.testing.assert_array_equal(there, array.reshape(2, 3, 4).transpose(2, 0, 1))
    assert np.shares_memory(there, array)
    back = axes.rearranged(there, pattern.model, pattern.stored, sizes)
    np.testing.assert_array_equal(back, array)


def test_lengths_are_in_proportion():
    assert axes.lengths(12, (4, 1, 1)) == [8, 2, 2]
    with pytest.raises(MisfitError):
        axes.lengths(13, (4, 1, 1))
