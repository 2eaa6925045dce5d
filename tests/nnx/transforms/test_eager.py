"""Functions that are compiled outside of traces, and run as they are inside."""

from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.random import RandomState, default_rng

from linnet import nnx
from linnet.errors import FeatureError
from linnet.nnx.transforms.eager import compiled_outside
from tests.functional.interceptors import under_their_names

X = jnp.ones((1, 2))


def recorded():
    """A function of a layer, and a list that grows when it runs in Python."""
    runs = []

    @compiled_outside
    def scaled(layer, x, *, times, shift=None):
        """Scales."""
        runs.append((times, isinstance(x, jax.core.Tracer)))
        layer.calls[...] += 1
        y = times * layer(x)
        return y if shift is None else y + shift

    return scaled, runs


def build():
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    layer.calls = nnx.Variable(jnp.zeros((), jnp.int32))
    return layer


@pytest.mark.usefixtures("tests_as_library")
def test_it_is_compiled_once_for_equal_options_and_structures():
    scaled, runs = recorded()
    layer, other = build(), build()
    want = 3 * layer(X)
    for which in (layer, layer, other):
        assert jnp.allclose(scaled(which, X, times=3), want)
    assert (int(layer.calls), int(other.calls)) == (2, 1)
    assert runs == [(3, True)]
    scaled(layer, X, times=3.0)
    scaled(layer, X, times=True)
    scaled(layer, X, times=1)
    assert [times for times, _ in runs] == [3, 3.0, True, 1]
    assert [type(times) for times, _ in runs] == [int, float, bool, int]


@pytest.mark.usefixtures("tests_as_library")
def test_arrays_are_traced_wherever_they_stand():
    scaled, runs = recorded()
    layer = build()
    for shift in (1.0, 2.0):
        got = scaled(layer, X, times=1, shift=jnp.full((1, 2), shift))
        assert jnp.allclose(got, layer(X) + shift)
    assert len(runs) == 1


def test_inside_a_trace_it_leaves_no_mark():
    scaled, runs = recorded()
    layer = build()
    jaxpr = nnx.make_jaxpr(lambda layer, x: scaled(layer, x, times=2))(layer, X)
    assert "pjit" not in str(jaxpr)
    nnx.jit(lambda layer, x: scaled(layer, x, times=2))(layer, X)
    assert int(layer.calls) == 1
    assert runs == [(2, True), (2, True)]


@pytest.mark.usefixtures("tests_as_library")
def test_errors_name_the_layer_outside():
    scaled, _ = recorded()
    model = nnx.List([build()])
    with pytest.raises(FeatureError) as error:
        scaled(model[0], jnp.ones((1, 3)), times=1)
    assert str(error.value).startswith("model[0] (Linear) expected inputs whose last axis")
    assert int(model[0].calls) == 0


def test_it_keeps_name_and_docstring():
    scaled, _ = recorded()
    assert (scaled.__name__, scaled.__doc__) == ("scaled", "Scales.")


# ---- nnx.scan -----------------------------------------------------------------------------------


def counted_scan(step, **options):
    """A scan of a step, and a list that grows when the step runs in Python."""
    runs = []

    def recorded_step(*args):
        runs.append(args)
        return step(*args)

    return nnx.scan(recorded_step, **options), runs


def test_a_scan_runs_its_step_in_every_call_and_compiles_once_for_equal_types(compiled):
    total, runs = counted_scan(lambda so_far, x: (so_far + x, so_far))
    starts = list(map(jnp.array, (0.0, 1.0, 2.0)))
    short, long = jnp.arange(3.0), jnp.arange(5.0)
    for n, start in enumerate(starts):
        last, seen = total(start, short)
        assert (float(last), seen.tolist()) == (n + 3, [n, n, n + 1])
    assert float(total(starts[0], long)[0]) == 10
    compiled.clear()
    assert float(total(starts[1], short)[0]) == 4
    assert float(total(starts[1], long)[0]) == 11
    assert (len(runs), compiled) == (6, [])


def test_a_scan_sees_what_is_written_to_variables_around_it():
    scale = nnx.Param(jnp.array(2.0))
    product, runs = counted_scan(lambda c, x: (c * scale[...], x))
    for value in (2.0, 2.0, 3.0, 4.0):
        scale[...] = jnp.array(value)
        assert float(product(jnp.array(1.0), jnp.arange(3.0))[0]) == value**3
    assert len(runs) == 4  # one each time


