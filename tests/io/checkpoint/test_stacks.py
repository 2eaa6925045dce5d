"""Stacked and listed layers restore into each other, with their optimizer and their keys."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from linnet import io, nnx
from linnet.errors import CheckpointMismatchError
from tests.compare import is_key

DEPTH = 3


class Block(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(2, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


class Listed(nnx.Module):
    def __init__(self, seed, depth=DEPTH):
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List([Block(rngs=rngs) for _ in range(depth)])


class Stacked(nnx.Module):
    def __init__(self, seed, depth=DEPTH):
        self.layers = nnx.Stack(lambda rngs: Block(rngs=rngs), depth, rngs=nnx.Rngs(seed))


class Scanned(nnx.Module):
    """Layers stacked by hand, as programs did before there was nnx.Stack."""

    def __init__(self, seed, depth=DEPTH):
        @nnx.split_rngs(splits=depth)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return Block(rngs=rngs)

        self.layers = make(nnx.Rngs(seed))


def training(kind, seed):
    """A model and its optimizer, with other numbers everywhere."""
    model = kind(seed)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    for number, (_, variable) in enumerate(nnx.to_flat_state(nnx.state((model, optimizer)))):
        x = variable[...]
        if not is_key(x):
            values = np.arange(x.size).reshape(x.shape) + 100 * number + seed
            variable[...] = jnp.asarray(values, x.dtype)
    return model, optimizer


def by_layer(*nodes):
    """Every entry of every layer, whichever way the layers are held."""
    found = {}
    for path, variable in nnx.to_flat_state(nnx.state(nodes)):
        x = variable[...]
        if is_key(x):
            x = jax.random.key_data(x)
        x = np.asarray(x)
        if "layers" not in path:
            found[path] = x.tolist()
            continue
        at = path.index("layers") + 1
        if isinstance(path[at], int):
            found[path] = x.tolist()
        else:
            below = path[at + 1 :] if path[at] == "stacked" else path[at:]
            for i, layer in enumerate(x):
                found[(*path[:at], i, *below)] = layer.tolist()
    return found


@pytest.fixture(scope="module", params=[Listed, Stacked, Scanned])
def saved(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("stacks") / "a"
    model, optimizer = training(request.param, 0)
    io.save(path, model=model, optimizer=optimizer)
    return path, by_layer(model, optimizer)


@pytest.mark.parametrize("new", [Listed, Stacked, Scanned])
def test_every_form_restores_into_every_other(saved, new):
    path, want = saved
    model, optimizer = training(new, 5)
    assert by_layer(model, optimizer) != want
    io.restore(path, model=model, optimizer=optimizer)
    assert by_layer(model, optimizer) == want


def test_an_abstract_stack_gets_the_layers_of_a_list(tmp_path):
    model = Listed(0)
    io.save(tmp_path / "a", model=model)
    abstract = nnx.eval_shape(lambda: Stacked(1))
    io.restore(tmp_path / "a", model=abstract)
    want = jnp.stack([layer.linear.kernel[...] for layer in model.layers])
    np.testing.assert_array_equal(abstract.layers.stacked.linear.kernel[...], want)
    keys = [layer.dropout.rngs.key[...] for layer in model.layers]
    assert (abstract.layers.stacked.dropout.rngs.key[...] == jnp.stack(keys)).all()


@pytest.mark.parametrize(("old", "new"), [(Stacked, Listed), (Listed, Stacked)])
def test_another_number_of_layers_is_refused(tmp_path, old, new):
    io.save(tmp_path / "a", model=old(0))
    with pytest.raises(CheckpointMismatchError) as caught:
        io.restore(tmp_path / "a", model=new(0, DEPTH - 1))
    lines = str(caught.value).splitlines()[1:-1]
    if new is Listed:
        assert (
            lines[1]
            == "  - model/layers/stacked/dropout/rngs/key: layers [2] of the stack are not wanted"
        )
    else:
        assert lines[1] == (
            "  - model/layers/stacked/dropout/rngs/key: expected key<fry>[2], found key<fry>[3]"
        )
    assert len(lines) == 4


def test_stacks_in_a_stack(tmp_path):
    class Deep(nnx.Module):
        def __init__(self, listed):
            kernel = jnp.arange(12.0).reshape(2, 3, 2)
            if listed:
                make = lambda x: nnx.Dict(kernel=nnx.Param(x))  # noqa: E731
                outer = [nnx.Dict(inner=nnx.List([make(x) for x in rows])) for rows in kernel]
                self.outer = nnx.List(outer)
            else:
                self.outer = nnx.Dict(inner=nnx.Dict(kernel=nnx.Param(kernel)))

    for old, new in ((True, False), (False, True)):
        io.save(tmp_path / str(old), model=Deep(old))
        zero = jax.tree.map(jnp.zeros_like, Deep(new))
        io.restore(tmp_path / str(old), model=zero)
        assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), zero, Deep(new)))
