"""Plans: one trace for each structure, and never a stale one."""

import contextlib
import copy
import dataclasses
import functools
import gc
import signal
import threading
import typing
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from linnet import nnx
from linnet.nnx.graphlib.walk import Walk
from linnet.nnx.transforms import plan
from tests.models import Config
from tests.nnx.transforms.stateful import Count, Pair, Scale, ScaleNormNoise, counted, values
from tests.subprocesses import run_program


class Trainer(nnx.Module):
    """Holds an optax transformation and its state, as an optimizer does."""

    def __init__(self, model, rate):
        self.tx = optax.adam(rate)
        self.state = nnx.OptState(self.tx.init(nnx.as_pure(nnx.state(model, nnx.Param))))

    def update(self, model, grads):
        params = nnx.state(model, nnx.Param)
        pure = nnx.as_pure(params)
        updates, self.state.value = self.tx.update(nnx.as_pure(grads), self.state.value, pure)
        nnx.update(model, optax.apply_updates(pure, updates))


def train(model, trainer, x):
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    trainer.update(model, grads)
    return loss


# ---- one trace for each structure ---------------------------------------------------------------


def test_repeated_steps_trace_once():
    step, traces = counted(train)
    jitted, model = nnx.jit(step), ScaleNormNoise()
    trainer = Trainer(model, 1e-3)
    losses = [float(jitted(model, trainer, jnp.arange(3.0))) for _ in range(5)]
    assert len(traces) == 1
    assert len(set(losses)) == 5
    assert model.scale.count.value == 5


def test_train_and_eval_trace_once_each():
    step, traces = counted(lambda net, x: net(x))
    jitted, net, x = nnx.jit(step), ScaleNormNoise(), jnp.arange(3.0)
    for _ in range(3):
        net.train()
        jitted(net, x)
        net.eval()
        np.testing.assert_allclose(jitted(net, x), x * 2 - net.norm.mean.value, rtol=1e-6)
    assert len(traces) == 2
    assert net.scale.count.value == 6


def test_an_equal_model_and_optimizer_do_not_trace_again():
    step, traces = counted(train)
    jitted, x = nnx.jit(step), jnp.arange(3.0)
    for seed in range(3):
        model = ScaleNormNoise(seed)
        jitted(model, Trainer(model, 1e-3), x)
    assert len(traces) == 1
    jitted(model, Trainer(model, 1e-2), x)
    assert len(traces) == 2


def test_a_restored_model_does_not_trace_again():
    step, traces = counted(lambda net, x: net(x))
    jitted, net, x = nnx.jit(step), ScaleNormNoise(w=2.0), jnp.arange(3.0)
    net.eval()
    jitted(net, x)
    nnx.update(net, nnx.state(ScaleNormNoise(w=3.0), nnx.Param))
    np.testing.assert_allclose(jitted(net, x), x * 3)
    merged = nnx.merge(*nnx.split(net))
    merged.scale.w[...] = 4.0
    np.testing.assert_allclose(jitted(merged, x), x * 4)
    np.testing.assert_allclose(jitted(nnx.clone(net), x), x * 4)
    assert len(traces) == 1


def test_fresh_rngs_do_not_trace_again():
    step, traces = counted(lambda model, rngs, x: model(x) + rngs.normal(x.shape))
    jitted, model, x = nnx.jit(step), Scale(), jnp.arange(3.0)
    for seed in range(5):
        want = x * 2 + nnx.Rngs(seed).normal((3,))
        np.testing.assert_allclose(jitted(model, nnx.Rngs(seed), x), want, rtol=1e-6)
    assert len(traces) == 1
    assert model.count.value == 5


def test_fresh_modules_beside_a_known_one():
    @nnx.jit
    def step(model, a, b):
        a, b = (m(1.0) if isinstance(m, Scale) else m for m in (a, b))
        return model(1.0) * 100 + a * 10 + b

    model = Scale(1.0)
    made = []
    for i in (3.0, 4.0, 5.0):
        made += [float(step(model, Scale(i), 2.0))]
    for i in (3.0, 4.0, 5.0):
        made += [float(step(model, 2.0, Scale(i)))]
    assert made == [132, 142, 152, 123, 124, 125]
    assert model.count.value == 6


def test_a_model_in_another_place_is_another_call():
    step = nnx.jit(lambda a, b: (a(1.0), b) if isinstance(a, Scale) else (a, b(1.0)))
    model = Scale(3.0)
    for _ in range(3):
        assert [float(x) for x in step(model, 5.0)] == [3, 5]
        assert [float(x) for x in step(5.0, model)] == [5, 3]


