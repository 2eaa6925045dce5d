"""Prepared calls of ``nnx.jit`` from many threads, and what they keep alive.

Plans are not checked against a walk here: that would hide how long things take, and another thread
may change an object between the two.
"""

import contextlib
import gc
import sys
import threading
import tracemalloc
import weakref

import jax
import jax.numpy as jnp
import pytest

from linnet import nnx
from tests.nnx.transforms.random_programs import checking_plans
from tests.nnx.transforms.stateful import Count, Pair, Scale, ScaleNormNoise

STEPS = 2_000
THREADS = 8


@pytest.fixture(autouse=True)
def unchecked():
    with checking_plans(False):
        yield


@contextlib.contextmanager
def switching_often():
    """Has the interpreter change threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def in_threads(*tasks, seconds=120):
    """Runs functions at the same time; raises what one of them raised, or that one hangs."""
    errors = []
    start = threading.Barrier(len(tasks))

    def run(task):
        try:
            start.wait()
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(task,), daemon=True) for task in tasks]
    with switching_often():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds)
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
    if errors:
        raise errors[0]


def counter():
    return Count(jnp.zeros((), jnp.int32))


# ---- threads ------------------------------------------------------------------------------------


@nnx.jit
def count_twice(model):
    """Two Variables that are always equal, unless a step is torn or lost."""
    model.a[...] += 1
    model.b[...] += 1


def repeatedly(step, *models, times=STEPS):
    def task():
        for _ in range(times):
            step(*models)

    return task


def test_eight_threads_step_eight_models():
    models = [Pair(counter(), counter()) for _ in range(THREADS)]
    in_threads(*(repeatedly(count_twice, model) for model in models))
    assert [(int(m.a.value), int(m.b.value)) for m in models] == [(STEPS, STEPS)] * THREADS


def test_eight_threads_step_one_model():
    model = Pair(counter(), counter())
    in_threads(*[repeatedly(count_twice, model)] * THREADS)
    assert (int(model.a.value), int(model.b.value)) == (THREADS * STEPS, THREADS * STEPS)


def test_eight_threads_step_two_models_in_both_orders():
    @nnx.jit
    def step(one, other):
        count_twice.fun(one)
        count_twice.fun(other)

    one, other = Pair(counter(), counter()), Pair(counter(), counter())
    forth, back = repeatedly(step, one, other), repeatedly(step, other, one)
    in_threads(*[forth, back] * (THREADS // 2))
    assert [int(v.value) for v in (one.a, one.b, other.a, other.b)] == [THREADS * STEPS] * 4


def test_threads_that_change_the_structure_beside_each_other():
    models = [ScaleNormNoise(seed) for seed in range(THREADS)]
    want = [ScaleNormNoise(seed) for seed in range(THREADS)]
    step = nnx.jit(lambda net: (net.scale(1.0), net.noise.deterministic))
    wrong = []

    def task(model):
        for i in range(200):
            model.eval() if i % 2 else model.train()
            if bool(step(model)[1]) != bool(i % 2):
                wrong.append(i)

    in_threads(*[lambda model=model: task(model) for model in models])
    for model in want:
        model.scale.count[...] += 200
    assert wrong == []
    assert [int(m.scale.count.value) for m in models] == [int(m.scale.count.value) for m in want]


def test_no_watcher_is_lost_when_threads_prepare_calls_at_once():
    functions = [nnx.jit(lambda model, k=k: [s.w * 1 for s in model.a]) for k in range(6)]
    models = []  # kept, so that none counts as made for a single call
    stale = []
    for attempt in range(300):
        model, number = Pair([Scale(0.0) for _ in range(10)], None), attempt % 10
        models.append(model)
        functions[0](model)
        in_threads(*[lambda f=f, m=model: f(m) for f in functions])
        models.append(model.a[number].w)  # kept: that it is gone would be noticed
        model.a[number].w = nnx.Param(jnp.float32(100))
        stale += [attempt for f in functions if f(model)[number] < 100]
    assert stale == []


# ---- growth -------------------------------------------------------------------------------------


def with_switches(count=24):
    """A model with many flags, as one with that many Dropouts has."""
    model = Pair([ScaleNormNoise() for _ in range(count)], None)
    step = nnx.jit(lambda model: sum(net.noise.deterministic for net in model.a))
    for mode in (model.train, model.eval) * 2 + (model.train,):
        mode()
        step(model)
    return model, step


def flip(model, times):
    for _ in range(times):
        model.eval()
        model.train()


def python_calls(f, *args):
    """How many Python functions a call runs."""
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        f(*args)
    finally:
        sys.setprofile(None)
    return calls


def test_what_happened_often_costs_the_next_call_no_more_than_what_happened_once():
    model, step = with_switches()
    work = []
    for times in (1, 1, 300):
        flip(model, times)
        work.append(python_calls(step, model))
    assert work[2] < 2 * work[1]


def test_changes_between_calls_do_not_pile_up():
    model, step = with_switches()
    tracemalloc.start()
    sizes = []
    for times in (10, 120):
        flip(model, times)
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sizes[1] - sizes[0] < 20_000
    assert step(model) == 0


# ---- memory -------------------------------------------------------------------------------------


def test_steps_leave_nothing_behind():
    step = nnx.jit(lambda net, rngs, x: net(x) + rngs.normal(x.shape))
    net, x = ScaleNormNoise(), jnp.arange(3.0)

    def run(times):
        for i in range(times):
            step(net, nnx.Rngs(i), x)
        gc.collect()
        return tracemalloc.get_traced_memory()[0], len(gc.get_objects()), len(jax.live_arrays())

    tracemalloc.start()
    run(300)
    memory, objects, arrays = run(300)
    more_memory, more_objects, more_arrays = run(10_000)
    tracemalloc.stop()
    assert more_memory - memory < 100_000
    assert more_objects - objects < 100
    assert more_arrays <= arrays


def parts_of(net):
    return [net, net.scale, net.scale.w, net.scale.count, net.norm.mean, net.noise.rngs.key]


@contextlib.contextmanager
def without_collector():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def flip_by_hand(net):
    net.noise.deterministic = not net.noise.deterministic


def train_and_evaluate(net):
    net.eval()
    net.train()


@pytest.mark.parametrize("change", [lambda net: None, flip_by_hand, train_and_evaluate])
def test_a_dropped_model_is_freed_at_once(change):
    step, x = nnx.jit(lambda net, x: net(x)), jnp.arange(3.0)
    step(ScaleNormNoise(), x)
    with without_collector():
        net = ScaleNormNoise()
        for _ in range(4):
            step(net, x)
            change(net)
        parts = [weakref.ref(part) for part in parts_of(net)]
        arrays = [weakref.ref(net.scale.w.raw_value)]
        del net
        assert [part() for part in parts] == [None] * len(parts)
        assert [array() for array in arrays] == [None]


def test_dropped_models_leave_no_plans_behind():
    step, x = nnx.jit(lambda net, x: net(x)), jnp.arange(3.0)
    kept = ScaleNormNoise()

    def run(times):
        for seed in range(times):
            net = ScaleNormNoise(seed)
            step(net, x)
            step(kept, x)
            step(net, x)
        del net
        gc.collect()
        return len(gc.get_objects())

    run(20)
    assert run(100) - run(20) < 100


def test_a_dropped_function_is_freed_while_the_model_lives():
    net, x = ScaleNormNoise(), jnp.arange(3.0)
    functions = [nnx.jit(lambda net, x, k=k: net(x) + k) for k in range(3)]
    for function in functions:
        function(net, x)
        net.eval()
        function(net, x)
    gone = [weakref.ref(function) for function in functions]
    del functions, function
    gc.collect()
    assert [function() for function in gone] == [None] * 3
    net.train()  # what watched for them is gone too
