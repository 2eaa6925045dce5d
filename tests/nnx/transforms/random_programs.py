"""Random programs: what they consist of, how one is drawn, and how it is run twice and compared."""

import contextlib
import difflib
from typing import Any, NamedTuple

import jax.numpy as jnp
from hypothesis import strategies as st

from linnet import nnx
from linnet.nnx.transforms import jit_function, plan
from tests.nnx.transforms import random_operations
from tests.nnx.transforms.random_changes import CHANGES, GROUPS, UNNOTICED
from tests.nnx.transforms.random_operations import OPERATIONS, program, seen_text
from tests.nnx.transforms.random_worlds import (
    INGREDIENTS,
    World,
    account,
    array,
    identities,
    is_member,
    node,
    one_of,
)

WHERE, NUMBER = st.integers(0, 30), st.integers(1, 9)


class Argument(NamedTuple):
    """One argument of a call: a root, any object of the world, or one that is made for the call."""

    source: str
    where: int
    n: int

    def take(self, world):
        return SOURCES[self.source](world, self.where, self.n)


def any_object(world, where, n):
    members = [x for x in identities(world.all(), look=False) if is_member(x)]
    return members[where % len(members)]


def any_rngs(world, where, n):
    found = [x for x in identities(world.all(), look=False) if isinstance(x, nnx.Rngs)]
    return (one_of(found, where) or [nnx.Rngs(n)])[0]


SOURCES = {
    "left": lambda world, where, n: world.roots["left"],
    "right": lambda world, where, n: world.roots["right"],
    "any object": any_object,
    "any Rngs": any_rngs,
    "fresh object": lambda world, where, n: node(n),
    "fresh Variable": lambda world, where, n: nnx.Param(array(n)),
    "fresh Rngs": lambda world, where, n: nnx.Rngs(n),
}

FORMS = {
    "positional": lambda objects: (objects, {}),
    "one by name": lambda objects: (objects[:-1], {"last": objects[-1]}),
    "all by name": lambda objects: ((), {f"arg{i}": x for i, x in enumerate(objects)}),
    "in a list": lambda objects: ((list(objects),), {}),
    "in a dict": lambda objects: ((), {"all": dict(zip("zyx", objects, strict=False))}),
    "a number first": lambda objects: ((2.0, *objects), {}),
}


class Form(NamedTuple):
    """How objects are passed."""

    arguments: tuple[Argument, ...]
    form: str

    def take(self, world):
        return FORMS[self.form](tuple(argument.take(world) for argument in self.arguments))


class Call(NamedTuple):
    """Changes from outside, and then a call of one of the functions."""

    changes: tuple[Any, ...]
    form: int
    function: int
    look: bool


class Program(NamedTuple):
    """All that happens: what is built, what the jitted functions do, and when they are called."""

    recipe: tuple[Any, ...]
    functions: tuple[Any, ...]
    forms: tuple[Form, ...]
    calls: tuple[Call, ...]
    checked: bool

    def complete_recipe(self):
        """The recipe, and what else the operations and changes need to have an effect."""
        needs = [
            (need, where, n)
            for steps in self.functions
            for name, where, n in steps
            for need in random_operations.NEEDS[name]
        ]
        needs += [
            (need, where, n)
            for call in self.calls
            for name, where, n in call.changes
            for need in CHANGES[name].needs
        ]
        return [*self.recipe, *needs]


# ---- drawing ------------------------------------------------------------------------------------


def steps(names, least, most):
    step = st.tuples(st.sampled_from(sorted(names)), WHERE, NUMBER)
    return st.lists(step, min_size=least, max_size=most).map(tuple)


