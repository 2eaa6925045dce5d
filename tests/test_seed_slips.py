"""Names that the documents use by a slip of the pen resolve to the real ones."""

import pytest

from linnet import nnx


@pytest.mark.parametrize(
    ("slip", "name"),
    [
        ("Intermediates", "Intermediate"),
        ("BatchStats", "BatchStat"),
        ("var_default", "var_defaults"),
    ],
)
def test_slip(slip, name):
    assert getattr(nnx, slip) is getattr(nnx, name)


def test_the_slips_work_as_written():
    with nnx.var_default(hijax=True):
        assert nnx.Param(1.0).hijax
    assert not nnx.Param(1.0).hijax
    model = nnx.Dict(mean=nnx.BatchStat(1.0), seen=nnx.Intermediate((2,)), w=nnx.Param(3.0))
    _, stats, seen, rest = nnx.split(model, nnx.BatchStats, nnx.Intermediates, ...)
    assert (list(stats), list(seen), list(rest)) == (["mean"], ["seen"], ["w"])
