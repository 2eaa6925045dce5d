"""Programs that are run on Flax and on Linnet, and must do the same on both.

A program is a function of a namespace with ``nnx`` (Flax's or Linnet's). It returns anything made
of containers, arrays, numbers, strings and states. ``program`` enters it in its file's catalogue:

    PROGRAMS = {}

    @program(PROGRAMS)
    def linear_and_its_state(f):
        layer = f.nnx.Linear(2, 3, rngs=f.nnx.Rngs(0))
        return layer(jnp.ones((1, 2))), f.nnx.state(layer)

    test_programs = same_on_both(PROGRAMS)

A program that both must refuse says so, ``@program(PROGRAMS, raises=ValueError)``, and Linnet's
error must be of the builtin class that Flax's error is. Any other program that raises fails, also
where both raise. Flax is called from outside only.
"""

import types
import warnings

import flax
import flax.errors
import flax.nnx
import jax
import numpy as np
import pytest

import linnet
import linnet.errors
from linnet import nnx


def program(catalogue, raises=None):
    """Enters a function in a catalogue of programs, under its name.

    ``raises`` is the class of the error that both libraries must raise, the name of a class that
    both define in ``errors``, or None.
    """

    def enter(function):
        assert function.__name__ not in catalogue
        catalogue[function.__name__] = (function, raises)
        return function

    return enter


def table(catalogue, prefix, programs, raises=None):
    """Enters programs of one line, functions of ``nnx``; ``raises`` has those refused."""
    raises = raises or {}
    assert raises.keys() <= programs.keys()
    for name, run in programs.items():

        def entered(f, run=run):
            return run(f.nnx)

        entered.__name__ = f"{prefix}_{name}"
        program(catalogue, raises.get(name))(entered)


def linear(nnx, seed=0, ins=3, outs=3):
    return nnx.Linear(ins, outs, rngs=nnx.Rngs(seed))


def stacked(nnx, count=3):
    make = nnx.vmap(lambda key: nnx.Linear(3, 3, rngs=nnx.Rngs(key)))
    return make(jax.random.split(jax.random.key(0), count))


def same_on_both(catalogue):
    """A test for each program of a catalogue."""

    @pytest.mark.parametrize("name", catalogue)
    def test(name):
        check(*catalogue[name])

    return test


def check(function, raises=None):
    """Runs a program on both libraries and compares what they do."""
    theirs = outcome(function, types.SimpleNamespace(nnx=flax.nnx, flax=flax))
    ours = outcome(function, types.SimpleNamespace(nnx=nnx, flax=linnet))
    if isinstance(raises, str):
        assert isinstance(theirs, getattr(flax.errors, raises)), f"Flax: {shown(theirs)}"
        assert isinstance(ours, getattr(linnet.errors, raises)), f"Linnet: {shown(ours)}"
        return
    if raises is not None:
        assert isinstance(theirs, raises), f"Flax: {shown(theirs)}"
        builtin = next(cls for cls in type(theirs).__mro__ if cls.__module__ == "builtins")
        assert isinstance(ours, builtin), f"Linnet: {shown(ours)}"
        return
    raised = [x for x in (theirs, ours) if isinstance(x, Exception)]
    assert not raised, f"Flax: {shown(theirs)}\nLinnet: {shown(ours)}"
    assert theirs is not None, "This program returns nothing, so it shows nothing."
    one, other = theirs, ours
    assert jax.tree.structure(one) == jax.tree.structure(other), f"Flax: {one}\nLinnet: {other}"
    for want, found in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        if isinstance(want, (str, bool, type(None))) or isinstance(found, (str, bool)):
            assert want == found
        else:
            assert np.asarray(want).dtype == np.asarray(found).dtype
            scale = np.abs(np.asarray(want)).max(initial=1.0, where=np.isfinite(want))
            np.testing.assert_allclose(found, want, rtol=1e-6, atol=1e-6 * scale)


def outcome(function, namespace):
    """What a program returns, in plain containers, or the error it raises."""
    try:
        with warnings.catch_warnings(), jax.numpy_rank_promotion("allow"):
            warnings.simplefilter("ignore")
            return as_plain(function(namespace))
    except Exception as error:
        return error


def shown(found):
    """A result, or the class and the first line of an error."""
    if isinstance(found, Exception):
        return f"{type(found).__name__}: {str(found).strip().partition(chr(10))[0]}"
    return repr(found)


def as_plain(value):
    """States, Variables and keys as plain containers and arrays."""
    if hasattr(value, "to_pure_dict"):
        return as_plain(value.to_pure_dict())
    if hasattr(value, "get_metadata") and hasattr(value, "get_value"):
        return as_plain(value.get_value())
    if isinstance(value, dict) or hasattr(value, "items"):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(item) for item in value]
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(value)
    return value
