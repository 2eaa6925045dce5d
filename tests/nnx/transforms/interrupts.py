"""Interrupts calls of a compiled function at random moments, in a process of its own.

JAX does not survive every interrupt in its own Python code: if it is left without a current trace,
this ends. What is checked is that no Variable is left with an array that was donated.
"""

import signal

import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state

from linnet import nnx


class Holder(nnx.Module):
    def __init__(self):
        self.large = nnx.Param(jnp.zeros((256, 256)))
        self.small = nnx.Variable(jnp.zeros(()))


@nnx.jit
def step(holder):
    holder.large[...] = jnp.sin(holder.large[...]) + 1
    holder.small[...] += 1


def interrupt(number, frame):
    raise KeyboardInterrupt


def jax_is_whole():
    try:
        get_opaque_trace_state()
    except (AssertionError, AttributeError):
        return False
    return True


def main():
    holder, rng, interrupts = Holder(), np.random.default_rng(0), 0
    step(holder)
    signal.signal(signal.SIGALRM, interrupt)
    for delay in rng.uniform(1e-5, 2e-3, 300):
        try:
            # Again each second: an interrupt in code that Python runs on its own account is lost.
            signal.setitimer(signal.ITIMER_REAL, delay, 1.0)
            while True:
                step(holder)
        except BaseException:  # JAX turns an interrupt in its own code into other errors
            signal.setitimer(signal.ITIMER_REAL, 0)
            interrupts += 1
        assert not holder.large._cell.value.is_deleted()
        if not jax_is_whole():
            break
    print(interrupts, "interrupts")
