"""Models that the tests of linnet.io save and restore; what is compared afterwards."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from linnet import nnx
from tests.compare import is_key
from tests.models import OneOfEverything


def training(seed=0):
    """A model and an optimizer after one step, so that no state is a constant."""
    model = OneOfEverything(seed)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def loss(model):
        return jnp.mean(model(jnp.linspace(0.0, 1.0, 8).reshape(2, 4)) ** 2)

    optimizer.update(model, nnx.grad(loss)(model))
    return model, optimizer


def bits(tree):
    """Every leaf of objects by path: type, shape and bytes."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(tree)):
        if is_key(leaf):
            data = np.asarray(jax.random.key_data(leaf))
        else:
            data = np.asarray(leaf)
        weak = getattr(leaf, "weak_type", False)
        leaf_type = (type(leaf).__name__, str(getattr(leaf, "dtype", "")), weak, data.shape)
        found[jax.tree_util.keystr(path)] = (*leaf_type, data.tobytes())
    return found


def names_in(folder):
    """The names of the files and folders in a folder."""
    return sorted(entry.name for entry in folder.iterdir())
