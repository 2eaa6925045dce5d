"""The key of the user's code changes whenever the code does, and is made again only then."""

import contextlib
import functools
import types

import jax.numpy as jnp
import pytest
from hypothesis import given, strategies as st

from linnet import nnx
from linnet.nnx.transforms.user_code import UserCode


def _method(self, x, times=2, *, plus=0):
    return helper(x) * times + plus + len(x)  # noqa: F821


def _helper(x):
    return rate if limit is None else table[0]  # noqa: F821


def _closed_over(value):
    def inner(self):
        return value

    return inner


class CodeWorld:
    """A class of modules and a function, with globals of their own that a test changes."""

    def __init__(self):
        self.globals = {"rate": 2.0, "limit": None, "table": (1,)}
        self.globals["helper"] = self.function(_helper)
        of_base = {"__module__": __name__, "shift": 1}
        self.base = type("Base", (nnx.Module,), dict(of_base))
        self.other_base = type("OtherBase", (nnx.Module,), {**of_base, "shift": 2})
        wrapped = self.function(lambda self: rate)  # noqa: F821
        members = {
            "__module__": __name__,
            "method": self.function(_method, defaults=(2,)),
            "closure": _closed_over(1),
            "static": staticmethod(_closed_over(2)),
            "property": property(_closed_over(3)),
            "wrapped": functools.wraps(wrapped)(functools.partial(wrapped)),
            "scale": 1.0,
            "nothing": None,
            "sizes": (1, 2),
        }
        self.cls = type("Model", (self.base,), members)
        self.user = self.function(lambda model, x: model.method(x))
        self.leaves = [self.cls(), jnp.ones(1)]

    def function(self, like, defaults=None):
        return types.FunctionType(like.__code__, self.globals, like.__name__, defaults)

    def method(self):
        return vars(self.cls)["method"]

    def cell(self):
        return vars(self.cls)["closure"].__closure__[0]


def _set(name, value):
    return lambda world: setattr(world.cls, name, value)


def _set_global(name, value):
    return lambda world: world.globals.__setitem__(name, value)


def _set_part(name, value):
    return lambda world: setattr(world.method(), name, value)


def _wrap_another(world):
    vars(world.cls)["wrapped"].__wrapped__ = world.function(_helper)


def _delete(name):
    return lambda world: name in vars(world.cls) and delattr(world.cls, name)


CODE_CHANGES = {
    "nothing": lambda world: None,
    "a global": _set_global("rate", 3.0),
    "a global back": _set_global("rate", 2.0),
    "a global of another type": _set_global("rate", 2),
    "a global becomes None": _set_global("rate", None),
    "a global goes": lambda world: world.globals.pop("rate", None),
    "a builtin is shadowed": _set_global("len", None),
    "a helper": lambda world: world.globals.update(helper=world.function(_method)),
    "a global becomes a list": lambda world: world.globals.update(table=[1]),
    "a list grows": lambda world: (
        world.globals["table"] == [1] and world.globals["table"].append(2)
    ),
    "a class attribute": _set("scale", 2.0),
    "a class attribute of another type": _set("scale", 1),
    "a class attribute becomes a dict": lambda world: setattr(world.cls, "scale", {"a": 1}),
    "a dict of a class": lambda world: (
        type(world.cls.scale) is dict and world.cls.scale.update(a=2)
    ),
    "a new attribute": _set("more", 1),
    "an operator": _set("__add__", _closed_over(1)),
    "a new attribute that is None": _set("more", None),
    "None goes": _delete("nothing"),
    "an attribute goes": _delete("more"),
    "an attribute gets another name": lambda world: (
        type.__delattr__(world.base, "shift"),
        setattr(world.base, "moved", 1),
    ),
    "an attribute of a base": lambda world: setattr(world.base, "shift", 2),
    "another base": lambda world: setattr(world.cls, "__bases__", (world.other_base,)),
    "code": _set_part("__code__", _helper.__code__),
    "defaults": _set_part("__defaults__", (3,)),
    "a default that is a list": lambda world: setattr(world.method(), "__defaults__", ([1],)),
    "a list of defaults grows": lambda world: (
        world.method().__defaults__ == ([1],) and world.method().__defaults__[0].append(1)
    ),
    "defaults of keywords": lambda world: setattr(world.method(), "__kwdefaults__", {"plus": 1}),
    "a default of a keyword": lambda world: (
        world.method().__kwdefaults__ and world.method().__kwdefaults__.update(plus=2)
    ),
    "an attribute of a function": _set_part("mark", 1),
    "another attribute of a function": _set_part("mark", 2),
    "a closure": lambda world: setattr(world.cell(), "cell_contents", 5),
    "a closure over a list": lambda world: setattr(world.cell(), "cell_contents", [5]),
    "an empty closure": lambda world: delattr(world.cell(), "cell_contents"),
    "another property": _set("property", property(_closed_over(4))),
    "another wrapped function": _wrap_another,
    "another class": lambda world: setattr(world.leaves[0], "__class__", world.base),
}

# The change that another one needs before it.
FOLLOWS_ON = {
    "a global back": "a global",
    "a list grows": "a global becomes a list",
    "a dict of a class": "a class attribute becomes a dict",
    "an attribute goes": "a new attribute",
    "a list of defaults grows": "a default that is a list",
    "a default of a keyword": "defaults of keywords",
    "another attribute of a function": "an attribute of a function",
}


@given(st.lists(st.sampled_from(sorted(CODE_CHANGES)), max_size=8))
def test_the_key_of_code_is_the_one_that_is_made_anew(changes):
    world = CodeWorld()
    code = UserCode(world.user)
    for change in ["nothing", *changes]:
        with contextlib.suppress(AttributeError, ValueError):  # some follow only on others
            CODE_CHANGES[change](world)
        for _ in range(2):
            assert code.key(world.leaves) == UserCode(world.user).key(world.leaves)


def test_the_key_of_code_is_made_once_while_nothing_changes():
    world = CodeWorld()
    code = UserCode(world.user)
    assert code.key(world.leaves) is code.key(world.leaves)
    before = code.key(world.leaves)
    for change in ("a global", "an attribute of a base", "a closure"):
        CODE_CHANGES[change](world)
        assert code.key(world.leaves) != before
        assert code.key(world.leaves) is code.key(world.leaves)


@pytest.mark.parametrize("change", sorted(set(CODE_CHANGES) - {"nothing"}))
def test_each_change_of_code_is_noticed(change):
    world, code_change = CodeWorld(), CODE_CHANGES[change]
    if change in FOLLOWS_ON:
        CODE_CHANGES[FOLLOWS_ON[change]](world)
    code = UserCode(world.user)
    before = code.key(world.leaves)
    code_change(world)
    assert code.key(world.leaves) != before