def programs(groups=frozenset(GROUPS) - UNNOTICED, operations=frozenset(OPERATIONS), checked=False):
    """Programs with changes of some groups and with some operations."""
    changes = [name for name, change in CHANGES.items() if change.group in groups] or ["nothing"]
    sources = st.sampled_from(["left", "left", *SOURCES])
    other = st.builds(Argument, sources, WHERE, NUMBER)
    arguments = st.tuples(
        st.builds(Argument, st.sampled_from(["left", "left", *SOURCES]), WHERE, NUMBER)
    )
    arguments = st.one_of(arguments, st.tuples(other, other), st.tuples(other, other, other))
    form = st.builds(Form, arguments, st.sampled_from(sorted(FORMS)))
    call = st.builds(
        Call, steps(changes, 0, 2), st.integers(0, 1), st.integers(0, 1), st.booleans()
    )
    return st.builds(
        Program,
        steps(INGREDIENTS, 1, 5),
        st.lists(steps(operations, 0, 2), min_size=1, max_size=2).map(tuple),
        st.lists(form, min_size=1, max_size=2).map(tuple),
        st.lists(call, min_size=2, max_size=4).map(tuple),
        st.just(checked),
    )


# ---- running ------------------------------------------------------------------------------------


@contextlib.contextmanager
def checking_plans(checked):
    """Has every cached plan compared with a walk, or not."""
    modules = [module for module in (plan, jit_function) if hasattr(module, "CHECK_PLANS")]
    before = [module.CHECK_PLANS for module in modules]
    for module in modules:
        module.CHECK_PLANS = checked
    try:
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.CHECK_PLANS = value


class Side:
    """One of the two worlds, with the functions that run in it."""

    def __init__(self, program_, plain):
        self.name = "eagerly" if plain else "under nnx.jit"
        self.world = World(program_.complete_recipe())
        wrap = (lambda f: f) if plain else nnx.jit
        self.functions = [wrap(program(steps, plain)) for steps in program_.functions]

    def change(self, changes):
        for name, where, n in changes:
            CHANGES[name].make(self.world, where, n)

    def call(self, form, function, x, look):
        """Calls a function and gives an account of everything afterwards."""
        args, kwargs = form.take(self.world)
        known = identities([*self.world.all(), args, kwargs], look)
        out = self.functions[function](*args, x=x, **kwargs)
        # Also of Variables that are no longer there: someone else may hold them.
        values = [x.raw_value for x in known if isinstance(x, nnx.Variable)]
        roots = {**self.world.roots, "args": (args, kwargs), "out": out, "values": values}
        return account(roots, known, look), out[0][0]


def run_program(program_):
    """Runs a program under ``nnx.jit`` and eagerly and compares the worlds after each call.

    Compared are what the function saw when it began, its outputs, and of everything that can be
    reached: values, attributes, static values, metadata, classes, the order of entries, which
    places hold the same object, and which of them hold one that was there before the call.
    """
    with checking_plans(program_.checked):
        sides = [Side(program_, plain=False), Side(program_, plain=True)]
        for number, call in enumerate(program_.calls):
            form = program_.forms[call.form % len(program_.forms)]
            function = call.function % len(program_.functions)
            look = call.look or number == len(program_.calls) - 1
            for side in sides:
                side.change(call.changes)
            accounts = [side.call(form, function, jnp.float32(number), look) for side in sides]
            assert_same(*accounts, number)


def assert_same(jitted, eager, number):
    """Fails with the places in which two accounts differ."""
    (found, saw), (wanted, should_see) = jitted, eager
    lines = [
        f"  {path}: {found.get(path, 'nothing')} under nnx.jit, {wanted.get(path, 'nothing')} eagerly"
        for path in dict.fromkeys([*found, *wanted])
        if found.get(path) != wanted.get(path)
    ]
    if int(saw) != int(should_see):
        texts = difflib.unified_diff(
            seen_text(saw), seen_text(should_see), "jit", "eager", "", "", 0
        )
        lines += ["  what the function saw:", *(f"    {line}" for line in texts)]
    assert not lines, "\n".join([f"after call {number}:", *lines[:40]])
