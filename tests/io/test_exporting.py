import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from linnet import io, nnx, struct
from linnet.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    ExportError,
    MissingPackageError,
    NotACheckpointError,
    UnsafePathError,
)
from linnet.io.exported import load

X = np.linspace(-1.0, 1.0, 8, dtype=np.float32).reshape(2, 4)
SHAPE = jax.ShapeDtypeStruct((2, 4), jnp.float32)


class ChangedByCalls(nnx.Module):
    """Running statistics, dropout and a counter: all that a call can change."""

    def __init__(self, rngs):
        self.layers = nnx.Stack(functools.partial(nnx.Linear, 4, 4), 2, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.array(0))
        self.half = nnx.Param(jnp.ones(4, jnp.bfloat16))

    def __call__(self, x):
        self.calls[...] += 1
        x = self.dropout(self.norm(self.layers(x)))
        return {"y": x * jnp.broadcast_to(self.half[...].astype(x.dtype), x.shape), "n": self.calls}

    def twice(self, x):
        return self(self(x)["y"])


def make(seed=0):
    return ChangedByCalls(nnx.Rngs(seed))


# Runs in a process that can import neither Linnet nor this file.
ALONE = """
import sys
for name in ("linnet", "flax", "safetensors", "orbax"):
    sys.modules[name] = None
sys.path.insert(0, sys.argv[1])
import numpy as np
from load import load
model = load()
x = np.load(sys.argv[2])
outputs = [model(x) for _ in range(2)]
np.savez(sys.argv[3], **{f"{key}{n}": out[key] for n, out in enumerate(outputs) for key in out})
print(model)
"""


