"""One number for an array, so that a table can say what Flax gave."""

import jax
import numpy as np


def digest(*arrays, places=5) -> float:
    """An inner product that changes when an entry changes or moves."""
    flat = np.concatenate([np.asarray(x, np.float64).ravel() for x in arrays])
    return round(float(np.cos(np.arange(flat.size)) @ flat), places)


def paths_and_digest(out, places=4):
    """The paths and shapes of the arrays of a pytree, with its texts, and one digest of them."""
    names, numbers = [], []
    for path, leaf in jax.tree_util.tree_leaves_with_path(out):
        text = "/".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
        if hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf) % 1000
        if isinstance(leaf, str | type(None)):
            names.append(f"{text}={leaf}")
        else:
            names.append(f"{text}{list(np.shape(leaf))}")
            numbers.append(leaf)
    return [names, digest(*numbers, np.zeros(1), places=places)]
