"""Converted models compute what the Linen models compute, from the same variables."""

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import as_flax, io, linen as nn, nnx

pytest.importorskip("libcst")

from linnet.migration import to_nnx
from linnet.traverse_util import flatten_dict
from tests.compare import assert_close, is_key
from tests.models import normal

HERE = Path(__file__).parent
PROGRAMS = HERE.parent / "programs" / "linen"
# A call of a model for the programs whose sizes the source alone does not say.
EXAMPLES = {
    HERE / "other_classes.py": "Flattening()(jnp.ones((1, 8, 8, 1)))",
    HERE / "seed_pairs.py": "MLP(4, num_layers=5)(jnp.ones((2, 4)), training=True)",
    PROGRAMS / "vae.py": "VAE()(jnp.ones((1, 8, 8, 1)))",
}


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Imports a Linen program, and what became of it; both import Flax."""
    folder = tmp_path_factory.mktemp("converted")

    @functools.cache
    def both(path: Path) -> tuple[Any, Any, Any]:
        source = path.read_text(encoding="utf-8")
        found = to_nnx(source, example=EXAMPLES.get(path))
        texts = {f"{path.stem}_linen": source, f"{path.stem}_nnx": found.text}
        modules = []
        for name, text in texts.items():
            file = folder / f"{name}.py"
            file.write_text(text, encoding="utf-8")
            spec = importlib.util.spec_from_file_location(name, file)
            assert spec is not None and spec.loader is not None
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
            modules.append(sys.modules[name])
        return modules[0], modules[1], found

    with as_flax.installed():
        yield both


def filled(model, *inputs, **kwargs):
    """Variables for a Linen model, with random numbers; nothing is compiled for it."""
    keys = {"params": jax.random.key(0)}
    shapes = nn.meta.unbox(jax.eval_shape(lambda: model.init(keys, *inputs, **kwargs)))
    random = np.random.default_rng(0)
    return {
        collection: jax.tree.map(lambda x: numbers(random, x), tree)
        for collection, tree in shapes.items()
        if collection != "intermediates"
    }


def numbers(random, like):
    if jnp.issubdtype(like.dtype, jnp.integer):
        return np.ones(like.shape, like.dtype)
    return random.uniform(0.05, 0.5, like.shape).astype(like.dtype)


def built(make):
    """A converted model; what is not loaded into it is zero."""
    model = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))

    def zeros(x):
        if is_key(x):
            return jnp.broadcast_to(jax.random.key(0), x.shape)
        return np.zeros(x.shape, x.dtype)

    nnx.update(model, jax.tree.map(zeros, nnx.state(model)))
    return model


def compare(linen_model, make, inputs, kwargs=None, mutable=False):
    """The outputs of both, and, with ``mutable``, the collection that a call writes."""
    kwargs = kwargs or {}
    variables = filled(linen_model, *inputs, **kwargs)
    rngs = {"sample": jax.random.key(5)}

    def linen_call(variables, *inputs):
        written = list(variables) if mutable else False
        return linen_model.apply(variables, *inputs, rngs=rngs, mutable=written, **kwargs)

    want = jax.jit(linen_call)(variables, *inputs)
    model = built(make)
    io.load_linen(variables, model)
    model.eval()
    got = nnx.jit(lambda model, *inputs: model(*inputs, **kwargs))(model, *inputs)
    if mutable:
        want, updates = want
        for path, value in flatten_dict(updates[mutable]).items():
            np.testing.assert_allclose(found_at(model, path), value, rtol=1e-5, atol=1e-6)
    assert_close(got, want, atol=1e-5)
    return model, want


def found_at(model, path):
    for name in path:
        model = getattr(model, name)
    return model[...]


IMAGES = (2, 8, 8, 1)
# file, class, arguments, sizes, inputs, keyword arguments of the call
CASES = [
    ("seed_pairs", "Model", (8, 3), {"in_features": 6}, [normal(2, 6)], {"training": False}),
    ("seed_pairs", "AutoEncoder", (3, 6), {"in_features": 6}, [normal(2, 6)], {}),
    ("seed_pairs", "RNN", (4,), {"in_features": 2}, [normal(3, 5, 2)], {}),
    ("seed_pairs", "MLP", (4, 5), {"in_features": 4}, [normal(2, 4)], {"training": False}),
    ("other_classes", "Flattening", (), {"in_features": 1}, [normal(*IMAGES)], {}),
    ("other_classes", "Widths", ((5, 4, 2),), {"in_features": 3}, [normal(2, 3)], {}),
    ("other_classes", "ListOfLayers", (4,), {"in_features": 3}, [normal(2, 3)], {}),
    ("other_classes", "Encoder", (2,), {"in_features": 4, "x_size1": 5}, [normal(2, 5, 4)], {}),
    ("other_classes", "Normed", (4,), {"in_features": 3}, [normal(2, 3)], {"train": False}),
    ("other_classes", "BothWays", (3,), {"in_features": 4}, [normal(2, 5, 4)], {}),
    ("other_classes", "Chained", (), {"in_features": 4}, [normal(2, 5, 4)], {}),
    ("other_classes", "ChainedOnTheSpot", (), {"in_features": 4}, [normal(2, 4)], {}),
    ("other_classes", "Recomputed", (4, 2), {"in_features": 3}, [normal(2, 3)], {}),
    ("other_classes", "Options", (4, False, True), {"in_features": 3}, [normal(2, 3)], {}),
    ("other_classes", "Options", (4,), {"in_features": 3}, [normal(2, 3)], {}),
    ("other_classes", "Skips", (), {"in_features": 1}, [normal(*IMAGES)], {}),
    ("other_classes", "Experts", (3, 4), {"in_features": 2}, [normal(2, 2)], {}),
    ("other_classes", "Heads", (2, 3), {"in_features": 4}, [normal(2, 5, 4)], {}),
    ("other_classes", "Derived", (4,), {"in_features": 3}, [normal(2, 3)], {}),
    ("other_classes", "Tied", (5, 4), {}, [jnp.arange(3)], {}),
    ("other_classes", "Appended", (2,), {"in_features": 4}, [normal(2, 4)], {}),
    ("other_classes", "Twins", (4, 3), {"in_features": 2}, [normal(2, 2)], {}),
    (
        "other_classes",
        "Patches",
        (2, 4, 3),
        {"in_features": 1, "positions_shape": (1, 17, 4)},
        [normal(*IMAGES)],
        {},
    ),
    (
        "programs",
        "resnet.ResNet",
        ([1, 1], 4),
        {"in_features": 1},
        [normal(*IMAGES)],
        {"train": False},
    ),
    ("programs", "ppo.ActorCritic", (5,), {"in_features": 4}, [normal(2, 4)], {}),
]


@pytest.mark.parametrize(
    ("file", "name", "arguments", "sizes", "inputs", "kwargs"),
    CASES,
    ids=[f"{case[1]}{len(case[2])}" for case in CASES],
)
def test_same_numbers(load, file, name, arguments, sizes, inputs, kwargs):
    path = HERE / f"{file}.py"
    if file == "programs":
        file, _, name = name.partition(".")
        path = PROGRAMS / f"{file}.py"
    if not path.exists():
        pytest.skip(f"there is no {path}")
    linen, converted, _ = load(path)
    model, _ = compare(
        getattr(linen, name)(*arguments),
        functools.partial(getattr(converted, name), *arguments, **sizes),
        inputs,
        kwargs,
    )
    assert type(model).__module__ == f"{path.stem}_nnx"


def test_collections_of_a_call(load):
    linen, converted, _ = load(HERE / "seed_pairs.py")
    make = functools.partial(converted.Counting, 4, in_features=4)
    x = normal(6, 4)
    model, _ = compare(linen.Counting(4), make, [x], {"training": True}, mutable="batch_stats")
    assert isinstance(model.count, converted.Counter)
    assert int(model.count[...]) == 2

    linen, converted, _ = load(HERE / "other_classes.py")
    make = functools.partial(converted.Average, in_features=4)
    model, _ = compare(linen.Average(), make, [x], {}, mutable="averages")
    assert isinstance(model.mean, converted.Averages)


def test_steps_of_the_guide(load):
    linen, converted, _ = load(HERE / "seed_pairs.py")
    x, labels = normal(4, 6), jnp.array([0, 1, 2, 1])
    variables = filled(linen.model, x, training=False)
    io.load_linen(variables, converted.model)
    params = linen.train_step(jax.random.key(0), variables["params"], x, labels)
    converted.train_step(jax.random.key(0), converted.model, x, labels)
    got = nnx.to_pure_dict(nnx.state(converted.model, nnx.Param))
    assert jax.tree.structure(got) == jax.tree.structure(params)
    assert_close(got, params, atol=1e-5)

    params = filled(linen.dense, x)["params"]
    state = linen.train_state.TrainState.create(
        apply_fn=linen.dense.apply, params=params, tx=linen.optax.adam(1e-1)
    )
    io.load_linen({"params": params}, converted.dense)
    optimizer = nnx.Optimizer(converted.dense, linen.optax.adam(1e-1), wrt=nnx.Param)
    for i in range(2):
        state = linen.state_step(jax.random.key(i), state, x, labels)
        converted.state_step(jax.random.key(i), converted.dense, optimizer, x, labels)
    assert_close(nnx.to_pure_dict(nnx.state(converted.dense, nnx.Param)), state.params, atol=1e-5)


def test_seed_pairs_convert_wholly(load):
    _, _, found = load(HERE / "seed_pairs.py")
    assert not found.left
    assert "linen" not in found.text.split('"""')[2]


