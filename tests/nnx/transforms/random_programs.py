"""Random programs: what they consist of, how one is drawn, and how it is run twice and compared."""

import contextlib
import difflib
import random
import sys
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import HiddenDataWarning, LostVariableWarning
from linnet.nnx.transforms import donation, packing, plan
from tests.nnx.transforms import random_operations
from tests.nnx.transforms.random_changes import AROUND, CHANGES, GROUPS
from tests.nnx.transforms.random_operations import CALM, OPERATIONS, program_function, seen_text
from tests.nnx.transforms.random_worlds import (
    INGREDIENTS,
    World,
    account,
    array,
    identities,
    is_member,
    node,
    one_of,
    stored,
)


class Step(NamedTuple):
    """An ingredient, an operation or a change: its name, a number for where, another for what."""

    name: str
    where: int
    n: int


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


AGAIN = "the first argument again"
SOURCES = {
    AGAIN: any_rngs,
    "left": lambda world, where, n: world.roots["left"],
    "right": lambda world, where, n: world.roots["right"],
    "any object": any_object,
    "any Rngs": any_rngs,
    "a result": lambda world, where, n: (one_of(world.results, where) or [node(n)])[0],
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

WRAPPERS = {
    "jit": nnx.jit,
    "jit of remat": lambda f: nnx.jit(nnx.remat(f)),
    "donating": lambda f: nnx.jit(f, donate_argnums=0),
}


class Form(NamedTuple):
    """How objects are passed."""

    arguments: tuple[Argument, ...]
    form: str

    def take(self, world):
        objects = []
        for argument in self.arguments:
            again = argument.source == AGAIN
            objects.append(objects[0] if again and objects else argument.take(world))
        return FORMS[self.form](tuple(objects))


class Call(NamedTuple):
    """Changes from outside, and then a call of one of the functions."""

    changes: tuple[Step, ...]
    form: int
    function: int
    look: bool
    precision: str | None = None  # a setting of JAX during the call
    twin: bool = False  # in a second world of the same recipe, with a number of another type


class Program(NamedTuple):
    """All that happens: what is built, what the jitted functions do, and when they are called."""

    recipe: tuple[Step, ...]
    functions: tuple[tuple[Step, ...], ...]
    forms: tuple[Form, ...]
    calls: tuple[Call, ...]
    wrapper: str = "jit"
    checked: bool = False
    donates: bool = False  # arrays of any size, not large ones alone

    def complete_recipe(self):
        """The recipe, and what else the operations and changes need to have an effect."""
        operations = [step for steps in self.functions for step in steps]
        changes = [step for call in self.calls for step in call.changes]
        needs = [(step, random_operations.NEEDS[step.name]) for step in operations]
        needs += [(step, CHANGES[step.name].needs) for step in changes]
        return [*self.recipe, *(step._replace(name=need) for step, all_ in needs for need in all_)]


# ---- drawing ------------------------------------------------------------------------------------


def random_program(seed, groups=frozenset(GROUPS) - AROUND, operations=frozenset(OPERATIONS)):
    """The program of a seed, with changes of some groups and with some operations.

    Writes that go round ``__setattr__`` are left out unless asked for.

    Plans are checked in those of odd seeds, and state of any size is donated in half of all. Half
    of the programs are calm: there is less in them, their functions change no structure, and one
    change stands alone after two or more like calls: the first makes an object known, and the next
    find out what is remembered of it.
    """
    rng = random.Random(seed)
    calm = seed // 2 % 2 == 0
    operations = sorted(CALM & operations if calm and CALM & operations else operations)
    changes = [name for name, change in CHANGES.items() if change.group in groups]

    def steps(names, least, most):
        return tuple(step(rng.choice(names)) for _ in range(rng.randint(least, most)))

    def step(name):
        return Step(name, rng.randrange(30), rng.randint(1, 9))

    def form(left):
        sources = ["left" if rng.random() < left else rng.choice(list(SOURCES))]
        sources += rng.choices(["any Rngs", *SOURCES], k=rng.choice([0, 0, 1, 1, 2]))
        arguments = tuple(Argument(source, *step("")[1:]) for source in sources)
        return Form(arguments, rng.choice(list(FORMS)))

    def call():
        form, function, look = rng.random() < 0.25, rng.random() < 0.25, rng.random() < 0.3
        precision = "highest" if rng.random() < 0.2 else None
        return Call(steps(changes, 1, 2), int(form), int(function), look, precision)

    # Every change has its turn in each sort of program, after calls that prepare it.
    own = step(changes[seed // 4 % len(changes)])
    checked, donates = seed % 2 == 1, seed // 4 % 2 == 0
    alike = 2 if calm or rng.random() < 0.5 else 1
    if checked and donates:  # arrays are packed when they were the same in two calls with a plan
        alike += 2
    quiet = [call()._replace(changes=()) for _ in range(alike)]
    calls = [*quiet, call(), *(call() for _ in range(rng.randint(0, 2)))]
    changed = calls[len(quiet)].changes
    if calm:
        own = own._replace(where=own.where | 1)  # something on the left
        first = alike + 1
        calls = [other._replace(form=0, function=0) for other in calls[:first]] + calls[first:]
    changed = (own,) if calm else (own, *changed[1:])
    calls[len(quiet)] = calls[len(quiet)]._replace(changes=changed)
    last = seed % 3 == 0  # whether a call in the twin world comes last, or stands anywhere
    calls = [*calls, calls[0]._replace(twin=True)] if last else calls
    calls = [other._replace(twin=other.twin or rng.random() < 0.15) for other in calls]
    return Program(
        recipe=steps(list(INGREDIENTS), 0, 1 if calm else 5),
        functions=tuple(steps(operations, 0, 2 if calm else 3) for _ in range(rng.randint(1, 2))),
        forms=(form(left=1 if calm else 0.75), form(left=0.75)),
        calls=tuple(calls),
        wrapper="jit" if rng.random() < 0.8 else rng.choice(list(WRAPPERS)),
        checked=checked,
        donates=donates,
    )


# ---- running ------------------------------------------------------------------------------------


@contextlib.contextmanager
def checking_plans(checked):
    """Has every cached plan compared with a walk, or not."""
    others = sys.modules.get("linnet.nnx.transforms.jit")  # may hold a copy of the switch
    modules = [module for module in (plan, others) if hasattr(module, "CHECK_PLANS")]
    before = [module.CHECK_PLANS for module in modules]
    for module in modules:
        module.CHECK_PLANS = checked
    try:
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.CHECK_PLANS = value


@contextlib.contextmanager
def donating_from(least, *, packed):
    """Has state donated that is at least so large, and the arrays beside it packed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(donation, "LEAST_BYTES", least)
        patch.setattr(donation.callers, "are_many", False)
        if packed:
            patch.setattr(donation, "can_pack", lambda: True)
            patch.setattr(donation, "_PACKED_AT", 1)
            patch.setattr(packing, "_LEAST_ARRAYS", 1)
            patch.setattr(donation, "_is_brief", lambda cost: True)
        yield


class Side:
    """A world and its twin, with the functions that run in them."""

    def __init__(self, program, plain):
        self.program = program
        self.worlds = [World(program.complete_recipe()) for _ in (False, True)]
        self.world = self.worlds[0]
        self.kept = []
        wrap = (lambda f: f) if plain else WRAPPERS[program.wrapper]
        self.functions = [wrap(program_function(steps, plain)) for steps in program.functions]

    def change(self, changes):
        for name, where, n in changes:
            if n % 3 == 0:  # as if someone else held on to everything that is there now
                self.kept.append(identities(self.world.all(), look=False))
            CHANGES[name].make(self.world, where, n)

    def call(self, form, function, x, look):
        """Calls a function and gives an account of everything afterwards."""
        args, kwargs = form.take(self.world)
        # What comes out of an inner transform is an array of JAX's, wherever it came from.
        keeps_numpy = self.program.wrapper == "jit"
        known = identities([*self.world.all(), args, kwargs], look)
        known = [x for x in known if keeps_numpy or not isinstance(x, np.ndarray)]
        out = self.functions[function](*args, x=x, **kwargs)
        # Also of Variables that are no longer there: someone else may hold them.
        # JAX sorts the keys of dicts in values, here too.
        values = [
            jax.tree.map(lambda x: x, stored(v)) for v in known if isinstance(v, nnx.Variable)
        ]
        roots = {**self.world.roots, "args": (args, kwargs), "out": out, "values": values}
        if self.program.wrapper == "jit":  # transforms inside of it lose what they take out
            roots["known"] = [x for x in known if not isinstance(x, np.ndarray | nnx.Variable)]
        self.world.results = [x for x in out[1] if is_member(x)]
        return account(roots, known, look, keeps_numpy=keeps_numpy), out[0][0]


def run_program(program):
    """Runs a program under ``nnx.jit`` and eagerly and compares the worlds after each call.

    Compared are what the function saw when it began, its outputs, and of everything that can be
    reached: values, attributes, static values, metadata, classes, the order of entries, which
    places hold the same object, and which of them hold one that was there before the call.
    """
    least = 0 if program.donates else donation.LEAST_BYTES
    donating = donating_from(least, packed=program.donates and program.checked)
    with checking_plans(program.checked), donating, warnings.catch_warnings():
        warnings.simplefilter("ignore", LostVariableWarning)
        warnings.simplefilter("ignore", HiddenDataWarning)
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        sides = [Side(program, plain=False), Side(program, plain=True)]
        for number, call in enumerate(program.calls):
            form = program.forms[call.form % len(program.forms)]
            function = call.function % len(program.functions)
            look = call.look or number == len(program.calls) - 1
            for side in sides:
                side.world = side.worlds[call.twin]
                side.change(call.changes)
            x = jnp.asarray(float(number)) if call.twin else jnp.float32(number)
            with jax.default_matmul_precision(call.precision):
                accounts = [side.call(form, function, x, look) for side in sides]
            assert_same_accounts(*accounts, number)


def assert_same_accounts(jitted, eager, number):
    """Fails with the places in which two accounts differ."""
    (found, saw), (wanted, should_see) = jitted, eager
    lines = [
        f"  {path}: {found.get(path)} under nnx.jit, {wanted.get(path)} eagerly"
        for path in dict.fromkeys([*found, *wanted])
        if found.get(path) != wanted.get(path)
    ]
    if int(saw) != int(should_see):
        texts = difflib.unified_diff(seen_text(saw), seen_text(should_see), "jit", "eager", n=0)
        lines += ["  what the function saw:", *(f"    {line.rstrip()}" for line in texts)]
    assert not lines, "\n".join([f"after call {number}:", *lines[:40]])


# ---- making failures small ----------------------------------------------------------------------


def shorter(steps, least=0):
    """The tuples with one element less."""
    return [steps[:i] + steps[i + 1 :] for i in range(len(steps)) if len(steps) > least]


def changed(items, simpler):
    """The tuples with one element replaced by a simpler one."""
    return [
        (*items[:i], other, *items[i + 1 :])
        for i, item in enumerate(items)
        for other in simpler(item)
    ]


def simpler_step(step):
    return [step._replace(**kw) for kw in ({"where": 0}, {"n": 1}) if step._replace(**kw) != step]


def simpler_steps(steps):
    return [*shorter(steps), *changed(steps, simpler_step)]


def simpler_call(call):
    found = [call._replace(changes=other) for other in simpler_steps(call.changes)]
    if call.precision is not None:
        found.append(call._replace(precision=None))
    if call.twin:
        found.append(call._replace(twin=False))
    return found + ([call._replace(form=0, function=0)] if call.form or call.function else [])


def simpler_form(form):
    found = [form._replace(arguments=other) for other in shorter(form.arguments, 1)]
    found += [form._replace(arguments=other) for other in changed(form.arguments, simpler_step)]
    return found + ([form._replace(form="positional")] if form.form != "positional" else [])


def simpler_programs(program):
    """Programs with a little less in them, the largest steps first."""
    yield from (program._replace(calls=other) for other in shorter(program.calls, 1))
    yield from (program._replace(functions=other) for other in shorter(program.functions, 1))
    yield from (program._replace(forms=other) for other in shorter(program.forms, 1))
    yield from (program._replace(recipe=other) for other in simpler_steps(program.recipe))
    for other in changed(program.functions, simpler_steps):
        yield program._replace(functions=other)
    yield from (program._replace(calls=other) for other in changed(program.calls, simpler_call))
    yield from (program._replace(forms=other) for other in changed(program.forms, simpler_form))
    if program.wrapper != "jit":
        yield program._replace(wrapper="jit")


def failure_of(program):
    """The error that a program ends with, or None."""
    try:
        run_program(program)
    except Exception as error:
        return error.with_traceback(None)
    return None


def smallest_failing(program, error, tries=300):
    """A program that fails as well, from which nothing can be left out, and its error."""
    for _ in range(tries):
        for simpler in simpler_programs(program):
            tries -= 1
            other = failure_of(simpler) if tries > 0 else None
            if type(other) is type(error):
                program, error = simpler, other
                break
        else:
            break
    return program, error


def check_program(seed, **options):
    """Runs the program of a seed; a failure is reported with the smallest program that fails."""
    program = random_program(seed, **options)
    if failure_of(program) is None:
        return
    program, error = smallest_failing(program, failure_of(program))
    lines = [f"    {name}={value!r}," for name, value in program._asdict().items()]
    text = f"{type(error).__name__}: {error}" if error else "a failure that does not come back"
    raise AssertionError("\n".join([f"seed {seed}:", "run_program(Program(", *lines, "))", text]))
