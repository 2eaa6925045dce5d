"""Saving and restoring: everything comes back bit for bit, or nothing is changed."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import bits, training

from linnet import io, nnx, struct
from linnet.errors import (
    CheckpointExistsError,
    CheckpointMismatchError,
    UnstorableError,
)
from tests.compare import identical, is_key
from tests.models import Count, OneOfEverything

Pair = collections.namedtuple("Pair", "left right")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of a model and its optimizer, with both."""
    model, optimizer = training(0)
    path = tmp_path_factory.mktemp("io") / "saved"
    io.save(path, model=model, optimizer=optimizer, step=3, note="first")
    return path, model, optimizer


def test_a_model_and_its_optimizer_come_back_bit_for_bit(saved):
    path, model, optimizer = saved
    other, other_optimizer = training(5)
    kernel = other.layers[0].kernel
    assert bits(other) != bits(model)
    restored = io.restore(path, model=other, optimizer=other_optimizer)
    assert bits(other) == bits(model)
    assert bits(other_optimizer) == bits(optimizer)
    assert restored.model is other and other.layers[0].kernel is kernel
    assert restored.problems == [] and restored.path == str(path)
    assert (restored.step, restored["note"]) == (3, "first")


def test_training_goes_on_as_if_it_had_never_stopped(saved):
    path, _, _ = saved
    x = jnp.ones((3, 4))

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(lambda m: jnp.sum(m(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    runs = []
    for seed in (1, 2):
        other, other_optimizer = training(seed)
        io.restore(path, model=other, optimizer=other_optimizer)
        losses = [float(step(other, other_optimizer)) for _ in range(3)]
        runs.append((losses, bits((other, other_optimizer))))
    assert runs[0] == runs[1]


def test_a_part_can_be_restored_and_the_rest_is_left_alone(saved):
    path, model, _ = saved
    other = OneOfEverything(7)
    assert set(io.restore(path, model=other)) == {"model", "step", "note"}
    assert bits(other) == bits(model)


def test_without_items_all_comes_back_as_nested_dicts_with_integer_keys(saved):
    path, model, _ = saved
    everything = io.restore(path)
    assert set(everything) == {"model", "optimizer", "step", "note"}
    pure = everything.model
    assert list(pure["layers"]) == [0, 1]
    np.testing.assert_array_equal(pure["layers"][1]["kernel"], model.layers[1].kernel[...])
    assert pure["dropout"]["rngs"]["key"].dtype == model.dropout.rngs.key[...].dtype
    assert isinstance(pure["table"], np.ndarray)
    assert everything.optimizer["opt_state"][0]["mu"]["layers"][0]["bias"].shape == (4,)


def test_an_attribute_that_was_not_restored_says_so(saved):
    with pytest.raises(AttributeError, match=r"'optimizer' was not restored; there are .*model"):
        _ = io.restore(saved[0], model=OneOfEverything(1)).optimizer


PLAIN = {
    "int": -3,
    "big": 2**80,
    "float": 0.1,
    "nan": float("nan"),
    "minus": float("-inf"),
    "true": True,
    "none": None,
    "text": "grüße\n",
    "empty text": "",
    "bytes": b"\x00\xff",
    "complex": 1.5 - 2j,
    "nested": {"list": [1, [2.5, ()]], "tuple": (1, {"x": []}), 3: "int key", "3": "text key"},
    "numpy": np.arange(6, dtype=np.int16).reshape(2, 3),
    "float64": np.array([0.1], np.float64),
    "big endian": np.array([1.5, 2.5], ">f4"),
    "none of it": np.zeros((0, 3), np.float16),
    "half": jnp.ones(3, jnp.bfloat16) / 3,
    "eight": jnp.asarray([0.5, 2.0], jnp.float8_e4m3fn),
    "four": jnp.asarray([-3, 7], jnp.int4),
    "flags": jnp.array([True, False]),
    "waves": jnp.array([1 + 2j]),
    "scalar": jnp.float32(2.5),
    "key": jax.random.key(3),
    "keys": jax.random.split(jax.random.key(3, impl="unsafe_rbg"), 3),
    "a.b": 1,
    "a": {"b": 2, "c/d": 3, "..": 4, "": 5, "e~f": "six"},
}


# In the byte order of the machine.
RESTORED = {**PLAIN, "big endian": np.array([1.5, 2.5], np.float32)}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("io") / "plain"
    io.save(path, PLAIN)
    return path


@pytest.mark.parametrize("name", PLAIN)
def test_plain_values_and_arrays_come_back_as_they_were(plain, name):
    assert identical(RESTORED[name], io.restore(plain, {name: ...})[name])


def test_plain_values_come_back_into_examples_of_their_type(plain):
    def example(x):
        if isinstance(x, dict):
            return {key: example(item) for key, item in x.items()}
        if isinstance(x, list | tuple):
            return type(x)(map(example, x))
        if x is None or isinstance(x, str | bytes):
            return x and x[:1]
        if is_key(x):
            zeros = jax.random.key_data(x) * 0
            return jax.random.wrap_key_data(zeros, impl=jax.random.key_impl(x))
        return x * 0 if hasattr(x, "shape") and x.dtype != bool else x

    restored = io.restore(plain, example(PLAIN))
    assert all(identical(RESTORED[name], restored[name]) for name in PLAIN)
    assert isinstance(restored["numpy"], np.ndarray) and isinstance(restored["half"], jax.Array)


def test_trees_of_other_types_are_rebuilt_as_those_types(tmp_path):
    @struct.dataclass
    class Record:
        rate: float
        state: object

    tx = optax.adam(1e-3)
    tree = Record(0.5, Pair((tx.init({"w": jnp.ones(2)}),), jnp.arange(2)))
    io.save(tmp_path / "a", tree=tree)
    example = jax.tree.map(lambda x: x * 0, tree)
    found = io.restore(tmp_path / "a", tree=example).tree
    assert isinstance(found, Record) and found.rate == 0.5
    assert isinstance(found.state, Pair) and found.state.right.tolist() == [0, 1]
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    loose = io.restore(tmp_path / "a").tree
    assert set(loose["state"]) == {"left", "right"}


class Grain:
    """A position the way Grain tells it."""

    def __init__(self, position=None):
        self.position = position

    def get_state(self):
        return self.position

    def set_state(self, position):
        self.position = position


class Torch(Grain):
    """A position the way PyTorch tells it."""

    get_state = set_state = None

    def state_dict(self):
        return self.position

    def load_state_dict(self, position):
        self.position = position


@pytest.mark.parametrize("kind", [Grain, Torch])
@pytest.mark.parametrize(
    "position",
    [
        b'{"next": 17}',
        {"epoch": 2, "workers": [(0, 3), (1, 2)], 7: None, "order": np.arange(5)},
        12,
        {},
    ],
    ids=["bytes", "nested", "number", "empty"],
)
def test_the_position_of_an_iterator_comes_back(tmp_path, kind, position):
    io.save(tmp_path / "a", data=kind(position), model=OneOfEverything())
    data = kind()
    restored = io.restore(tmp_path / "a", model=OneOfEverything(1), data=data)
    assert identical(data.position, position)
    assert restored.data is data


def test_what_two_items_share_is_saved_once_and_found_in_both(tmp_path):
    model = OneOfEverything()
    optimizer = nnx.ModelAndOptimizer(model, optax.sgd(0.1))
    io.save(tmp_path / "both", model=model, optimizer=optimizer)
    assert "model" not in io.restore(tmp_path / "both").optimizer
    other = OneOfEverything(3)
    io.restore(tmp_path / "both", optimizer=nnx.ModelAndOptimizer(other, optax.sgd(0.1)))
    assert bits(other) == bits(model)
    io.save(tmp_path / "one", optimizer=optimizer)
    again = OneOfEverything(4)
    io.restore(tmp_path / "both", model=again)
    assert bits(again) == bits(model)


def test_tied_weights_are_saved_once(tmp_path):
    class Tied(nnx.Module):
        def __init__(self, seed, tied):
            self.embed = nnx.Param(jnp.full((2, 3), float(seed)))
            self.head = self.embed if tied else nnx.Param(jnp.full((2, 3), -1.0))

    io.save(tmp_path / "tied", model=Tied(5, True))
    assert set(io.restore(tmp_path / "tied").model) == {"embed"}
    apart = Tied(0, False)
    io.restore(tmp_path / "tied", model=apart)
    assert float(apart.head[0, 0]) == float(apart.embed[0, 0]) == 5.0
    io.save(tmp_path / "apart", model=apart)
    tied = Tied(0, True)
    io.restore(tmp_path / "apart", model=tied)
    assert tied.head is tied.embed and float(tied.embed[0, 0]) == 5.0


def test_states_and_variables_are_items_too(saved, tmp_path):
    path, model, _ = saved
    other = OneOfEverything(2)
    io.restore(path, model=nnx.state(other))
    other.table = model.table  # an array in no Variable is the module's own affair
    assert bits(other) == bits(model)
    io.save(tmp_path / "a", v=Count(jnp.arange(3)), arrays=nnx.State({"x": jnp.ones(2)}))
    v = Count(jnp.zeros(3, jnp.int32))
    restored = io.restore(tmp_path / "a", v=v, arrays=nnx.State({"x": jnp.zeros(2)}))
    assert v[...].tolist() == [0, 1, 2]
    assert restored.arrays["x"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("storage", [{"ref": True}, {"hijax": True}])
def test_variables_stored_as_refs_are_read_and_written(tmp_path, storage):
    io.save(tmp_path / "a", v=nnx.Param(jnp.arange(3.0), **storage))
    v = nnx.Param(jnp.zeros(3), **storage)
    ref = v.raw_value
    io.restore(tmp_path / "a", v=v)
    assert v.raw_value is ref and v[...].tolist() == [0.0, 1.0, 2.0]


# ---- abstract ones ------------------------------------------------------------------------------


@pytest.mark.parametrize("shape_of", [nnx.eval_shape, jax.eval_shape])
def test_an_abstract_model_gets_its_arrays(saved, shape_of):
    path, model, _ = saved
    abstract = shape_of(lambda: OneOfEverything(9))
    assert isinstance(abstract.layers[0].kernel[...], jax.ShapeDtypeStruct)
    io.restore(path, model=abstract)
    found, want = bits(abstract), bits(model)
    # What was a NumPy array is abstract like any other.
    strip = {key: value[1:] for key, value in found.items()}
    assert strip == {key: value[1:] for key, value in want.items()}


def test_an_abstract_tree_of_shapes_gets_its_arrays(saved):
    path, model, _ = saved
    shapes = jax.eval_shape(lambda: nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    found = io.restore(path, model=shapes, strict=False)
    assert {problem.kind for problem in found.problems} == {"extra"}
    np.testing.assert_array_equal(found.model["layers"][0]["kernel"], model.layers[0].kernel[...])


# ---- what does not fit --------------------------------------------------------------------------


def test_every_misfit_is_listed_and_nothing_is_written(saved):
    path, model, _ = saved
    other = OneOfEverything(5, depth=3)
    other.layers[0].bias = nnx.Param(jnp.zeros(5))
    other.layers[1].kernel = nnx.Param(jnp.zeros((4, 4), jnp.bfloat16))
    other.norm.skale = other.norm.scale
    del other.norm.scale
    before = bits(other)
    with pytest.raises(CheckpointMismatchError) as caught:
        io.restore(path, model=other)
    lines = str(caught.value).splitlines()
    assert lines[0] == (f"{path} does not fit what it is to be restored into; nothing was changed:")
    assert lines[1:-1] == [
        "  - model/layers/0/bias: expected float32[5], found float32[4]",
        "  - model/layers/1/kernel: expected bfloat16[4, 4], found float32[4, 4]",
        "  - model/layers/2/bias: missing",
        "  - model/layers/2/kernel: missing",
        "  - model/norm/skale: missing; did you mean model/norm/scale?",
        "  - model/norm/scale: not wanted; did you mean model/norm/skale?",
    ]
    assert lines[-1].startswith("Fix: rename={'model/norm/scale': 'model/norm/skale'} for entries")
    assert bits(other) == before
    kinds = [problem.kind for problem in caught.value.problems]
    assert kinds == ["shape", "dtype", "missing", "missing", "missing", "extra"]

    loose = io.restore(path, model=other, strict=False)
    assert loose.problems == caught.value.problems
    np.testing.assert_array_equal(other.layers[0].kernel[...], model.layers[0].kernel[...])
    assert other.layers[0].bias.shape == (5,) and other.layers[1].kernel.dtype == jnp.bfloat16


def test_a_misfit_in_one_item_leaves_the_others_alone(saved):
    path, _, _ = saved
    model, optimizer = training(5)
    before = bits((model, optimizer))
    with pytest.raises(CheckpointMismatchError, match=r"note: expected int, found str"):
        io.restore(path, model=model, optimizer=optimizer, note=3)
    assert bits((model, optimizer)) == before


def test_a_read_only_variable_is_refused_before_anything_is_written(saved):
    path, _, _ = saved
    model = OneOfEverything(5)
    model.norm.scale.set_metadata(mutable=False)
    before = bits(model)
    with pytest.raises(Exception, match="read-only"):
        io.restore(path, model=model)
    assert bits(model) == before


def test_an_item_that_was_not_saved_is_named_once(saved):
    with pytest.raises(CheckpointMismatchError) as caught:
        io.restore(saved[0], modle=OneOfEverything(1), data=...)
    assert str(caught.value).splitlines()[1:-1] == [
        "  - modle: not saved; there are model, note, optimizer, step; did you mean model?",
        "  - data: not saved; there are model, note, optimizer, step",
    ]


def test_a_long_list_is_cut(saved):
    with pytest.raises(CheckpointMismatchError) as caught:
        io.restore(saved[0], model=OneOfEverything(0, depth=40))
    assert str(caught.value).splitlines()[-2] == "  - and 26 more"
    assert len(caught.value.problems) == 76


def test_a_key_of_another_implementation_is_refused(tmp_path):
    io.save(tmp_path / "a", key=jax.random.key(0), raw=jnp.array([0, 3], jnp.uint32))
    with pytest.raises(
        CheckpointMismatchError, match=r"key: expected key<rbg>\[\], found key<fry>"
    ):
        io.restore(tmp_path / "a", key=jax.random.key(1, impl="rbg"))
    raw = io.restore(tmp_path / "a", raw=jax.random.key(1)).raw
    assert raw == jax.random.key(3)


def test_renamed_paths_restore_an_older_model(saved):
    path, model, optimizer = saved
    new, new_optimizer = training(5)
    for item in (new, new_optimizer.opt_state[0].mu, new_optimizer.opt_state[0].nu):
        norm = item["norm"] if isinstance(item, dict) else item.norm
        if isinstance(norm, dict):
            norm["gain"] = norm.pop("scale")
        else:
            norm.gain = norm.scale
            del norm.scale
    rename = {"**/scale": "**/gain"}
    io.restore(path, model=new, optimizer=new_optimizer, rename=rename)
    np.testing.assert_array_equal(new.norm.gain[...], model.norm.scale[...])
    moments = (new_optimizer.opt_state[0].mu, optimizer.opt_state[0].mu)
    np.testing.assert_array_equal(moments[0]["norm"]["gain"][...], moments[1]["norm"]["scale"][...])


def test_a_tree_in_memory_restores_like_a_folder(saved):
    path, model, _ = saved
    tree = {"model": io.restore(path).model, "step": 3}
    tree["model"]["layers"] = {str(i): x for i, x in tree["model"]["layers"].items()}
    table = tree["model"]["table"]
    other = OneOfEverything(5)
    assert io.load_tree(tree, model=other, step=0).step == 3
    assert bits(other) == bits(model)
    table[:] = -1  # the model has a table of its own
    assert bits(other) == bits(model)
    del tree["model"]["norm"]["scale"]
    before = bits(other)
    with pytest.raises(
        CheckpointMismatchError, match=r"the tree does not fit .*\n.*norm/scale: miss"
    ):
        io.load_tree(tree, model=other)
    assert bits(other) == before
    loose = io.load_tree(tree["model"], other=other, strict=False)
    assert [problem.path for problem in loose.problems] == ["other/norm/scale"]


# ---- what cannot be saved -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (object(), "x is a object, which a checkpoint cannot hold"),
        ({"f": len}, "x/f is a builtin_function_or_method, which"),
        ({1.5: 2}, "x has the key 1.5; keys are text or integers"),
        (np.array(["a"]), "x is a NumPy array of dtype <U1"),
        (np.array([None]), "x is a NumPy array of dtype object"),
        (jax.ShapeDtypeStruct((2,), jnp.float32), "x is abstract: it has a shape and no value"),
        (nnx.Param(object()), "x is a object"),
    ],
    ids=range(7),
)
def test_what_cannot_be_saved_is_refused_by_path(tmp_path, item, text):
    with pytest.raises(UnstorableError, match=re.escape(text)):
        io.save(tmp_path / "a", x=item)
    assert not list(tmp_path.iterdir())


def test_traced_and_donated_arrays_are_refused_by_path(tmp_path):
    @jax.jit
    def step(x):
        io.save(tmp_path / "a", x=x)

    with pytest.raises(UnstorableError, match="x is traced"):
        step(jnp.ones(2))
    gone = jnp.ones(2)
    gone.delete()
    with pytest.raises(UnstorableError, match="m/w was given away"):
        io.save(tmp_path / "a", m={"w": gone})
    with pytest.raises(UnstorableError, match="There is nothing to save"):
        io.save(tmp_path / "a")
    with pytest.raises(UnstorableError, match="name of an item is text, but got 3"):
        io.save(tmp_path / "a", {3: 1})


def test_an_existing_folder_is_replaced_only_when_told(tmp_path):
    path = tmp_path / "a"
    io.save(path, x=1)
    with pytest.raises(CheckpointExistsError, match=r"a is there already\.\nFix: .*overwrite=True"):
        io.save(path, x=2)
    assert io.restore(path).x == 1
    io.save(path, x=2, overwrite=True)
    assert io.restore(path).x == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
