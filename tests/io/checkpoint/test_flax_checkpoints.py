"""Checkpoints that Flax programs saved, and ours in the hands of plain Orbax.

``flax_checkpoints.zip`` was written by Flax 0.12.8 and Orbax 0.12.8: the model below after one step
of Adam, as a State and as pure dicts, by the checkpointers and by the manager, and as msgpack. The
digests are those of Flax's own arrays.
"""

import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from models import bits, training

from linnet import io, nnx
from linnet.errors import CheckpointMismatchError, DamagedCheckpointError
from linnet.io.shared.entries import raw_data
from tests.digest import digest
from tests.models import Count

ARCHIVE = Path(__file__).with_name("flax_checkpoints.zip")
MODEL, OPTIMIZER = -1653762522.46274, 1.57899


class SavedByFlax(nnx.Module):
    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs)])
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.count = Count({"calls": jnp.array(0), "recent": (jnp.zeros(2),)})


@pytest.fixture(scope="module")
def flax(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flax")
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture
def model():
    return SavedByFlax(5)


def digest_of(node):
    return digest(*map(raw_data, jax.tree.leaves(nnx.state(node))))


@pytest.mark.parametrize(
    "where", ["state", "pure", "raw_keys", "both", "managed/3", "managed/3/model", "alone/7"]
)
def test_a_model_that_flax_saved_is_restored(flax, model, where):
    restored = io.restore(flax / where, model=model)
    assert digest_of(model) == MODEL
    assert restored.problems == []
    assert int(model.count.value["calls"]) == 1
    assert model.dropout.rngs.key[...].dtype == jax.random.key(0).dtype


def test_an_optimizer_that_flax_saved_is_restored(flax, model):
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    restored = io.restore(flax / "both", model=model, optimizer=optimizer, step=0)
    assert (digest_of(model), digest_of(optimizer), restored.step) == (MODEL, OPTIMIZER, 3)


def test_an_abstract_model_is_restored(flax):
    abstract = nnx.eval_shape(lambda: SavedByFlax(0))
    io.restore(flax / "state", model=abstract)
    assert digest_of(abstract) == MODEL


def test_listed_layers_that_flax_saved_are_stacked(tmp_path):
    class Deep(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([nnx.Linear(3, 3, rngs=nnx.Rngs(i)) for i in range(2)])

    class Scanned(nnx.Module):
        def __init__(self):
            self.layers = nnx.Stack(lambda rngs: nnx.Linear(3, 3, rngs=rngs), 2, rngs=nnx.Rngs(9))

    deep, scanned = Deep(), Scanned()
    saved = tmp_path / "deep"
    checkpointer = ocp.StandardCheckpointer()
    # The State form: Flax has a folder for each Variable, with its value in it.
    state = jax.tree.map(lambda x: {"value": x}, nnx.to_pure_dict(nnx.state(deep)))
    checkpointer.save(saved, state)
    checkpointer.wait_until_finished()
    io.restore(saved, model=scanned)
    for i in range(2):
        np.testing.assert_array_equal(scanned.layers[i].kernel[...], deep.layers[i].kernel[...])


def test_without_a_model_it_comes_back_as_it_was_saved(flax):
    everything = io.restore(flax / "both")
    assert everything.step == 3
    assert everything.model["layers"]["0"]["kernel"]["value"].shape == (2, 3)


def test_another_model_is_refused_by_path(flax, model):
    model.norm = nnx.LayerNorm(2, rngs=nnx.Rngs(0))
    before = bits(model)
    with pytest.raises(CheckpointMismatchError) as caught:
        io.restore(flax / "state", model=model)
    assert str(caught.value).splitlines()[1:-1] == [
        "  - model/norm/mean/value: not wanted",
        "  - model/norm/var/value: not wanted",
    ]
    assert bits(model) == before


def test_older_names_are_renamed(flax):
    class Newer(nnx.Module):
        def __init__(self):
            old = SavedByFlax(1)
            self.body, self.norm = old.layers, old.norm
            self.dropout, self.count = old.dropout, old.count

    newer = Newer()
    io.restore(flax / "state", model=newer, rename={"model/layers": "model/body"})
    same = SavedByFlax(2)
    io.restore(flax / "pure", model=same)
    assert bits(newer.body) == bits(same.layers)


# ---- ours, opened by Orbax itself ---------------------------------------------------------------


@pytest.mark.parametrize("checkpointer", [ocp.StandardCheckpointer, ocp.PyTreeCheckpointer])
@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_plain_orbax_opens_ours(tmp_path, checkpointer):
    model, optimizer = training()
    values = {"step": 7, "rate": 0.5, "note": "hi", "on": True, "nothing": None}
    io.save(tmp_path / "a", model=model, optimizer=optimizer, key=jax.random.key(3), **values)
    tree = checkpointer().restore(tmp_path / "a")
    assert {name: tree[name] for name in values} == values
    np.testing.assert_array_equal(
        tree["model"]["layers"]["1"]["kernel"], model.layers[1].kernel[...]
    )
    mu = optimizer.opt_state[0].mu["layers"][0]["bias"][...]
    np.testing.assert_array_equal(
        tree["optimizer"]["opt_state"]["0"]["mu"]["layers"]["0"]["bias"], mu
    )
    assert tree["key"] == jax.random.key(3)


def test_plain_orbax_opens_what_a_manager_saved(tmp_path):
    model, _ = training()
    with io.Manager(tmp_path) as manager:
        manager.save(4, model=nnx.state(model, nnx.Param))
    assert ocp.CheckpointManager(tmp_path).all_steps() == [4]
    shapes = {"model": jax.eval_shape(lambda: nnx.to_pure_dict(nnx.state(model, nnx.Param)))}
    shapes["model"]["layers"] = {str(i): x for i, x in shapes["model"]["layers"].items()}
    tree = ocp.StandardCheckpointer().restore(tmp_path / "4", shapes)
    state = nnx.state(model, nnx.Param)
    nnx.replace_by_pure_dict(state, tree["model"])
    np.testing.assert_array_equal(state["layers"][0]["kernel"][...], model.layers[0].kernel[...])


# ---- what else an Orbax manager writes ----------------------------------------------------------


@pytest.fixture
def composite(tmp_path):
    """Two steps, each with a tree and plain values beside it."""
    save = ocp.args.Composite(
        model=ocp.args.StandardSave({"w": jnp.arange(4000.0)}),
        extra=ocp.args.JsonSave({"epoch": 3, "names": ["a", {"b": None}]}),
    )
    with ocp.CheckpointManager(tmp_path) as manager:
        for step in range(2):
            manager.save(step, args=save)
    return tmp_path


def test_plain_values_beside_a_tree_are_restored(composite):
    want = {"epoch": 3, "names": ["a", {"b": None}]}
    found = io.restore(composite / "1")
    assert found.extra == want and found.model["w"][-1] == 3999
    example = {"epoch": 0, "names": ["", {"b": None}]}
    assert io.restore(composite / "1", model=..., extra=example).extra == want
    with pytest.raises(CheckpointMismatchError, match="extra/epoch: expected str, found int"):
        io.restore(composite / "1", extra={**example, "epoch": ""})
    (composite / "1" / "extra" / "metadata").write_text('{"epoch": ')
    with pytest.raises(DamagedCheckpointError, match=r"metadata is not .*JSON.*\nFix: .*/0, which"):
        io.restore(composite / "1")


def test_a_damaged_checkpoint_of_orbax_is_named_and_a_whole_one_offered(composite):
    files = (composite / "1" / "model").rglob("d/*")
    largest = max(files, key=lambda file: file.stat().st_size)
    largest.write_bytes(bytes(1000) + largest.read_bytes()[1000:])
    with pytest.raises(DamagedCheckpointError) as caught:
        io.restore(composite / "1", model={"w": jnp.zeros(4000)})
    text = str(caught.value)
    assert text.startswith(f"Orbax cannot read {composite / '1' / 'model'}: ")
    assert text.endswith(f"Fix: restore {composite / '0'}, which is whole.")
