"""A residual network that tells the directions of gratings, trained on every device with ``pmap``.

Gradients are averaged over the devices; each keeps batch statistics of its own, which are averaged
before the network is tested and stored.
"""

import functools
import json
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils, traverse_util
from flax.training import checkpoints, common_utils, train_state
from jax import lax

CLASSES, SIZE, BATCH, STEPS = 4, 8, 32, 24


class ResidualBlock(nn.Module):
    filters: int
    conv: Callable[..., Any]
    norm: Callable[..., Any]
    act: Callable[[jax.Array], jax.Array] = nn.relu
    strides: tuple[int, int] = (1, 1)

    @nn.compact
    def __call__(self, x):
        residual = x
        y = self.conv(self.filters, (3, 3), self.strides)(x)
        y = self.act(self.norm()(y))
        y = self.conv(self.filters, (3, 3))(y)
        y = self.norm(scale_init=nn.initializers.zeros)(y)
        if residual.shape != y.shape:
            residual = self.conv(self.filters, (1, 1), self.strides, name="conv_proj")(residual)
            residual = self.norm(name="norm_proj")(residual)
        return self.act(residual + y)


class ResNet(nn.Module):
    stage_sizes: Sequence[int]
    num_classes: int
    num_filters: int = 8
    dtype: Any = jnp.float32
    act: Callable[[jax.Array], jax.Array] = nn.relu

    @nn.compact
    def __call__(self, x, train: bool = True):
        conv = functools.partial(
            nn.Conv, use_bias=False, dtype=self.dtype, kernel_init=nn.initializers.he_uniform()
        )
        norm = functools.partial(
            nn.BatchNorm,
            use_running_average=not train,
            momentum=0.9,
            epsilon=1e-5,
            dtype=self.dtype,
            axis_name="batch" if train and not self.is_initializing() else None,
        )
        x = conv(self.num_filters, (3, 3), name="conv_init")(x)
        x = nn.relu(norm(name="bn_init")(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2), padding="SAME")
        for i, size in enumerate(self.stage_sizes):
            for j in range(size):
                strides = (2, 2) if i > 0 and j == 0 else (1, 1)
                x = ResidualBlock(
                    self.num_filters * 2**i, conv=conv, norm=norm, act=self.act, strides=strides
                )(x)
        x = jnp.mean(x, axis=(1, 2))
        return jnp.asarray(nn.Dense(self.num_classes, dtype=self.dtype)(x), jnp.float32)


class TrainState(train_state.TrainState):
    batch_stats: flax.core.FrozenDict


def gratings(seed):
    """An endless stream of batches: waves of four directions, with noise."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:SIZE, :SIZE]
    while True:
        label = rng.integers(CLASSES, size=BATCH)
        angle = (label * np.pi / CLASSES)[:, None, None]
        phase = rng.uniform(0, 2 * np.pi, size=(BATCH, 1, 1))
        wave = np.sin(1.5 * (np.cos(angle) * rows + np.sin(angle) * columns) + phase)
        image = wave + 0.3 * rng.normal(size=wave.shape)
        yield {"image": image[..., None].astype(np.float32), "label": label.astype(np.int32)}


def cross_entropy(logits, labels):
    onehot = common_utils.onehot(labels, num_classes=CLASSES)
    return optax.softmax_cross_entropy(logits=logits, labels=onehot).mean()


def metrics_of(logits, labels):
    metrics = {
        "loss": cross_entropy(logits, labels),
        "accuracy": jnp.mean(jnp.argmax(logits, -1) == labels),
    }
    return lax.pmean(metrics, axis_name="batch")


def train_step(state, batch, schedule):
    def loss_fn(params):
        logits, updates = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            batch["image"],
            mutable=["batch_stats"],
        )
        loss = cross_entropy(logits, batch["label"])
        kernels = [p for p in jax.tree_util.tree_leaves(params) if p.ndim > 1]
        return loss + 0.5e-4 * sum(jnp.sum(p**2) for p in kernels), (updates, logits)

    (_, (updates, logits)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    grads = lax.pmean(grads, axis_name="batch")
    metrics = metrics_of(logits, batch["label"])
    metrics["learning_rate"] = schedule(state.step)
    state = state.apply_gradients(grads=grads, batch_stats=updates["batch_stats"])
    return state, metrics


def eval_step(state, batch):
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, batch["image"], train=False, mutable=False)
    return metrics_of(logits, batch["label"])


cross_replica_mean = jax.pmap(lambda x: lax.pmean(x, "x"), "x")


def sync_batch_stats(state):
    return state.replace(batch_stats=cross_replica_mean(state.batch_stats))


def create_state(key, model, schedule):
    variables = jax.jit(model.init)({"params": key}, jnp.ones((1, SIZE, SIZE, 1)))
    decayed = traverse_util.path_aware_map(
        lambda path, _: path[-1] == "kernel", variables["params"]
    )
    tx = optax.chain(
        optax.masked(optax.add_decayed_weights(1e-4), decayed),
        optax.sgd(schedule, momentum=0.9, nesterov=True),
    )
    return TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=tx,
        batch_stats=variables["batch_stats"],
    )


def main():
    model = ResNet(stage_sizes=[1, 1], num_classes=CLASSES)
    schedule = optax.join_schedules(
        [optax.linear_schedule(0.0, 0.1, 4), optax.cosine_decay_schedule(0.1, STEPS - 4)], [4]
    )
    state = jax_utils.replicate(create_state(jax.random.key(0), model, schedule), axis_name="batch")
    step = jax.pmap(functools.partial(train_step, schedule=schedule), axis_name="batch")
    test = jax.pmap(eval_step, axis_name="batch")

    batches = jax_utils.prefetch_to_device(
        map(common_utils.shard, gratings(0)), 2, axis_name="batch"
    )
    losses, history = [], []
    for _, batch in zip(range(STEPS), batches, strict=False):
        state, metrics = step(state, batch)
        history.append(metrics)
        losses.append(float(metrics["loss"][0]))

    state = sync_batch_stats(state)
    tested = test(state, common_utils.shard(next(gratings(1))))
    losses.append(float(jax_utils.unreplicate(tested)["loss"]))
    history = common_utils.get_metrics(history)
    assert history["learning_rate"].shape == (STEPS,)
    assert history["accuracy"][-4:].mean() > history["accuracy"][:4].mean() + 0.2

    state = jax.device_get(jax_utils.unreplicate(state))
    with tempfile.TemporaryDirectory() as folder:
        checkpoints.save_checkpoint(folder, state, int(state.step), keep=2)
        blank = jax.tree_util.tree_map(np.zeros_like, state)
        restored = checkpoints.restore_checkpoint(folder, blank)
    jax.tree_util.tree_map(np.testing.assert_array_equal, restored.params, state.params)
    return losses, {"params": restored.params, "batch_stats": restored.batch_stats}


if __name__ == "__main__":
    print(json.dumps(main()[0]))
