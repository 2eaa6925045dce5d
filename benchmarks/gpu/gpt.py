"""GPT-2 as one writes it with NNX, with JAX by hand and with PyTorch: one set of shapes for all.

bfloat16 computes, float32 holds the parameters; the table of tokens is also the last layer; no
dropout.
"""

import dataclasses
import importlib
from typing import Any


@dataclasses.dataclass(frozen=True)
class Config:
    """The shapes of a model and of its batches."""

    layers: int
    width: int
    heads: int
    batch: int
    length: int = 1024
    vocab: int = 50304

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def parameters(self) -> int:
        products = 12 * self.layers * self.width**2
        others = (13 * self.layers + 2 + self.length) * self.width
        return products + others + self.vocab * self.width

    def step_flops(self) -> float:
        """Of the products in a training step; causal attention counts half of the scores."""
        products = 12 * self.layers * self.width**2 + self.vocab * self.width
        return 6 * self.tokens * (products + self.layers * self.length * self.width)

    def step_bytes(self) -> float:
        """Parameters and two moments, read and written; activations could stay on the chip."""
        return 2 * 3 * 4 * self.parameters


CONFIGS = {
    "124M": Config(layers=12, width=768, heads=12, batch=32),
    "350M": Config(layers=24, width=1024, heads=16, batch=32),
    "1.3B": Config(layers=24, width=2048, heads=16, batch=16),
}
QUICK = Config(layers=2, width=32, heads=2, batch=2, length=64, vocab=128)


def nnx_model(
    package: str,
    config: Config,
    *,
    stack: bool = False,
    unroll: bool = False,
    remat: Any = False,
    **options: Any,
) -> Any:
    """The model on `linnet.nnx` or `flax.nnx`; remat may be a policy, options are of the layers.

    `unroll` is of the stack.
    """
    import jax.numpy as jnp

    nnx = importlib.import_module(f"{package}.nnx")
    width = config.width
    init = nnx.initializers.normal(0.02)
    options = {"dtype": jnp.bfloat16, "param_dtype": jnp.float32} | options
    decode = options.pop("decode", False)

    class Block(nnx.Module):
        def __init__(self, *, rngs):
            self.norm1 = nnx.LayerNorm(width, rngs=rngs, **options)
            self.attention = nnx.MultiHeadAttention(
                config.heads, width, decode=decode, rngs=rngs, **options
            )
            self.norm2 = nnx.LayerNorm(width, rngs=rngs, **options)
            self.up = nnx.Linear(width, 4 * width, rngs=rngs, **options)
            self.down = nnx.Linear(4 * width, width, rngs=rngs, **options)

        def __call__(self, x):
            causal = {} if decode else {"is_causal": True}
            if package == "flax" and causal:  # which takes a mask
                causal = {"mask": nnx.make_causal_mask(x[..., 0])}
            x = x + self.attention(self.norm1(x), **causal)
            return x + self.down(nnx.gelu(self.up(self.norm2(x))))

    class GPT(nnx.Module):
        def __init__(self, *, rngs):
            self.words = nnx.Embed(config.vocab, width, embedding_init=init, rngs=rngs, **options)
            self.places = nnx.Embed(config.length, width, embedding_init=init, rngs=rngs, **options)
            self.norm = nnx.LayerNorm(width, rngs=rngs, **options)
            if stack:
                self.blocks = nnx.Stack(Block, config.layers, rngs=rngs, remat=remat, unroll=unroll)
            else:
                self.blocks = nnx.List([Block(rngs=rngs) for _ in range(config.layers)])

        def hidden(self, words, places):
            x = self.words(words) + self.places(places)[None]
            if stack:
                return self.norm(self.blocks(x))
            call = Block.__call__
            if remat:
                call = nnx.remat(call, **({} if remat is True else {"policy": remat}))
            for block in self.blocks:
                x = call(block, x)
            return self.norm(x)

        def __call__(self, words, places):
            return self.words.attend(self.hidden(words, places))

    return GPT(rngs=nnx.Rngs(0))