@nnx.use_eager_sharding(False)
def test_transformer_of_a_program(load):
    path = PROGRAMS / "transformer.py"
    if not path.exists():
        pytest.skip(f"there is no {path}")
    linen, converted, _ = load(path)
    config = {"deterministic": True, "layers": 2}
    tokens = jnp.arange(24).reshape(2, 12) % 16
    model, _ = compare(
        linen.LanguageModel(linen.Config(**config)),
        functools.partial(converted.LanguageModel, converted.Config(**config)),
        [tokens],
    )
    assert isinstance(model.blocks, nnx.Stack)
    assert model.blocks.stacked.mlp.gate.kernel.out_sharding == ("layers", "embed", "mlp")


def test_sequences_of_a_program(load):
    path = PROGRAMS / "seq2seq.py"
    if not path.exists():
        pytest.skip(f"there is no {path}")
    linen, converted, _ = load(path)
    questions, answers = map(jnp.asarray, linen.sums(np.random.default_rng(0), 3))
    rngs = {"sample": jax.random.key(1)}
    variables = filled(linen.Seq2seq(5), questions, answers)
    logits, _ = linen.Seq2seq(5).apply(variables, questions, answers, rngs=rngs)
    model = built(functools.partial(converted.Seq2seq, 5))
    io.load_linen(variables, model)
    got, drawn = model(questions, answers)
    assert_close(got, logits, atol=1e-5)
    assert drawn.shape == answers[:, 1:].shape and len(set(np.asarray(drawn).ravel().tolist())) > 2