def test_runs_in_a_process_without_linnet_and_without_the_source(tmp_path):
    model = make()
    io.export(tmp_path / "first", model, SHAPE)
    os.rename(tmp_path / "first", tmp_path / "moved")
    np.save(tmp_path / "x.npy", X)
    command = [sys.executable, "-I", "-c", ALONE, "moved", "x.npy", "out.npz"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "inputs=(ShapedArray(float32[2,4]),)" in done.stdout
    assert "10 weights, 4 of them updated" in done.stdout
    found = np.load(tmp_path / "out.npz")
    run = nnx.jit(lambda m, x: m(x))
    for n in range(2):  # the second call goes on where the first ended: dropout, statistics, count
        wanted = run(model, X)
        np.testing.assert_allclose(found[f"y{n}"], wanted["y"], rtol=1e-6)
        assert found[f"n{n}"] == wanted["n"][...] == n + 1


def test_load_exported_keeps_state_from_call_to_call(tmp_path):
    model = make()
    io.export(tmp_path / "x", model, SHAPE)
    run = io.load_exported(tmp_path / "x")
    first = run(X)
    assert (int(first["n"]), int(run(X)["n"]), int(run.weights["calls"])) == (1, 2, 2)
    assert int(model.calls[...]) == 0
    step = nnx.jit(lambda m, x: m(x))
    step(model, X)
    step(model, X)
    for name in ("norm.mean", "norm.var", "dropout.rngs.count"):
        wanted = functools.reduce(getattr, name.split("."), model)[...]
        np.testing.assert_allclose(run.weights[name], wanted, rtol=1e-6)
    # With the weights in hand, nothing is kept.
    outputs, updates = run.exported.call(run.weights, X)
    assert int(outputs["n"]) == int(updates["calls"]) == 3
    assert sorted(updates) == ["calls", "dropout.rngs.count", "norm.mean", "norm.var"]
    assert int(run.weights["calls"]) == 2


def test_the_manifest_says_what_there_is(tmp_path):
    io.export(tmp_path / "x", make(), SHAPE)
    facts = json.loads((tmp_path / "x/export.json").read_text())
    assert facts["inputs"] == ["float32[2,4]"]
    assert facts["names"] == ["x"]
    assert facts["outputs"] == {"n": "int32[]", "y": "float32[2,4]"}
    assert facts["platforms"] == ["cpu"]
    assert facts["weights"] == sorted(facts["weights"])
    assert "layers.stacked.kernel" in facts["weights"]
    assert sorted(os.listdir(tmp_path / "x")) == [
        "export.json", "load.py", "program.bin", "weights.safetensors",
    ]  # fmt: skip


def test_evaluation_changes_only_the_counter(tmp_path):
    model = make()
    model.eval()
    io.export(tmp_path / "x", model, SHAPE)
    run = io.load_exported(tmp_path / "x")
    assert json.loads((tmp_path / "x/export.json").read_text())["updates"] == ["calls"]
    np.testing.assert_allclose(run(X)["y"], nnx.jit(lambda m, x: m(x))(model, X)["y"], rtol=1e-6)


def test_weights_may_be_replaced_by_those_of_another_run(tmp_path):
    first, second = (nnx.Linear(4, 3, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    io.export(tmp_path / "x", first, SHAPE)
    io.save_safetensors(tmp_path / "x/weights.safetensors", second, overwrite=True)
    np.testing.assert_allclose(io.load_exported(tmp_path / "x")(X), second(X), rtol=1e-6)


def test_an_argument_called_model_is_not_taken_for_the_model_itself(tmp_path):
    class Pair(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(4, 4, rngs=rngs)

        def apply(self, model, x):
            return self.layer(x) + 10 * model.layer(x)

    first, second = Pair(nnx.Rngs(0)), Pair(nnx.Rngs(1))
    io.export(tmp_path / "e", first.apply, second, SHAPE)
    loaded = io.load_exported(tmp_path / "e")
    np.testing.assert_allclose(loaded(X), first.apply(second, X), rtol=1e-6)
    assert sorted(loaded.weights) == [
        "model.layer.bias",
        "model.layer.kernel",
        "self.layer.bias",
        "self.layer.kernel",
    ]


def test_the_batch_may_have_any_size(tmp_path):
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    io.export(tmp_path / "x", model, SHAPE, batch=True)
    run = io.load_exported(tmp_path / "x")
    for size in (1, 2, 7):
        x = np.ones((size, 4), np.float32)
        np.testing.assert_allclose(run(x), model(x), rtol=1e-6)
    assert json.loads((tmp_path / "x/export.json").read_text())["inputs"] == ["float32[batch,4]"]


def test_shapes_and_constraints_are_those_of_jax(tmp_path):
    def f(model, x, y, scale):
        return (model(x) + y) * scale

    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    example = jax.ShapeDtypeStruct((2, 3, 4), jnp.float32)
    shapes = ("b, t, 4", "b, t, _", None)
    io.export(tmp_path / "x", f, model, example, example, 1.0, shapes=shapes, constraints=["t<=9"])
    run = io.load_exported(tmp_path / "x")
    x = np.ones((5, 7, 4), np.float32)
    np.testing.assert_allclose(run(x, x, 2.0), f(model, x, x, 2.0), rtol=1e-6)
    facts = json.loads((tmp_path / "x/export.json").read_text())
    assert facts["inputs"] == ["float32[b,t,4]", "float32[b,t,4]", "float32[]"]
    with pytest.raises(ValueError, match="shapes"):
        run(*[np.ones((5, 10, 4), np.float32)] * 2, 2.0)
    with pytest.raises(ExportError, match="batch=True and shapes= say the same thing"):
        io.export(tmp_path / "y", model, SHAPE, batch=True, shapes="b, 4")


def scaled(model, batch, scale):
    return model(batch["x"]) * scale


GIVEN = {
    "a shape": (
        ({"x": np.ones((5, 3), np.float32), "n": np.ones(5, np.int32)}, 2.0),
        "batch['x']: expected float32[batch,4], got float32[5,3]",
    ),
    "a rank and a dtype": (
        ({"x": np.ones(4, np.float32), "n": np.ones(5, np.float32)}, 2.0),
        "batch['n']: expected int32[batch], got float32[5]\n"
        "  - batch['x']: expected float32[batch,4], got float32[4]",
    ),
    "the type of a number": (
        ({"x": np.ones((5, 4), np.float32), "n": np.ones(5, np.int32)}, 2),
        "scale: expected float32[], got int32[]",
    ),
    "a text": (
        ({"x": np.ones((5, 4), np.float32), "n": np.ones(5, np.int32)}, "2"),
        "scale: expected float32[], got str",
    ),
    "a structure": (
        ({"x": np.ones((5, 4), np.float32)}, 2.0),
        "batch: expected {n: int32[batch], x: float32[batch,4]}, got {x: float32[5,4]}",
    ),
    "two sizes for one": (
        ({"x": np.ones((5, 4), np.float32), "n": np.ones(6, np.int32)}, 2.0),
        "batch is one size, but it is 6 in batch['n'].shape[0], 5 in batch['x'].shape[0]",
    ),
}


@pytest.fixture(scope="module")
def scaling(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "x"
    example = {"x": SHAPE, "n": jax.ShapeDtypeStruct((2,), jnp.int32)}
    io.export(folder, scaled, nnx.Linear(4, 3, rngs=nnx.Rngs(0)), example, 1.0, batch=True)
    return folder


@pytest.mark.parametrize("opened", [io.load_exported, load], ids=["Linnet", "load.py"])
@pytest.mark.parametrize("case", GIVEN)
def test_inputs_that_do_not_fit_are_named(case, opened, scaling):
    inputs, text = GIVEN[case]
    run = opened(scaling)
    with pytest.raises((ValueError, TypeError)) as caught:
        run(*inputs)
    assert str(caught.value) == (
        f"The exported model was called with inputs that do not fit:\n  - {text}\n"
        "Fix: pass what was exported, or export it again; batch=True or shapes= leave sizes open."
    )
    good = {"x": np.ones((5, 4), np.float32), "n": np.ones(5, np.int32)}
    assert run(good, 2.0).shape == (5, 3)


def test_too_few_inputs_are_named(scaling):
    with pytest.raises(ValueError) as caught:
        io.load_exported(scaling)(1.0)
    assert str(caught.value) == (
        "The exported model takes 2 inputs (batch, scale), but got 1.\nFix: pass them by position."
    )


def test_without_names_inputs_are_numbered(scaling, tmp_path):
    shutil.copytree(scaling, tmp_path / "x")
    place = tmp_path / "x/export.json"
    for names in (3, ["one"]):
        place.write_text(json.dumps({**json.loads(place.read_text()), "names": names}))
        with pytest.raises(ValueError, match=r"takes 2 inputs \(input 0, input 1\), but got 1"):
            io.load_exported(tmp_path / "x")(1.0)


def test_what_jax_says_of_constraints_gets_the_inputs(tmp_path):
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    io.export(tmp_path / "x", model, SHAPE, shapes="b, 4", constraints=["b <= 8"])
    with pytest.raises(ValueError) as caught:
        io.load_exported(tmp_path / "x")(np.ones((9, 4), np.float32))
    assert caught.value.__notes__[-1] == (
        "The inputs of the exported model: inputs: expected float32[b,4], got float32[9,4]."
    )


def test_sequences_of_any_length(tmp_path):
    model = nnx.RNN(nnx.LSTMCell(4, 3, rngs=nnx.Rngs(0)))
    io.export(tmp_path / "x", model, jnp.zeros((2, 5, 4)), shapes="batch, time, 4")
    run = io.load_exported(tmp_path / "x")
    for shape in ((1, 7, 4), (3, 2, 4)):
        x = np.linspace(-1, 1, np.prod(shape), dtype=np.float32).reshape(shape)
        np.testing.assert_allclose(run(x), model(x), rtol=1e-6, atol=1e-7)


def test_one_text_for_one_input(tmp_path):
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    io.export(tmp_path / "x", model, SHAPE, shapes="b, 4")
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    out = io.load_exported(tmp_path / "x")(x)
    assert out.shape == (3, 3)
    np.testing.assert_allclose(out, model(x), rtol=1e-6, atol=1e-7)


def test_several_platforms(tmp_path):
    io.export(tmp_path / "x", nnx.Linear(4, 3, rngs=nnx.Rngs(0)), SHAPE, platforms=("cpu", "cuda"))
    run = io.load_exported(tmp_path / "x")
    assert run.exported.platforms == ("cpu", "cuda")
    assert run(X).shape == (2, 3)


def test_a_function_of_several_models_that_share(tmp_path):
    def f(encoder, x, decoder, *, scale=2.0):
        return decoder(encoder(x)) * scale

    a, b = nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 4, rngs=nnx.Rngs(1))
    b.kernel = nnx.Param(a.kernel[...].T)
    b.bias = a.other = nnx.Param(jnp.arange(4.0))
    io.export(tmp_path / "x", f, a, SHAPE, b)
    run = io.load_exported(tmp_path / "x")
    # What is shared is there once, under its first name.
    assert sorted(run.weights) == [
        "decoder.bias", "decoder.kernel", "encoder.bias", "encoder.kernel",
    ]  # fmt: skip
    np.testing.assert_allclose(run(X), f(a, X, b), rtol=1e-6)


def test_a_method(tmp_path):
    model = make()
    model.eval()
    io.export(tmp_path / "x", model.twice, SHAPE)
    wanted = nnx.jit(lambda m, x: m.twice(x))(model, X)["y"]
    np.testing.assert_allclose(io.load_exported(tmp_path / "x")(X)["y"], wanted, rtol=1e-6)


def test_a_state_and_layers_without_one(tmp_path):
    model, relu = nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.Sequential(nnx.relu)
    graphdef, state = nnx.split(model)
    io.export(tmp_path / "x", lambda s, x: relu(nnx.merge(graphdef, s)(x)), state, SHAPE)
    run = io.load_exported(tmp_path / "x")
    assert sorted(run.weights) == ["s.bias", "s.kernel"]
    np.testing.assert_allclose(run(X), nnx.relu(model(X)), rtol=1e-6)


def test_gradients_where_they_were_asked_for(tmp_path):
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    io.export(tmp_path / "x", model, SHAPE, vjp_order=1)
    run = io.load_exported(tmp_path / "x")
    grads = jax.grad(lambda w: run.exported.call(w, X)[0].sum())(run.weights)
    np.testing.assert_allclose(grads["kernel"], np.repeat(X.sum(0)[:, None], 3, 1), rtol=1e-6)


def test_numbers_that_give_way_still_do(tmp_path):
    class Scaled(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.asarray(2.0))

        def __call__(self, x):
            return x * self.scale[...]

    io.export(tmp_path / "x", Scaled(), jax.ShapeDtypeStruct((), jnp.bfloat16))
    out = io.load_exported(tmp_path / "x")(jnp.bfloat16(1.5))
    assert (out.dtype, float(out)) == (jnp.bfloat16, 3.0)


class Sowing(nnx.Module):
    def __call__(self, x):
        self.sow(nnx.Intermediate, "seen", x)
        return x


GLOBAL = nnx.Linear(4, 3, rngs=nnx.Rngs(0))


@struct.dataclass
class Answer:
    y: jax.Array


def test_calls_that_cannot_be_a_program_are_refused(tmp_path):
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    export = functools.partial(io.export, tmp_path / "x")
    with pytest.raises(ExportError) as error:
        export(Sowing(), SHAPE)
    assert str(error.value) == (
        "The call adds or removes Variables (seen.0), which a program cannot do.\n"
        "Fix: make them before the export, or leave out sow and the like."
    )
    with pytest.raises(ExportError, match=r"An example argument holds 'relu', which is no array"):
        export(lambda m, x, name: m(x), model, SHAPE, "relu")
    with pytest.raises(ExportError, match="Fix: take and return arrays in dicts, lists and tuples"):
        export(lambda m, x: Answer(m(x)), model, SHAPE)
    with pytest.raises(ExportError, match=r"A int cannot be called.\nFix: pass a model"):
        export(3, SHAPE)
    with pytest.raises(ExportError, match="bias is abstract: it has a shape and no value, so it"):
        export(nnx.eval_shape(lambda: nnx.Linear(4, 3, rngs=nnx.Rngs(0))), SHAPE)
    donated = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    donated.bias.raw_value.delete()
    with pytest.raises(ExportError, match="bias was given away: its buffer was donated to a"):
        export(donated, SHAPE)
    with pytest.raises(
        ExportError, match=r"would have the name d\.a\.b\.\nFix: rename one of them"
    ):
        export(lambda d, x: x, nnx.Dict({"a.b": nnx.Param(1.0), "a": {"b": nnx.Param(2.0)}}), SHAPE)
    with pytest.raises(ExportError, match="p is int4, a dtype that safetensors files do not have"):
        export(lambda p, x: x, nnx.Param(jnp.zeros(2, jnp.int4)), SHAPE)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("in_list", [False, True])
def test_masked_arrays_are_refused_by_path(in_list, tmp_path):
    masked = np.ma.masked_array([1.0, 2.0], [True, False])
    model = nnx.Dict(net=nnx.Dict(weight=nnx.Param([masked] if in_list else masked)))
    with pytest.raises(ExportError) as error:
        io.export(tmp_path / "x", lambda model, x: x, model, SHAPE)
    assert str(error.value) == (
        f"model.net.weight{'.0' * in_list} is a masked array, and its mask would be lost, so it "
        "cannot be exported.\nFix: give it an array of numbers."
    )
    assert os.listdir(tmp_path) == []


class Trainer:
    """No module, but it holds one."""

    def __init__(self):
        self.model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))

    def predict(self, x):
        return self.model(x)

    def apply(self, model, x):
        return model(x)


def calling(held, get):
    """A function that calls a model which it finds in what it holds."""
    return lambda x: get(held)(x) + 1


MODEL = Trainer().model
HOLDERS = {
    "closure": calling(MODEL, lambda model: model),
    "global": lambda x: GLOBAL(x) + 1,
    "list": calling([MODEL], lambda models: models[0]),
    "dict in a list": calling([{"m": MODEL}], lambda models: models[0]["m"]),
    "function in a function": calling(calling(MODEL, lambda model: model), lambda f: f),
    "argument of a partial": functools.partial(lambda m, x: m(x), MODEL),
    "jitted": nnx.jit(calling(MODEL, lambda model: model)),
    "method": Trainer().predict,
}


@pytest.mark.parametrize("case", HOLDERS)
def test_weights_do_not_become_constants_in_silence(case, tmp_path):
    with pytest.raises(ExportError, match="holds a model that is not among its arguments"):
        io.export(tmp_path / "x", HOLDERS[case], SHAPE)


def test_a_model_that_is_passed_may_be_held_too(tmp_path):
    trainer = Trainer()
    io.export(tmp_path / "x", trainer.apply, trainer.model, SHAPE)
    run = io.load_exported(tmp_path / "x")
    assert sorted(run.weights) == ["model.bias", "model.kernel"]
    np.testing.assert_allclose(run(X), trainer.model(X), rtol=1e-6)


class Scaling(nnx.Module):
    def __init__(self):
        self.layer = nnx.Linear(4, 3, rngs=nnx.Rngs(0))

    def __call__(self, x, shift=0.0, *, scale=1.0):
        return self.layer(x) * scale + shift

    def times(self, factor, x):
        return self(x) * factor


def test_arguments_that_never_change_are_bound_by_a_partial(tmp_path):
    model = Scaling()
    partials = [functools.partial(model, scale=2.0), functools.partial(model.times, 2.0)]
    for number, partial in enumerate(partials):
        io.export(tmp_path / str(number), partial, SHAPE, batch=True)
        run = io.load_exported(tmp_path / str(number))
        assert sorted(run.weights) == ["layer.bias", "layer.kernel"]
        np.testing.assert_allclose(run(X[:1]), 2 * model(X[:1]), rtol=1e-6)


def test_only_an_export_is_replaced(tmp_path):
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointExistsError, match="is there already and is no export"):
        io.export(precious, model, SHAPE, overwrite=True)
    assert (precious / "thesis.txt").read_text() == "years of work"
    io.export(tmp_path / "x", model, SHAPE)
    with pytest.raises(CheckpointExistsError, match=r"Fix: .* or pass overwrite=True"):
        io.export(tmp_path / "x", model, SHAPE)
    io.export(tmp_path / "x", make(), SHAPE, overwrite=True)
    assert "calls" in io.load_exported(tmp_path / "x").weights
    assert sorted(os.listdir(tmp_path)) == ["precious", "x"]


@pytest.fixture
def exported(tmp_path):
    io.export(tmp_path / "x", nnx.Linear(4, 3, rngs=nnx.Rngs(0)), SHAPE)
    return tmp_path / "x"


def test_what_is_no_whole_export_is_refused(exported, tmp_path):
    with pytest.raises(
        CheckpointNotFoundError, match=f"There is no export {tmp_path}/none.\nFix: name"
    ):
        io.load_exported(tmp_path / "none")
    with pytest.raises(NotACheckpointError, match=r"there is no export\.json in it\.\nFix: name"):
        io.load_exported(tmp_path)
    program = exported / "program.bin"
    whole = program.read_bytes()
    program.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DamagedCheckpointError, match=f"{program} is not what was written"):
        io.load_exported(exported)
    program.write_bytes(whole)
    safetensors.numpy.save_file({"kernel": X}, exported / "weights.safetensors")
    with pytest.raises(DamagedCheckpointError) as error:
        io.load_exported(exported)
    assert str(error.value) == (
        f"{exported}/weights.safetensors does not hold the weights of the program beside it, which "
        "are bias, kernel.\nFix: io.save_safetensors(path, model, only=..., overwrite=True) of the "
        "model that was exported."
    )


