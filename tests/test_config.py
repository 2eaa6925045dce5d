"""Ambient settings: a call, a block, a decorator, the environment; compiled functions notice."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from linnet import config, nnx
from linnet.nnx.graphlib.graphdef import graph_mode, graph_modes
from tests.subprocesses import run_program

SETTINGS = [nnx.set_graph_mode, nnx.set_graph_updates, nnx.use_eager_sharding]


@pytest.fixture(params=SETTINGS, ids=lambda setting: setting.__name__)
def setting(request):
    yield request.param
    request.param(True)


def test_a_call_lasts(setting):
    assert setting.current_value() is True
    setting(False)
    assert setting.current_value() is setting.get_default() is False
    setting(1)
    assert setting.current_value() is True


def test_a_block_ends(setting):
    with setting(False):
        assert setting.current_value() is False
        assert setting.get_default() is True
        assert setting.get_stack() == [True, False]
    assert setting.current_value() is True
    assert setting.get_stack() == [True]


def test_blocks_nest(setting):
    seen = []
    with setting(False):
        with setting(True):
            with setting(False):
                seen.append(setting.current_value())
            seen.append(setting.current_value())
        seen.append(setting.current_value())
    assert [*seen, setting.current_value()] == [False, True, False, True]


def test_a_block_ends_by_an_error(setting):
    with pytest.raises(ZeroDivisionError), setting(False):
        _ = 1 / 0
    assert setting.current_value() is True


def test_a_call_in_a_block_lasts_until_its_end(setting):
    with setting(False):
        setting(True)
        setting(False)
        setting(True)
        assert setting.current_value() is True
        with setting(False):
            assert setting.current_value() is False
        assert setting.current_value() is True
    assert setting.current_value() is True
    with setting(True):
        setting(False)
    assert setting.current_value() is True


def test_a_block_inside_a_lasting_call(setting):
    setting(False)
    with setting(True):
        assert setting.current_value() is True
    assert setting.current_value() is False


def test_an_instance_serves_again(setting):
    off = setting(False)
    setting(True)
    for _ in range(2):
        with off, off:
            assert setting.current_value() is False
        assert setting.current_value() is True


def test_a_decorator(setting):
    @setting(False)
    def inside(x, *, y):
        """Says so."""
        return setting.current_value(), x + y

    assert setting.current_value() is True
    assert inside(1, y=2) == (False, 3)
    assert setting.current_value() is True
    assert (inside.__name__, inside.__doc__) == ("inside", "Says so.")


def test_settings_do_not_touch_each_other():
    with nnx.set_graph_mode(False):
        assert nnx.set_graph_updates.current_value() is True
        with nnx.set_graph_updates(False):
            assert nnx.set_graph_mode.current_value() is False


def test_compiled_functions_are_traced_for_each_value(setting):
    traces = []

    @jax.jit
    def f(x):
        traces.append(setting.current_value())
        return x

    for value in (True, False, True, False):
        with setting(value):
            f(1.0)
    setting(False)
    f(1.0)
    assert traces == [True, False]


def test_compiled_functions_notice_other_defaults_for_variables():
    make = jax.jit(lambda x: nnx.var_defaults().hijax)
    assert not make(1.0)
    with nnx.var_defaults(hijax=True):
        assert make(1.0)
    assert not make(1.0)


# ---- the environment ---------------------------------------------------------------------------

NAMES = {
    "NNX_GRAPH_MODE": "set_graph_mode",
    "NNX_GRAPH_UPDATES": "set_graph_updates",
    "NNX_EAGER_SHARDING": "use_eager_sharding",
}


def test_the_environment_sets_the_default():
    values = ", ".join(f"nnx.{name}.current_value()" for name in NAMES.values())
    result = run_program(
        f"from linnet import nnx; print({values})", **dict.fromkeys(NAMES, "false")
    )
    assert result.stdout == "False False False\n", result.stderr


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("True", True), (" on ", True), ("0", False), ("no", False), ("", False)],
)
def test_texts_for_a_flag(monkeypatch, text, value):
    monkeypatch.setenv("LINNET_TEST_FLAG", text)
    assert config.env_flag("LINNET_TEST_FLAG", not value) is value
    monkeypatch.delenv("LINNET_TEST_FLAG")
    assert config.env_flag("LINNET_TEST_FLAG", value) is value


def test_other_texts_are_refused(monkeypatch):
    monkeypatch.setenv("LINNET_TEST_FLAG", "maybe")
    with pytest.raises(ValueError) as error:
        config.env_flag("LINNET_TEST_FLAG", True)
    assert str(error.value) == (
        "LINNET_TEST_FLAG='maybe' in the environment: use one of true, false, 1, 0."
    )


# ---- threads -----------------------------------------------------------------------------------


def test_a_block_is_for_its_thread_and_a_call_for_all(setting):
    with ThreadPoolExecutor(1) as other:
        with setting(False):
            assert other.submit(setting.current_value).result() is True
        setting(False)
        assert other.submit(setting.current_value).result() is False
        other.submit(setting, True).result()
        assert setting.current_value() is True


def test_blocks_of_many_threads_leave_no_trace(setting):
    barrier = threading.Barrier(4)
    interval = sys.getswitchinterval()

    def work():
        barrier.wait()
        for _ in range(300):
            with setting(False):
                assert setting.current_value() is False
            with setting(False), setting(True):
                assert setting.current_value() is True

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(work) for _ in range(4)]:
                done.result()
    finally:
        sys.setswitchinterval(interval)
    assert setting.current_value() is setting.get_default() is True


def test_many_calls_are_not_all_remembered(setting):
    for _ in range(1000):
        setting(False)
        setting(True)
    assert len(config._changes[setting.context]) <= config._MOST_CHANGES + 1


# ---- the two switches of the object model ------------------------------------------------------


def test_both_homes_of_the_switches():
    assert nnx.graphlib.set_graph_mode is nnx.set_graph_mode
    assert nnx.graphlib.set_graph_updates is nnx.set_graph_updates


@pytest.mark.parametrize(
    ("switch", "read"),
    [
        (nnx.set_graph_mode, graph_mode),
        (nnx.set_graph_updates, lambda updates: graph_modes(True, updates)[1]),
    ],
)
def test_an_explicit_choice_wins_over_the_ambient_one(switch, read):
    assert (read(None), read(True), read(False)) == (True, True, False)
    with switch(False):
        assert (read(None), read(True), read(False)) == (False, True, False)


def test_tree_mode_refuses_sharing():
    p = nnx.Param(jnp.ones(2))
    shared = {"a": p, "b": p}
    nnx.split(shared)
    with nnx.set_graph_mode(False):
        with pytest.raises(ValueError, match=r"Variable at \.b was already seen at \.a"):
            nnx.split(shared)
        nnx.split(shared, graph=True)
    with pytest.raises(ValueError, match="already seen"):
        nnx.split(shared, graph=False)
