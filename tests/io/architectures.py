"""Small models whose weights come from elsewhere, with the names that the shipped maps expect."""

import functools

import jax
import jax.numpy as jnp

from linnet import nnx


def layers_of(block, depth, rngs, *, stacked):
    if stacked:
        return nnx.Stack(block, depth, rngs=rngs)
    return nnx.List([block(rngs=rngs) for _ in range(depth)])


def run(layers, x):
    if isinstance(layers, nnx.Stack):
        return layers(x)
    for layer in layers:
        x = layer(x)
    return x


class Mlp(nnx.Module):
    def __init__(self, width, hidden, names, activation, *, rngs):
        self.activation, self.names = activation, tuple(names)
        setattr(self, names[0], nnx.Linear(width, hidden, rngs=rngs))
        setattr(self, names[1], nnx.Linear(hidden, width, rngs=rngs))

    def __call__(self, x):
        up, down = (getattr(self, name) for name in self.names)
        return down(self.activation(up(x)))


class GPT2Block(nnx.Module):
    def __init__(self, width, heads, *, rngs):
        self.ln_1 = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.ln_2 = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        gelu = functools.partial(nnx.gelu, approximate=True)
        self.mlp = Mlp(width, 4 * width, ("c_fc", "c_proj"), gelu, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.ln_1(x), is_causal=True)
        return x + self.mlp(self.ln_2(x))


