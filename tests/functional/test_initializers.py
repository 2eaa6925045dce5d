"""Initializers: Flax's numbers, from one key."""

import jax
import jax.numpy as jnp
import pytest

from linnet import nnx
from tests.digest import digest

KEY = jax.random.key(0)
I = nnx.initializers  # noqa: E741
CASES = [
    ("constant", lambda: I.constant(3.0)(KEY, (2, 2)), 0.40249),
    ("delta_orthogonal", lambda: I.delta_orthogonal()(KEY, (3, 2, 4)), -0.09537),
    ("glorot_normal", lambda: I.glorot_normal()(KEY, (3, 4)), 0.83523),
    ("glorot_uniform", lambda: I.glorot_uniform()(KEY, (3, 4)), 0.89173),
    ("he_normal", lambda: I.he_normal()(KEY, (3, 4)), 1.27584),
    ("he_uniform", lambda: I.he_uniform()(KEY, (3, 4)), 1.36214),
    ("kaiming_normal", lambda: I.kaiming_normal()(KEY, (3, 4)), 1.27584),
    ("kaiming_uniform", lambda: I.kaiming_uniform()(KEY, (3, 4)), 1.36214),
    ("lecun_normal", lambda: I.lecun_normal()(KEY, (3, 4)), 0.90216),
    ("lecun_uniform", lambda: I.lecun_uniform(0, 1, (2,))(KEY, (3, 4, 2)), -2.15607),
    ("normal", lambda: I.normal()(KEY, (3, 4)), 0.01413),
    ("normal stddev", lambda: I.normal(2.0)(KEY, (3, 4)), 2.82618),
    ("ones", lambda: I.ones(KEY, (3,)), 1.12416),
    ("ones_init", lambda: I.ones_init()(KEY, (3,)), 1.12416),
    ("orthogonal", lambda: I.orthogonal(2.0)(KEY, (3, 3)), 2.2061),
    ("truncated_normal", lambda: I.truncated_normal(0.3, lower=-1.0)(KEY, (3, 4)), 0.34194),
    ("uniform", lambda: I.uniform()(KEY, (3, 4)), 0.00275),
    (
        "variance_scaling",
        lambda: I.variance_scaling(2.0, "fan_avg", "uniform")(KEY, (3, 4)),
        1.26109,
    ),
    ("xavier_normal", lambda: I.xavier_normal()(KEY, (3, 4)), 0.83523),
    ("xavier_uniform", lambda: I.xavier_uniform()(KEY, (3, 4)), 0.89173),
    ("zeros", lambda: I.zeros(KEY, (3,)), 0.0),
    ("zeros_init", lambda: I.zeros_init()(KEY, (3,)), 0.0),
]


@pytest.mark.parametrize(("draw", "want"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_numbers_of_flax(draw, want):
    assert digest(draw()) == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("make", [I.lecun_normal, I.normal, I.uniform, I.zeros_init])
def test_dtypes(make):
    assert make()(KEY, (2, 2), jnp.bfloat16).dtype == jnp.bfloat16


def test_both_names_are_one():
    assert nnx.initializers.lecun_normal is nnx.nn.initializers.lecun_normal
