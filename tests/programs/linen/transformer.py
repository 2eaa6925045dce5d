"""A language model of scanned, rematerialised blocks whose parameters are divided over a mesh.

It learns to continue counting with varying steps. Axes have logical names, which rules map to the
axes of the mesh.
"""

import functools
import json
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from jax.sharding import Mesh, NamedSharding, PartitionSpec

LENGTH, BATCH, STEPS = 12, 16, 25
RULES = (
    ("batch", "data"),
    ("vocab", "model"),
    ("heads", "model"),
    ("mlp", "model"),
    ("embed", None),
    ("kv", None),
    ("layers", None),
)


@flax.struct.dataclass
class Config:
    vocab: int = 16
    embed: int = 16
    heads: int = 2
    head_size: int = 8
    mlp: int = 32
    layers: int = 3
    dropout: float = 0.1
    dtype: Any = jnp.float32
    deterministic: bool = False
    kernel_init: Any = nn.initializers.variance_scaling(1.0, "fan_in", "normal")


def dense(features, axes, config, **kwargs):
    init = nn.with_logical_partitioning(config.kernel_init, axes)
    return nn.DenseGeneral(features, use_bias=False, dtype=config.dtype, kernel_init=init, **kwargs)


class LayerNorm(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x):
        init = nn.with_logical_partitioning(nn.initializers.ones_init(), ("embed",))
        return nn.LayerNorm(use_bias=False, scale_init=init, dtype=self.config.dtype)(x)


class Attention(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x, mask):
        cfg = self.config
        shape, axes = (cfg.heads, cfg.head_size), ("embed", "heads", "kv")
        query, key, value = (
            nn.with_logical_constraint(
                dense(shape, axes, cfg, name=name)(x), ("batch", "length", "heads", "kv")
            )
            for name in ("query", "key", "value")
        )
        rng = None if cfg.deterministic else self.make_rng("dropout")
        y = nn.dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            dropout_rng=rng,
            dropout_rate=cfg.dropout,
            deterministic=cfg.deterministic,
        )
        return dense(cfg.embed, ("heads", "kv", "embed"), cfg, axis=(-2, -1), name="out")(y)


class Mlp(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x):
        cfg = self.config
        gate = dense(cfg.mlp, ("embed", "mlp"), cfg, name="gate")(x)
        up = dense(cfg.mlp, ("embed", "mlp"), cfg, name="up")(x)
        y = nn.with_logical_constraint(nn.gelu(gate) * up, ("batch", "length", "mlp"))
        y = nn.Dropout(cfg.dropout, broadcast_dims=(-2,))(y, deterministic=cfg.deterministic)
        return dense(cfg.embed, ("mlp", "embed"), cfg, name="down")(y)


class Block(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x, mask):
        x = nn.with_logical_constraint(x, ("batch", "length", "embed"))
        x = x + Attention(self.config, name="attention")(LayerNorm(self.config)(x), mask)
        x = x + Mlp(self.config, name="mlp")(LayerNorm(self.config)(x))
        self.sow("intermediates", "norms", jnp.sqrt(jnp.mean(x**2)))
        return x, None


class LanguageModel(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, tokens):
        cfg = self.config
        init = nn.initializers.normal(1.0)
        embed = nn.Embed(
            cfg.vocab,
            cfg.embed,
            dtype=cfg.dtype,
            embedding_init=nn.with_logical_partitioning(init, ("vocab", "embed")),
            name="token",
        )
        position = self.param(
            "position",
            nn.with_logical_partitioning(nn.initializers.normal(0.1), (None, "embed")),
            (LENGTH, cfg.embed),
        )
        x = embed(tokens) + position[None, : tokens.shape[1]]
        mask = nn.make_causal_mask(tokens, dtype=cfg.dtype)
        remat = nn.remat(
            Block,
            prevent_cse=False,
            policy=jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
        )
        blocks = nn.scan(
            remat,
            variable_axes={"params": 0, "intermediates": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=cfg.layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = blocks(cfg, name="blocks")(x, mask)
        logits = embed.attend(LayerNorm(cfg, name="final")(x)) / np.sqrt(cfg.embed)
        return nn.with_logical_constraint(logits, ("batch", "length", "vocab"))


def counting(seed):
    """Batches of numbers that go up by one to three, modulo the vocabulary."""
    rng = np.random.default_rng(seed)
    while True:
        start, step = rng.integers(16, size=(BATCH, 1)), rng.integers(1, 4, size=(BATCH, 1))
        yield ((start + step * np.arange(LENGTH + 1)) % 16).astype(np.int32)


def loss_of(logits, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def train_step(state, tokens, key):
    key = jax.random.fold_in(key, state.step)

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, tokens[:, :-1], rngs={"dropout": key})
        return loss_of(logits, tokens[:, 1:])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def main():
    config = Config()
    model = LanguageModel(config)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, weight_decay=1e-3))
    devices = np.asarray(jax.devices())
    mesh = Mesh(devices.reshape(1 if len(devices) < 4 else 2, -1), ("data", "model"))

    def create(key):
        names = {"params": key, "dropout": jax.random.fold_in(key, 1)}
        variables = model.init(names, jnp.zeros((1, LENGTH), jnp.int32))
        return train_state.TrainState.create(
            apply_fn=model.apply, params=variables["params"], tx=tx
        )

    losses = []
    with mesh, nn.logical_axis_rules(RULES):
        specs = nn.get_partition_spec(jax.eval_shape(create, jax.random.key(0)))
        mlp = specs.params["blocks"]["mlp"]["gate"]["kernel"]
        assert mlp == PartitionSpec("layers", "embed", "mlp"), mlp
        shardings = nn.logical_to_mesh_sharding(specs, mesh, RULES)
        mlp = shardings.params["blocks"]["mlp"]["gate"]["kernel"].spec
        assert mlp == PartitionSpec(None, None, "model"), mlp
        data = NamedSharding(mesh, PartitionSpec("data"))
        state = jax.jit(create, out_shardings=shardings)(jax.random.key(0))
        step = jax.jit(
            train_step,
            in_shardings=(shardings, data, None),
            out_shardings=(shardings, None),
            donate_argnums=0,
        )
        for _, tokens in zip(range(STEPS), counting(0), strict=False):
            state, loss = step(state, tokens, jax.random.key(1))
            losses.append(float(loss))

        exact = LanguageModel(config.replace(deterministic=True, dropout=0.0))
        test = jax.jit(functools.partial(exact.apply, mutable=["intermediates"]))
        tokens = next(counting(1))
        logits, seen = test({"params": state.params}, tokens[:, :-1])
    losses.append(float(loss_of(logits, tokens[:, 1:])))
    (norms,) = seen["intermediates"]["blocks"]["norms"]
    losses.extend(norms.tolist())
    assert norms.shape == (config.layers,)
    return losses, {"params": nn.unbox(state.params)}


if __name__ == "__main__":
    print(json.dumps(main()[0]))