class GPT2(nnx.Module):
    def __init__(self, vocab, positions, width, heads, depth, *, rngs, stacked=False, tied=True):
        self.wte = nnx.Embed(vocab, width, rngs=rngs)
        self.wpe = nnx.Embed(positions, width, rngs=rngs)
        block = functools.partial(GPT2Block, width, heads)
        self.h = layers_of(block, depth, rngs, stacked=stacked)
        self.ln_f = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        if not tied:
            self.lm_head = nnx.Linear(width, vocab, use_bias=False, rngs=rngs)
        self.tied = tied

    def __call__(self, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        x = self.ln_f(run(self.h, self.wte(tokens) + self.wpe(positions)))
        return self.wte.attend(x) if self.tied else self.lm_head(x)


def turned(x, *, pairs=False, base=10_000.0):
    """Rotary positions of ``(batch, length, heads, dim)``: of halves, or of neighbours."""
    dim = x.shape[-1]
    frequencies = base ** (-jnp.arange(0, dim, 2) / dim)
    angles = jnp.arange(x.shape[1])[:, None] * frequencies[None, :]
    cos, sin = (f(angles)[None, :, None, :] for f in (jnp.cos, jnp.sin))
    a, b = (x[..., ::2], x[..., 1::2]) if pairs else (x[..., : dim // 2], x[..., dim // 2 :])
    parts = (a * cos - b * sin, b * cos + a * sin)
    return jnp.stack(parts, -1).reshape(x.shape) if pairs else jnp.concatenate(parts, -1)


class LlamaAttention(nnx.Module):
    def __init__(self, width, heads, kv_heads, *, pairs, has_head_axis, rngs):
        dim = width // heads
        self.heads, self.kv_heads, self.pairs = heads, kv_heads, pairs
        linear = functools.partial(nnx.LinearGeneral, use_bias=False, rngs=rngs)
        if has_head_axis:
            sizes = (heads, dim), (kv_heads, dim)
        else:
            sizes = (heads * dim,), (kv_heads * dim,)
        self.q_proj = linear(width, sizes[0])
        self.k_proj = linear(width, sizes[1])
        self.v_proj = linear(width, sizes[1])
        self.o_proj = linear(sizes[0], width, axis=(-2, -1) if has_head_axis else -1)

    def __call__(self, x):
        q, k, v = (
            p(x).reshape(*x.shape[:-1], heads, -1)
            for p, heads in (
                (self.q_proj, self.heads),
                (self.k_proj, self.kv_heads),
                (self.v_proj, self.kv_heads),
            )
        )
        q, k = turned(q, pairs=self.pairs), turned(k, pairs=self.pairs)
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        ins = self.o_proj.in_features
        return self.o_proj(out.reshape(*x.shape[:-1], *ins))


def rotary_attention(width, heads, kv_heads, *, tables, decode, rngs):
    """What ``LlamaAttention`` does, from the layers of ``nnx``."""
    rope = nnx.RoPE(embedding_size=width // heads, max_seq_len=8) if tables else nnx.RoPE()
    attend = functools.partial(nnx.dot_product_attention_with_rope, rope=rope)
    options = {"use_bias": False, "attention_fn": attend, "decode": decode, "rngs": rngs}
    return nnx.MultiHeadAttention(heads, width, num_kv_heads=kv_heads, **options)


class LlamaMlp(nnx.Module):
    def __init__(self, width, hidden, *, rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.gate_proj, self.up_proj = linear(width, hidden), linear(width, hidden)
        self.down_proj = linear(hidden, width)

    def __call__(self, x):
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaBlock(nnx.Module):
    def __init__(self, width, hidden, attention, *, rngs):
        self.input_layernorm = nnx.RMSNorm(width, epsilon=1e-6, rngs=rngs)
        self.self_attn = attention(rngs=rngs)
        self.post_attention_layernorm = nnx.RMSNorm(width, epsilon=1e-6, rngs=rngs)
        self.mlp = LlamaMlp(width, hidden, rngs=rngs)

    def __call__(self, x):
        causal = {"is_causal": True} if isinstance(self.self_attn, nnx.MultiHeadAttention) else {}
        x = x + self.self_attn(self.input_layernorm(x), **causal)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nnx.Module):
    def __init__(
        self, vocab, width, heads, kv_heads, hidden, depth, *, rngs,
        stacked=False, pairs=False, has_head_axis=True, rope=False, tables=False, decode=False,
    ):  # fmt: skip
        if rope:
            make, options = rotary_attention, {"tables": tables, "decode": decode}
        else:
            make, options = LlamaAttention, {"pairs": pairs, "has_head_axis": has_head_axis}
        attention = functools.partial(make, width, heads, kv_heads, **options)
        self.embed_tokens = nnx.Embed(vocab, width, rngs=rngs)
        block = functools.partial(LlamaBlock, width, hidden, attention)
        self.layers = layers_of(block, depth, rngs, stacked=stacked)
        self.norm = nnx.RMSNorm(width, epsilon=1e-6, rngs=rngs)
        self.lm_head = nnx.Linear(width, vocab, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        return self.lm_head(self.norm(run(self.layers, self.embed_tokens(tokens))))


class ViTBlock(nnx.Module):
    def __init__(self, width, heads, hidden, *, rngs):
        self.norm1 = nnx.LayerNorm(width, epsilon=1e-12, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, epsilon=1e-12, rngs=rngs)
        gelu = functools.partial(nnx.gelu, approximate=False)
        self.mlp = Mlp(width, hidden, ("fc1", "fc2"), gelu, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nnx.Module):
    def __init__(self, channels, width, patch, *, rngs):
        self.proj = nnx.Conv(
            channels, width, (patch, patch), strides=patch, padding="VALID", rngs=rngs
        )

    def __call__(self, images):
        x = self.proj(images)
        return x.reshape(x.shape[0], -1, x.shape[-1])


class ViT(nnx.Module):
    def __init__(
        self, size, patch, channels, width, heads, hidden, depth, labels, *, rngs, stacked=False
    ):
        self.patch_embed = PatchEmbed(channels, width, patch, rngs=rngs)
        self.cls_token = nnx.Param(jnp.zeros((1, 1, width)))
        self.pos_embed = nnx.Param(jnp.zeros((1, (size // patch) ** 2 + 1, width)))
        block = functools.partial(ViTBlock, width, heads, hidden)
        self.blocks = layers_of(block, depth, rngs, stacked=stacked)
        self.norm = nnx.LayerNorm(width, epsilon=1e-12, rngs=rngs)
        self.head = nnx.Linear(width, labels, rngs=rngs)

    def __call__(self, images):
        x = self.patch_embed(images)
        first = jnp.broadcast_to(self.cls_token[...], (x.shape[0], 1, x.shape[-1]))
        x = jnp.concatenate([first, x], 1)
        x = run(self.blocks, x + jnp.broadcast_to(self.pos_embed[...], x.shape))
        return self.head(self.norm(x)[:, 0])
