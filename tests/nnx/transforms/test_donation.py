"""Large state is donated without being asked, and nobody else's array is touched."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from linnet import nnx
from linnet.errors import DonatedBufferError
from linnet.nnx.transforms import donation, packing, plan
from linnet.nnx.variablelib import ownership
from tests.subprocesses import run_program

SIZE = 256  # 256 KiB a kernel


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """As in a program with one thread and no checks, which read the state in every call."""
    monkeypatch.setattr(plan, "CHECK_PLANS", False)
    monkeypatch.setattr(donation.callers, "are_many", False)
    monkeypatch.setattr(donation.callers, "only", threading.get_ident())


class Holder(nnx.Module):
    def __init__(self):
        self.large = nnx.Param(jnp.zeros((SIZE, SIZE)))
        self.read_only = nnx.Param(jnp.ones((SIZE, SIZE)))
        self.small = nnx.Variable(jnp.zeros(()))


def make_step():
    @nnx.jit
    def step(holder, by):
        holder.large[...] += by * holder.read_only[...]
        holder.small[...] += 1
        return holder.large[0, 0]

    return step


def held(variable):
    """The array in a Variable, without a read that anybody could notice."""
    return variable._cell.value


def test_a_replaced_array_gives_its_memory_to_the_new_one():
    holder, step = Holder(), make_step()
    step(holder, 1.0)
    before, kept, small = held(holder.large), held(holder.read_only), held(holder.small)
    step(holder, 1.0)
    assert before.is_deleted()
    assert not kept.is_deleted() and held(holder.read_only) is kept
    assert not small.is_deleted()
    assert float(holder.large[3, 4]) == 2.0 and float(holder.small[...]) == 2.0


def test_a_first_call_that_fails_leaves_the_choice_to_the_next():
    holder, step = Holder(), make_step()
    with pytest.raises(TypeError, match="incompatible shapes"):
        step(holder, jnp.ones((3, 7)))
    step(holder, jnp.ones((1, 1)))
    before = held(holder.large)
    step(holder, jnp.ones((1, 1)))
    assert before.is_deleted()


def test_the_arrays_that_came_from_outside_stay():
    array = jnp.zeros((SIZE, SIZE))
    holder, step = Holder(), make_step()
    holder.large = nnx.Param(array)
    for _ in range(3):
        step(holder, 1.0)
    assert float(array[0, 0]) == 0.0
    holder.large.value = array
    assert float(step(holder, 1.0)) == 1.0
    assert float(array[0, 0]) == 0.0


READS = {
    "value": lambda m: m.large.value,
    "item": lambda m: m.large[...],
    "raw value": lambda m: m.large.raw_value,
    "state": lambda m: nnx.state(m)["large"].value,
    "split": lambda m: nnx.split(m)[1]["large"].value,
    "leaves": lambda m: jax.tree.leaves(m)[0],
    "clone": lambda m: nnx.clone(m).large.raw_value,
    "copy": lambda m: m.large.copy().raw_value,
    "shard": lambda m: m.large[...].addressable_data(0),
    "transpose": lambda m: m.large.T,
    "numpy": lambda m: np.asarray(m.large),
    "dlpack": lambda m: np.from_dlpack(m.large[...]),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_what_was_read_stays(read):
    holder, step = Holder(), make_step()
    for _ in range(3):
        step(holder, 1.0)
    seen = read(holder)
    for _ in range(3):
        step(holder, 1.0)
    assert float(seen[5, 6]) == 3.0
    assert float(holder.large[5, 6]) == 6.0
    before = held(holder.large)
    step(holder, 1.0)
    assert not before.is_deleted()  # the line above read it
    before = held(holder.large)
    step(holder, 1.0)
    assert before.is_deleted()


def test_an_array_in_two_variables_is_not_donated_twice():
    @nnx.jit
    def step(first, second):
        first[...] += 1
        second[...] += 2

    array = jnp.zeros((SIZE, SIZE))
    first, second = nnx.Param(array), nnx.Param(array)
    for _ in range(3):
        step(first, second)
    assert float(first[0, 0]) == 3.0 and float(second[0, 0]) == 6.0
    second.value = first.value
    step(first, second)
    assert float(first[0, 0]) == 4.0 and float(second[0, 0]) == 5.0


@pytest.mark.parametrize("beside", [False, True], ids=["in two Variables", "as an argument too"])
def test_an_array_that_is_donated_and_used_a_second_time(beside):
    class Two(nnx.Module):
        def __init__(self):
            self.a = nnx.Param(jnp.ones((SIZE, SIZE)))
            self.b = nnx.Param(jnp.ones((SIZE, SIZE)) if beside else self.a.value)

    @nnx.jit(donate_argnums=0)
    def step(model, x):
        model.a[...] += x
        model.b[...] += x

    model = Two()
    with pytest.raises(DonatedBufferError) as caught:
        step(model, model.a.value if beside else 1.0)
    assert str(caught.value) == (
        f"nnx.jit: model.a and {'x' if beside else 'model.b'} hold the same array, which cannot "
        "be donated and used a second time in one call.\n"
        "Fix: give each an array of its own (jnp.copy), or put one Variable in both places, or "
        "donate nothing: large state is donated without donate_argnums too."
    )
    assert float(model.a[0, 0]) == 1.0
    model.b = model.a
    step(model, 1.0)
    assert float(model.a[0, 0]) == 3.0


def test_an_input_that_becomes_the_value_stays_with_the_caller():
    @nnx.jit
    def put(holder, x):
        holder.large.value = x

    holder, x = Holder(), jnp.full((SIZE, SIZE), 7.0)
    for _ in range(4):
        put(holder, x)
    assert float(x[0, 0]) == 7.0 and float(holder.large[0, 0]) == 7.0


def test_a_value_that_is_also_returned_stays():
    @nnx.jit
    def step(holder):
        holder.large[...] += 1
        return holder.large[...]

    holder = Holder()
    seen = [step(holder) for _ in range(4)]
    assert [float(x[0, 0]) for x in seen] == [1.0, 2.0, 3.0, 4.0]


def test_the_function_is_traced_and_compiled_once():
    traces = []

    @nnx.jit
    def step(holder):
        traces.append(1)
        holder.large[...] += 1

    holder = Holder()
    for _ in range(4):
        step(holder)
    assert len(traces) == 1 and step.jitted_fn._cache_size() == 1


def test_other_shapes_are_traced_again_and_donated_too():
    @nnx.jit
    def step(holder, x):
        holder.large[...] += x.sum()

    holder = Holder()
    for size in (1, 2, 2, 1):
        step(holder, jnp.ones(size))
    before = held(holder.large)
    step(holder, jnp.ones(3))
    assert before.is_deleted() and float(holder.large[0, 0]) == 9.0


def test_a_value_of_another_structure_is_traced_again():
    @nnx.jit
    def step(holder):
        holder.large[...] += 1
        return holder.tree.value["l"] if "l" in holder.tree.value else -holder.tree.value["m"]

    holder, seen = Holder(), []
    holder.tree = nnx.Variable({"k": jnp.ones(()), "l": jnp.ones(())})
    for key in "llmml":
        holder.tree.value = {"k": jnp.ones(()), key: jnp.ones(())}
        seen.append(float(step(holder)))
    assert seen == [1.0, 1.0, -1.0, -1.0, 1.0]


def test_on_a_gpu_small_arrays_are_donated_beside_large_ones(monkeypatch):
    monkeypatch.setattr(donation, "donates_small", lambda: True)
    holder, step = Holder(), make_step()
    step(holder, 1.0)
    large, small = held(holder.large), held(holder.small)
    step(holder, 1.0)
    assert large.is_deleted() and small.is_deleted()
    count = nnx.Variable(jnp.zeros(()))
    add = nnx.jit(lambda count: count.set_value(count[...] + 1))
    add(count)
    before = held(count)
    add(count)
    assert not before.is_deleted()
    assert (float(holder.small[...]), float(count[...])) == (2.0, 2.0)


class Reader(Holder):
    """Beside what it writes, it holds small arrays of several shapes and dtypes that it reads."""

    def __init__(self, n=1.0):
        super().__init__()
        self.scales = nnx.List([nnx.Param(jnp.full((2, i), n, jnp.float32)) for i in (1, 2, 3)])
        self.halves = nnx.List([nnx.Param(jnp.full(i, n, jnp.bfloat16)) for i in (2, 3)])
        self.many = nnx.Variable(jnp.full((SIZE, SIZE), n))
        self.key = nnx.Variable(jax.random.key(0))

    def total(self):
        scales = [scale[...].sum() * (i + 1) for i, scale in enumerate(self.scales)]
        return sum(scales) + sum(half[...].astype(jnp.float32).sum() for half in self.halves)


@pytest.fixture
def packed(monkeypatch):
    monkeypatch.setattr(donation, "can_pack", lambda: True)
    monkeypatch.setattr(donation, "_is_brief", lambda cost: cost["bytes accessed"] > 0)
    monkeypatch.setattr(donation, "donates_small", lambda: True)
    monkeypatch.setattr(packing, "_LEAST_ARRAYS", 2)


def donating_of(step):
    [entry] = step._entries.values()
    return entry.donating_function


def make_reading_step():
    @nnx.jit
    def step(reader, x):
        reader.large[...] += x.sum()
        reader.small[...] += 1
        return reader.total() + reader.many[0, 0]

    return step


def test_on_a_gpu_small_arrays_that_are_read_are_packed(packed):
    step, reader = make_reading_step(), Reader()
    assert [float(step(reader, jnp.ones(2))) for _ in range(8)] == [34.0] * 8
    assert (float(reader.large[0, 0]), float(reader.small[...])) == (16.0, 8.0)
    functions = donating_of(step).jitted, donating_of(step)._packed
    assert [function._cache_size() for function in functions] == [1, 1]
    assert step.traces.count == step.jitted_fn._cache_size() == 1
    assert [scale[...].tolist() for scale in reader.scales][1] == [[1, 1], [1, 1]]


def calls_of_packed(step, monkeypatch):
    """The calls of the function for packed arrays from here on, each as the number of arrays."""
    found, function = [], donating_of(step)._packed

    def noted(packed, rest, *others):
        found.append((len(packed), len(rest)))
        return function(packed, rest, *others)

    noted._cache_size = function._cache_size
    monkeypatch.setattr(donating_of(step), "_packed", noted)
    return found


def test_another_array_is_read_at_once_and_packed_when_it_stays(packed, monkeypatch):
    step, reader = make_reading_step(), Reader()
    for _ in range(5):
        step(reader, jnp.ones(2))
    calls = calls_of_packed(step, monkeypatch)
    assert float(step(reader, jnp.ones(2))) == 34.0
    assert calls == [(2, 3)]  # two dtypes; two large ones and the key by themselves
    reader.scales[0][...] = jnp.full((2, 1), 3.0, jnp.float32)
    assert float(step(reader, jnp.ones(2))) == 38.0
    assert calls == [(2, 3)]
    assert [float(step(reader, jnp.ones(2))) for _ in range(2)] == [38.0] * 2
    assert calls == [(2, 3)] * 3
    reader.scales[0][...] *= 2
    reader.halves[1].value = jnp.zeros(3, jnp.bfloat16)
    assert [float(step(reader, jnp.ones(2))) for _ in range(3)] == [41.0] * 3


def test_models_do_not_take_the_packed_arrays_of_one_another(packed):
    step, readers = make_reading_step(), [Reader(n) for n in (1.0, 2.0, 3.0)]
    for _ in range(6):
        assert [float(step(reader, jnp.ones(2))) for reader in readers] == [34.0, 68.0, 102.0]
    assert [float(reader.large[0, 0]) for reader in readers] == [12.0] * 3
    assert donating_of(step)._packed._cache_size() == 1


def test_a_model_of_other_shapes_is_not_packed(packed, monkeypatch):
    step, reader, other = make_reading_step(), Reader(), Reader()
    first, second = other.scales[0][...], other.scales[1][...]  # as many numbers in other shapes
    other.scales[0].value, other.scales[1].value = second, first
    for _ in range(6):
        step(reader, jnp.ones(2))
    calls = calls_of_packed(step, monkeypatch)
    assert [float(step(other, jnp.ones(2))) for _ in range(4)] == [32.0] * 4
    assert not calls and donating_of(step)._packed._cache_size() == 1


def test_values_of_numpy_are_not_packed(packed):
    step, reader, other = make_reading_step(), Reader(), Reader()
    for _ in range(6):
        step(reader, jnp.ones(2))
    changing = np.ones((2, 1), np.float32)
    other.scales[0].set_raw_value(changing)
    for n in range(4):
        changing[...] = n
        assert float(step(other, jnp.ones(2))) == 32.0 + 2 * n


def test_a_packed_model_is_freed(packed):
    before = jax.live_arrays()  # kept alive: a new array must not get the address of one of these
    known = set(map(id, before))
    step, reader = make_reading_step(), Reader()
    for _ in range(6):
        step(reader, jnp.ones(2))
    # Ten of the model, and two into which the small ones were packed.
    assert len([x for x in jax.live_arrays() if id(x) not in known]) >= 12
    del reader
    gc.collect()
    assert not [x.shape for x in jax.live_arrays() if id(x) not in known]


def test_the_function_for_packed_arrays_never_traces(packed):
    precisions = []

    @nnx.jit
    def step(reader, x):
        reader.large[...] += x.sum()
        precisions.append(jax.config.jax_default_matmul_precision)
        return x * reader.large[0, 0] + 0 * reader.total()

    reader, total = Reader(), 0.0
    for number in range(12):
        size = 1 + number // 6
        precision = "highest" if number % 6 > 3 else None
        total += size
        with jax.default_matmul_precision(precision):
            assert step(reader, jnp.ones(size)).tolist() == [total] * size
    assert precisions == [None, "highest", None, "highest"]
    assert step.traces.count == step.jitted_fn._cache_size() == 4


def test_both_functions_go_on_with_what_was_traced(packed):
    rate, keys = [1.0], ["loss"]

    @nnx.jit
    def step(reader, x):
        reader.large[...] += rate[0] * x.sum() + 0 * reader.total()
        return dict.fromkeys(keys, rate[0])

    reader = Reader()
    for _ in range(4):
        step(reader, jnp.ones(1))
    step(reader, jnp.ones(2))
    rate[0], keys[:] = 5.0, ["loss", "more"]
    for size in (2, 2, 1, 1, 2, 1):
        assert step(reader, jnp.ones(size)) == {"loss": 1.0}
    assert step(reader, jnp.ones(3)) == step(reader, jnp.ones(3)) == {"loss": 5.0, "more": 5.0}
    assert float(reader.large[0, 0]) == 45.0


@pytest.mark.parametrize(
    "clear", [lambda step: jax.clear_caches(), lambda step: step.clear_cache()]
)
def test_cleared_caches_are_cleared_for_both_functions(packed, clear):
    rate = [1.0]

    @nnx.jit
    def step(reader):
        reader.large[...] += rate[0] + 0 * reader.total()
        return rate[0]

    reader = Reader()
    for _ in range(6):
        step(reader)
    rate[0] = 5.0
    clear(step)
    assert [float(step(reader)) for _ in range(6)] == [5.0] * 6
    assert float(reader.large[0, 0]) == 36.0


def test_a_function_for_packed_arrays_that_is_interrupted_is_made_again(packed, monkeypatch):
    step, reader = make_reading_step(), Reader()
    for _ in range(3):
        step(reader, jnp.ones(1))

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(donation._TracedProgram, "evaluate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(reader, jnp.ones(1))
    for _ in range(6):
        step(reader, jnp.ones(1))
    assert donating_of(step)._packed._cache_size() == 1
    assert float(reader.large[0, 0]) == 9.0


def test_a_function_that_fails_when_packing_begins_can_be_called_again(packed):
    @nnx.jit
    def step(reader, x):
        if x.shape == (3,):
            raise ValueError("three")
        reader.large[...] += x.sum() + 0 * reader.total()

    reader = Reader()
    for _ in range(3):
        step(reader, jnp.ones(1))
    with pytest.raises(ValueError, match="three"):
        step(reader, jnp.ones(3))
    for size in (2, 1, 2, 1):
        step(reader, jnp.ones(size))
    assert float(reader.large[0, 0]) == 9.0


@pytest.mark.parametrize(
    ("cost", "is_brief"),
    [
        ({"flops": 1e9, "bytes accessed": 1e9}, True),
        ({"flops": 1e13, "bytes accessed": 1e9}, False),
        ({"flops": 1e9, "bytes accessed": 1e10}, False),
        ({"flops": 1e3, "bytes accessed": 1e4}, False),
        ({}, False),
        (None, False),
    ],
)
def test_what_is_brief(cost, is_brief):
    assert donation._is_brief(cost) == is_brief


def test_constants_and_arguments_that_are_written_stay_with_their_owners():
    constant, argument = jnp.ones((SIZE, SIZE)), jnp.full((SIZE, SIZE), 3.0)

    @nnx.jit
    def step(holder, x):
        holder.large[...] = constant
        holder.read_only[...] = x

    holder = Holder()
    for _ in range(4):
        step(holder, argument)
    assert not constant.is_deleted() and not argument.is_deleted()
    assert (float(holder.large[0, 0]), float(holder.read_only[0, 0])) == (1.0, 3.0)


def test_what_a_trace_depends_on_counts_in_later_traces():
    scale, precisions = [1.0], []

    @nnx.jit
    def step(holder, x):
        holder.large[...] += scale[0]
        precisions.append(jax.config.jax_default_matmul_precision)
        return nnx.Linear(4, 4, rngs=nnx.Rngs(0))(x)

    holder, x = Holder(), jnp.ones((2, 4))
    assert step(holder, x).dtype == jnp.float32
    with jax.default_matmul_precision("highest"):
        step(holder, x)
    assert precisions == [None, "highest"]
    with nnx.precision(nnx.Policy(compute=jnp.bfloat16)):
        assert step(holder, x).dtype == jnp.bfloat16
    scale[0] = 10.0
    jax.clear_caches()
    step(holder, x)
    assert float(holder.large[0, 0]) == 13.0


def test_it_equals_the_step_without():
    def train(donate):
        model = nnx.Linear(SIZE, SIZE, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        x = jax.random.normal(jax.random.key(1), (8, SIZE))

        @nnx.jit
        def step(model, optimizer):
            loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
            optimizer.update(model, grads)
            return loss

        with nnx.use_state_donation(donate):
            losses = [float(step(model, optimizer)) for _ in range(4)]
        return losses, np.asarray(model.kernel)

    (losses, kernel), (other_losses, other_kernel) = train(True), train(False)
    assert losses == other_losses
    np.testing.assert_array_equal(kernel, other_kernel)


def test_it_can_be_switched_off():
    holder, step = Holder(), make_step()
    with nnx.use_state_donation(False):
        step(holder, 1.0)
        before = held(holder.large)
        step(holder, 1.0)
    assert not before.is_deleted()


def test_with_checks_for_nan_nothing_is_donated():
    holder, step = Holder(), make_step()
    step(holder, 1.0)
    before = held(holder.large)
    with jax.debug_nans(True):
        step(holder, 1.0)
    assert not before.is_deleted()


def test_old_arrays_are_freed():
    holder, step = Holder(), make_step()
    step(holder, 1.0)
    gone = weakref.ref(held(holder.large))
    holder.large.value = jnp.ones((SIZE, SIZE))
    assert gone() is None


def test_an_interrupt_loses_nothing():
    done = run_program("from tests.nnx.transforms import interrupts; interrupts.main()")
    assert int(done.stdout.split()[0]) > 0


def test_a_second_thread_ends_donation():
    holder, step, other = Holder(), make_step(), Holder()
    step(holder, 1.0)
    thread = threading.Thread(target=lambda: make_step()(other, 1.0))
    thread.start()
    thread.join()
    before = held(holder.large)
    step(holder, 1.0)
    assert not before.is_deleted() and float(holder.large[0, 0]) == 2.0


def test_a_thread_that_reads_all_the_time_sees_whole_values():
    holder, step = Holder(), make_step()
    step(holder, 1.0)
    failures, done = [], threading.Event()

    def read():
        while not done.is_set():
            try:
                rows = np.asarray(holder.large[...])
                assert rows.min() == rows.max()
            except Exception as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        step(holder, 1.0)
    done.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert float(holder.large[0, 0]) == 201.0


def test_what_a_read_waited_for_is_not_the_variables_alone(monkeypatch):
    """A call of another thread ends while a read waits for it; the next one must donate a copy."""
    variable, new = nnx.Param(jnp.zeros(3)), jnp.ones(3)

    def end_of_the_call(_):
        variable._cell.value = new
        ownership.note_owned([variable], [variable._cell])
        ownership.donations.clear()

    monkeypatch.setattr("linnet.nnx.variablelib.variable.wait_for_donation", end_of_the_call)
    monkeypatch.setitem(ownership.donations, 0, [variable])  # no thread has that number
    assert variable.value is new
    assert not ownership.are_own([variable], [variable._cell])


def test_a_read_that_waits_too_long_is_told(monkeypatch):
    monkeypatch.setattr(ownership, "_LONGEST_WAIT", 0.01)
    holder = Holder()
    found = []

    def read():
        try:
            holder.large.value  # noqa: B018
        except RuntimeError as error:
            found.append(str(error))

    with ownership.donation_in_progress([holder.large]):
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    assert len(found) == 1
    assert "read while a compiled function that replaces it ran in another thread" in found[0]
    assert "Fix: " in found[0] and "use_state_donation(False)" in found[0]


@pytest.mark.parametrize("inside", [False, True])
def test_a_host_callback_that_raises_takes_nothing_with_it(inside):
    step, fails = step_with_simulator(inside)
    model, x = nnx.Linear(200, 200, rngs=nnx.Rngs(0)), jnp.ones((1, 200))
    for _ in range(3):
        step(model, x).block_until_ready()
    before = np.asarray(model.kernel.value)
    fails.append(True)
    with pytest.raises(ValueError, match="the simulator broke") as error:
        step(model, x).block_until_ready()
    assert not hasattr(error.value, "__notes__")
    assert (np.asarray(model.kernel.value) == before).all()


def test_a_call_that_fails_while_it_runs_says_what_it_took_with_it():
    step, fails = step_with_simulator(donate_argnums=0)
    model, x = nnx.Linear(200, 200, rngs=nnx.Rngs(0)), jnp.ones((1, 200))
    step(model, x).block_until_ready()
    fails.append(True)
    with pytest.raises(ValueError, match="the simulator broke") as error:
        step(model, x).block_until_ready()
    assert error.value.__notes__ == [
        "The memory of model.bias, model.kernel was donated to this call, so what was there is "
        "lost.\nFix: restore it from a checkpoint; and so that the next call that fails leaves its "
        "arguments as they were, donate nothing: no donate_argnums, and "
        "nnx.use_state_donation(False) before the function is first called."
    ]


def step_with_simulator(inside=False, **options):
    """A step that asks the host for its input, and a list that makes the host raise."""
    fails = []

    def simulate(x):
        if fails:
            raise ValueError("the simulator broke")
        return np.asarray(x)

    def simulated(x):
        return jax.pure_callback(simulate, jax.typeof(x), x)

    @nnx.jit(**options)
    def step(model, x):
        x = jax.lax.fori_loop(0, 1, lambda _, x: simulated(x), x) if inside else simulated(x)
        model.kernel[...] += x.sum()
        return model(x)

    return step, fails
