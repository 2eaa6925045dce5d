"""Learning rates by step, with the values of Flax 0.12.8."""

import jax
import numpy as np
import pytest

from linnet.training import lr_schedule

STEPS = [0, 1, 5, 10, 15, 20, 29, 30, 31, 49, 50, 51, 70]
COSINE = [0.09045085, 0.07938927, 0.06545085, 0.03756551, 0.03454915, 0.03159378]
COSINE += [9.86636e-05, 0, 9.86636e-05, 0.03454915]
SCHEDULES = {
    "constant": (
        lr_schedule.create_constant_learning_rate_schedule(0.1, 10, 2.0),
        [0, 0.005, 0.025, 0.05, 0.075, *[0.1] * 8],
    ),
    "constant at once": (
        lr_schedule.create_constant_learning_rate_schedule(0.1, 10),
        [0.1] * 13,
    ),
    "stepped": (
        lr_schedule.create_stepped_learning_rate_schedule(0.1, 10, [[3, 0.5], [5, 0.1]], 1.0),
        [0, 0.01, 0.05, *[0.1] * 5, 0.05, 0.05, 0.05, 0.01, 0.01],
    ),
    "stepped at once": (
        lr_schedule.create_stepped_learning_rate_schedule(0.1, 10, [[3, 0.5], [5, 0.1]]),
        [*[0.1] * 8, 0.05, 0.05, 0.05, 0.01, 0.01],
    ),
    "cosine": (
        lr_schedule.create_cosine_learning_rate_schedule(0.1, 10, 5, 1.0),
        [0, 0.00999013, 0.04877641, *COSINE],
    ),
    "cosine at once": (
        lr_schedule.create_cosine_learning_rate_schedule(0.1, 10, 5),
        [0.1, 0.09990134, 0.09755283, *COSINE],
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rates(name):
    schedule, want = SCHEDULES[name]
    np.testing.assert_allclose([float(schedule(s)) for s in STEPS], want, rtol=1e-5, atol=1e-8)
    under_jit = jax.jit(schedule)
    np.testing.assert_allclose([float(under_jit(s)) for s in STEPS], want, rtol=1e-5, atol=1e-8)


def test_steps_between_epochs():
    schedule = lr_schedule.create_stepped_learning_rate_schedule(1.0, 3, [[2.5, 0.5], [4, 0.1]])
    assert [round(float(schedule(i)), 1) for i in range(16)] == [1.0] * 9 + [0.5] * 4 + [0.1] * 3