def with_program(folder, code):
    (folder / "program.bin").write_bytes(code)
    facts = json.loads((folder / "export.json").read_text())
    facts["sha256"] = hashlib.sha256(code).hexdigest()
    (folder / "export.json").write_text(json.dumps(facts))


def test_bytes_that_are_no_program_are_refused(exported):
    with_program(exported, b"garbage" * 100)
    with pytest.raises(DamagedCheckpointError) as error:
        io.load_exported(exported)
    version = jax.__version__
    assert str(error.value).startswith(
        f"JAX {version} does not take {exported}/program.bin for a program: "
    )
    assert str(error.value).endswith(f"Fix: load it with JAX {version}, or export the model again.")


def test_a_program_of_any_size_is_not_read(exported):
    os.truncate(exported / "program.bin", 1 << 40)  # takes no room on the disk
    with pytest.raises(DamagedCheckpointError) as error:
        io.load_exported(exported)
    assert str(error.value) == (
        f"{exported}/program.bin has 1099511627776 bytes; 2147483648 are allowed for a program.\n"
        "Fix: export the model again."
    )


def test_the_loader_alone_says_that_weights_were_cut_off(exported):
    weights = exported / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(ValueError, match=f"{weights} was cut off"):
        load(exported)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": "other"}, "does not belong to an export"),
        ({"version": 99}, "is of version 99; this version of Linnet reads version 1"),
    ],
)
def test_a_manifest_of_another_kind_is_refused(exported, change, text):
    place = exported / "export.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), **change}))
    with pytest.raises(NotACheckpointError, match=text):
        io.load_exported(exported)


@pytest.mark.parametrize("name", ["program.bin", "weights.safetensors", "export.json"])
def test_links_out_of_the_folder_are_refused(exported, name):
    os.rename(exported / name, exported.parent / "outside")
    os.symlink(exported.parent / "outside", exported / name)
    with pytest.raises(UnsafePathError, match=f"{name} leads to .*outside, outside of its folder"):
        io.load_exported(exported)


def test_without_flatbuffers_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(io.exporting.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match="flatbuffers, which JAX does not bring") as error:
        io.export(tmp_path / "x", nnx.Linear(4, 3, rngs=nnx.Rngs(0)), SHAPE)
    assert str(error.value).endswith("Fix: pip install 'linnet[export]', or flatbuffers itself.")
