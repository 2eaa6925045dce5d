"""The dtype of a computation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.functional.dtypes import canonicalize_dtype, promote_dtype

HALF, WHOLE = jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.int8)


@pytest.mark.parametrize(
    ("args", "options", "want"),
    [
        ((HALF, None), {}, "bfloat16"),
        ((HALF, jnp.ones(2)), {}, "float32"),
        ((HALF, 1.0), {}, "bfloat16"),
        ((WHOLE,), {}, "float32"),
        ((WHOLE,), {"inexact": False}, "int8"),
        ((WHOLE, HALF), {}, "bfloat16"),
        ((np.ones(2, np.float16), None), {}, "float16"),
        ((jnp.ones(2),), {"dtype": jnp.float16}, "float16"),
        ((jnp.ones(2),), {"dtype": jnp.int32, "inexact": False}, "int32"),
        ((jnp.ones(2),), {"dtype": "bfloat16"}, "bfloat16"),
    ],
)
@pytest.mark.parametrize("sequence", [tuple, list])
def test_promotion(args, options, want, sequence):
    assert jnp.dtype(canonicalize_dtype(*args, **options)) == want
    got = promote_dtype(sequence(args), **options)
    assert type(got) is sequence
    assert [x is None for x in got] == [x is None for x in args]
    assert all(isinstance(x, jax.Array) and x.dtype == want for x in got if x is not None)


def test_arrays_that_agree_are_handed_back():
    x = jnp.ones(2)
    assert promote_dtype((x, None, x))[0] is x
    assert not jax.typeof(promote_dtype((jnp.asarray(1.0),))[0]).weak_type


def test_integers_are_refused():
    with pytest.raises(ValueError) as error:
        promote_dtype((WHOLE,), dtype=jnp.int32)
    assert str(error.value).endswith("int32'>.\nFix: use a floating-point dtype.")


def test_the_names_that_layers_use():
    assert nnx.nn.dtypes.promote_dtype is promote_dtype
    assert nnx.nn.dtypes.canonicalize_dtype is canonicalize_dtype
    assert nnx.Linear(2, 3, rngs=nnx.Rngs(0)).promote_dtype is promote_dtype


def test_lists_of_numbers():
    x, w = promote_dtype(([[1, 2]], jnp.ones((2, 1))))
    assert x.dtype == w.dtype == jnp.float32 and x.tolist() == [[1, 2]]
    assert canonicalize_dtype([[1, 2]], None) == jnp.float32
