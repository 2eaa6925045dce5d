"""Whatever a program does, it does the same under ``nnx.jit`` as it does eagerly.

Random programs over random objects, with random changes between the calls; see
``random_worlds.py``, ``random_operations.py`` and ``random_changes.py`` for what they are made of,
and ``run_program`` for what is compared. One jitted function is used through a whole program.
"""

import jax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.nnx.transforms.random_programs import programs, run_program
from tests.nnx.transforms.random_worlds import INGREDIENTS, World, account

pytestmark = [
    pytest.mark.filterwarnings("ignore::linnet.errors.LostVariableWarning"),
    pytest.mark.filterwarnings("ignore::linnet.errors.HiddenDataWarning"),
]

USUAL = settings.default.max_examples


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """The programs are compiled once and run a few times."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def many(count):
    return settings(max_examples=count, suppress_health_check=list(HealthCheck))


@many(3 * USUAL // 2)
@given(programs(checked=False))
def test_programs_do_the_same_under_jit(program):
    run_program(program)


@many(3 * USUAL // 2)
@given(programs(checked=True))
def test_programs_do_the_same_under_jit_with_plans_checked(program):
    run_program(program)


@pytest.mark.slow
@pytest.mark.parametrize("checked", [False, True])
@many(5 * USUAL)
@given(st.data())
def test_many_programs_do_the_same_under_jit(checked, data):
    run_program(data.draw(programs(checked=checked)))


@many(USUAL)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(INGREDIENTS)), st.integers(0, 9), st.integers(1, 9)))
)
def test_two_worlds_of_one_recipe_are_alike(recipe):
    assert account(World(recipe).roots) == account(World(recipe).roots)