@pytest.mark.parametrize("deep", [False, True])
def test_arrays_around_a_scan_are_found_wherever_they_are_used(deep):
    def step(c, x):
        change = lambda c: c + held["shift"]  # noqa: E731
        return (jax.jit(change) if deep else change)(c), x

    for shift in (jnp.array(1.0), jnp.ones((1,)), jax.random.key_data(jax.random.key(3))[1:]):
        held = {"shift": shift}
        walk, _ = counted_scan(step)
        start = jnp.zeros_like(shift)
        for factor in (1, 2, 3):
            held["shift"] = shift * factor
            assert (walk(start, jnp.arange(2.0))[0] == 2 * factor * shift).all()


def test_a_scan_whose_second_trace_uses_arrays_around_it():
    scale = nnx.Param(jnp.array(2.0))
    step = lambda c, x: (c * (scale[...] if len(c) > 1 else 2.0), x)  # noqa: E731
    walk, _ = counted_scan(step)
    for size, value in ((1, 2.0), (1, 3.0), (2, 3.0), (1, 4.0), (2, 4.0), (2, 5.0)):
        scale[...] = jnp.array(value)
        want = value if size > 1 else 2.0
        assert walk(jnp.ones(size), jnp.arange(1.0))[0].tolist() == [want] * size


def test_what_a_scan_adds_to_an_object_each_time():
    class Grows(nnx.Module):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "seen", x)
            return x

    model = Grows()
    walk, _ = counted_scan(lambda m, x: m(x), in_axes=(None, 0), out_axes=0)
    for n in range(1, 4):
        walk(model, jnp.arange(2.0))
        assert [seen.tolist() for seen in nnx.pop(model, nnx.Intermediate)["seen"][...]] == [[0, 1]]
        model.note = n  # another structure


def test_flags_and_odd_things_among_the_arguments_of_a_scan():
    step = lambda c, x, by, note: (c + by["a"][0] * (note is None), x)  # noqa: E731
    walk, _ = counted_scan(step, in_axes=(nnx.Carry, 0, None, None))
    for by in (1.0, 2.0, 1.0):
        assert float(walk(jnp.array(0.0), jnp.arange(2.0), {"a": [by]}, None)[0]) == 2 * by
    assert float(walk(jnp.array(0.0), jnp.arange(2.0), {"a": [1.0]}, {1, 2})[0]) == 0


def test_it_does_not_keep_everything_it_ever_compiled(monkeypatch):
    monkeypatch.setattr("linnet.nnx.transforms.eager._MOST_TRACES", 3)
    scaled, runs = recorded()
    layer = build()
    for times in (1, 2, 3, 4, 5, 1):
        assert jnp.allclose(scaled(layer, X, times=times), times * layer(X))
    assert len(runs) == 6


def test_a_scan_without_jit():
    total, _ = counted_scan(lambda c, x: (c + x, x))
    with jax.disable_jit():
        for _ in range(2):
            assert float(total(jnp.array(0.0), jnp.arange(3.0))[0]) == 3


def test_a_scan_in_eight_threads():
    total, _ = counted_scan(lambda c, x: (c + x, x))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: float(total(jnp.array(n), jnp.arange(3.0))[0]), range(16)))
    assert found == [n + 3 for n in range(16)]


@pytest.mark.parametrize(
    ("old", "new", "read"),
    [
        (2.0, 3.0, lambda scale: scale.value),
        (np.float32(2), np.float32(3), lambda scale: scale.value),
        (np.full(2, 2.0), np.full(2, 3.0), lambda scale: scale.value),
        (jnp.array(2.0), jnp.array(3.0), float),
    ],
    ids=["number", "NumPy number", "NumPy array", "array read as a number"],
)
def test_a_scan_that_reads_numbers_of_a_variable_around_it(old, new, read):
    scale = nnx.Variable(old)
    walk, _ = counted_scan(lambda c, x: (c + x * read(scale), x))
    for value in (old, old, new, old):
        scale.value = value
        want = jnp.broadcast_to(3 * jnp.asarray(value), 2)
        assert (walk(jnp.zeros(2), jnp.arange(3.0))[0] == want).all()


LAYER = nnx.Dropout(0.5, deterministic=True)


def step_of(layer):
    return lambda c, x: (c + (x if layer.deterministic else -x), x)


def step_of_list(layers):
    return lambda c, x: (c + (x if layers[0].deterministic else -x), x)


def step_of_function(layer):
    is_fixed = lambda: layer.deterministic  # noqa: E731
    return lambda c, x: (c + (x if is_fixed() else -x), x)


