"""Sharding of batches, stacking of metrics, one-hot labels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet.errors import AxisError
from linnet.training import common_utils


def test_onehot():
    onehot = common_utils.onehot
    assert onehot(jnp.array([1, 0]), 3).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert onehot(np.array([1, 5, -1]), 3).tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert onehot(np.array([1, 0], np.uint8), 300).sum() == 2  # 257 is no 1 of 8 bits
    assert onehot(np.array([True, False]), 2).tolist() == [[0, 1], [1, 0]]
    smooth = onehot(jnp.array([[1], [0]]), 2, on_value=0.75, off_value=0.25)
    assert smooth.tolist() == [[[0.25, 0.75]], [[0.75, 0.25]]] and smooth.dtype == jnp.float32
    assert onehot(jnp.array([1]), 2, on_value=2, off_value=1).dtype == jnp.float32


def test_shards(monkeypatch):
    monkeypatch.setattr(jax, "local_device_count", lambda: 4)
    tree = {"a": np.arange(8).reshape(8, 1)}
    assert common_utils.shard(tree)["a"].tolist() == [
        [[0], [1]],
        [[2], [3]],
        [[4], [5]],
        [[6], [7]],
    ]
    keys = common_utils.shard_prng_key(jax.random.PRNGKey(0))
    assert keys[:2].tolist() == [[1797259609, 2579123966], [928981903, 3453687069]]
    for bad in (np.arange(6), np.array(3)):
        with pytest.raises(AxisError) as caught:
            common_utils.shard({"x": bad})
        assert str(caught.value) == (
            f"shard cannot divide the first axis of .x, of shape {bad.shape}, among 4 devices.\n"
            "Fix: use batches whose size is a multiple of 4."
        )


def test_forests():
    stacked = common_utils.stack_forest([{"a": 1, "b": 2.0}, {"a": 3, "b": 4.0}])
    assert stacked["a"].tolist() == [1, 3] and stacked["b"].tolist() == [2, 4]
    with pytest.raises(TypeError, match="stack_forest got no trees"):
        common_utils.stack_forest([])
    step = jax.pmap(lambda x: {"loss": x})
    metrics = common_utils.get_metrics([step(jnp.array([i + 0.5])) for i in range(3)])
    assert metrics["loss"].tolist() == [0.5, 1.5, 2.5]
