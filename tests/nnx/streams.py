"""Random streams written down as plain numbers."""

import jax


def key_data(key):
    return jax.random.key_data(key).tolist()


def contents(rngs):
    """What every stream holds: its keys and its counts."""
    return {
        name: (key_data(stream.key.value), stream.count.value.tolist())
        for name, stream in rngs.items()
    }
