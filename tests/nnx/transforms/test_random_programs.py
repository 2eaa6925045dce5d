"""Whatever a program does, it does the same under ``nnx.jit`` as it does eagerly.

Random programs over random objects, with random changes between the calls; see
``random_worlds.py``, ``random_operations.py`` and ``random_changes.py`` for what they are made of,
and ``random_programs.run_program`` for what is compared. One jitted function is used through a
whole program, and plans are checked against a walk in every other program.

A failure names the seed and the smallest program that fails, to be pasted into a test.
"""

import random

import jax
import pytest
from hypothesis import settings

from linnet.nnx.transforms import donation
from tests.nnx.transforms.random_changes import AROUND
from tests.nnx.transforms.random_programs import (
    Argument,
    Form,
    Step,
    check_program,
    failure_of,
    random_program,
    run_program,
)
from tests.nnx.transforms.random_worlds import INGREDIENTS, SHARED_STATICS, World, account

USUAL = settings.default.max_examples  # 75, or what HYPOTHESIS_PROFILE says


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """The programs are compiled once and run a few times."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize("part", range(10))
def test_programs_do_the_same_under_jit(part):
    for seed in range(part, min(500, 6 * USUAL), 10):
        check_program(seed)


LEFT = Form((Argument("left", 0, 1),), "positional")
WRITES = frozenset({"write", "write_in_place", "write_an_item", "write_what_a_setting_says"})


def with_packed_arrays(program):
    """The program with each of its calls made three times: arrays that stay the same get packed."""
    calls = [again for call in program.calls for again in (call, *[call._replace(changes=())] * 2)]
    return program._replace(forms=(LEFT,), calls=tuple(calls), checked=True, donates=True)


@pytest.mark.parametrize("part", range(2))
def test_programs_do_the_same_with_packed_arrays(part, monkeypatch):
    made = []
    make = donation.DonatingFunction._make_packed
    monkeypatch.setattr(
        donation.DonatingFunction,
        "_make_packed",
        lambda self, *args: made.append(self) or make(self, *args),
    )
    seeds = range(part, min(100, 2 * USUAL), 2)
    for seed in seeds:
        run_program(with_packed_arrays(random_program(seed, operations=WRITES)))
    assert len(made) >= len(seeds) / 16  # not in vain


STATICS = frozenset(
    {"write", "write_into_a_static_object", "set_a_static_value", "grow_a_static_list"}
)


@pytest.mark.parametrize("part", range(2))
def test_programs_keep_the_static_values_of_two_worlds_apart(part):
    for seed in range(part, min(60, USUAL), 2):
        program = random_program(seed, operations=STATICS, groups=frozenset({"statics", "nothing"}))
        calls = [one for call in program.calls for one in (call, call._replace(twin=True))]
        run_program(program._replace(calls=tuple(calls)))


@pytest.mark.parametrize("part", range(2))
def test_programs_change_static_values_that_several_modules_share(part):
    for seed in range(part, min(200, 2 * USUAL), 2):
        program = random_program(seed, operations=STATICS, groups=frozenset({"statics", "nothing"}))
        rng = random.Random(seed)
        names = rng.choices([*SHARED_STATICS, "config", "numbers", "child"], k=3)
        recipe = tuple(Step(name, 4 * rng.randrange(9) + 1, rng.randint(1, 9)) for name in names)
        run_program(program._replace(recipe=(*recipe, *program.recipe), forms=(LEFT,)))


STATIC_VALUES = ("config", "settings", "options", "user dict", "numbers", "number", "child")
STATIC_CHANGES = ("put_another_static_value", "change_a_static_value_in_place", "set_a_number")


def with_changes_one_by_one(program, seed):
    """The program with a few static values, and one change of them before each second call."""
    rng = random.Random(seed)

    def step(names):
        return Step(rng.choice(names), rng.randrange(30), rng.randint(1, 9))

    call = program.calls[0]._replace(changes=(), form=0, function=0, look=True, twin=False)
    changed = [call._replace(changes=(step(STATIC_CHANGES),)) for _ in range(6)]
    calls = (call, call, *(one for other in changed for one in (other, call)))
    recipe = tuple(step(STATIC_VALUES) for _ in range(3))
    return program._replace(recipe=recipe, forms=(LEFT,), calls=calls, checked=False)


@pytest.mark.parametrize("part", range(2))
def test_programs_see_static_values_that_were_set_and_changed_later(part):
    for seed in range(part, min(200, 2 * USUAL), 2):
        program = random_program(seed, operations=frozenset({"write"}))
        run_program(with_changes_one_by_one(program, seed))


@pytest.mark.parametrize("part", range(2))
def test_writes_around_setattr_are_found_by_the_check(part):
    for seed in range(1 + 2 * part, min(40, USUAL), 4):
        program = random_program(seed, groups=AROUND)
        assert program.checked
        error = failure_of(program)
        assert error is None or "something changed unannounced" in str(error), f"seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_many_programs_do_the_same_under_jit(part):
    for seed in range(part, 10 * USUAL, 20):
        check_program(100_000 + seed)


@pytest.mark.parametrize("seed", range(20))
def test_two_worlds_of_one_recipe_are_alike(seed):
    rng = random.Random(seed)
    names = rng.choices(sorted(INGREDIENTS), k=12)
    recipe = [Step(name, rng.randrange(30), rng.randint(1, 9)) for name in names]
    one, other = World(recipe), World(recipe)
    assert account(one.roots) == account(other.roots)
