"""When training stops early; the counts are those of Flax 0.12.8."""

import jax
import jax.numpy as jnp

from linnet.training import early_stopping


def test_early_stopping_waits_and_stops():
    stopping = early_stopping.EarlyStopping(min_delta=1e-3, patience=2)
    seen = []
    for loss in [1.0, 0.9, 0.9, 0.8995, 0.5, 0.6, 0.7, 0.8]:
        stopping = stopping.update(loss)
        seen.append((stopping.best_metric, stopping.patience_count, stopping.has_improved))
    assert seen == [
        (1.0, 0, True),
        (0.9, 0, True),
        (0.9, 1, False),
        (0.9, 2, False),
        (0.5, 0, True),
        (0.5, 1, False),
        (0.5, 2, False),
        (0.5, 3, False),
    ]
    assert stopping.should_stop
    assert stopping.update(0.1).should_stop and stopping.update(0.1).has_improved
    assert stopping.reset() == early_stopping.EarlyStopping(min_delta=1e-3, patience=2)
    assert len(jax.tree.leaves(stopping)) == 6


def test_early_stopping_takes_arrays_and_is_not_fooled_by_nan():
    stopping = early_stopping.EarlyStopping(patience=1).update(jnp.float32(2.0))
    assert stopping.has_improved and float(stopping.best_metric) == 2
    stopping = early_stopping.EarlyStopping(patience=1).update(float("nan"))
    assert not stopping.has_improved and stopping.best_metric == float("inf")
    assert stopping.update(1.0).best_metric == 1.0
