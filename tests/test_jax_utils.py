"""Replication, reading ahead, partial evaluation, scans over any axes, padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import jax_utils


def test_replicate_and_back():
    tree = {"w": jnp.arange(3.0), "n": 2, "key": jax.random.key(0)}
    copies = jax_utils.replicate(tree)
    count = jax.local_device_count()
    assert copies["w"].shape == (count, 3)
    np.testing.assert_array_equal(copies["w"], np.tile(np.arange(3.0), (count, 1)))
    np.testing.assert_array_equal(copies["n"], np.full(count, 2))
    back = jax_utils.unreplicate(copies)
    np.testing.assert_array_equal(back["w"], tree["w"])
    assert back["key"] == tree["key"] and int(back["n"]) == 2
    assert jax_utils.unreplicate(np.ones((4, 2))).shape == (2,)


def test_replicated_trees_go_through_pmap():
    sums = jax.pmap(lambda x: jax_utils.pmean({"x": x + 1}, "i"), axis_name="i")(
        jax_utils.replicate(jnp.arange(2.0))
    )
    np.testing.assert_array_equal(jax_utils.unreplicate(sums)["x"], [1.0, 2.0])


def test_prefetch_reads_as_far_ahead_as_asked():
    taken = []

    def batches():
        for i in range(4):
            taken.append(i)
            yield {"x": np.full((1, 2), i)}

    ahead = jax_utils.prefetch_to_device(batches(), 2, jax.devices()[:1])
    assert taken == []
    np.testing.assert_array_equal(next(ahead)["x"], [[0, 0]])
    assert taken == [0, 1]
    assert [int(b["x"][0, 0]) for b in ahead] == [1, 2, 3]


def test_prefetch_refuses():
    with pytest.raises(ValueError, match="at least 1 batch ready, but got size=0"):
        jax_utils.prefetch_to_device([], 0)
    one = jax.devices()[:1]
    with pytest.raises(ValueError, match=r"each of 1 devices, but got one of shape \(3, 1\)"):
        list(jax_utils.prefetch_to_device([np.ones((3, 1))], 1, one))


def test_partial_eval_by_shape():
    def fn(x, y, scale=1.0):
        drawn = jax.random.normal(jax.random.key(0), y.shape)
        return jnp.ones(x.shape[-1]) * scale, x + y[None], drawn

    known, unknown, drawn = jax_utils.partial_eval_by_shape(
        fn, [((2, 3), jnp.bfloat16), (3,)], scale=2.0
    )
    np.testing.assert_array_equal(known, [2.0, 2.0, 2.0])
    assert unknown == jax.ShapeDtypeStruct((2, 3), jnp.float32)
    np.testing.assert_array_equal(drawn, jax.random.normal(jax.random.key(0), (3,)))
    given = jax_utils.partial_eval_by_shape(lambda x, y: y * 2, [jnp.ones(2)], jnp.ones(1))
    np.testing.assert_array_equal(given, [2.0])


X = jnp.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    ("axis", "last", "outputs"),
    [
        ((0, 1), 15.0, [[0, 0, 2], [9, 24, 50]]),
        ((1, 0), 15.0, [[0, 3, 16], [0, 16, 50]]),
    ],
)
@pytest.mark.parametrize("unroll", [1, (1, 3)])
def test_scan_over_two_axes(axis, last, outputs, unroll):
    carry, ys = jax_utils.scan_in_dim(lambda c, x: (c + x, x * c), 0.0, X, axis, unroll)
    assert carry == last
    np.testing.assert_array_equal(ys, outputs)


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [1, -1, (1,)])
def test_scan_over_one_axis(axis, keepdims):
    def body(carry, x):
        assert x.shape == ((2, 1) if keepdims else (2,))
        return carry + x.sum(), x * 2

    carry, ys = jax_utils.scan_in_dim(body, 0.0, X, axis, keepdims=keepdims)
    assert carry == 15.0
    np.testing.assert_array_equal(ys, 2 * X)


def test_scan_keeps_two_axes():
    x = jnp.arange(12.0).reshape(2, 3, 2)
    carry, ys = jax_utils.scan_in_dim(
        lambda c, x: (c + x.sum(), x + c), 0.0, x, axis=(2, 0), keepdims=True
    )
    assert carry == 66.0
    np.testing.assert_array_equal(ys, [[[0, 31], [2, 33], [4, 35]], [[12, 46], [14, 48], [16, 50]]])


def test_scan_names_an_axis_that_is_missing():
    with pytest.raises(
        IndexError, match=r"over the axes \(2,\), but got an array of shape \(2, 3\)"
    ):
        jax_utils.scan_in_dim(lambda c, x: (c, x), 0.0, X, axis=2)


@pytest.mark.parametrize(("size", "least", "each"), [(5, None, 5), (5, 8, 8), (4, 2, 4)])
def test_padded_batches(size, least, each):
    count, seen = jax.local_device_count(), []
    each = max(-(-size // count), least or 0)

    def predict(params, x, y):
        seen.append((x.shape, y["z"].shape))
        return {"out": params * x.sum(-1) + y["z"]}

    x, z = np.arange(3.0 * size).reshape(size, 3), np.ones(size)
    out = jax_utils.pad_shard_unpad(predict)(2.0, x, {"z": z}, min_device_batch=least)
    np.testing.assert_array_equal(out["out"], 2 * x.sum(-1) + 1)
    assert seen == [((count, each, 3), (count, each))]


def test_padding_leaves_static_arguments_and_results():
    wrapped = jax_utils.pad_shard_unpad(
        lambda x, k: (x.shape[0], k), static_argnums=(), static_argnames=("k",), static_return=True
    )
    assert wrapped(np.ones(3), k="s") == (jax.local_device_count(), "s")


def test_padding_wants_one_size():
    with pytest.raises(
        AssertionError, match=r"batches of one size, but got arrays of sizes \[4, 5\]"
    ):
        jax_utils.pad_shard_unpad(lambda p, x, y: x)(0, np.ones(5), np.ones(4))
