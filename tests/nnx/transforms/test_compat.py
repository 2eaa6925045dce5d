"""nnx.compat: the API with shared references and graph updates, whatever the settings are."""

import inspect

import jax.numpy as jnp
import pytest

from linnet import nnx
from tests.nnx.transforms.stateful import Count, Pair, Scale

pytestmark = pytest.mark.usefixtures("values_only")
NAMES = [name for name, value in vars(nnx.compat).items() if hasattr(value, "keywords")]


@pytest.fixture
def shared():
    part = Scale()
    return Pair(part, part)


def test_every_function_has_its_switches_on():
    assert len(NAMES) == 34
    for name in NAMES:
        switched = getattr(nnx.compat, name)
        switches = {"graph", "graph_updates"} & inspect.signature(switched.func).parameters.keys()
        assert switches
        assert switched.keywords == dict.fromkeys(switches, True)
        assert (switched.__name__, switched.__doc__) == (name, switched.func.__doc__)


TAKING_APART = {
    "split": lambda pair: nnx.merge(*nnx.compat.split(pair)),
    "clone": nnx.compat.clone,
    "graphdef": lambda pair: nnx.merge(nnx.compat.graphdef(pair), nnx.compat.state(pair)),
    "recursive_map": lambda pair: nnx.compat.recursive_map(lambda path, node: node, pair),
}


@pytest.mark.parametrize("name", TAKING_APART)
def test_sharing_survives(name, shared):
    copy = TAKING_APART[name](shared)
    assert copy.a is copy.b
    assert copy.a.w.value == 2
    with pytest.raises(ValueError, match="was already seen at"):
        getattr(nnx, name)(*([lambda p, n: n] if name == "recursive_map" else []), shared)


def touch(pair, x):
    pair.a(x)
    pair.b(x)
    pair.label = "new"
    return pair.a.w * x


TRANSFORMS = {
    "jit": lambda pair: nnx.compat.jit(touch)(pair, 3.0),
    "remat": lambda pair: nnx.compat.remat(touch)(pair, 3.0),
    "grad": lambda pair: nnx.compat.grad(touch, argnums=1)(pair, 3.0) * 3,
    "value_and_grad": lambda pair: nnx.compat.value_and_grad(touch)(pair, 3.0)[0],
    "vmap": lambda pair: nnx.compat.vmap(touch, in_axes=(None, 0))(pair, jnp.array([3.0]))[0],
    "cond": lambda pair: nnx.compat.cond(True, touch, touch, pair, 3.0),
    "switch": lambda pair: nnx.compat.switch(0, [touch, touch], pair, 3.0),
    "checkify": lambda pair: nnx.compat.checkify(touch)(pair, 3.0)[1],
    "scan": lambda pair: nnx.compat.scan(
        touch, in_axes=(nnx.StateAxes({...: nnx.Carry}), 0), out_axes=0
    )(pair, jnp.array([3.0]))[0],
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_carry_sharing_and_structure_out(name, shared):
    part = shared.a
    assert TRANSFORMS[name](shared) == 6
    assert shared.a is shared.b is part
    assert part.count.value == 2
    assert shared.label == "new"


def test_loops(shared):
    def body(*args):
        args[-1].a.count[...] += 1
        return args[-1]

    assert nnx.compat.fori_loop(0, 3, body, shared) is shared
    assert nnx.compat.while_loop(lambda pair: pair.b.count < 5, body, shared) is shared
    assert shared.a.count.value == 5


def test_grad_returns_a_state_of_parameters(shared):
    grads = nnx.compat.grad(touch)(shared, 3.0)
    assert isinstance(grads, nnx.State)
    assert grads.a.w.value == 3


def test_without_compat_the_settings_hold(shared):
    with pytest.raises(ValueError, match="tree-mode jit"):
        nnx.jit(touch)(shared, 3.0)


def test_a_switch_can_still_be_given(shared):
    with pytest.raises(ValueError, match="tree-mode jit"):
        nnx.compat.jit(touch, graph=False)(shared, 3.0)


def test_decorators():
    @nnx.compat.jit(static_argnames="n")
    def add(count, n):
        count[...] += n
        return count

    count = Count(jnp.array(0))
    assert add(count, n=3) is count
    assert count.value == 3
