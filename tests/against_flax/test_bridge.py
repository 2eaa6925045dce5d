"""The bridge's programs on both libraries: each direction, with state, keys, metadata, sharing,
under the transforms of both sides, and ``nnx.bridge.Module``."""

import flax.linen
import flax.nnx.bridge  # noqa: F401

import linnet.linen  # noqa: F401
from tests.against_flax.compare import program, same_on_both
from tests.nnx.bridge.cases import CASES, plain

PROGRAMS = {}

# What both refuse; Linen's own errors have no builtin class in common with ours but Exception.
REFUSED = {
    "to_nnx_immutable_by_default": Exception,
    "to_nnx_unknown_method": AttributeError,
    "to_nnx_unknown_attribute": AttributeError,
    "to_nnx_fields_are_no_attributes": AttributeError,
    "to_nnx_init_of_a_function": ValueError,
    "same_path_in_two_collections": ValueError,
    "no_collection_for_an_array": ValueError,
    "nnx_meta_of_another_type": AssertionError,
    "to_linen_key_missing": AttributeError,
    "to_linen_stream_missing": KeyError,
    "to_linen_unknown_method": AttributeError,
    "to_linen_unknown_attribute": AttributeError,
    "functional_before_init": AssertionError,
    "module_unbound": ValueError,
    "module_unbound_rng": ValueError,
    "module_without_keys": KeyError,
    "module_unknown_method": AttributeError,
    "module_interop_outside": AssertionError,
}


def enter(name, case):
    """Enters a case, a function of ``nnx`` and ``linen``, as a program."""

    def run(f):
        return plain(case(f.nnx, f.flax.linen))

    run.__name__ = name
    program(PROGRAMS, REFUSED.get(name))(run)


for name, case in CASES.items():
    enter(name, case)

test_programs = same_on_both(PROGRAMS)
