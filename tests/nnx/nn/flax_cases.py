"""Rows of a table: a layer, how it is built and called, and what Flax 0.12.8 gave for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from linnet import nnx
from tests.digest import digest


class Case(NamedTuple):
    """The layer, what is special here, its arguments, its input, and the digests from Flax."""

    layer: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    x: Any
    parameters: float
    output: float

    def __str__(self) -> str:
        return f"{self.layer.__name__}-{self.name}"

    def build(self) -> Any:
        """The layer."""
        return self.layer(*self.args, **self.kwargs, rngs=nnx.Rngs(0))


def parameters(layer: Any) -> list[Any]:
    """The values of all parameters, by name."""
    return [layer.__dict__[name][...] for name in sorted(nnx.state(layer, nnx.Param))]


def doubled(args: tuple[Any, ...], **_: Any) -> tuple[Any, ...]:
    """A ``promote_dtype`` whose effect shows in the numbers."""
    return tuple(None if x is None else 2 * x for x in args)


def check(case: Case, method: str = "__call__") -> None:
    """The parameters and the output are Flax's."""
    layer = case.build()
    out = getattr(layer, method)(case.x)
    half = jnp.bfloat16 in (out.dtype, case.kwargs.get("param_dtype"))
    tolerance = 0.03 if half else 1e-5
    got = digest(*parameters(layer)), digest(out)
    np.testing.assert_allclose(got, case[-2:], rtol=tolerance, atol=tolerance)