FORMS = {
    "by position": ({}, lambda step, model, other, x: step(model, other, x)),
    "by name": ({}, lambda step, model, other, x: step(model, x=x, other=other)),
    "donated": ({"donate_argnums": (0, 2)}, lambda step, model, other, x: step(model, other, x)),
    "donated by name": (
        {"donate_argnames": "other"},
        lambda step, model, other, x: step(model, x=x, other=other),
    ),
    "static": (
        {"static_argnames": "power"},
        lambda step, model, other, x: step(model, other, x, power=1),
    ),
    "in containers": (
        {},
        lambda step, model, other, x: step(*[{"inner": [model]}, (other, None)], x),
    ),
    "lone Variables": ({}, lambda step, model, other, x: step(model.w, other, x)),
    "sharded": (
        {"in_shardings": jax.sharding.SingleDeviceSharding(jax.devices()[0])},
        lambda step, model, other, x: step(model, other, x),
    ),
}


@pytest.mark.parametrize(("options", "call"), FORMS.values(), ids=FORMS)
def test_known_objects_are_not_walked_again(monkeypatch, options, call):
    def step(model, other, x, power=1):
        for variable in jax.tree.leaves((model, other), is_leaf=lambda x: isinstance(x, Count)):
            if isinstance(variable, Count):
                variable[...] += 1
        return x**power

    step, traces = counted(step)
    jitted, model, other = nnx.jit(step, **options), Scale(1.0), Scale(2.0)
    for _ in range(2):
        call(jitted, model, other, jnp.ones(2))
    monkeypatch.setattr(plan, "CHECK_PLANS", False)
    monkeypatch.setattr(Walk, "_object", None)
    for _ in range(2):
        assert call(jitted, model, other, jnp.ones(2)).tolist() == [1, 1]
    assert other.count.value == 4
    assert [float(m.w.value) for m in (model, other)] == [1, 2]
    assert len(traces) == 1


def test_static_arguments_of_a_plan_are_told_apart():
    @nnx.jit(static_argnums=1)
    def tell(model, what):
        return model(1.0) * (10 if what is True else 100)

    model = Scale(1.0)
    assert [float(tell(model, what)) for what in (1, True, 1, True)] == [100, 10, 100, 10]


@pytest.mark.parametrize("some, other", [(0.0, -0.0), ((1,), (True,)), ((1,), (1.0,))])
def test_static_arguments_that_compare_equal_are_told_apart(some, other):
    text = nnx.jit(lambda x, what: x * len(repr(what)), static_argnums=1)
    for what in (some, other, some, other):
        assert text(1, what) == len(repr(what))
    assert text.jitted_fn._cache_size() == 2


def test_shapes_and_dtypes_are_the_business_of_jax():
    step, traces = counted(lambda model, x: model(x))
    jitted, model = nnx.jit(step), Scale()
    for x in (jnp.ones(2), jnp.ones(3), jnp.ones(2), jnp.ones(2, jnp.int32)):
        assert jitted(model, x).tolist() == [2.0] * len(x)
    model.w.value = jnp.full(2, 5.0)
    assert jitted(model, jnp.ones(2)).tolist() == [5, 5]
    assert len(traces) == 4


# ---- what changes between calls counts ----------------------------------------------------------


def twice_with_change(model, change, read):
    """The answers before and after a change, with a flag flipped on the way there and back."""
    run, traces = counted(read)
    jitted = nnx.jit(run)
    model.flag = False
    before = float(jitted(model))
    model.flag = True
    jitted(model)
    change(model)
    with_flag = float(jitted(model))
    model.flag = False
    after = float(jitted(model))
    assert with_flag == after
    assert float(jitted(model)) == after
    return before, after, len(traces)


@dataclasses.dataclass(frozen=True)
class Frozen:
    sizes: list


class Hashed(Config):
    def __hash__(self):
        return hash(self.width)


class Named(typing.NamedTuple):
    sizes: list


def with_static(value):
    model = Scale(10.0)
    model.held = value
    return model


STATICS = {
    "list": ([1], lambda h: h.append(2), len),
    "dict": ({"a": 1}, lambda h: h.update(b=2), len),
    "set": ({1}, lambda h: h.add(2), len),
    "tuple of lists": (([1],), lambda h: h[0].append(2), lambda h: len(h[0])),
    "named tuple": (Named([1]), lambda h: h.sizes.append(2), lambda h: len(h.sizes)),
    "dataclass": (Config(1), lambda h: setattr(h, "width", 2), lambda h: h.width),
    "frozen dataclass": (Frozen([1]), lambda h: h.sizes.append(2), lambda h: len(h.sizes)),
    "hashable object": (Hashed(1), lambda h: setattr(h, "width", 2), lambda h: h.width),
    "partial": (functools.partial(len, [1]), lambda h: h.args[0].append(2), lambda h: h()),
}