def test_training_of_a_program(load):
    linen, converted, _ = load(PROGRAMS / "seq2seq.py")
    questions, answers = map(jnp.asarray, linen.sums(np.random.default_rng(0), 3))
    variables = filled(linen.Seq2seq(5), questions, answers)
    model = built(functools.partial(converted.Seq2seq, 5))
    io.load_linen(variables, model)
    optimizer = nnx.Optimizer(model, linen.optax.adam(1e-2), wrt=nnx.Param)
    state = linen.train_state.TrainState.create(
        apply_fn=linen.Seq2seq(5).apply, params=variables["params"], tx=linen.optax.adam(1e-2)
    )
    for i in range(2):
        state, want = linen.train_step(state, questions, answers, jax.random.key(i))
        got = converted.train_step(model, optimizer, questions, answers, jax.random.key(i))
        assert_close(got, want, atol=1e-5)
    assert_close(io.linen_variables(model)["params"], state.params, atol=1e-5)


@pytest.mark.slow
def test_converted_program_runs_to_its_end(load):
    _, converted, _ = load(PROGRAMS / "seq2seq.py")
    with jax.numpy_rank_promotion("allow"):
        losses, variables = converted.main()
    assert len(losses) == converted.STEPS + 4 and list(variables) == ["params"]


def test_autoencoder_of_a_program(load):
    path = PROGRAMS / "vae.py"
    if not path.exists():
        pytest.skip(f"there is no {path}")
    linen, converted, _ = load(path)
    x = normal(2, 8, 8, 1)
    variables = filled(linen.VAE(), x)
    model = built(functools.partial(converted.VAE, in_features=1))
    io.load_linen(variables, model)
    model.eval()
    want = linen.VAE().apply(variables, x, method="encode")
    got = model.encode(x)
    assert_close([got.mean, got.logvar], [want.mean, want.logvar], atol=1e-5)
    pictures = linen.VAE().apply(variables, want.mean, method="generate")
    assert_close(model.generate(got.mean), pictures, atol=1e-5)
    model(x)
    assert int(model.seen[...]) == 1 + 2 and isinstance(model.seen, converted.Counts)


@pytest.mark.parametrize("name", ["resnet", "transformer", "seq2seq", "vae", "ppo"])
def test_classes_of_programs_convert_wholly(load, name):
    path = PROGRAMS / f"{name}.py"
    if not path.exists():
        pytest.skip(f"there is no {path}")
    _, converted, found = load(path)
    modules = [
        v for v in vars(converted).values() if isinstance(v, type) and issubclass(v, nnx.Module)
    ]
    assert modules
    left = [remark.text for remark in found.left if "was left as it is" in remark.text]
    assert not left
    assert "could not be found out" not in found.text