def step_of_global(c, x):
    return c + jnp.where(any(x.deterministic for x in [LAYER]), x, -x), x


@pytest.mark.parametrize(
    "step",
    [step_of(LAYER), step_of_list([LAYER]), step_of_function(LAYER), step_of_global],
    ids=["name", "list", "function", "global"],
)
def test_a_scan_that_looks_at_flags_of_a_module_around_it(step):
    walk = nnx.scan(step, in_axes=(nnx.Carry, 0))
    for fixed, want in ((True, 3.0), (True, 3.0), (False, -3.0), (True, 3.0)):
        LAYER.deterministic = fixed
        assert float(walk(jnp.array(0.0), jnp.arange(3.0))[0]) == want


@pytest.mark.usefixtures("tests_as_library")
def test_it_runs_as_it_is_while_somebody_stands_in_for_a_contraction():
    scaled, runs = recorded()
    layer, seen = build(), []
    want = scaled(layer, X, times=3)
    for _ in range(2):
        with under_their_names(seen.append):
            got = scaled(layer, X, times=3)
        assert not jnp.allclose(got, want)
    assert jnp.allclose(scaled(layer, X, times=3), want)
    assert seen == ["dot_general"] * 2
    assert runs == [(3, True), (3, False), (3, False)]
    assert int(layer.calls) == 4


def test_a_scan_shows_its_contractions():
    layer, seen = build(), []
    walk = nnx.scan(lambda x, _: (layer(x), None), in_axes=(nnx.Carry, 0))
    over = nnx.scan(lambda layer, x, _: (layer(x), None), in_axes=(None, nnx.Carry, 0))
    for call in (lambda: walk(X, jnp.arange(3)), lambda: over(layer, X, jnp.arange(3))):
        want, _ = call()
        with under_their_names(seen.append):
            got, _ = call()
        assert seen
        seen.clear()
        assert not jnp.allclose(got, want)
        assert jnp.allclose(call()[0], want)


IMPURE = {
    "an object of NumPy's": lambda: default_rng().normal(),
    "a function of NumPy's": lambda: np.random.default_rng().normal(),
    "a class of NumPy's": lambda: RandomState().normal(),
    "an attribute by name": lambda: getattr(np, "random").rand(),  # noqa: B009
    "a builtin function": lambda: perf_counter() % 1,
}


@pytest.mark.parametrize("read", IMPURE.values(), ids=IMPURE)
def test_a_scan_reads_in_every_call_what_is_another_each_time(read):
    walk = nnx.scan(lambda c, x: (c, x * read()), in_axes=(nnx.Carry, 0))
    found = [walk(jnp.array(0.0), jnp.ones(1))[1].item() for _ in range(4)]
    assert len(set(found)) > 1


def test_a_scan_reads_files_and_settings_in_every_call(tmp_path):
    file = tmp_path / "numbers.npy"
    load = jnp.load

    def step(c, x):
        return c, x * load(file)[0] + jax.config.jax_enable_checks

    walk = nnx.scan(step, in_axes=(nnx.Carry, 0))
    for number in (1.0, 2.0):
        np.save(file, np.full(1, number))
        assert walk(jnp.array(0.0), jnp.ones(1))[1].item() == number
    with jax.enable_checks(True):
        assert walk(jnp.array(0.0), jnp.ones(1))[1].item() == 3.0


def test_a_method_that_replaces_one_of_a_layer_counts_at_once(monkeypatch):
    rnn = nnx.RNN(nnx.GRUCell(2, 2, rngs=nnx.Rngs(0)))
    stack = nnx.Stack(lambda rngs: nnx.Linear(2, 2, rngs=rngs), 2, rngs=nnx.Rngs(0))
    calls = [lambda: rnn(jnp.ones((1, 3, 2))), lambda: stack(X)]
    before = [[call(), call()] for call in calls]
    with monkeypatch.context() as patch:
        patch.setattr(nnx.GRUCell, "__call__", lambda self, carry, x: (carry, 7.0 * RATE * x))
        patch.setattr(nnx.Linear, "__call__", lambda self, x: 7.0 * RATE * x)
        assert [call().ravel()[0].item() for call in calls] == [7.0, 49.0]
        monkeypatch.setattr(f"{__name__}.RATE", 2.0)  # what the new method reads counts as well
        assert [call().ravel()[0].item() for call in calls] == [14.0, 196.0]
    for call, (first, second) in zip(calls, before, strict=True):
        assert jnp.allclose(call(), first) and (first == second).all()


RATE = 1.0
TABLE = {"rate": 1.0}