def jax_parameters(config: Config) -> dict[str, Any]:
    """The parameters of the model by hand, as nested dicts."""
    import jax
    import jax.numpy as jnp

    layers, width = config.layers, config.width
    shapes = {"qkv": (width, 3 * width), "out": (width, width)}
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
    keys = iter(jax.random.split(jax.random.key(0), 6))

    def normal(*shape):
        return jax.random.normal(next(keys), shape) * 0.02

    def block():
        kernels = {name: normal(layers, *shape) for name, shape in shapes.items()}
        biases = {f"{name}_bias": jnp.zeros((layers, b)) for name, (_, b) in shapes.items()}
        norms = {f"scale{i}": jnp.ones((layers, width)) for i in (1, 2)}
        norms |= {f"shift{i}": jnp.zeros((layers, width)) for i in (1, 2)}
        return kernels | biases | norms

    return {
        "words": normal(config.vocab, width),
        "places": normal(config.length, width),
        "scale": jnp.ones(width),
        "shift": jnp.zeros(width),
        "blocks": block(),
    }


def jax_hidden(config: Config, parameters: dict[str, Any], words: Any) -> Any:
    """What goes into the last layer, by hand; attention by cuDNN where there is a GPU."""
    import jax
    import jax.numpy as jnp

    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    shape = (config.batch, config.length, config.heads, config.width // config.heads)

    def bf16(x):
        return x.astype(jnp.bfloat16)

    def norm(x, scale, shift):
        x = x.astype(jnp.float32)
        mean = x.mean(-1, keepdims=True)
        variance = ((x - mean) ** 2).mean(-1, keepdims=True)
        return bf16((x - mean) * jax.lax.rsqrt(variance + 1e-6) * scale + shift)

    x = bf16(parameters["words"])[words] + bf16(parameters["places"])
    for layer in range(config.layers):
        p = {name: value[layer] for name, value in parameters["blocks"].items()}

        def dense(x, name, p=p):
            return x @ bf16(p[name]) + bf16(p[f"{name}_bias"])

        qkv = dense(norm(x, p["scale1"], p["shift1"]), "qkv")
        query, key, value = (part.reshape(shape) for part in jnp.split(qkv, 3, axis=-1))
        mixed = jax.nn.dot_product_attention(
            query, key, value, is_causal=True, implementation=implementation
        )
        x = x + dense(mixed.reshape(x.shape), "out")
        x = x + dense(jax.nn.gelu(dense(norm(x, p["scale2"], p["shift2"]), "up")), "down")
    return norm(x, parameters["scale"], parameters["shift"])


def torch_model(config: Config, device: str, *, decode: bool = False, remat: bool = False) -> Any:
    """The model in PyTorch; a call gives the loss, or the next words where it decodes."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    width, heads = config.width, config.heads

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

            if decode:
                shape = (config.batch, heads, config.length, width // heads)
                self.register_buffer("keys", torch.zeros(shape))
                self.register_buffer("values", torch.zeros(shape))

        def forward(self, x, place=None, mask=None):
            batch, length, _ = x.shape
            qkv = self.qkv(self.norm1(x)).view(batch, length, 3, heads, width // heads)
            query, key, value = qkv.permute(2, 0, 3, 1, 4)
            if decode:
                self.keys[:, :, place] = key
                self.values[:, :, place] = value
                key, value = self.keys, self.values
            mixed = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=not decode
            )
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
            return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(config.vocab, width)
            self.places = nn.Embedding(config.length, width)
            self.blocks = nn.ModuleList(Block() for _ in range(config.layers))
            self.norm = nn.LayerNorm(width)
            for table in (self.words, self.places):
                nn.init.normal_(table.weight, std=0.02)
            self.register_buffer("all_places", torch.arange(config.length))

        def forward(self, words, labels):
            return self.next_words(words, labels) if decode else self.loss(words, labels)

        def loss(self, words, labels):
            x = self.words(words) + self.places.weight
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if remat else block(x)
            logits = self.norm(x) @ self.words.weight.T
            return F.cross_entropy(logits.view(-1, config.vocab).float(), labels.reshape(-1))

        def next_words(self, words, place):
            x = self.words(words) + self.places(place)
            mask = (self.all_places <= place)[None, None, None]
            for block in self.blocks:
                x = block(x, place, mask)
            return (self.norm(x) @ self.words.weight.T)[:, -1].argmax(-1, keepdim=True)

    with torch.device(device):
        return GPT()
