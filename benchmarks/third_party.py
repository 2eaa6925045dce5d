"""Libraries that import Flax, on Linnet: small programs of each, with the numbers they give.

usage: python -m linnet benchmarks/third_party.py [PART OF A NAME]     on Linnet
       python benchmarks/third_party.py [PART OF A NAME]               on Flax

This file is a program for Flax: nothing in it knows of Linnet. A library that is not installed is
skipped: `pip install --no-deps clu google-metrax qwix brax flashbax numpyro`, with what they need
besides Flax. The sums of the results are printed, so that two runs can be compared.

With JAX 0.10.2 these give the numbers of Flax 0.12.8: clu 0.0.12, google-metrax 0.2.4, qwix 0.1.8,
brax 0.14.2, flashbax 0.1.3, numpyro 0.22.0, optax 0.2.8, orbax-checkpoint 0.12.8, treescope 0.1.10.
What fails: clu's Std, with Flax too, because it calls jnp.clip(a_min=...), which JAX has no more;
clu's metric_writers, checkpoint and periodic_actions want TensorFlow, which was not tried.
"""

import importlib.metadata
import sys
import tempfile

import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn, nnx

PROGRAMS = {}


def uses(*packages):
    """Enters a program under its name, with the distributions that it needs."""

    def enter(function):
        PROGRAMS[function.__name__] = (packages, function)
        return function

    return enter


X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
LABELS = jnp.array([0, 2, 1, 1])
LOGITS = jnp.asarray(X[:, :3])


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.relu(nn.Dense(8)(x)))


class Net(nnx.Module):
    def __init__(self, *, rngs):
        self.conv = nnx.Conv(1, 4, (3,), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.out = nnx.Linear(24, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x[..., None])))
        return self.out(x.reshape(len(x), -1))


@uses("clu")
def clu_metrics():
    from clu import metrics

    @flax.struct.dataclass
    class Collection(metrics.Collection):
        accuracy: metrics.Accuracy
        loss: metrics.Average.from_output("loss")

    first = Collection.single_from_model_output(logits=LOGITS, labels=LABELS, loss=LOGITS[:, 0])
    second = Collection.single_from_model_output(logits=-LOGITS, labels=LABELS, loss=LOGITS[:, 1])
    return first.merge(second).compute()


@uses("clu")
def clu_parameter_overview():
    from clu import parameter_overview

    variables = Mlp().init(jax.random.key(0), X)
    table = parameter_overview.get_parameter_overview(variables["params"], include_stats=False)
    return {"lines": len(table.splitlines()), "total": "83" in table.splitlines()[-1]}


@uses("google-metrax", "clu")
def metrax_metrics():
    import metrax

    predictions, targets = jnp.array([0.1, 0.8, 0.6, 0.3]), jnp.array([0.0, 1.0, 1.0, 0.0])
    found = {
        "mse": metrax.MSE.from_model_output(predictions, targets),
        "r2": metrax.RSQUARED.from_model_output(predictions, targets),
        "precision": metrax.Precision.from_model_output(predictions, targets, threshold=0.5),
        "roc": metrax.AUCROC.from_model_output(predictions, targets),
    }
    return {name: metric.merge(metric).compute() for name, metric in found.items()}


@uses("google-metrax", "clu")
def metrax_metrics_in_nnx():
    import metrax.nnx

    metric = metrax.nnx.MSE()
    assert isinstance(metric, nnx.Metric)
    both = nnx.MultiMetric(mse=metrax.nnx.MSE(), mae=metrax.nnx.MAE())

    @nnx.jit
    def step(metric, both, predictions, targets):
        metric.update(predictions=predictions, labels=targets)
        both.update(predictions=predictions, labels=targets)

    for shift in (0.0, 0.5):
        step(metric, both, jnp.array([0.1, 0.8]) + shift, jnp.array([0.0, 1.0]))
    return {"alone": metric.compute(), **both.compute()}


@uses("qwix")
def qwix_quantised_nnx():
    import qwix

    model = Net(rngs=nnx.Rngs(0))
    model.eval()
    rules = [qwix.QuantizationRule(module_path=".*", weight_qtype=jnp.int8, act_qtype=jnp.int8)]
    trained = qwix.quantize_model(model, qwix.QtProvider(rules), X)
    served = qwix.quantize_model(model, qwix.PtqProvider(rules), X)

    def loss(model):
        return jnp.mean(model(X) ** 2)

    return {
        "full": model(X),
        "training": trained(X),
        "gradient": nnx.grad(loss)(trained)["out"]["kernel"].get_value(),
        "serving": served(X),
        "int8": sum(x.dtype == jnp.int8 for x in jax.tree.leaves(nnx.state(served))),
    }


@uses("qwix")
def qwix_quantised_linen():
    import qwix

    class Conv(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Conv(4, (3,), name="conv")(x[..., None]))
            return nn.Dense(3, name="out")(x.reshape(len(x), -1))

    rules = [qwix.QuantizationRule(module_path=".*", weight_qtype=jnp.int8, act_qtype=jnp.int8)]
    model = Conv()
    variables = model.init(jax.random.key(0), X)
    trained = qwix.quantize_model(model, qwix.QtProvider(rules))
    served = qwix.quantize_model(model, qwix.PtqProvider(rules))
    abstract = jax.eval_shape(served.init, jax.random.key(0), X)["params"]
    quantised = qwix.quantize_params(variables["params"], abstract)
    return {
        "full": model.apply(variables, X),
        "training": trained.apply(variables, X),
        "serving": served.apply({"params": quantised}, X),
    }