class Rated(nnx.Module):
    rate = 1.0

    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        return x * self.w * RATE * TABLE["rate"] * self.rate


class RatedCell(nnx.RNNCellBase):
    def __init__(self):
        self.rated = Rated(None)

    def __call__(self, carry, x):
        carry = self.rated(carry + x)
        return carry, carry

    def initialize_carry(self, shape, rngs=None, **_):
        return jnp.zeros(shape)

    @property
    def num_feature_axes(self):
        return 1


def stack_of_rated():
    stack = nnx.Stack(Rated, 1, rngs=nnx.Rngs(0))
    return lambda: stack(jnp.ones(()))


def rnn_of_rated():
    rnn = nnx.RNN(RatedCell())
    return lambda: rnn(jnp.ones((1, 1, 1)))


def scan_of_rated():
    model = Rated(None)
    walk = nnx.scan(lambda m, x: m(x), in_axes=(None, 0), out_axes=0)
    return lambda: walk(model, jnp.ones(1))


@pytest.mark.parametrize("make", [stack_of_rated, rnn_of_rated, scan_of_rated])
def test_globals_and_class_attributes_count_as_they_are_now(make, monkeypatch):
    run, here = make(), __name__
    assert [run().item() for _ in range(3)] == [1, 1, 1]
    monkeypatch.setattr(f"{here}.RATE", 2.0)
    assert [run().item() for _ in range(3)] == [2, 2, 2]
    monkeypatch.setitem(TABLE, "rate", 3.0)
    assert [run().item() for _ in range(3)] == [6, 6, 6]
    monkeypatch.setattr(Rated, "rate", 5.0)
    assert [run().item() for _ in range(3)] == [30, 30, 30]
    monkeypatch.setattr(Rated, "__call__", lambda self, x: x * 7)
    assert [run().item() for _ in range(3)] == [7, 7, 7]
    monkeypatch.undo()
    assert [run().item() for _ in range(3)] == [1, 1, 1]


def from_table(x):
    return x * TABLE["rate"]


def test_tables_that_a_called_function_reads_count_as_they_are_now(monkeypatch):
    walk = nnx.scan(lambda x: from_table(from_table(x)), in_axes=0, out_axes=0)
    assert [walk(jnp.ones(1)).item() for _ in range(3)] == [1, 1, 1]
    monkeypatch.setitem(TABLE, "rate", 3.0)
    assert [walk(jnp.ones(1)).item() for _ in range(3)] == [9, 9, 9]


class Halved(nnx.Module):
    def __init__(self, *, rngs):
        self.w = nnx.Param(jnp.ones((2, 2)))

    def factor(self):
        return 0.5

    def __call__(self, x):
        return self.factor() * (x @ self.w[...])


class Tripled(Halved):
    def factor(self):
        return 3.0


def test_classes_are_those_of_now_also_for_objects_that_are_known(monkeypatch):
    layers = nnx.Stack(Halved, 2, rngs=nnx.Rngs(0))
    apply = compiled_outside(lambda block, x: block(x))
    block = Halved(rngs=nnx.Rngs(0))

    def results():
        return [float(apply(block, X)[0, 0]), float(layers(X)[0, 0])]

    for _ in range(4):  # from the second call on they are not walked
        assert results() == [1.0, 1.0]
    monkeypatch.setattr(Halved, "factor", lambda self: 1.0)
    assert results() == [2.0, 4.0]
    block.__class__ = Tripled
    for _ in range(3):
        assert results() == [6.0, 4.0]
    monkeypatch.setattr(Tripled, "factor", lambda self: 5.0)
    assert results() == [10.0, 4.0]
    block.__class__ = Halved
    assert results() == [2.0, 4.0]


def test_classes_of_pytrees_count_though_a_definition_lacks_them(monkeypatch):
    @jax.tree_util.register_pytree_node_class
    class Pair:
        def __init__(self, *parts):
            self.parts = parts

        def total(self):
            return self.parts[0] + self.parts[1]

        def tree_flatten(self):
            return self.parts, None

        @classmethod
        def tree_unflatten(cls, _, parts):
            return cls(*parts)

    block = nnx.Dict(pair=Pair(nnx.Param(jnp.ones(2)), nnx.Param(jnp.ones(2))))
    apply = compiled_outside(lambda block: block.pair.total())
    for _ in range(3):
        assert apply(block).tolist() == [2.0, 2.0]
    monkeypatch.setattr(Pair, "total", lambda self: self.parts[0] - self.parts[1])
    assert apply(block).tolist() == [0.0, 0.0]
