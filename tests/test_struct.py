"""Frozen dataclasses that are JAX pytrees."""

import dataclasses
import pickle
from typing import Generic, TypeVar

import cloudpickle
import jax
import jax.numpy as jnp
import pytest

from linnet import struct

T = TypeVar("T")


@struct.dataclass
class Config:
    rate: float
    name: str = struct.field(pytree_node=False, default="adam")
    extra: dict = struct.field(default_factory=dict)


class Point(struct.PyTreeNode):
    x: float
    label: str = struct.field(pytree_node=False, default="p")


class Point3(Point):
    z: float = 0.0


@pytest.mark.parametrize(
    ("node", "leaves"),
    [
        (Config(0.5, extra={"k": 2}), {".rate": 0.5, ".extra['k']": 2}),
        (Point(1.0), {".x": 1.0}),
        (Point3(1.0, z=2.0), {".x": 1.0, ".z": 2.0}),
    ],
)
def test_leaves_and_their_paths(node, leaves):
    found = jax.tree_util.tree_leaves_with_path(node)
    assert {jax.tree_util.keystr(path): leaf for path, leaf in found} == leaves


def test_fields_that_are_no_node_are_structure():
    traces = []

    @jax.jit
    def f(config):
        traces.append(config.name)
        return config.replace(rate=config.rate * 2)

    assert float(f(Config(0.5)).rate) == 1.0
    f(Config(0.25))
    assert f(Config(0.5, "sgd")).name == "sgd"
    assert traces == ["adam", "sgd"]


def test_replace_leaves_the_original():
    config = Config(0.5)
    changed = config.replace(rate=0.1, name="sgd")
    assert (changed.rate, changed.name) == (0.1, "sgd")
    assert config == Config(0.5)
    assert Point(1.0).replace(x=2.0) == Point(2.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nope'"):
        config.replace(nope=1)


@pytest.mark.parametrize(("node", "field"), [(Config(0.5), "rate"), (Point(1.0), "x")])
def test_instances_are_frozen(node, field):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(node, field, 3.0)


def test_a_class_may_ask_not_to_be_frozen():
    @struct.dataclass(frozen=False)
    class Counter:
        n: int

    counter = Counter(1)
    counter.n = 2
    assert jax.tree.leaves(counter) == [2]


def test_options_of_dataclasses_are_passed_on():
    class Keyword(struct.PyTreeNode, kw_only=True):
        a: int = 1
        b: int

    @struct.dataclass(order=True)
    class Version:
        major: int
        minor: int = struct.field(metadata={"unit": "none"}, default=0)

    assert Keyword(b=2) == Keyword(a=1, b=2)
    assert Version(1, 2) < Version(2)
    assert dataclasses.fields(Version)[1].metadata == {"unit": "none", "pytree_node": True}


def test_inheritance_and_decorating_twice():
    @struct.dataclass
    class Wider(Config):
        width: int = 4

    assert jax.tree.leaves(Wider(0.5)) == [0.5, 4]
    assert struct.dataclass(Config) is Config


def test_fields_that_the_constructor_does_not_take():
    @struct.dataclass
    class Circle:
        radius: float
        area: float = struct.field(init=False, default=0.0)

        def __post_init__(self):
            object.__setattr__(self, "area", 3 * self.radius**2)

    doubled = jax.tree.map(lambda x: 2 * x, Circle(1.0))
    assert (doubled.radius, doubled.area) == (2.0, 12.0)


def test_generic_nodes():
    class Box(struct.PyTreeNode, Generic[T]):
        value: T

    assert jax.tree.map(lambda x: x + 1, Box[int](1)) == Box(2)


def test_nodes_under_transforms():
    grads = jax.grad(lambda p: p.x**2)(Point(3.0))
    assert (type(grads), float(grads.x), grads.label) == (Point, 6.0, "p")
    mapped = jax.vmap(lambda p: p.replace(x=p.x + 1))(Point(jnp.arange(2.0)))
    assert mapped.x.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("module", [pickle, cloudpickle])
def test_pickling(module):
    node = Config(0.5, extra={"k": Point(1.0)})
    assert module.loads(module.dumps(node)) == node


def test_the_base_class_is_no_node():
    with pytest.raises(NotImplementedError) as error:
        struct.PyTreeNode()
    assert str(error.value) == (
        "PyTreeNode is a base class, not a node.\nFix: derive a class with fields from it."
    )
