"""One number for an array, so that a table can say what Flax gave."""

import numpy as np


def digest(*arrays) -> float:
    """An inner product that changes when an entry changes or moves."""
    flat = np.concatenate([np.asarray(x, np.float64).ravel() for x in arrays])
    return round(float(np.cos(np.arange(flat.size)) @ flat), 5)
