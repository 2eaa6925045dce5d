"""What is converted and what is left, the text, the comments, the report and the command."""

import re
from pathlib import Path

import pytest

pytest.importorskip("libcst")

from linnet.errors import LayerArgumentError
from linnet.migration import main, to_nnx
from tests.subprocesses import run_python

HERE = Path(__file__).parent

HEAD = "import jax\nimport jax.numpy as jnp\nimport optax\nfrom linnet import linen as nn\n"
MODEL = """

class Model(nn.Module):
    width: int = 4

    @nn.compact
    def __call__(self, x, train: bool = False):
        return nn.Dense(self.width)(x)

"""

BATCHED = MODEL.replace(
    "return nn.Dense(self.width)(x)",
    "return nn.BatchNorm(use_running_average=not train)(nn.Dense(self.width)(x))",
)


def left_in(source):
    return {
        remark.text.partition(" was left as it is: ")[0]: remark.text.partition(": ")[2]
        for remark in to_nnx(source).left
    }


def test_what_is_left_of_other_classes():
    source = (HERE / "other_classes.py").read_text(encoding="utf-8")
    assert left_in(source) == {
        "Mapped": "a vmap over layers without their number",
        "Gated": "linen.GRUCell has no counterpart in NNX that keeps its parameters",
        "Weighted": "linen.WeightNorm has no counterpart in NNX that keeps its parameters",
        "Nested": "the function layer makes submodules",
        "Looking": "self.variables has no counterpart",
        "UsesLeft": "Nested, which it makes, was left as it is",
        "Hidden": "deterministic of Dropout depends on the call, which is not seen",
    }


def test_what_is_left_is_not_changed():
    source = (HERE / "other_classes.py").read_text(encoding="utf-8")
    text = to_nnx(source).text
    for name in ("Mapped", "Weighted", "Nested", "Looking", "UsesLeft"):
        start = source.index(f"class {name}(")
        end = source.find("\n\n\nclass", start)
        assert source[start : end if end > 0 else None] in text
        assert re.search(rf"# linnet: left as it is \(line \d+\): .+\nclass {name}\(", text)


def test_comments_and_formatting_stay():
    source = (
        HEAD
        + '''

# above the class
class Model(nn.Module):
    """What it does."""

    # how wide
    width: int  # in numbers

    @nn.compact
    def __call__(self, x):
        # first
        x = nn.Dense(self.width)( x )   # odd spaces
        x = nn.Dense(
            3,  # three
        )(x)
        return x  # done
'''
    )
    text = to_nnx(source).text
    for comment in re.findall("#.*", source):
        assert text.count(comment) == 1, comment
    assert "x = self.Dense_0( x )   # odd spaces" in text
    assert "        # how wide\n        self.width = width  # in numbers\n" in text


@pytest.mark.parametrize(
    ("imports", "name", "nnx"),
    [
        ("import flax.linen as nn", "nn.Dense", "from flax import nnx"),
        ("from flax import linen", "linen.Dense", "from flax import nnx"),
        ("from linnet import linen as layers", "layers.Dense", "from linnet import nnx"),
        ("from flax.linen import Dense as D, Module", "D", "from flax import nnx"),
    ],
)
def test_names_are_resolved_by_imports(imports, name, nnx):
    base = "Module" if "Module" in imports else name.rpartition(".")[0] + ".Module"
    compact = "compact" if "Module" in imports else name.rpartition(".")[0] + ".compact"
    if compact == "compact":
        imports += ", compact"
    source = (
        f"{imports}\n\nclass Model({base}):\n    @{compact}\n"
        f"    def __call__(self, x):\n        return {name}(2)(x)\n"
    )
    text = to_nnx(source).text
    assert text.startswith(nnx) and "linen" not in text
    assert "self.Dense_0 = nnx.Linear(in_features, 2, rngs=rngs)" in text


def test_what_is_not_linen_is_not_changed():
    source = (
        "class Dense:\n    pass\n\n\nclass Model(Dense):\n"
        "    def __call__(self, x):\n        return Dense()(x)\n"
    )
    found = to_nnx(source)
    assert found.text == source and not found.remarks


def test_sizes_that_are_not_known_are_asked_for():
    source = (HERE / "other_classes.py").read_text(encoding="utf-8")
    found = to_nnx(source)
    assert "def __init__(\n        self,\n        classes: int = 3,\n        *,\n" in found.text
    assert (
        "# linnet: pass Dense_0_in_features, which could not be found out.\nclass Flat"
        in found.text
    )
    traced = to_nnx(source, example="Flattening()(jnp.ones((1, 8, 8, 1)))")
    assert "self.Dense_0 = nnx.Linear(64, 8, rngs=rngs)" in traced.text
    assert (
        "# linnet: sizes of the example call: Dense_0: in_features=64.\nclass Flat" in traced.text
    )


