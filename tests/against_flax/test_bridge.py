"""The bridge's programs on both libraries: each direction, with state, keys, metadata, sharing,
under the transforms of both sides, and ``nnx.bridge.Module``."""

import flax.linen
import flax.nnx.bridge  # noqa: F401

import linnet.linen  # noqa: F401
from tests.against_flax.compare import program, same_on_both
from tests.nnx.bridge.cases import CASES, plain

PROGRAMS = {}


def enter(name, case):
    """Enters a case, a function of ``nnx`` and ``linen``, as a program."""

    def run(f):
        return plain(case(f.nnx, f.flax.linen))

    run.__name__ = name
    program(PROGRAMS)(run)


for name, case in CASES.items():
    enter(name, case)

test_programs = same_on_both(PROGRAMS)
