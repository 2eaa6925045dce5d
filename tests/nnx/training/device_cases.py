"""Metrics and optimizers on four devices. Run as a program; prints what went wrong, by case."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from linnet import nnx
from tests.compare import assert_close
from tests.nnx.training.largest import Largest
from tests.subprocesses import Cases

CASES = case = Cases()
close = functools.partial(assert_close, rtol=1e-6, atol=0)
VALUES = np.arange(8, dtype=np.float32)


def mesh(axis_type=AxisType.Auto):
    return jax.make_mesh((4,), ("i",), axis_types=(axis_type,))


METRICS = [
    (nnx.metrics.Average, 3.5),
    (nnx.metrics.Welford, nnx.metrics.Statistics(3.5, 2.2912879 / 8**0.5, 2.2912879)),
    (Largest, 7.0),
    (lambda: nnx.MultiMetric(a=nnx.metrics.Average(), b=Largest()), {"a": 3.5, "b": 7.0}),
]


@case
def metrics_are_merged_inside_shard_map():
    def over_devices(values):
        metrics = [make() for make, _ in METRICS]
        for metric in metrics:
            metric.update(values=values[:1])
            metric.update(values=values[1:])
        merged = [metric.reduce("i").compute() for metric in metrics]
        return merged, [metric.reduce("i").compute() for metric in metrics]  # nothing changed

    want = [result for _, result in METRICS]
    f = nnx.jit(nnx.shard_map(over_devices, mesh=mesh(), in_specs=P("i"), out_specs=P()))
    close(f(VALUES), (want, want))


@case
def metrics_are_merged_inside_pmap():
    make, want = METRICS[-1]

    def over_devices(values):
        metric = make()
        metric.update(values=values)
        return metric.reduce("i").compute()

    out = jax.pmap(over_devices, axis_name="i")(VALUES.reshape(4, 2))
    close(jax.tree.map(lambda x: x[3], out), want)


@case
def metrics_accumulate_on_each_device_and_are_merged_at_the_end():
    metric = nnx.vmap(lambda _: nnx.metrics.Average())(jnp.arange(4))

    def update(metric, values):
        metric.total.value, metric.count.value = metric.total[0], metric.count[0]
        metric.update(values=values)
        mean = metric.reduce("i").compute()
        metric.total.value, metric.count.value = metric.total[None], metric.count[None]
        return mean

    f = nnx.shard_map(update, mesh=mesh(), in_specs=P("i"), out_specs=P())
    assert float(f(metric, VALUES)) == 3.5
    assert float(f(metric, VALUES + 8)) == 7.5
    assert metric.count.value.tolist() == [4, 4, 4, 4]
    assert metric.total.value.tolist() == [18.0, 26.0, 34.0, 42.0]


@case
def metrics_of_sharded_batches_are_those_of_the_whole():
    metrics = [make() for make, _ in METRICS]
    values = jax.device_put(VALUES, NamedSharding(mesh(), P("i")))

    @nnx.jit
    def update(metrics, values):
        for metric in metrics:
            metric.update(values=values)

    update(metrics, values)
    close([metric.compute() for metric in metrics], [want for _, want in METRICS])


@case
def the_state_of_an_optimizer_is_sharded_as_opt_sharding_says():
    for axis_type in (AxisType.Explicit, AxisType.Auto):
        with jax.set_mesh(mesh(axis_type)):
            model = nnx.Linear(
                8, 4, rngs=nnx.Rngs(0), kernel_metadata={"opt_sharding": ("i", None)}
            )
            alone = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
            optimizers = [
                nnx.Optimizer(each, optax.adam(0.1), wrt=nnx.Param) for each in (model, alone)
            ]

            @nnx.jit
            def step(model, optimizer):
                grads = nnx.grad(lambda m: (m(jnp.ones((2, 8))) ** 2).sum())(model)
                optimizer.update(model, grads)

            for _ in range(2):
                step(model, optimizers[0])
                step(alone, optimizers[1])
                moment = optimizers[0].opt_state[0].mu["kernel"]
                assert moment.out_sharding == ("i", None)
                assert moment.value.addressable_shards[0].data.shape == (2, 4), axis_type
                assert model.kernel.value.sharding.is_fully_replicated, axis_type
            close(nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(nnx.state(alone)))


if __name__ == "__main__":
    case.run_on_four_devices()
