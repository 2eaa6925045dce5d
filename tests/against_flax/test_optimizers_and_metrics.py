"""Programs that train with transformations of Optax, and programs that measure."""

import jax
import jax.numpy as jnp
import optax

from tests.against_flax.compare import program, same_on_both

PROGRAMS = {}
X = jnp.linspace(-1, 1, 8).reshape(4, 2)
Y = jnp.array([[1.0], [0], [2], [-1]])


def net(nnx, seed=0):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.hidden = nnx.Linear(2, 4, rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.out = nnx.Linear(4, 1, rngs=rngs)

        def __call__(self, x):
            return self.out(nnx.tanh(self.norm(self.hidden(x))))

    return Net(nnx.Rngs(seed))


def loss(model):
    return ((model(X) - Y) ** 2).mean()


def train(nnx, tx, steps=3, wrt=None, jit=False, **options):
    """Losses and states after some steps."""
    model = net(nnx)
    optimizer = nnx.Optimizer(model, tx, wrt=wrt or nnx.Param)

    def step(model, optimizer):
        value, grads = nnx.value_and_grad(loss)(model)
        extra = {"value": value} if options.get("value") else {}
        optimizer.update(model, grads, **extra)
        return value

    step = nnx.jit(step) if jit else step
    losses = [step(model, optimizer) for _ in range(steps)]
    return losses, nnx.state(model), nnx.state(optimizer)


SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 5)
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "lion": lambda: optax.lion(1e-3),
    "rmsprop": lambda: optax.rmsprop(1e-2),
    "a_schedule": lambda: optax.adam(SCHEDULE),
    "clipping": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "accumulation": lambda: optax.MultiSteps(optax.sgd(0.1), 2),
    "injected_hyperparameters": lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
}
for name, make in OPTIMIZERS.items():

    def optimized(f, make=make):
        return train(f.nnx, make())

    optimized.__name__ = f"optimizer_{name}"
    program(PROGRAMS)(optimized)


@program(PROGRAMS)
def optimizer_under_jit(f):
    return train(f.nnx, optax.adam(1e-2), jit=True)


@program(PROGRAMS)
def optimizer_that_wants_the_loss(f):
    return train(f.nnx, optax.contrib.reduce_on_plateau(patience=1), value=True)


@program(PROGRAMS)
def optimizer_of_a_part(f):
    return train(f.nnx, optax.sgd(0.1), wrt=f.nnx.All(f.nnx.Param, f.nnx.PathContains("out")))


@program(PROGRAMS)
def optimizer_with_a_mask(f):
    def is_kernel(params):
        return jax.tree_util.tree_map_with_path(
            lambda p, _: "kernel" in jax.tree_util.keystr(p), params
        )

    return train(
        f.nnx, optax.chain(optax.masked(optax.add_decayed_weights(0.1), is_kernel), optax.sgd(0.1))
    )


@program(PROGRAMS)
def optimizer_by_label(f):
    def label(params):
        return jax.tree_util.tree_map_with_path(
            lambda p, _: "fast" if "out" in jax.tree_util.keystr(p) else "slow", params
        )

    return train(
        f.nnx, optax.multi_transform({"fast": optax.sgd(0.5), "slow": optax.sgd(0.01)}, label)
    )


@program(PROGRAMS)
def optimizer_state_split_and_merged(f):
    nnx = f.nnx
    model = net(nnx)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    graphdef, state = nnx.split((model, optimizer))

    @jax.jit
    def step(state):
        model, optimizer = nnx.merge(graphdef, state)
        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), value

    for _ in range(2):
        state, value = step(state)
    nnx.update((model, optimizer), state)
    return value, nnx.state(model), optimizer.step


@program(PROGRAMS)
def optimizer_learning_rate_changed_between_steps(f):
    nnx = f.nnx
    model = net(nnx)
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for rate in (0.1, 0.01):
        optimizer.opt_state.hyperparams["learning_rate"][...] = jnp.array(rate)
        optimizer.update(model, nnx.grad(loss)(model))
    return nnx.state(model)