USES = {
    "a step that is mapped": (
        "step = jax.pmap(lambda state: state.apply_fn({'params': state.params}, 1))",
        "the use of state.apply_fn",
    ),
    "other variables": (
        "model = Model()\nv = model.init(jax.random.key(0), jnp.ones((1, 2)))\n"
        "w = jax.tree.map(jnp.zeros_like, v['params'])\n"
        "y = model.apply({'params': w}, jnp.ones((1, 2)))",
        "apply with other variables than those of the model",
    ),
    "a second name": (
        "model = Model()\nv = model.init(jax.random.key(0), jnp.ones((1, 2)))\n"
        "params = v['params']\nold = params",
        "old is a second name for params",
    ),
    "values from before": (
        "model = Model()\nv = model.init(jax.random.key(0), jnp.ones((1, 2)))\n"
        "params = v['params']\nparams = jax.tree.map(jnp.zeros_like, params)\n"
        "y = model.apply(v, jnp.ones((1, 2)))",
        "v holds values from before an update",
    ),
    "a model of something else": (
        "def make(model):\n    return model.init(jax.random.key(0), jnp.ones((1, 2)))\n"
        "v = make(Model())",
        "the use of model.init",
    ),
    "two models": (
        "one, other = Model(), Model()\nv = one.init(jax.random.key(0), jnp.ones((1, 2)))",
        "Model wants in_features, which is not known here",
    ),
}


@pytest.mark.parametrize("case", USES)
def test_uses_that_are_not_understood_are_left(case):
    lines, reason = USES[case]
    found = to_nnx(HEAD + MODEL + lines + "\n")
    assert any(reason in remark.text for remark in found.left), [r.text for r in found.left]
    kept = [line for line in found.text.splitlines() if not line.lstrip().startswith("# linnet:")]
    assert "\n".join(kept).endswith(lines)
    assert "class Model(nnx.Module):" in found.text


def test_a_step_with_batch_statistics():
    source = (
        HEAD
        + BATCHED
        + """
from linnet.training import train_state


class TrainState(train_state.TrainState):
    batch_stats: dict


def create(key):
    model = Model()
    variables = model.init(key, jnp.ones((1, 2)))
    return TrainState.create(
        apply_fn=model.apply, params=variables["params"], tx=optax.sgd(0.1),
        batch_stats=variables["batch_stats"],
    )


@jax.jit
def step(state, x):
    def loss_fn(params):
        y, updates = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats}, x, train=True,
            mutable=["batch_stats"],
        )
        return (y**2).mean(), updates

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, updates), grads = grad_fn(state.params)
    state = state.apply_gradients(grads=grads, batch_stats=updates["batch_stats"])
    return state, loss


state = create(jax.random.key(0))
state, loss = step(state, jnp.ones((3, 2)))
"""
    )
    found = to_nnx(source)
    assert not found.left, [r.text for r in found.left]
    for line in (
        "    return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)\n",
        "@nnx.jit\ndef step(model, optimizer, x):\n    def loss_fn(model):\n        y = model(",
        "        return (y**2).mean(), None\n",
        "    grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)\n",
        "= grad_fn(model)\n    optimizer.update(model, grads)\n    return loss\n",
        "model, optimizer = create(jax.random.key(0))\n"
        "loss = step(model, optimizer, jnp.ones((3, 2)))\n",
    ):
        assert line in found.text, line


# What programs do around a model, and what becomes of it.
IDIOMS = {
    "frozen variables, taken apart": (
        "from flax.core import freeze, unfreeze\n"
        "model, x = Model(), jnp.ones((1, 2))\n"
        "stats, params = freeze(jax.jit(model.init)(jax.random.key(0), x)).pop('params')\n"
        "y = model.apply({'params': unfreeze(params), 'batch_stats': stats['batch_stats']}, x)\n",
        "x = jnp.ones((1, 2))\n"
        "model = Model(in_features=x.shape[-1], rngs=nnx.Rngs(0))\n"
        "y = model(x)\n",
    ),
    "keys of several streams": (
        "model = Model()\n"
        "keys = {'params': jax.random.key(0), 'noise': jax.random.key(1)}\n"
        "other = Model()\n"
        "x = jnp.ones((1, 2))\n"
        "variables = model.init(keys, x)\n"
        "more = other.init({'params': jax.random.key(2), 'noise': jax.random.key(1)}, x)\n",
        "keys = {'params': jax.random.key(0), 'noise': jax.random.key(1)}\n"
        "x = jnp.ones((1, 2))\n"
        "model = Model(in_features=x.shape[-1], rngs=nnx.Rngs(0, **keys))\n"
        "other = Model(\n    in_features=x.shape[-1], rngs=nnx.Rngs(jax.random.key(2), "
        "noise=jax.random.key(1))\n)\n",
    ),
    "updates that are not used": (
        "model = Model()\n"
        "variables = model.init(jax.random.key(0), jnp.ones((1, 2)))\n"
        "y = model.apply(variables, jnp.ones((3, 2)), True, mutable=['batch_stats'])[0]\n",
        "model = Model(in_features=2, rngs=nnx.Rngs(0))\ny = model(jnp.ones((3, 2)), True)\n",
    ),
    "a bound model, and a dict of collections": (
        "model = Model()\n"
        "params = model.init(jax.random.key(0), jnp.ones((1, 2)))['params']\n"
        "y = model.bind({'params': params}).width\n"
        "out = {'params': params, 'y': y}\n",
        "model = Model(in_features=2, rngs=nnx.Rngs(0))\n"
        "y = model.width\n"
        "out = {'params': nnx.state(model, nnx.Param), 'y': y}\n",
    ),
    "one collection of what init returns": (
        "model = Model()\n"
        "stats = model.init(jax.random.key(0), jnp.ones((1, 2)))['batch_stats']\n"
        "mean = stats['BatchNorm_0']\n",
        "model = Model(in_features=2, rngs=nnx.Rngs(0))\n"
        "mean = nnx.state(model, nnx.BatchStat)['BatchNorm_0']\n",
    ),
}