@pytest.mark.parametrize("name", STATICS)
def test_a_static_value_that_changed_in_place_counts(name):
    value, change, measure = copy.deepcopy(STATICS[name])
    before, after, traces = twice_with_change(
        with_static(value), lambda m: change(m.held), lambda m: m.w * measure(m.held)
    )
    assert (before, after) == (10, 20)
    assert traces == 4


def test_a_list_in_a_named_tuple_that_is_written_inside_is_kept():
    def turn(m):
        m.held.sizes[0] = 1 - m.held.sizes[0]
        return m.w * m.held.sizes[0]

    model, step = with_static(Named([0])), nnx.jit(turn)
    for count in range(1, 6):
        assert step(model) == 10 * (count % 2)
        assert model.held == Named([count % 2])


def test_a_static_list_that_grew_traces_once_more():
    step, traces = counted(lambda model: model.w * len(model.held))
    jitted, model = nnx.jit(step), with_static([1])
    results = [float(jitted(model)), float(jitted(model))]
    model.held.append(2)
    results += [float(jitted(model)), float(jitted(model))]
    assert results == [10, 10, 20, 20]
    assert len(traces) == 2


def total(model):
    return sum(jax.tree.leaves(nnx.as_pure(nnx.state(model, nnx.Param))))


CHANGES = {
    "a new Variable": lambda m: setattr(m, "new", nnx.Param(jnp.array(5.0))),
    "a removed one": lambda m: delattr(m, "b"),
    "another one in its place": lambda m: setattr(m, "b", nnx.Param(jnp.array(7.0))),
    "another object at the same address": lambda m: (delattr(m, "a"), setattr(m, "a", Scale(9.0))),
    "a list that grew": lambda m: m.items.append(Scale(6.0)),
    "another element at the same address": lambda m: (m.items.pop(), m.items.append(Scale(9.0))),
    "a dict with another order": lambda m: m.named.update(x=m.named.pop("x")),
    "an element of nnx.List": lambda m: m.layers.__setitem__(0, Scale(9.0)),
    "a longer nnx.List": lambda m: m.layers.append(Scale(6.0)),
    "an entry of nnx.Dict": lambda m: m.by_name.__setitem__("new", Scale(9.0)),
    "an attribute of nnx.Dict": lambda m: setattr(m.by_name, "new", Scale(9.0)),
    "a State that grew": lambda m: m.state.__setitem__("new", nnx.Param(jnp.array(5.0))),
    "two that changed places": lambda m: (setattr(m, "a", m.b), setattr(m, "b", m.a)),
    "a shared one": lambda m: setattr(m, "again", m.a),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_structural_change_between_calls_counts(name):
    model = Pair(Scale(1.0), nnx.Param(jnp.array(2.0)))
    model.items = [Scale(3.0)]
    model.named = {"x": Scale(1.0), "y": Scale(1.0)}
    model.layers, model.by_name = nnx.List([Scale(4.0)]), nnx.Dict(k=Scale(5.0))
    model.state = nnx.State({"s": nnx.Param(jnp.array(1.0))})
    before, after, _ = twice_with_change(model, CHANGES[name], total)
    assert before == 18
    assert after == total(model)


def test_writes_reach_an_object_at_the_same_address():
    model = Pair(Scale(1.0), [Scale(2.0)])

    @nnx.jit
    def step(model):
        return model.a(1.0) + model.b[0](1.0)

    step(model)
    del model.a
    model.a = Scale(10.0)
    model.b.clear()
    model.b.append(Scale(20.0))
    assert step(model) == 30
    assert model.a.count.value == model.b[0].count.value == 1


def test_metadata_that_changed_between_calls_counts():
    before, after, traces = twice_with_change(
        Scale(2.0),
        lambda model: model.w.set_metadata(factor=10),
        lambda model: model.w * model.w.get_metadata("factor", 1),
    )
    assert (before, after, traces) == (2, 20, 4)


@pytest.mark.parametrize("name", STATICS)
def test_metadata_that_changed_in_place_counts(name):
    value, change, measure = copy.deepcopy(STATICS[name])
    model = Scale(10.0)
    model.w.set_metadata(held=value)
    step = nnx.jit(lambda m: m.w * measure(m.w.held))
    for _ in range(3):
        assert step(model) == 10 * measure(model.w.held)
    change(model.w.held)
    for _ in range(3):
        assert step(model) == 10 * measure(model.w.held)


class Remembering(Scale):
    @functools.cached_property
    def doubled(self):
        return self.w.value * 2


def test_a_cached_property_that_was_read_between_calls_counts():
    model, step = Remembering(1.0), nnx.jit(lambda m: m.doubled + m.w.value)
    plain = nnx.jit(lambda m: m.w.value)
    for _ in range(3):
        plain(model)
    assert model.doubled == 2
    model.w.value = jnp.float32(5.0)
    for _ in range(3):
        assert step(model) == 7
    del model.doubled
    assert step(model) == 15
    model.w.value = jnp.float32(6.0)
    assert step(model) == 16


class Deleting(Scale):
    def __delattr__(self, name):
        object.__delattr__(self, name)


def test_a_deletion_in_a_classs_own_way_counts():
    model, step = Deleting(1.0), nnx.jit(lambda m: m.w.value * (2 if hasattr(m, "mark") else 3))
    model.mark = "here"
    for _ in range(3):
        assert step(model) == 2
    del model.mark
    assert step(model) == 3


def test_a_static_value_in_a_list_of_data_counts():
    model = Pair([nnx.Param(jnp.array(2.0)), 3], None)
    before, after, traces = twice_with_change(
        model, lambda model: model.a.__setitem__(1, 4), lambda model: model.a[0] * model.a[1]
    )
    assert (before, after, traces) == (6, 8, 4)


def test_an_array_in_a_list_that_becomes_a_number_counts():
    model = Pair([jnp.zeros(()), jnp.ones(())], Scale())
    run = nnx.jit(lambda model: [isinstance(x, int) and x for x in model.a])
    for number in range(12):
        model.a[0] = jnp.zeros(())
        assert run(model)[0] is False or not run(model)[0]
        model.a[0] = number
        assert int(run(model)[0]) == number


def test_a_method_in_a_list_counts():
    class Switch(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.array(2.0))
            self.steps = [self.once]

        def once(self):
            return self.w * 1

        def tenfold(self):
            return self.w * 10

    before, after, _ = twice_with_change(
        Switch(), lambda m: m.steps.__setitem__(0, m.tenfold), lambda m: m.steps[0]()
    )
    assert (before, after) == (2, 20)


def test_an_attribute_that_becomes_data_counts():
    model = with_static(3)
    is_static = nnx.jit(lambda model: isinstance(model.held, int))
    assert is_static(model)
    model.held = nnx.data(3)
    assert not is_static(model)


def test_an_unannounced_change_is_caught_by_the_check():
    model = Scale()
    run = nnx.jit(lambda model: model(1.0))
    for _ in range(2):
        run(model)
    model.__dict__["w"] = nnx.Param(jnp.array(5.0))
    with pytest.raises(AssertionError) as raised:
        run(model)
    assert str(raised.value) == (
        "A plan of nnx.jit for <lambda> does not fit its objects: something changed unannounced. "
        "This is model.w: another Param than before.\n"
        "Fix: write setattr(object, name, value) or call nnx.update; a write through vars(object), "
        "object.__dict__, object.__setattr__ or dict.__setitem__ is not noticed. If the program "
        "has none, this is an error of Linnet: please report it."
    )


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("block", Scale, "nets[1].block: another Scale than before"),
        ("rate", lambda: 0.2, "nets[1].rate: 0.1 -> 0.2"),
        ("more", lambda: jnp.ones(2), "nets[1].more: new (an array)"),
        ("array", lambda: nnx.Param(jnp.ones(2)), "nets[1].array: an array -> Param"),
        ("pair", lambda: (jnp.ones(1), 2), "nets[1].pair[0]: its tuple is another one than before"),
    ],
)
def test_the_check_says_where_something_changed(name, value, text):
    class Net(nnx.Module):
        def __init__(self):
            self.block, self.rate = Scale(), 0.1
            self.array, self.pair = jnp.ones(2), (jnp.ones(1), 2)

    @nnx.jit
    def step(x, nets):
        return x

    nets = [Net(), Net()]
    for _ in range(2):
        step(1.0, nets)
    vars(nets[1])[name] = value()
    with pytest.raises(AssertionError) as raised:
        step(1.0, nets)
    message = str(raised.value)
    assert message.startswith("A plan of nnx.jit for step does not fit its objects: something ")
    assert f"This is {text}.\nFix: write setattr(" in message


