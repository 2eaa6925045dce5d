"""What loading holds beside the model, and how layers come into a stack."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import io
from linnet.io import names


@pytest.mark.parametrize("stacked", [False, True], ids=["listed", "stacked"])
def test_reading_holds_one_tensor_beyond_the_model(stacked, saved):
    size, count = 1 << 18, 8  # a megabyte each
    tensors = {f"l.{n}.w": np.full((512, size // 512), n, np.float32) for n in range(count)}
    path = saved(tensors)
    if stacked:
        model = {"l": np.zeros((count, size // 512, 512), np.float32)}
    else:
        model = {"l": {n: np.zeros((size // 512, 512), np.float32) for n in range(count)}}
    rule = names.Rule("l.*.w", "l/*", "a b -> b a")
    tracemalloc.start()
    try:
        loaded = io.load_safetensors(path, model, names.NameMap([rule])).model
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < (count + 2) * 4 * size
    assert loaded["l"][3][0, 0] == 3.0


def test_layers_go_to_a_stack_on_the_device_in_slabs(saved):
    count, rows, columns = 3, 2048, 1000
    value = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    path = saved({f"l.{n}.w": value + n for n in range(count)})
    rules = names.NameMap([names.Rule("l.*.w", "l/*", "a b -> b a")])
    model = {"l": jax.ShapeDtypeStruct((count, columns, rows), jnp.float32)}
    io.load_safetensors(path, model, rules)  # what is needed once
    tracemalloc.start()
    try:
        loaded = io.load_safetensors(path, model, rules).model["l"]
        peak = tracemalloc.get_traced_memory()[1]  # NumPy's; the stack is JAX's
    finally:
        tracemalloc.stop()
    assert peak < 1.25 * value.nbytes
    assert isinstance(loaded, jax.Array)
    assert np.array_equal(loaded, np.stack([(value + n).T for n in range(count)]))


@pytest.mark.parametrize("slab", [1, 3, 7, 1000])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (4, 3, 2)])
def test_slabs_of_any_size_give_the_whole_layer(slab, shape, saved, monkeypatch):
    monkeypatch.setattr("linnet.io.shared.placing._SLAB", slab)
    layers = [np.random.default_rng(n).normal(size=shape).astype(np.float32) for n in range(2)]
    path = saved({f"l.{n}": layer for n, layer in enumerate(layers)})
    model = {"l": jax.ShapeDtypeStruct((2, *shape), jnp.float32)}
    loaded = io.load_safetensors(path, model, names.NameMap([names.Rule("l.*", "l/*")])).model
    assert np.array_equal(loaded["l"], np.stack(layers))
