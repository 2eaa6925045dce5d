"""``linnet.config`` as programs use it: switches, read as attributes and set by ``update``."""

import jax
import pytest

from linnet import config, nnx
from tests.subprocesses import run_program

AT_FIRST = {
    "flax_always_shard_variable": True,
    "flax_array_ref": False,
    "flax_filter_frames": True,
    "flax_fix_rng_separator": False,
    "flax_hijax_variable": False,
    "flax_max_repr_depth": None,
    "flax_preserve_adopted_names": False,
    "flax_profile": True,
    "flax_pytree_module": True,
    "flax_return_frozendict": False,
    "flax_use_flaxlib": False,
    "flax_use_orbax_checkpointing": True,
    "nnx_graph_mode": True,
    "nnx_graph_updates": True,
}
READ = {
    "flax_always_shard_variable": nnx.using_eager_sharding,
    "flax_hijax_variable": lambda: nnx.var_defaults().hijax,
    "nnx_graph_mode": nnx.set_graph_mode.current_value,
    "nnx_graph_updates": nnx.set_graph_updates.current_value,
}


def test_what_they_are_at_first():
    assert {name: getattr(config, name) for name in AT_FIRST} == AT_FIRST
    assert set(AT_FIRST) <= set(dir(config))


@pytest.mark.parametrize("name", [name for name in AT_FIRST if name != "flax_max_repr_depth"])
def test_an_update_lasts(name):
    before = AT_FIRST[name]
    config.update(name, not before)
    try:
        assert getattr(config, name) is (not before)
        assert READ.get(name, lambda: not before)() is (not before)
    finally:
        config.update(name, int(before))
    assert getattr(config, name) is before
    with config.temp_flip_flag(name, not before):
        assert getattr(config, name) is (not before)
    assert getattr(config, name) is before


def test_a_flag_goes_back_after_an_error():
    with pytest.raises(ZeroDivisionError), config.temp_flip_flag("profile", False):
        _ = 1 / 0
    assert config.flax_profile is True


def test_a_switch_shows_the_value_outside_of_blocks():
    with nnx.set_graph_mode(False):
        assert config.nnx_graph_mode is True


@pytest.mark.parametrize(
    ("depth", "text"),
    [(0, "List(...)"), (1, "List([\n  Linear(...)\n])")],
)
def test_how_deep_objects_print(depth, text):
    model = nnx.List([nnx.Linear(1, 1, rngs=nnx.Rngs(0))])
    whole = repr(model)
    config.update("flax_max_repr_depth", depth)
    try:
        assert repr(model).replace("List([...])", "List(...)") == text
    finally:
        config.update("flax_max_repr_depth", None)
    assert repr(model) == whole


def test_a_compiled_function_follows_the_switch():
    seen = []
    step = jax.jit(lambda x: seen.append(nnx.set_graph_mode.current_value()) or x)
    step(1.0)
    config.update("nnx_graph_mode", False)
    try:
        step(1.0)
    finally:
        config.update("nnx_graph_mode", True)
    step(1.0)
    assert seen == [True, False]


def test_a_switch_that_is_not_there():
    with pytest.raises(LookupError, match=r"Unrecognized config option: flax_profil\. There are"):
        config.update("flax_profil", True)
    with pytest.raises(LookupError, match=r"\nFix: flax_profile\.$"):
        config.update("flax_profil", True)
    with pytest.raises(AttributeError, match=r"module 'linnet\.config' has no attribute 'nope'"):
        config.nope  # noqa: B018


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "flax_profile",
            "no",
            "linnet.config.flax_profile takes True or False, but got 'no'; it is True now.",
        ),
        (
            "flax_max_repr_depth",
            "two",
            "linnet.config.flax_max_repr_depth takes a number of levels or None, but got 'two'; "
            "it is None now.",
        ),
    ],
)
def test_values_that_are_refused(name, value, message):
    with pytest.raises(TypeError) as error:
        config.update(name, value)
    assert str(error.value) == message


def test_assignment_is_refused():
    with pytest.raises(AttributeError) as error:
        config.flax_profile = False
    assert str(error.value) == (
        "linnet.config.flax_profile is not set by assignment.\n"
        "Fix: linnet.config.update('flax_profile', False)."
    )


def test_the_environment():
    program = """
import os
os.environ |= {
    "FLAX_PROFILE": "0", "FLAX_MAX_REPR_DEPTH": "3", "FLAX_HIJAX_VARIABLE": "true",
    "FLAX_ALWAYS_SHARD_VARIABLE": "no", "NNX_GRAPH_MODE": "false",
}
from linnet import config, nnx
assert not config.flax_profile and config.flax_max_repr_depth == 3
assert nnx.var_defaults().hijax and not nnx.using_eager_sharding()
assert not nnx.set_graph_mode.current_value() and nnx.set_graph_updates.current_value()
"""
    run_program(program)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("FLAX_PROFILE", "maybe", "FLAX_PROFILE='maybe' in the environment: use one of true, "),
        ("FLAX_MAX_REPR_DEPTH", "-1", "FLAX_MAX_REPR_DEPTH='-1' in the environment: use a number."),
    ],
)
def test_bad_values_in_the_environment(name, text, message):
    program = f"""
import os
os.environ[{name!r}] = {text!r}
try:
    import linnet.nnx
except ValueError as error:
    assert str(error).startswith({message!r}), error
else:
    raise AssertionError("no error")
"""
    run_program(program)