# ---- memory -------------------------------------------------------------------------------------


def test_a_dropped_model_is_freed_with_its_plan_and_arrays():
    jitted = nnx.jit(lambda net, x: net(x))
    net, kept = ScaleNormNoise(), ScaleNormNoise()
    arrays = len(jax.live_arrays())
    for model in (net, kept, net, kept):
        jitted(model, jnp.arange(3.0)).block_until_ready()
    parts = [weakref.ref(part) for part in (net, net.scale, net.scale.w, net.norm.mean)]
    plans = [
        weakref.ref(kept) for table in jitted._tables.values() for kept in table.plans.values()
    ]
    del net, model
    gc.collect()
    jitted(kept, jnp.arange(3.0))
    assert [part() for part in parts] == [None] * 4
    assert [reference() is None for reference in plans].count(True) == 1
    assert len(jax.live_arrays()) < arrays


def test_a_dropped_function_is_freed_with_its_plans():
    net = ScaleNormNoise()
    jitted = nnx.jit(lambda net, x: net(x))
    jitted(net, jnp.arange(3.0))
    gone = weakref.ref(jitted)
    del jitted
    gc.collect()
    assert gone() is None


def test_many_steps_do_not_grow_the_process():
    step = nnx.jit(lambda net, rngs, x: net(x) + rngs.normal(x.shape))
    net, x = ScaleNormNoise(), jnp.arange(3.0)

    def run(steps):
        for i in range(steps):
            net.train() if i % 100 else net.eval()
            step(net, nnx.Rngs(i), x)
        gc.collect()
        return len(gc.get_objects()), len(jax.live_arrays())

    objects, arrays = run(300)
    more_objects, more_arrays = run(10_000)
    assert more_objects - objects < 100
    assert more_arrays <= arrays


