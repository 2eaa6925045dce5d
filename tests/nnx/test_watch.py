"""Those who depend on the structure of an object hear of its changes, and of its end."""

import gc
import weakref

import jax.numpy as jnp
import pytest

from linnet import nnx
from linnet.nnx import watch


class Listener:
    def __init__(self):
        self.heard = []

    def structure_changed(self, thing):
        self.heard.append(thing)


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))
        self.array = jnp.ones(2)
        self.flag = False


@pytest.fixture
def listener():
    return Listener()


ANNOUNCED = {
    "a static value": lambda model: setattr(model, "flag", True),
    "a new attribute": lambda model: setattr(model, "new", 1),
    "a removed attribute": lambda model: delattr(model, "flag"),
    "another Variable": lambda model: setattr(model, "w", nnx.Param(jnp.ones(2))),
    "no array any more": lambda model: setattr(model, "array", None),
    "a mark": lambda model: setattr(model, "flag", nnx.data(False)),
    "train": lambda model: model.set_attributes(flag=True),
}
SILENT = {
    "a value": lambda model: setattr(model.w, "value", jnp.zeros(3)),
    "part of a value": lambda model: model.w.__setitem__(0, 5.0),
    "an array": lambda model: setattr(model, "array", jnp.zeros(3)),
    "the same again": lambda model: setattr(model, "flag", False),
    "another object": lambda model: setattr(Model(), "flag", True),
}


@pytest.mark.parametrize("name", ANNOUNCED)
def test_structural_writes_are_announced(name, listener):
    model = Model()
    watch.watch(model, listener)
    ANNOUNCED[name](model)
    assert listener.heard
    assert all(thing is model for thing in listener.heard)


@pytest.mark.parametrize("name", SILENT)
def test_writes_of_values_are_not(name, listener):
    model = Model()
    watch.watch(model, listener)
    watch.watch(model.w, listener)
    SILENT[name](model)
    assert listener.heard == []


CONTAINERS = {
    "append": (nnx.List, lambda c: c.append(1)),
    "setitem": (nnx.List, lambda c: c.__setitem__(0, 2)),
    "delitem": (nnx.List, lambda c: c.__delitem__(0)),
    "insert": (nnx.List, lambda c: c.insert(0, 2)),
    "extend": (nnx.List, lambda c: c.extend([1])),
    "pop": (nnx.List, lambda c: c.pop()),
    "reverse": (nnx.List, lambda c: c.reverse()),
    "attribute": (nnx.List, lambda c: setattr(c, "name", "x")),
    "entry": (nnx.Dict, lambda c: c.__setitem__("b", 2)),
    "removed entry": (nnx.Dict, lambda c: c.__delitem__("a")),
    "entry as attribute": (nnx.Dict, lambda c: setattr(c, "b", 2)),
    "update": (nnx.Dict, lambda c: c.update(b=2)),
    "clear": (nnx.Dict, lambda c: c.clear()),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_announce_their_changes(name, listener):
    make, change = CONTAINERS[name]
    container = make([1, 2]) if make is nnx.List else make(a=1)
    watch.watch(container, listener)
    change(container)
    assert listener.heard[0] is container


def test_metadata_is_structure(listener):
    variable = nnx.Param(jnp.ones(2), role="a")
    watch.watch(variable, listener)
    variable.set_metadata(role="b")
    variable.role = "c"
    variable.del_metadata("role")
    assert len(listener.heard) == 3


def test_watching_twice_tells_once(listener):
    model, other = Model(), Listener()
    for who in (listener, listener, other):
        watch.watch(model, who)
    model.flag = True
    assert len(listener.heard) == len(other.heard) == 1


def test_the_end_of_an_object_is_told_and_leaves_nothing_behind(listener):
    model = Model()
    key = id(model)
    watch.watch(model, listener)
    assert key in watch._table
    del model
    gc.collect()
    assert listener.heard == [None]
    assert key not in watch._table


def test_a_watcher_is_held_weakly():
    model, gone = Model(), Listener()
    watch.watch(model, gone)
    reference = weakref.ref(gone)
    del gone
    assert reference() is None
    model.flag = True
    watch.watch(model, kept := Listener())
    model.flag = False
    assert len(kept.heard) == 1