@program(PROGRAMS)
def optimizer_by_hand_with_optax(f):
    nnx = f.nnx
    graphdef, params, rest = nnx.split(net(nnx), nnx.Param, ...)
    tx = optax.adam(1e-2)
    state = tx.init(params)
    for _ in range(2):
        grads = jax.grad(lambda p: loss(nnx.merge(graphdef, p, rest, copy=True)))(params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


@program(PROGRAMS)
def optimizer_of_two_models(f):
    nnx = f.nnx
    pair = {"a": net(nnx), "b": nnx.Linear(2, 1, rngs=nnx.Rngs(5))}
    optimizer = nnx.Optimizer(nnx.Dict(pair), optax.sgd(0.1), wrt=nnx.Param)
    both = nnx.Dict(pair)
    grads = nnx.grad(lambda m: ((m["a"](X) + m["b"](X) - Y) ** 2).mean())(both)
    optimizer.update(both, grads)
    return nnx.state(both)


@program(PROGRAMS)
def optimizer_of_a_train_state(f):
    nnx = f.nnx
    graphdef, params, rest = nnx.split(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), nnx.Param, ...)

    class State(nnx.TrainState):
        rest: object

    state = State.create(graphdef, params=params, tx=optax.sgd(0.1), rest=rest)
    grads = jax.tree.map(jnp.ones_like, state.params)
    state = state.apply_gradients(grads)
    return state.params, state.step


# ---- metrics ------------------------------------------------------------------------------------

LOGITS = jnp.array([[1.0, 2, 0], [3, 1, 0], [0, 0, 5], [9, 0, 0]])
LABELS = jnp.array([1, 0, 1, 2])


@program(PROGRAMS)
def metric_average(f):
    metric = f.nnx.metrics.Average()
    metric.update(values=jnp.arange(4.0))
    metric.update(values=2.0)
    first = metric.compute()
    metric.reset()
    metric.update(values=jnp.array([1.0, 3.0]))
    return first, metric.compute(), f.nnx.state(metric)


@program(PROGRAMS)
def metric_average_of_a_named_argument(f):
    metric = f.nnx.metrics.Average("loss")
    metric.update(loss=jnp.array([1.0, 2.0]), other=3)
    return metric.compute()


@program(PROGRAMS)
def metric_average_of_nothing(f):
    return f.nnx.metrics.Average().compute(), f.nnx.metrics.Accuracy().compute()


@program(PROGRAMS, raises=TypeError)
def metric_average_without_its_argument(f):
    f.nnx.metrics.Average("loss").update(values=1.0)


@program(PROGRAMS)
def metric_accuracy(f):
    metric = f.nnx.metrics.Accuracy()
    metric.update(logits=LOGITS, labels=LABELS)
    return metric.compute(), f.nnx.state(metric)


@program(PROGRAMS)
def metric_accuracy_of_two_classes(f):
    metric = f.nnx.metrics.Accuracy(threshold=0.5)
    metric.update(logits=jnp.array([0.1, 0.7, 0.5, 0.9]), labels=jnp.array([0, 1, 1, 0]))
    return metric.compute()


@program(PROGRAMS)
def metric_welford(f):
    metric = f.nnx.metrics.Welford()
    for values in (jnp.arange(4.0), jnp.array([7.0, -1.0])):
        metric.update(values=values)
    found = metric.compute()
    return found.mean, found.standard_deviation, found.standard_error_of_mean


@program(PROGRAMS)
def metric_of_several(f):
    nnx = f.nnx
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average())
    for _ in range(2):
        metrics.update(logits=LOGITS, labels=LABELS, values=jnp.arange(4.0))
    found = metrics.compute()
    metrics.reset()
    return found, metrics.compute(), nnx.state(metrics)


@program(PROGRAMS)
def metric_in_a_jitted_step(f):
    nnx = f.nnx
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))

    @nnx.jit
    def evaluate(metrics, logits):
        metrics.update(logits=logits, labels=LABELS, loss=logits.mean())

    for scale in (1.0, -1.0):
        evaluate(metrics, scale * LOGITS)
    return metrics.compute()


@program(PROGRAMS)
def metric_of_ones_own(f):
    nnx = f.nnx

    class Largest(nnx.Metric):
        def __init__(self):
            self.largest = nnx.metrics.MetricState(jnp.array(-jnp.inf))

        def reset(self):
            self.largest[...] = jnp.array(-jnp.inf)

        def update(self, *, values, **_):
            self.largest[...] = jnp.maximum(self.largest[...], values.max())

        def compute(self):
            return self.largest[...]

    metrics = nnx.MultiMetric(largest=Largest(), mean=nnx.metrics.Average())
    metrics.update(values=jnp.array([1.0, 5, 2]))
    return metrics.compute(), nnx.state(metrics, nnx.metrics.MetricState)


@program(PROGRAMS)
def metric_split_and_merged(f):
    nnx = f.nnx
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average())
    graphdef, state = nnx.split(metrics)

    @jax.jit
    def step(state, x):
        metrics = nnx.merge(graphdef, state)
        metrics.update(values=x)
        return nnx.state(metrics)

    nnx.update(metrics, step(state, jnp.arange(3.0)))
    return metrics.compute()


test_programs = same_on_both(PROGRAMS)