# ---- interrupts ------------------------------------------------------------------------------


class Interrupt(BaseException):
    """Raised at any point, as KeyboardInterrupt is, which would end pytest itself."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_never_leaves_half_a_step():
    model = Pair([Scale(0.0) for _ in range(40)], None)

    @nnx.jit
    def step(model):
        for scale in model.a:
            scale.w[...] += 1

    def interrupt(*_):
        armed.clear()
        raise Interrupt

    def run_until_interrupted(seconds):
        armed.add("once")
        with contextlib.suppress(Interrupt):
            signal.setitimer(signal.ITIMER_REAL, seconds)
            while armed:  # also over if JAX swallowed the error in a callback
                step(model)

    step(model)
    armed, before = set(), signal.signal(signal.SIGALRM, interrupt)
    try:
        for tries in range(100):
            with contextlib.suppress(Interrupt):  # one that JAX raises again later
                run_until_interrupted(0.001 + 0.00002 * tries)
            assert len({float(scale.w.value) for scale in model.a}) == 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_interrupt_while_looking_at_a_change_does_not_lose_it(monkeypatch):
    run, net = nnx.jit(lambda net: net.noise.deterministic), ScaleNormNoise()
    net.train()
    run(net)
    net.eval()
    assert run(net)
    net.train()

    def interrupt(obj):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(plan, "sort_attributes", interrupt)
        run(net)
    assert not run(net)


# ---- threads ------------------------------------------------------------------------------------


def test_eight_threads_step_eight_models():
    step = nnx.jit(lambda net, rngs, x: net(x) + rngs.normal(x.shape))
    want = [ScaleNormNoise(seed, w=seed + 1.0) for seed in range(8)]
    nets = [ScaleNormNoise(seed, w=seed + 1.0) for seed in range(8)]
    x, errors = jnp.arange(3.0), []

    def run(net, seed, step=step):
        try:
            for i in range(30):
                net.eval() if i % 3 == 0 else net.train()
                step(net, nnx.Rngs(seed + i), x)
        except BaseException as error:
            errors.append(error)

    for seed, net in enumerate(want):
        run(net, seed)
    threads = [threading.Thread(target=run, args=(net, n)) for n, net in enumerate(nets)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [values(net) for net in nets] == [values(net) for net in want]


# ---- other processes ----------------------------------------------------------------------------

CACHED = """
import jax, jax.numpy as jnp
from linnet import nnx
from tests.nnx.transforms.stateful import ScaleNormNoise

hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
print(nnx.jit(lambda net, x: net(x))(ScaleNormNoise(), jnp.arange(3.0)).tolist())
print(sum(event.endswith("/cache_hits") for event in hits))
"""


@pytest.mark.slow
def test_a_second_process_finds_the_persistent_cache(tmp_path):
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }

    def run():
        numbers, hits = run_program(CACHED, **settings).stdout.splitlines()
        return numbers, int(hits)

    first = run()
    names = {path.name for path in tmp_path.iterdir() if path.name.endswith("-cache")}
    second = run()
    assert any("lambda" in name for name in names)
    assert {path.name for path in tmp_path.iterdir() if path.name.endswith("-cache")} == names
    assert first[0] == second[0]
    assert second[1] > first[1]
