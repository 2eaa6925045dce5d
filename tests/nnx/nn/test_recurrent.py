"""RNN and Bidirectional: Flax's numbers, every argument, and bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import FeatureError, LayerArgumentError, RngsError
from tests.digest import digest
from tests.models import InList

NORMAL = jax.nn.initializers.normal(1.0)
B = {"bias_init": NORMAL}
XS = jax.random.normal(jax.random.key(1), (2, 5, 2))
TIME_MAJOR = XS.swapaxes(0, 1)
C, H = (jax.random.normal(jax.random.key(n), (2, 3)) for n in (2, 3))
LENGTHS = jnp.array([3, 5])
KEPT = {"reverse": True, "keep_order": True}


def cell(cls=nnx.GRUCell, seed=0, **options):
    return cls(2, 3, **options, rngs=nnx.Rngs(seed))


def run(layer, x, **call):
    """One number for the last carry and the outputs."""
    carry, outputs = layer(x, return_carry=True, **call)
    return digest(*jax.tree.leaves(carry), outputs)


# What is special, constructor, lengths, inputs, and Flax's numbers for an LSTM and a GRU.
CASES = [
    ("plain", {}, None, XS, -0.47802, 1.21504),
    ("time_major", {"time_major": True}, None, TIME_MAJOR, -0.91027, 1.11627),
    ("reverse", {"reverse": True}, None, XS, 0.21217, -0.12936),
    ("keep_order", KEPT, None, XS, 0.67519, -0.24934),
    ("keep_order alone", {"keep_order": True}, None, XS, -0.47802, 1.21504),
    ("unroll", {"unroll": 2}, None, XS, -0.47802, 1.21504),
    ("lengths", {}, LENGTHS, XS, 0.91633, 0.65318),
    ("reverse lengths", {"reverse": True}, LENGTHS, XS, 0.57227, -0.30443),
    ("keep_order lengths", KEPT, LENGTHS, XS, 0.74092, -0.33298),
    (
        "time_major lengths",
        {"time_major": True, **KEPT},
        LENGTHS,
        TIME_MAJOR,
        1.02248,
        -0.22861,
    ),
    ("one sequence", {}, None, XS[0], 0.27978, 0.47681),
    ("two batch axes", {}, None, jnp.stack([XS, -XS]), -0.36832, 0.43291),
]
cases = pytest.mark.parametrize(
    ("options", "lengths", "x", "lstm", "gru"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)


@cases
def test_numbers_of_flax(options, lengths, x, lstm, gru):
    for cls, want in ((nnx.LSTMCell, lstm), (nnx.GRUCell, gru)):
        layer = nnx.RNN(cell(cls, **B), **options)
        assert run(layer, x, seq_lengths=lengths) == pytest.approx(want, abs=2e-5)


@cases
def test_arguments_of_the_call_win(options, lengths, x, lstm, gru):
    call = {name: value for name, value in options.items() if name != "unroll"}
    opposite = {name: not value for name, value in call.items()}
    layer = nnx.RNN(cell(**B), **opposite)
    assert run(layer, x, seq_lengths=lengths, **call) == pytest.approx(gru, abs=2e-5)
    del lstm


def test_it_is_a_loop_over_the_cell():
    layer = nnx.RNN(cell(**B))
    carry, want = H, []
    for step in range(5):
        carry, y = layer.cell(carry, XS[:, step])
        want.append(y)
    last, outputs = layer(XS, initial_carry=H, return_carry=True)
    np.testing.assert_allclose(outputs, jnp.stack(want, axis=1), atol=1e-6)
    np.testing.assert_allclose(last, carry, atol=1e-6)


def test_lengths_end_each_sequence_by_itself():
    layer = nnx.RNN(cell(**B), return_carry=True)
    lengths = jnp.array([[0, 2], [5, 1]])
    x = jnp.stack([XS, -XS])
    carries = jnp.stack([H, 2 * H])
    last, _ = layer(x, seq_lengths=lengths, initial_carry=carries)
    for place in np.ndindex(2, 2):
        n = int(lengths[place])
        carry = carries[place]
        for step in range(n):
            carry, _ = layer.cell(carry, x[place][step])
        np.testing.assert_allclose(last[place], carry, atol=1e-6)


def test_unroll_makes_fewer_iterations():
    traced = jax.make_jaxpr(nnx.RNN(cell(), unroll=5, rngs=False))(XS)
    (loop,) = [e for e in traced.eqns if e.primitive.name == "scan"]
    assert loop.params["unroll"] == 5


def test_the_loop_carries_only_what_changes():
    traced = jax.make_jaxpr(nnx.RNN(cell(), rngs=False))(XS)
    (loop,) = [e for e in traced.eqns if e.primitive.name == "scan"]
    carry_and_output = loop.params["jaxpr"].jaxpr.outvars
    assert len(carry_and_output) == 2


def test_any_dtypes_go_through():
    layer = nnx.RNN(nnx.SimpleCell(2, 3, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    assert layer(XS).dtype == jnp.bfloat16
    layer = nnx.RNN(nnx.GRUCell(2, 3, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    carry, outputs = layer(XS, return_carry=True)
    assert (carry.dtype, outputs.dtype) == (jnp.bfloat16, jnp.float32)


# The keys of the first carry.


def test_random_first_carries_of_flax():
    layer = nnx.RNN(cell(carry_init=NORMAL))
    own = [digest(layer(XS)) for _ in range(2)]
    assert own == pytest.approx([1.63219, -0.65947], abs=2e-5)
    assert layer.rngs.count[...] == 2
    given = [digest(layer(XS, rngs=rngs)) for rngs in (nnx.Rngs(9), nnx.Rngs(9).carry)]
    assert given == pytest.approx([0.53995, 0.02349], abs=2e-5)
    seeded = nnx.RNN(cell(carry_init=NORMAL), rngs=nnx.Rngs(7))
    assert digest(seeded(XS)) == pytest.approx(0.15146, abs=2e-5)


@pytest.mark.parametrize(
    ("rngs", "tag", "key"),
    [
        (True, "carry", jax.random.key(0)),
        (nnx.Rngs(7), "default", jax.random.fold_in(jax.random.key(7), 0)),
        (nnx.Rngs(carry=7), "carry", jax.random.fold_in(jax.random.key(7), 0)),
        (jax.random.key(7), "carry", jax.random.key(7)),
    ],
)
def test_where_the_keys_come_from(rngs, tag, key):
    parts = nnx.RNN(cell()), nnx.RNN(cell())
    for layer in (nnx.RNN(cell(), rngs=rngs), nnx.Bidirectional(*parts, rngs=True)):
        if isinstance(layer, nnx.RNN):
            assert (layer.rngs.tag, layer.rngs.key[...] == key) == (tag, True)
        else:
            assert (layer.rngs.tag, layer.rngs.key[...] == jax.random.key(0)) == ("carry", True)


@pytest.mark.parametrize("rngs", [False, None])
def test_without_keys_of_its_own_the_cells_are_used(rngs):
    layer = nnx.RNN(cell(carry_init=NORMAL, keep_rngs=True), rngs=rngs)
    layer(XS)
    assert layer.rngs is None
    assert layer.cell.rngs.count[...] == 1


# State in the cell.


class Noisy(nnx.RNNCellBase):
    """Counts its steps, and drops entries."""

    num_feature_axes = 1

    def __init__(self, rngs):
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.steps = nnx.BatchStat(jnp.zeros(()))

    def initialize_carry(self, input_shape, rngs=None):
        return jnp.zeros(input_shape[:1])

    def __call__(self, carry, x):
        self.steps[...] += 1
        return carry, self.drop(x)


ONES = jnp.ones((1, 6, 4))


@pytest.mark.parametrize(("filter", "same"), [(None, False), ("params", False), ("dropout", True)])
def test_broadcast_rngs_draw_the_same_in_every_step(filter, same):
    layer = nnx.RNN(Noisy(nnx.Rngs(dropout=3)), broadcast_rngs=filter)
    (outputs,) = layer(ONES)
    assert bool((outputs == outputs[:1]).all()) == same
    assert layer.cell.drop.rngs.count[...] == (1 if same else 6)
    assert layer.cell.steps[...] == 6
    want = [[2, 2, 0, 2], [2, 2, 0, 2]] if same else [[0, 0, 0, 0], [2, 2, 2, 2]]
    assert outputs[:2].tolist() == want  # as Flax draws


def test_state_axes_reach_the_loop():
    stacked = nnx.BatchStat(jnp.arange(6.0))
    axes = nnx.StateAxes({nnx.BatchStat: 0, ...: nnx.Carry})
    layer = nnx.RNN(Noisy(nnx.Rngs(0)), state_axes=axes)
    layer.cell.steps = stacked
    layer(ONES)
    assert stacked[...].tolist() == [1, 2, 3, 4, 5, 6]


# Both directions.


def both(**options):
    rngs = nnx.Rngs(0)
    forward = nnx.RNN(nnx.GRUCell(2, 3, **B, rngs=rngs))
    backward = nnx.RNN(nnx.OptimizedLSTMCell(2, 3, **B, rngs=rngs))
    return nnx.Bidirectional(forward, backward, **options)


@pytest.mark.parametrize(
    ("options", "call", "x", "want"),
    [
        ({}, {}, XS, 1.39238),
        ({"time_major": True}, {}, TIME_MAJOR, 2.50074),
        ({}, {"time_major": True}, TIME_MAJOR, 2.50074),
        ({}, {"seq_lengths": LENGTHS}, XS, 1.17885),
        ({"merge_fn": jnp.subtract}, {}, XS, 1.42261),
        ({}, {"initial_carry": (H, (C, H))}, XS, 3.1663),
        ({}, {"reverse": True, "keep_order": False}, XS, 1.39238),
    ],
    ids=["plain", "time_major", "call", "lengths", "merge_fn", "initial_carry", "reverse"],
)
def test_bidirectional_numbers_of_flax(options, call, x, want):
    assert run(both(**options), x, **call) == pytest.approx(want, abs=2e-5)


def test_bidirectional_returns_a_pair_of_carries():
    layer = both(return_carry=True)
    (forward, (c, h)), outputs = layer(XS)
    np.testing.assert_array_equal(outputs[:, -1, :3], forward)
    np.testing.assert_array_equal(outputs[:, 0, 3:], h)
    assert c.shape == (2, 3)
    assert (layer(XS, return_carry=False) == outputs).all()


def test_bidirectional_draws_one_carry_after_the_other():
    parts = (nnx.RNN(cell(seed=n, carry_init=NORMAL)) for n in range(2))
    layer = nnx.Bidirectional(*parts)
    assert digest(layer(XS)) == pytest.approx(4.30665, abs=2e-5)
    assert digest(layer(XS, rngs=nnx.Rngs(9))) == pytest.approx(-1.85796, abs=2e-5)
    counts = [x.rngs.count[...] for x in (layer, layer.forward_rnn, layer.backward_rnn)]
    assert counts == [2, 0, 0]


def test_bidirectional_without_keys_leaves_them_to_its_rnns():
    parts = [nnx.RNN(cell(seed=n, carry_init=NORMAL)) for n in range(2)]
    nnx.Bidirectional(*parts, rngs=False)(XS)
    assert [part.rngs.count[...] for part in parts] == [1, 1]


# Bad input.


@pytest.mark.parametrize(
    ("layer", "x", "call", "text"),
    [
        (
            nnx.RNN(cell()),
            XS[0, 0],
            {},
            "model.blocks[0] (RNN) expected inputs of shape (..., time, features), with 1 axes of "
            "features, but got float32[2].\nFix: keep the time axis, also where it has size 1; for "
            "one step, call the cell.",
        ),
        (nnx.RNN(cell(), time_major=True), XS[0, 0], {}, "of shape (time, ..., features)"),
        (
            nnx.RNN(cell()),
            XS,
            {"seq_lengths": jnp.array([1, 2, 3])},
            "model.blocks[0] (RNN) expected seq_lengths to be integers of shape (2,), one a "
            "sequence, but got int32[3].\nFix: give the number of steps of each sequence",
        ),
        (nnx.RNN(cell()), XS, {"seq_lengths": jnp.ones(2)}, "of shape (2,), one a sequence, but"),
        (nnx.RNN(cell()), XS, {"seq_lengths": [2]}, "one a sequence, but got int32[1]"),
        (
            nnx.RNN(cell()),
            XS[..., :1],
            {},
            "model.blocks[0].cell (GRUCell) expected inputs whose last axis has size 2, but got "
            "float32[2,1].",
        ),
        (
            nnx.RNN(cell(nnx.LSTMCell)),
            XS,
            {"initial_carry": H},
            "model.blocks[0].cell (LSTMCell) expected a carry that is a pair (c, h) of arrays of "
            "shape (2, 3), but got float32[2,3].",
        ),
        (
            both(),
            XS,
            {"initial_carry": H[0]},
            "model.blocks[0] (Bidirectional) expected initial_carry to be a pair, one carry a "
            "direction, but got float32[3].\nFix: pass (forward_carry, backward_carry).",
        ),
    ],
)
def test_bad_input(layer, x, call, text):
    model = InList(layer)
    with pytest.raises(FeatureError) as error:
        model(x, **call)
    assert text in str(error.value)


def test_what_is_no_cell():
    with pytest.raises(LayerArgumentError, match=r"RNN runs a cell such as nnx.LSTMCell, but got"):
        nnx.RNN(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("make", [lambda: nnx.RNN(cell(), rngs=5), lambda: both(rngs=5)])
def test_what_are_no_keys(make):
    with pytest.raises(RngsError, match=r"rngs must be an nnx.Rngs, an nnx.RngStream or a key"):
        make()


traces: list[int] = []  # a global: what tests close over is looked at


class Counting(nnx.SimpleCell):
    def __call__(self, carry, x):
        traces.append(1)
        return super().__call__(carry, x)


@pytest.mark.usefixtures("tests_as_library")
def test_calls_outside_of_traces_are_compiled_once():
    traces.clear()
    x = jax.random.normal(jax.random.key(0), (2, 5, 3))
    rnn = nnx.RNN(Counting(3, 4, rngs=nnx.Rngs(0)))
    first, again = rnn(x), rnn(x)
    assert jnp.array_equal(first, again)
    once = len(traces)
    nnx.clone(rnn)(x + 1)
    rnn.cell.dense_i.kernel[...] += 1
    assert not jnp.allclose(rnn(x), first)
    assert len(traces) == once
    rnn(x, reverse=True)
    assert len(traces) > once


def test_filters_without_a_hash_run_as_they_are():
    rnn = nnx.RNN(nnx.GRUCell(3, 4, rngs=nnx.Rngs(0)), broadcast_rngs=["dropout"])
    plain = nnx.RNN(nnx.GRUCell(3, 4, rngs=nnx.Rngs(0)))
    x = jnp.ones((2, 5, 3))
    assert jnp.allclose(rnn(x), plain(x))


def test_lengths_as_lists_and_one_for_all():
    layer = nnx.RNN(cell(), return_carry=True)
    last, _ = layer(XS, seq_lengths=jnp.array([2, 2]))
    for lengths in (2, [2, 2], np.array(2)):
        np.testing.assert_array_equal(layer(XS, seq_lengths=lengths)[0], last)