@uses("qwix")
def qwix_lora():
    import qwix

    model = nnx.Sequential(nnx.Linear(6, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 3, rngs=nnx.Rngs(1)))
    provider = qwix.LoraProvider(module_path=".*", rank=2, alpha=2.0)
    adapted = qwix.apply_lora_to_model(model, provider, X, rngs=nnx.Rngs(2))
    adapters = nnx.state(adapted, nnx.LoRAParam)
    return {"out": adapted(X), "adapters": len(jax.tree.leaves(adapters))}


@uses("brax")
def brax_networks():
    from brax.training.agents.ppo import networks as ppo

    policy = ppo.make_ppo_networks(6, 2)
    params = policy.policy_network.init(jax.random.key(0))
    return {
        "policy": policy.policy_network.apply(None, params, X),
        "value": policy.value_network.apply(None, policy.value_network.init(jax.random.key(1)), X),
    }


@uses("brax")
def brax_running_statistics():
    from brax.training.acme import running_statistics, specs

    state = running_statistics.init_state(specs.Array((6,), jnp.dtype("float32")))
    state = running_statistics.update(state, jnp.asarray(X))
    return {"mean": state.mean, "std": state.std, "out": running_statistics.normalize(X, state)}


@uses("flashbax")
def flashbax_buffer():
    import flashbax

    buffer = flashbax.make_item_buffer(max_length=8, min_length=2, sample_batch_size=2)
    state = buffer.init({"x": jnp.zeros(6)})
    for row in X:
        state = buffer.add(state, {"x": jnp.asarray(row)})
    return buffer.sample(state, jax.random.key(0)).experience


@uses("numpyro")
def numpyro_modules():
    import numpyro
    from numpyro.contrib.module import flax_module, nnx_module, random_flax_module

    def in_linen(x):
        return flax_module("net", Mlp(), input_shape=(4, 6))(x)

    def in_nnx(x):
        return nnx_module("net", nnx.Linear(6, 3, rngs=nnx.Rngs(0)))(x)

    def random(x):
        net = random_flax_module(
            "net", nn.Dense(3), numpyro.distributions.Normal(0, 1), input_shape=(4, 6)
        )
        return net(x)

    models = {"linen": in_linen, "nnx": in_nnx, "random": random}
    seeded = {name: numpyro.handlers.seed(f, jax.random.key(0)) for name, f in models.items()}
    return {name: model(jnp.asarray(X)) for name, model in seeded.items()}


@uses("optax")
def optax_with_states():
    model = Net(rngs=nnx.Rngs(0))

    def labels(params):
        return jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "other", params)

    tx = optax.multi_transform({"matrix": optax.adamw(0.1), "other": optax.sgd(0.1)}, labels)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for _ in range(3):
        optimizer.update(model, nnx.grad(lambda m: jnp.mean(m(X) ** 2))(model))
    frozen = flax.core.freeze(Mlp().init(jax.random.key(0), X)["params"])
    tx = optax.masked(optax.sgd(0.1), jax.tree.map(lambda p: p.ndim > 1, frozen))
    updates, _ = tx.update(frozen, tx.init(frozen))
    norm = optax.tree.norm(updates)
    return {"params": nnx.state(model, nnx.Param), "updates": updates, "norm": norm}


@uses("orbax-checkpoint")
def orbax_checkpoints():
    import orbax.checkpoint as ocp

    model = Net(rngs=nnx.Rngs(0))
    train = flax.training.train_state.TrainState.create(
        apply_fn=Mlp().apply, params=Mlp().init(jax.random.key(0), X)["params"], tx=optax.adam(0.1)
    )
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(f"{folder}/nnx", nnx.state(model))
        checkpointer.save(f"{folder}/linen", train)
        checkpointer.wait_until_finished()
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.state(model))
        restored = checkpointer.restore(f"{folder}/nnx", abstract)
        back = checkpointer.restore(f"{folder}/linen", jax.tree.map(jnp.zeros_like, train))
    assert type(restored) is nnx.State and type(back) is type(train)
    return {"nnx": restored, "linen": back.params}


@uses("treescope")
def treescope_trees():
    import treescope

    model = Net(rngs=nnx.Rngs(0))
    with treescope.active_autovisualizer.set_scoped(treescope.ArrayAutovisualizer()):
        text = treescope.render_to_text(model)
    linen = treescope.render_to_text(Mlp())
    frozen = treescope.render_to_text(flax.core.freeze({"a": 1}))
    return {
        "nnx": "kernel" in text and "Conv" in text,
        "linen": "Mlp" in linen,
        "frozen": "FrozenDict" in frozen,
    }


def digest(value):
    """The sum of each leaf, in a fixed order."""
    return [f"{float(np.sum(leaf)):.4g}" for leaf in jax.tree.leaves(value)]


def main(pattern=""):
    print(f"flax {flax.__version__} from {flax.__file__}, jax {jax.__version__}")
    failed = []
    for name, (packages, function) in PROGRAMS.items():
        if pattern not in name:
            continue
        try:
            versions = ", ".join(f"{one} {importlib.metadata.version(one)}" for one in packages)
        except importlib.metadata.PackageNotFoundError as error:
            print(f"skipped  {name}: {error.name} is not installed")
            continue
        try:
            print(f"ok       {name} ({versions}):", *digest(function()))
        except Exception as error:
            failed.append(name)
            text = str(error).partition("\n")[0]
            print(f"FAILED   {name} ({versions}): {type(error).__name__}: {text}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
