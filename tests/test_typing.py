"""The names that programs annotate with."""

import typing

import jax.numpy as jnp
import numpy as np
import pytest

import linnet.typing as t
from linnet import nnx


@pytest.mark.parametrize(
    "name",
    "Array ArrayPytree Axes Axis AxisName Collection ConvGeneralDilatedT DotGeneralT Dtype EinsumT "
    "FrozenVariableDict In InOutAxis InOutScanAxis Initializer Key LaxPadding Leaf LogicalNames "
    "LogicalPartitionSpec LogicalRules MISSING Missing MutableCollection MutableVariableDict Out "
    "PRNGFoldable PRNGKey PaddingLike PartitionSpecPytree Path PathParts PrecisionLike "
    "PromoteDtypeFn RNGSequences ScanAxis Shape ShapeDtype Sharding VariableDict".split(),
)
def test_names_can_stand_in_annotations(name):
    annotation = getattr(t, name)

    def f(x): ...

    f.__annotations__["x"] = annotation
    assert typing.get_type_hints(f)["x"] is not None
    assert annotation is t.MISSING or typing.Optional[annotation]  # noqa: UP045


def test_what_looks_like_an_array_or_a_key():
    assert t.has_shape_dtype(jnp.ones(2)) and t.has_shape_dtype(np.float32(1))
    assert not t.has_shape_dtype(1.0)
    assert t.is_key_like("a") and t.is_key_like(3) and not t.is_key_like([3])


def test_one_definition():
    assert nnx.Initializer is nnx.initializers.Initializer is t.Initializer
    assert nnx.graph.Key is t.Key
