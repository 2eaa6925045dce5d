"""Those who depend on the structure of an object hear of its changes."""

import weakref

import jax.numpy as jnp
import pytest

from linnet import nnx
from linnet.nnx.pytreelib import watch


class Listener:
    def __init__(self):
        self.heard = []

    def static_changed(self, thing):
        self.heard.append(thing)

    def content_changed(self):
        self.heard.append("content")


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))
        self.array = jnp.ones(2)
        self.flag = False


class Other(Model):
    pass


@pytest.fixture
def listener():
    return Listener()


STATIC = {
    "a static value": lambda model: setattr(model, "flag", True),
    "a new attribute": lambda model: setattr(model, "new", 1),
    "train": lambda model: model.set_attributes(flag=True),
    "another class": lambda model: setattr(model, "__class__", Other),
}
CONTENT = {
    "a removed attribute": lambda model: delattr(model, "flag"),
    "another Variable": lambda model: setattr(model, "w", nnx.Param(jnp.ones(2))),
    "no array any more": lambda model: setattr(model, "array", None),
    "a mark": lambda model: setattr(model, "flag", nnx.data(False)),
    "all attributes": lambda model: model.__setstate__(Model().__getstate__()),
    "another dict": lambda model: setattr(model, "__dict__", {"flag": True}),
}
SILENT = {
    "a value": lambda model: setattr(model.w, "value", jnp.zeros(3)),
    "part of a value": lambda model: model.w.__setitem__(0, 5.0),
    "an array": lambda model: setattr(model, "array", jnp.zeros(3)),
    "the same again": lambda model: setattr(model, "flag", False),
    "another object": lambda model: setattr(Model(), "flag", True),
}


@pytest.mark.parametrize("name", STATIC)
def test_writes_of_static_values_are_announced(name, listener):
    model = Model()
    watch.watch([model], listener)
    STATIC[name](model)
    assert listener.heard
    assert all(thing is model for thing in listener.heard)


@pytest.mark.parametrize("name", CONTENT)
def test_other_structural_writes_are_announced(name, listener):
    model = Model()
    watch.watch([model], listener)
    CONTENT[name](model)
    assert listener.heard[0] == "content"


@pytest.mark.parametrize("name", SILENT)
def test_writes_of_values_are_not(name, listener):
    model = Model()
    watch.watch([model, model.w], listener)
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
    watch.watch([container], listener)
    change(container)
    assert listener.heard[0] in ("content", container)


def test_metadata_is_structure(listener):
    variable = nnx.Param(jnp.ones(2), role="a")
    watch.watch([variable], listener)
    variable.set_metadata(role="b")
    variable.role = "c"
    variable.del_metadata("role")
    variable.__class__ = nnx.BatchStat
    assert len(listener.heard) == 4
    assert all(thing is variable for thing in listener.heard)


def test_all_watchers_are_told(listener):
    model, other = Model(), Listener()
    for who in (listener, other):
        watch.watch([model], who)
    model.flag = True
    assert len(listener.heard) == len(other.heard) == 1


def test_a_watcher_is_held_weakly():
    model, gone = Model(), Listener()
    watch.watch([model], gone)
    reference = weakref.ref(gone)
    del gone
    assert reference() is None
    model.flag = True
    watch.watch([model], kept := Listener())
    assert len(model._linnet_home.watchers) == 1
    model.flag = False
    assert len(kept.heard) == 1
