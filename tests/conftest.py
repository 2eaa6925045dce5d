"""How every test runs: on the CPU, strictly, with each plan checked against a walk."""

import os

# Before anything imports JAX or Linnet, which read these once.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["LINNET_CHECK_PLANS"] = "1"

import jax
import pytest
from hypothesis import settings

from linnet import nnx
from linnet.nnx.pytreelib import watch
from linnet.nnx.transforms import library_code
from tests.subprocesses import failures_of

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_rank_promotion", "raise")

# deadline=None: the first example pays for a compilation.
settings.register_profile("default", deadline=None, derandomize=True, max_examples=75)
settings.register_profile("quick", deadline=None, derandomize=True, max_examples=20)
settings.register_profile("full", deadline=None, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture
def strict_dtypes():
    """Mixing dtypes is an error in this test."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def leak_check():
    """A tracer that outlives its trace is an error in this test."""
    with jax.checking_leaks():
        yield


@pytest.fixture(autouse=True)
def classes_as_before():
    """What a test replaces in Linnet's classes, and puts back, counts for no other test."""
    count = len(watch.changed_classes)
    yield
    del watch.changed_classes[count:]


@pytest.fixture
def compiled():
    """The compilations since the last time it was cleared."""
    events = []

    def listen(event, duration, **_):
        if event.endswith("backend_compile_duration"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def values_only():
    """No graph mode, no graph updates: objects are not changed in place."""
    with nnx.set_graph_mode(False), nnx.set_graph_updates(False):
        yield


@pytest.fixture
def tests_as_library(monkeypatch):
    """Classes and functions of the tests count as the library's, so that they may count runs."""
    monkeypatch.setattr(library_code, "LIBRARIES", {*library_code.LIBRARIES, "tests"})


@pytest.fixture(scope="module")
def failures(request):
    """What went wrong in the ``cases`` of a test module, run in one process: texts by name."""
    return failures_of(request.module.cases)
