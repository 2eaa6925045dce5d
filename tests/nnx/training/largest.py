"""A metric as a user writes it."""

import jax.numpy as jnp

from linnet import nnx


class Largest(nnx.Metric):
    """The largest value seen."""

    def __init__(self):
        self.largest = nnx.metrics.MetricState(jnp.array(-jnp.inf))

    def reset(self):
        self.largest.value = jnp.array(-jnp.inf)

    def update(self, *, values):
        self.largest.value = jnp.maximum(self.largest.value, values.max())

    def compute(self):
        return self.largest.value

    def merge(self, other):
        merged = nnx.clone(self)
        merged.update(values=other.largest.value)
        return merged
