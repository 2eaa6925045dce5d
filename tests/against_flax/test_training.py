"""Programs that train: optimizers, metrics, gradients of a part of a model."""

import jax
import jax.numpy as jnp
import optax

from tests.against_flax.compare import program, same_on_both

PROGRAMS = {}

LOGITS = jnp.array([[1.0, 2, 0], [3, 1, 0], [0, 0, 5], [9, 0, 0]])
LABELS = jnp.array([1, 0, 1, 2])
MASK = jnp.array([1, 1, 1, 0])


def adapted(nnx):
    class Adapted(nnx.Module):
        def __init__(self, rngs):
            ones = jax.nn.initializers.ones
            self.linear = nnx.Linear(2, 3, rngs=rngs)
            self.adapter = nnx.LoRA(3, 2, 3, b_initializer=ones, rngs=rngs)
            self.norm = nnx.BatchNorm(3, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.adapter(self.linear(x)))

    return Adapted(nnx.Rngs(0))


def trained(nnx, wrt, differentiated, tx, jit=lambda f: f):
    """The state after three steps that optimize a part of the model."""
    model = adapted(nnx)
    optimizer = nnx.Optimizer(model, tx, wrt=wrt)
    x = jnp.arange(8.0).reshape(4, 2)

    def step(model, optimizer):
        of = nnx.DiffState(0, differentiated)
        grads = nnx.grad(lambda model: ((model(x) - 1) ** 2).sum(), argnums=of)(model)
        optimizer.update(model, grads)

    for _ in range(3):
        jit(step)(model, optimizer)
    return nnx.state(model), optimizer.step


def metrics(nnx, **arguments):
    both = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average())
    both.update(logits=LOGITS, labels=LABELS, values=jnp.arange(4.0), **arguments)
    return both.compute()


@program(PROGRAMS)
def gradients_of_all_parameters_for_adapters(f):
    return trained(f.nnx, f.nnx.LoRAParam, f.nnx.Param, optax.adam(0.1))


@program(PROGRAMS)
def gradients_of_all_parameters_for_adapters_under_jit(f):
    return trained(f.nnx, f.nnx.LoRAParam, f.nnx.Param, optax.adam(0.1), f.nnx.jit)


@program(PROGRAMS)
def the_norm_of_the_gradients_is_that_of_the_optimized(f):
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))
    return trained(f.nnx, f.nnx.LoRAParam, f.nnx.Param, tx)


@program(PROGRAMS)
def optimized_by_path(f):
    return trained(f.nnx, f.nnx.PathContains("linear"), f.nnx.Param, optax.sgd(0.1))


@program(PROGRAMS, raises=ValueError)
def gradients_of_adapters_for_all_parameters(f):
    return trained(f.nnx, f.nnx.Param, f.nnx.LoRAParam, optax.sgd(0.1))


@program(PROGRAMS, raises=ValueError)
def a_gradient_of_nothing(f):
    model = f.nnx.Linear(2, 2, rngs=f.nnx.Rngs(0))
    optimizer = f.nnx.Optimizer(model, optax.sgd(0.1), wrt=f.nnx.Param)
    grads = f.nnx.grad(lambda model: model(jnp.ones((1, 2))).sum())(model)
    grads["unknown"] = f.nnx.Param(jnp.ones(3))
    optimizer.update(model, grads)


@program(PROGRAMS)
def one_mask_for_all_metrics(f):
    return metrics(f.nnx, mask=MASK)


@program(PROGRAMS)
def a_mask_for_each_metric(f):
    return metrics(f.nnx, mask={"accuracy": MASK, "loss": 1 - MASK})


@program(PROGRAMS)
def a_mask_for_one_metric(f):
    return metrics(f.nnx, mask={"accuracy": MASK}), metrics(f.nnx, mask={})


@program(PROGRAMS)
def a_mask_that_is_none(f):
    return metrics(f.nnx, mask={"accuracy": MASK.astype(bool), "loss": None})


@program(PROGRAMS)
def masks_of_nested_metrics(f):
    nnx = f.nnx
    nested = nnx.MultiMetric(
        inner=nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average()),
        loss=nnx.metrics.Average(),
    )
    masks = {"inner": {"accuracy": MASK}, "loss": 1 - MASK}
    nested.update(logits=LOGITS, labels=LABELS, values=jnp.arange(4.0), mask=masks)
    return nested.compute()


@program(PROGRAMS, raises=TypeError)
def a_mask_for_a_metric_that_takes_none(f):
    nnx = f.nnx

    class Total(nnx.Metric):
        def __init__(self):
            self.total = nnx.metrics.MetricState(jnp.zeros(()))

        def reset(self):
            self.total[...] = jnp.zeros(())

        def update(self, *, values):
            self.total[...] += values.sum()

        def compute(self):
            return self.total[...]

    nnx.MultiMetric(total=Total()).update(values=jnp.arange(4.0), mask={"total": MASK})


@program(PROGRAMS)
def masks_under_jit(f):
    nnx = f.nnx
    both = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average())

    @nnx.jit
    def step(both, mask):
        masks = {"accuracy": mask, "loss": mask[::-1]}
        both.update(logits=LOGITS, labels=LABELS, values=jnp.arange(4.0), mask=masks)

    for _ in range(2):
        step(both, MASK)
    return both.compute()


@program(PROGRAMS, raises=ValueError)
def labels_with_a_class_axis(f):
    f.nnx.metrics.Accuracy().update(logits=LOGITS, labels=jax.nn.one_hot(LABELS, 3))


@program(PROGRAMS)
def a_step_of_model_and_optimizer(f):
    model = f.nnx.Linear(2, 2, rngs=f.nnx.Rngs(0))
    optimizer = f.nnx.ModelAndOptimizer(model, optax.sgd(0.1, momentum=0.9), wrt=f.nnx.Param)
    for _ in range(2):
        grads = f.nnx.grad(lambda model: (model(jnp.ones((1, 2))) ** 2).sum())(model)
        optimizer.update(grads)
    return f.nnx.state(model)


test_programs = same_on_both(PROGRAMS)
