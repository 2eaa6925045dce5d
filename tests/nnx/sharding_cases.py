"""Sharding by rule on eight devices. Run as a program; prints what went wrong, by case."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

from linnet import nnx
from linnet.errors import ShardingError
from tests.models import make_mesh
from tests.subprocesses import Cases

CASES = case = Cases()
X = np.random.default_rng(1).normal(size=(16, 32)).astype(np.float32)


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, width=32, rngs=None):
        self.block = Block(width, rngs or nnx.Rngs(0))

    def __call__(self, x):
        return self.block(x)


def loss(model, x):
    return ((model(x) - 1) ** 2).mean()


@nnx.jit
def step(model, optimizer, x):
    value, grads = nnx.value_and_grad(loss)(model, x)
    optimizer.update(model, grads)
    return value


def train(model, optimizer, x):
    return [float(step(model, optimizer, x)) for _ in range(3)]


def specs(report):
    return {entry.path: tuple(entry.spec) for entry in report.entries}


def plain():
    model = Model()
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


TENSOR = [(r"up\.kernel", (None, "model")), (r"down\.kernel", ("model",)), (r"norm", None)]


@case
def sharded_models_train_as_on_one_device():
    want = train(*plain(), jnp.asarray(X))
    for sizes, rules, up in [
        ((8,), (), (None, "data")),
        ((2, 4), TENSOR, ("data", "model")),
        ((1, 8), TENSOR, ("data", "model")),
    ]:
        mesh = make_mesh(*sizes)
        model, optimizer = plain()
        report = nnx.fsdp((model, optimizer), mesh, min_size=64, rules=rules)
        assert specs(report)["[0].block.up.kernel"] == up
        assert specs(report)["[1].opt_state[0].mu.block.up.kernel"] == up, specs(report)
        shard = model.block.up.kernel.value.addressable_shards[0].data
        assert shard.size == 32 * 128 // 8
        with jax.set_mesh(mesh):
            got = train(model, optimizer, jax.device_put(X, NamedSharding(mesh, P("data"))))
        np.testing.assert_allclose(got, want, rtol=1e-4)
        assert model.block.up.kernel.out_sharding == up


@case
def the_report_is_a_table():
    model = nnx.eval_shape(Model)
    report = nnx.fsdp(
        model, make_mesh(2, 4), min_size=64, rules=TENSOR, only=nnx.PathContains("up")
    )
    assert str(report) == (
        "path              shape             spec           bytes per device\n"
        ".block.up.bias    float32[128]      (data)         256\n"
        ".block.up.kernel  float32[32, 128]  (data, model)  2,048\n"
        "2 arrays of 4,224 (16.9 KB); 2,304 bytes per device"
    )
    assert model.block.up.kernel.value.sharding == NamedSharding(
        make_mesh(2, 4), P("data", "model")
    )
    assert report.bytes_needed() == 2 * 2304 and report.bytes_needed(gradients=False) == 2304


@case
def an_optimizer_built_afterwards_follows():
    mesh = make_mesh(8)
    model = Model()
    nnx.fsdp(model, mesh, min_size=64)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    moment = optimizer.opt_state[0].mu["block"]["up"]["kernel"]
    assert moment.value.sharding.spec == P(None, "data")


@case
def rules_that_do_not_fit_are_refused():
    for rules, text in [
        ([(r"up\.kernel", (None, "modle"))], "no axis 'modle'"),
        ([(r"up\.bias", (None, "model"))], "2 entries for 1 axes"),
    ]:
        try:
            nnx.fsdp(Model(), make_mesh(2, 4), rules=rules)
        except ShardingError as error:
            assert "The Param at .block.up." in str(error) and text in str(error), error
        else:
            raise AssertionError(rules)
    try:
        nnx.fsdp(Model(), AbstractMesh((8,), ("data",)))
    except ShardingError as error:
        assert "which has no devices" in str(error)
    else:
        raise AssertionError


def error_of(*args, **kwargs):
    """The text of the error of ``nnx.fsdp``."""
    try:
        nnx.fsdp(*args, **kwargs)
    except ShardingError as error:
        return str(error)
    raise AssertionError((args, kwargs))


def state_of(model):
    return [(path, v.get_metadata(), v.value.sharding) for path, v in nnx.to_flat_state(model)]


@case
def a_refused_call_changes_nothing():
    model, optimizer = plain()
    before = [state_of(nnx.state(node)) for node in (model, optimizer)]
    mesh = make_mesh(2, 4)
    for options in [
        {"rules": [(r"up\.kernel", (None, "modle"))]},  # after .block.down was decided
        {"rules": [(r"nothing", None)]},
        {"rules": [(r"(", None)]},
        {"only": nnx.BatchStat},
    ]:
        error_of((model, optimizer), mesh, min_size=64, **options)
        assert [state_of(nnx.state(node)) for node in (model, optimizer)] == before, options
    nnx.fsdp((model, optimizer), mesh, min_size=64)
    assert model.block.up.kernel.out_sharding == (None, "data")
    assert [state_of(nnx.state(node)) for node in (model, optimizer)] != before


@case
def rules_may_be_a_dict():
    want = nnx.fsdp(Model(), make_mesh(2, 4), min_size=64, rules=TENSOR)
    got = nnx.fsdp(Model(), make_mesh(2, 4), min_size=64, rules=dict(TENSOR))
    assert specs(got) == specs(want)
    for names in ("model", ["model"], P("model")):
        report = nnx.fsdp(Model(), make_mesh(2, 4), rules={"up.bias": names})
        assert specs(report)[".block.up.bias"] == ("model",)


@case
def rules_are_checked():
    mesh = make_mesh(2, 4)
    assert error_of(Model(), mesh, rules=[("norm", None), (r"up\.kernl", None)]) == (
        "nnx.fsdp: the rule 'up\\\\.kernl' matches no Variable.\n"
        "Fix: write a regular expression that is found in a path, such as .block.up.kernel, "
        ".block.down.kernel; leave out rules for what the model lacks."
    )
    fix = (
        "\nFix: write rules=[(r'up\\.kernel', (None, 'model'))], a regular expression for paths "
        "and a name, a tuple of names or None for each axis; None alone keeps the array whole."
    )
    for rules, text in [
        ([("norm", None), ("up(", None)], "rule 1, ('up(', None), is no regular expression: "),
        ({"*": None}, "rule 0, ('*', None), is no regular expression: nothing to repeat"),
        (("up", (None, "model")), "rule 0, 'up', is no pair of a regular expression and axis na"),
        (["up"], "rule 0, 'up', is no pair"),
        ([("up", 3)], "rule 0, ('up', 3), is no pair"),
        ([((None, "model"), "up")], "rule 0, ((None, 'model'), 'up'), is no pair"),
    ]:
        error = error_of(Model(), mesh, rules=rules)
        assert error.startswith(f"nnx.fsdp: {text}") and error.endswith(fix), error
    for rules in ("up", None, 3):
        text = f"nnx.fsdp got rules={rules!r}, which are no rules.{fix}"
        assert error_of(Model(), mesh, rules=rules) == text


@case
def a_rule_may_be_for_what_only_leaves_out():
    report = nnx.fsdp(Model(), make_mesh(2, 4), rules=TENSOR, only=nnx.PathContains("up"))
    assert set(specs(report)) == {".block.up.bias", ".block.up.kernel"}


@case
def a_call_without_anything_to_shard_is_refused():
    mesh = make_mesh(8)
    assert error_of(Model(), mesh, only=nnx.BatchStat) == (
        "nnx.fsdp: only=<class 'linnet.nnx.variablelib.variable.BatchStat'> selects no array among "
        "the 6 Variables (Param).\n"
        "Fix: pass a filter such as nnx.Param, or leave it out to shard all."
    )
    assert error_of({}, mesh) == (
        "nnx.fsdp found no Variables in its first argument, dict.\n"
        "Fix: pass a model, (model, optimizer), or a pytree of them."
    )
    assert "in its first argument, the class Model." in error_of(Model, mesh)


@case
def swapped_arguments_are_refused():
    fix = "\nFix: nnx.fsdp(model, mesh), with a jax.sharding.Mesh, as jax.make_mesh makes it."
    takes = "nnx.fsdp takes a mesh as its second argument, but got "
    assert error_of(make_mesh(8), Model()) == f"{takes}Model, and the mesh as its first.{fix}"
    assert error_of(Model(), "data") == f"{takes}str.{fix}"


class Large(nnx.Module):
    """The shape of a decoder with seventy thousand million parameters."""

    def __init__(self, width, hidden, depth, words, rngs):
        metadata = {"rngs": rngs, "use_bias": False, "param_dtype": jnp.bfloat16}
        self.embed = nnx.Embed(words, width, param_dtype=jnp.bfloat16, rngs=rngs)
        self.blocks = nnx.List(
            [
                nnx.Dict(
                    query=nnx.Linear(width, width, **metadata),
                    key=nnx.Linear(width, width // 8, **metadata),
                    value=nnx.Linear(width, width // 8, **metadata),
                    out=nnx.Linear(width, width, **metadata),
                    gate=nnx.Linear(width, hidden, **metadata),
                    up=nnx.Linear(width, hidden, **metadata),
                    down=nnx.Linear(hidden, width, **metadata),
                )
                for _ in range(depth)
            ]
        )
        self.head = nnx.Linear(width, words, **metadata)


@case
def a_large_model_is_counted_without_being_built():
    start = time.perf_counter()

    def make():
        model = Large(8192, 28672, 80, 128256, nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.Param)

    model, optimizer = nnx.eval_shape(make)
    reports = {
        count: nnx.fsdp((model, optimizer), AbstractMesh((count,), ("data",))) for count in (8, 64)
    }
    elapsed = time.perf_counter() - start
    parameters = 70_553_436_160  # the published size, less the norms
    assert abs(reports[8].total_bytes - 3 * 2 * parameters) < 1e-3 * reports[8].total_bytes
    assert not reports[8].fits(64) and reports[64].fits(64)
    assert elapsed < 60, elapsed


@case
def activations_are_counted():
    x = jax.ShapeDtypeStruct((16, 32), jnp.float32)
    counted = nnx.activation_bytes(loss, Model(), x)
    assert 16 * 32 * 4 < counted < 40 * 16 * 128 * 4
    twice = nnx.activation_bytes(loss, Model(), jax.ShapeDtypeStruct((32, 32), jnp.float32))
    assert 1.9 * counted < twice < 2.1 * counted


if __name__ == "__main__":
    case.run_on_devices(8)
