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

from tests.nnx.transforms.random_changes import AROUND
from tests.nnx.transforms.random_programs import Step, check_program, failure_of, random_program
from tests.nnx.transforms.random_worlds import INGREDIENTS, World, account

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
