"""Restoring under other names, of weights that are tied or not, and all or nothing."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from linnet import io, nnx
from linnet.errors import CheckpointMismatchError, TraceContextError


class Pair(nnx.Module):
    """Two tables, which may be one."""

    def __init__(self, seed, *, tied, first="embed", second="out"):
        rngs = nnx.Rngs(seed)
        one = nnx.Param(rngs.normal((3, 2)))
        setattr(self, first, one)
        setattr(self, second, one if tied else nnx.Param(rngs.normal((3, 2))))


class Loader:
    """An iterator with a position, which may refuse one."""

    def __init__(self, position=0, refuses=False):
        self.position, self.refuses = position, refuses

    def get_state(self):
        return {"at": self.position}

    def set_state(self, state):
        if self.refuses and state["at"] != self.position:
            raise RuntimeError("no such place")
        self.position = state["at"]


def lines(caught):
    return str(caught.value).splitlines()[1:]


@pytest.fixture
def tied(tmp_path):
    model = Pair(0, tied=True)
    io.save(tmp_path / "tied", model=model)
    return tmp_path / "tied", model.embed[...]


# ---- tied weights -------------------------------------------------------------------------------


def test_weights_that_differ_do_not_restore_into_tied_ones(tmp_path):
    io.save(tmp_path / "a", model=Pair(0, tied=False))
    model = Pair(1, tied=True)
    before = np.asarray(model.embed[...])
    with pytest.raises(CheckpointMismatchError) as caught:
        io.restore(tmp_path / "a", model=model)
    assert lines(caught) == [
        "  - model/out: not wanted: it differs from model/embed, to which it is tied here",
        "Fix: rename={'model/out': None} for entries that are to be left out, or strict=False to "
        "restore what fits and get this list back.",
    ]
    np.testing.assert_array_equal(model.embed[...], before)
    loose = io.restore(tmp_path / "a", model=model, strict=False)
    assert [(p.kind, p.path) for p in loose.problems] == [("extra", "model/out")]
    left_out = io.restore(tmp_path / "a", model=model, rename={"model/out": None})
    assert left_out.problems == [] and model.embed is model.out
    np.testing.assert_array_equal(model.embed[...], Pair(0, tied=False).embed[...])


@pytest.mark.parametrize(
    "value", [jnp.array([jnp.nan, 1.0]), jax.random.key(3), np.arange(2), 3, "text"], ids=str
)
def test_equal_copies_restore_into_what_is_one(value):
    variable = nnx.Variable(value)
    model = nnx.Dict(a=variable, b=variable)
    io.load_tree({"a": value, "b": value}, model=model)
    assert model["a"] is model["b"]


@pytest.mark.parametrize(
    ("rename", "first", "second"),
    [
        ({"model/embed": "model/tokens"}, "tokens", "out"),
        ({"model/out": "model/head"}, "embed", "head"),
        ({"model/embed": "model/tokens", "model/out": "model/head"}, "tokens", "head"),
    ],
)
@pytest.mark.parametrize("now_tied", [True, False])
def test_each_path_of_tied_weights_can_be_renamed(tied, rename, first, second, now_tied):
    path, want = tied
    model = Pair(1, tied=now_tied, first=first, second=second)
    assert io.restore(path, model=model, rename=rename).problems == []
    for name in (first, second):
        np.testing.assert_array_equal(getattr(model, name)[...], want)


def test_an_item_that_is_part_of_another_comes_back_without_items_too(tmp_path):
    model = nnx.Dict(encoder=nnx.Linear(1, 2, rngs=nnx.Rngs(0)))
    io.save(tmp_path / "a", model=model, encoder=model["encoder"])
    found = io.restore(tmp_path / "a")
    assert sorted(found) == ["encoder", "model"]
    assert sorted(found.encoder) == sorted(found.model["encoder"]) == ["bias", "kernel"]
    np.testing.assert_array_equal(found.encoder["kernel"], model["encoder"].kernel[...])


# ---- other names --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rename", "place"),
    [({"old": "new"}, ("new", "layers")), ({"old/layers": "old/blocks"}, ("old", "blocks"))],
)
def test_what_is_renamed_keeps_its_lists_and_integers(tmp_path, rename, place):
    tree = {"layers": [{"w": 1}, (2.5, {3: "x"})], 7: {"a/b": None, "c": []}}
    io.save(tmp_path / "a", old=tree)
    item, layers = place
    want = {item: {layers: tree["layers"], 7: tree[7]}}
    assert io.restore(tmp_path / "a", rename=rename) == want
    assert io.restore(tmp_path / "a", {item: ...}, rename=rename) == want


def test_what_is_left_out_leaves_no_empty_container(tmp_path):
    io.save(tmp_path / "a", tree={"old": [[1], {}], "new": 2})
    assert io.restore(tmp_path / "a", rename={"tree/old": None}) == {"tree": {"new": 2}}


# ---- what to do ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "fix"),
    [
        (
            {"w": jnp.zeros(3)},
            "rename={'x/b': None} for entries that are to be left out, or strict",
        ),
        (
            {"w": jnp.zeros(3), "b": 1.5},
            "restore with the dtypes that were saved and convert after",
        ),
        ({"w": jnp.zeros(3), "zzzz": b""}, "rename={old: new} for entries that have another name"),
        ({"w": jnp.zeros(3), "bb": 1}, "rename={'x/b': 'x/bb'} for entries that have another name"),
        ({"w": jnp.zeros(2), "b": 1}, "strict=False to restore what fits and get this list back."),
    ],
    ids=range(5),
)
def test_the_repair_fits_the_problem(tmp_path, wanted, fix):
    io.save(tmp_path / "a", x={"w": jnp.zeros(3), "b": 1})
    with pytest.raises(CheckpointMismatchError, match=r"\nFix: " + re.escape(fix)):
        io.restore(tmp_path / "a", x=wanted)


# ---- all or nothing -----------------------------------------------------------------------------


@pytest.mark.parametrize("refuser", ["loader", "model"])
def test_iterators_go_back_when_something_else_is_refused(tmp_path, refuser):
    model = nnx.Dict(w=nnx.Param(jnp.ones(2)))
    io.save(tmp_path / "a", first=Loader(5), model=model, second=Loader(6))
    first, second = Loader(1), Loader(2, refuses=refuser == "loader")
    other = nnx.Dict(w=nnx.Param(jnp.zeros(2), mutable=refuser != "model"))
    with pytest.raises(Exception, match=r"no such place|read-only") as caught:
        io.restore(tmp_path / "a", first=first, second=second, model=other)
    assert (first.position, second.position, other["w"][0]) == (1, 2, 0)
    if refuser == "loader":
        assert caught.value.__notes__ == ["Raised while the position of second was set."]


def test_nothing_is_restored_into_traced_objects(tmp_path):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    io.save(tmp_path / "a", model=model)
    with pytest.raises(TraceContextError) as error:
        nnx.jit(lambda model: io.restore(tmp_path / "a", model=model).problems)(model)
    assert str(error.value).startswith(
        "model/bias is traced: nothing can be restored inside a function that JAX compiles.\n"
        "Fix: have it restored before the call, and pass the model."
    )


# ---- another optimizer --------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.1),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "schedule": optax.adam(optax.linear_schedule(0.1, 0.0, 10)),
    "injected": optax.inject_hyperparams(optax.sgd)(0.1),
}
ADAM = "0/count, 0/mu, 0/nu"


def with_optimizer(name, layers=2):
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(*(nnx.Linear(2, 2, rngs=rngs) for _ in range(layers)))
    return model, nnx.Optimizer(model, OPTIMIZERS[name], wrt=nnx.Param)


@pytest.mark.parametrize(
    ("saved", "here", "parts"),
    [
        ("adam", "sgd", (ADAM, "nothing")),
        ("sgd", "adam", ("nothing", ADAM)),
        ("adam", "momentum", (ADAM, "0/trace")),
        ("adam", "schedule", (ADAM, f"{ADAM}, 1/count")),
        ("adam", "clipped", (ADAM, "1/0/count, 1/0/mu, 1/0/nu")),
        ("adam", "injected", (ADAM, "count, hyperparams")),
    ],
)
@pytest.mark.parametrize("is_alone", [False, True], ids=["with the model", "alone"])
def test_the_state_of_another_optimizer_is_told_in_one_line(tmp_path, saved, here, parts, is_alone):
    model, optimizer = with_optimizer(saved)
    io.save(tmp_path / "a", model=model, optimizer=optimizer)
    model, optimizer = with_optimizer(here)
    items = {"optimizer": optimizer} if is_alone else {"model": model, "optimizer": optimizer}
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(items)))
    with pytest.raises(CheckpointMismatchError) as caught:
        io.restore(tmp_path / "a", items)
    rename = ""
    if here == "clipped":
        rename = (
            "rename={'optimizer/opt_state/0': 'optimizer/opt_state/1/0'} if only its place has "
            "changed, or "
        )
    assert str(caught.value) == (
        f"{tmp_path / 'a'} does not fit what it is to be restored into; nothing was changed:\n"
        f"  - optimizer/opt_state: saved by another optimizer, with {parts[0]}; the one here has "
        f"{parts[1]}\n"
        f"Fix: build the optimizer as it was when it was saved, or {rename}leave optimizer out of "
        "the items, or strict=False to restore what fits and get this list back."
    )
    assert all(problem.path.startswith("optimizer/opt_state/") for problem in caught.value.problems)
    after = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(items)))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_an_optimizer_whose_place_has_changed_is_renamed_as_the_error_says(tmp_path):
    model, optimizer = with_optimizer("adam")
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    io.save(tmp_path / "a", model=model, optimizer=optimizer)
    other, clipped = with_optimizer("clipped")
    rename = {"optimizer/opt_state/0": "optimizer/opt_state/1/0"}
    io.restore(tmp_path / "a", model=other, optimizer=clipped, rename=rename)
    assert int(clipped.opt_state[1][0].count) == 1
    mu, want = (
        o.mu["layers"][0]["kernel"][...] for o in (clipped.opt_state[1][0], optimizer.opt_state[0])
    )
    np.testing.assert_array_equal(mu, want)


@pytest.mark.parametrize("is_alone", [False, True], ids=["with the model", "alone"])
def test_another_model_with_the_same_optimizer_is_listed(tmp_path, is_alone):
    model, optimizer = with_optimizer("adam", layers=3)
    io.save(tmp_path / "a", model=model, optimizer=optimizer)
    model, optimizer = with_optimizer("adam")
    items = {"optimizer": optimizer} if is_alone else {"model": model, "optimizer": optimizer}
    with pytest.raises(CheckpointMismatchError) as caught:
        io.restore(tmp_path / "a", items)
    text = str(caught.value)
    assert "optimizer/opt_state/0/mu/layers/2/kernel: not wanted" in text
    assert "another optimizer" not in text
    assert ("model/layers/2/kernel: not wanted" in text) is not is_alone