@pytest.mark.parametrize("case", IDIOMS)
def test_idioms_around_a_model(case):
    before, after = IDIOMS[case]
    found = to_nnx(HEAD + BATCHED + before)
    assert not found.left, [r.text for r in found.left]
    assert found.text.endswith(after)


def test_another_model_with_the_variables_of_one():
    before = (
        "model = Model()\n"
        "variables = model.init(jax.random.key(0), jnp.ones((1, 2)))\n"
        "params, stats = variables['params'], variables['batch_stats']\n"
    )
    other = "other = Model(4)\ny = other.apply({'params': params, 'batch_stats': stats}, 1)\n"
    model = BATCHED.replace("self.width)(x)", "self.width)(nn.one_hot(x, 3))")
    found = to_nnx(HEAD + model + before + other)
    assert not found.left, [r.text for r in found.left]
    assert found.text.endswith(
        "other = Model(4, rngs=nnx.Rngs(0))\n"
        "nnx.update(other, nnx.state(model, (nnx.Param, nnx.BatchStat)))\n"
        "y = other(1)\n"
    )
    inside = before + "f = lambda x: Model(3).apply({'params': params}, x)\n"
    reasons = [remark.text for remark in to_nnx(HEAD + BATCHED + inside).left]
    assert any("the use of Model(3).apply" in reason for reason in reasons), reasons


# Why the training code of the Linen programs is left as it is; None: it is converted.
TRAINING = {
    "resnet": "a TrainState of something else than a model and its parameters",
    "transformer": "a model that was made elsewhere is initialised",
    "seq2seq": None,
    "vae": "state, which is a TrainState, is used as a whole",
    "ppo": "the use of state.apply_fn",
}


@pytest.mark.parametrize("name", TRAINING)
def test_training_code_of_the_programs(name):
    source = (HERE.parent / "programs/linen" / f"{name}.py").read_text(encoding="utf-8")
    example = "VAE()(jnp.ones((1, 8, 8, 1)))" if name == "vae" else None
    found = to_nnx(source, example=example)
    reasons = [
        remark.text.partition("were left as they are: ")[2]
        for remark in found.left
        if "were left as they are" in remark.text
    ]
    assert reasons == ([] if TRAINING[name] is None else [TRAINING[name]])
    assert bool(found.left) == bool(reasons)


def test_command(tmp_path, capsys):
    program, output = tmp_path / "model.py", tmp_path / "out.py"
    program.write_text(HEAD + MODEL)
    assert main([str(program), "-o", str(output)]) == 0
    assert "class Model(nnx.Module):" in output.read_text()
    report = capsys.readouterr().err
    assert f"{program}:7: Model was converted\n" in report
    assert report.endswith("everything was converted\n")

    program.write_text(HEAD + MODEL + "nets = [Model()]\n")
    assert main([str(program)]) == 1
    printed = capsys.readouterr()
    assert "class Model(nnx.Module):" in printed.out
    assert "left: the uses of models were left as they are: Model is made inside" in printed.err

    assert main([str(tmp_path / "none.py")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_command_traces_an_example(tmp_path, capsys):
    (tmp_path / "sizes.py").write_text("SIDE = 4\n")
    program = tmp_path / "model.py"
    text = (
        "from sizes import SIDE\n"
        + HEAD
        + MODEL.replace("(x)\n", "(x.reshape((x.shape[0], -1)))\n")
    )
    program.write_text(text)
    assert main([str(program), "--example", "Model()(jnp.ones((2, SIDE, SIDE)))"]) == 0
    assert "self.Dense_0 = nnx.Linear(16, self.width, rngs=rngs)" in capsys.readouterr().out
    assert main([str(program), "--example", "Model()"]) == 2
    assert "calls <class" in capsys.readouterr().err


def test_examples_that_are_no_calls_of_models():
    with pytest.raises(LayerArgumentError, match=r"is no call\.\nFix: write a call of a model"):
        to_nnx(HEAD + MODEL, example="Model")
    with pytest.raises(LayerArgumentError, match=r"which is no Linen module\.\nFix: write a call"):
        to_nnx(HEAD + MODEL, example="len((1, 2))")


def test_the_module_runs_as_a_program(tmp_path):
    program = tmp_path / "model.py"
    program.write_text(HEAD + MODEL)
    run = run_python("-m", "linnet", "--to-nnx", program)
    assert "class Model(nnx.Module):" in run.stdout
