"""GPT-2, Llama and ViT in plain NumPy, on tensors with the names and layouts of Hugging Face.

Written from the papers and the layout of the files; they share no code with the models.
"""

import math

import numpy as np


def random_tensors(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return {n: rng.normal(0, 0.3, shape).astype(np.float32) for n, shape in shapes.items()}


def layer_norm(x, weight, bias, epsilon):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon) * weight + bias


def softmax(x):
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def attend(q, k, v, *, is_causal):
    """Attention of ``(batch, heads, length, dim)``."""
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    if is_causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    return softmax(scores) @ v


def heads_of(x, heads):
    batch, length, width = x.shape
    return x.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3)


def merged(x):
    batch, heads, length, dim = x.transpose(0, 1, 2, 3).shape
    return x.transpose(0, 2, 1, 3).reshape(batch, length, heads * dim)


def gpt2_shapes(vocab, positions, width, depth, prefix=""):
    shapes = {"wte.weight": (vocab, width), "wpe.weight": (positions, width)}
    for n in range(depth):
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"h.{n}.{norm}.weight": (width,), f"h.{n}.{norm}.bias": (width,)}
        for name, ins, outs in (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        ):
            shapes |= {f"h.{n}.{name}.weight": (ins, outs), f"h.{n}.{name}.bias": (outs,)}
    shapes |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    return {prefix + name: shape for name, shape in shapes.items()}


def gpt2(t, tokens, heads, depth, prefix=""):
    """Logits; ``Conv1D`` of GPT-2 computes ``x @ weight + bias``."""
    t = {name.removeprefix(prefix): np.float64(x) for name, x in t.items()}

    def conv1d(x, name):
        return x @ t[f"{name}.weight"] + t[f"{name}.bias"]

    def norm(x, name):
        return layer_norm(x, t[f"{name}.weight"], t[f"{name}.bias"], 1e-5)

    x = t["wte.weight"][tokens] + t["wpe.weight"][np.arange(tokens.shape[1])]
    for n in range(depth):
        fused = conv1d(norm(x, f"h.{n}.ln_1"), f"h.{n}.attn.c_attn")
        q, k, v = (heads_of(part, heads) for part in np.split(fused, 3, -1))
        x = x + conv1d(merged(attend(q, k, v, is_causal=True)), f"h.{n}.attn.c_proj")
        up = conv1d(norm(x, f"h.{n}.ln_2"), f"h.{n}.mlp.c_fc")
        up = 0.5 * up * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
        x = x + conv1d(up, f"h.{n}.mlp.c_proj")
    return norm(x, "ln_f") @ t["wte.weight"].T


def llama_shapes(vocab, width, heads, kv_heads, hidden, depth, *, tied=False):
    kv = width // heads * kv_heads
    shapes = {"model.embed_tokens.weight": (vocab, width), "model.norm.weight": (width,)}
    for n in range(depth):
        layer = f"model.layers.{n}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (width,),
            f"{layer}.post_attention_layernorm.weight": (width,),
            f"{layer}.self_attn.q_proj.weight": (width, width),
            f"{layer}.self_attn.k_proj.weight": (kv, width),
            f"{layer}.self_attn.v_proj.weight": (kv, width),
            f"{layer}.self_attn.o_proj.weight": (width, width),
            f"{layer}.mlp.gate_proj.weight": (hidden, width),
            f"{layer}.mlp.up_proj.weight": (hidden, width),
            f"{layer}.mlp.down_proj.weight": (width, hidden),
        }
    return shapes if tied else {**shapes, "lm_head.weight": (vocab, width)}


def llama(t, tokens, heads, kv_heads, depth):
    """Logits; rotary positions turn feature ``i`` of a head with feature ``i + dim / 2``."""
    t = {name: np.float64(x) for name, x in t.items()}

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * t[f"{name}.weight"]

    def rotated(x):
        half = x.shape[-1] // 2
        angles = np.outer(np.arange(x.shape[2]), 10_000.0 ** (-np.arange(half) / half))
        waves = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
        return np.concatenate([waves.real, waves.imag], -1)

    x = t["model.embed_tokens.weight"][tokens]
    for n in range(depth):
        layer = f"model.layers.{n}"
        h = norm(x, f"{layer}.input_layernorm")
        q, k, v = (
            heads_of(h @ t[f"{layer}.self_attn.{name}_proj.weight"].T, number)
            for name, number in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        k, v = (np.repeat(part, heads // kv_heads, 1) for part in (rotated(k), v))
        out = merged(attend(rotated(q), k, v, is_causal=True))
        x = x + out @ t[f"{layer}.self_attn.o_proj.weight"].T
        h = norm(x, f"{layer}.post_attention_layernorm")
        gate = h @ t[f"{layer}.mlp.gate_proj.weight"].T
        up = gate / (1 + np.exp(-gate)) * (h @ t[f"{layer}.mlp.up_proj.weight"].T)
        x = x + up @ t[f"{layer}.mlp.down_proj.weight"].T
    head = t.get("lm_head.weight", t["model.embed_tokens.weight"])
    return norm(x, "model.norm") @ head.T


def vit_shapes(size, patch, channels, width, hidden, depth, labels):
    embeddings = "vit.embeddings"
    shapes = {
        f"{embeddings}.cls_token": (1, 1, width),
        f"{embeddings}.position_embeddings": (1, (size // patch) ** 2 + 1, width),
        f"{embeddings}.patch_embeddings.projection.weight": (width, channels, patch, patch),
        f"{embeddings}.patch_embeddings.projection.bias": (width,),
    }
    for n in range(depth):
        layer = f"vit.encoder.layer.{n}"
        for name, ins, outs in (
            *((f"attention.attention.{part}", width, width) for part in ("query", "key", "value")),
            ("attention.output.dense", width, width),
            ("intermediate.dense", width, hidden),
            ("output.dense", hidden, width),
        ):
            shapes |= {f"{layer}.{name}.weight": (outs, ins), f"{layer}.{name}.bias": (outs,)}
        for norm in ("layernorm_before", "layernorm_after"):
            shapes |= {f"{layer}.{norm}.weight": (width,), f"{layer}.{norm}.bias": (width,)}
    shapes |= {"vit.layernorm.weight": (width,), "vit.layernorm.bias": (width,)}
    return {**shapes, "classifier.weight": (labels, width), "classifier.bias": (labels,)}


def vit(t, images, heads, depth, patch):
    """Logits for images ``(batch, channels, height, width)``."""
    t = {name.removeprefix("vit."): np.float64(x) for name, x in t.items()}
    erf = np.vectorize(math.erf)

    def linear(x, name):
        return x @ t[f"{name}.weight"].T + t[f"{name}.bias"]

    def norm(x, name):
        return layer_norm(x, t[f"{name}.weight"], t[f"{name}.bias"], 1e-12)

    batch, channels, rows, columns = images.shape
    tiles = images.reshape(batch, channels, rows // patch, patch, columns // patch, patch)
    kernel = t["embeddings.patch_embeddings.projection.weight"]
    x = np.einsum("bcrpsq,wcpq->brsw", tiles, kernel).reshape(batch, -1, kernel.shape[0])
    x = x + t["embeddings.patch_embeddings.projection.bias"]
    first = np.repeat(t["embeddings.cls_token"], batch, 0)
    x = np.concatenate([first, x], 1) + t["embeddings.position_embeddings"]
    for n in range(depth):
        layer = f"encoder.layer.{n}"
        h = norm(x, f"{layer}.layernorm_before")
        q, k, v = (
            heads_of(linear(h, f"{layer}.attention.attention.{part}"), heads)
            for part in ("query", "key", "value")
        )
        out = merged(attend(q, k, v, is_causal=False))
        x = x + linear(out, f"{layer}.attention.output.dense")
        h = linear(norm(x, f"{layer}.layernorm_after"), f"{layer}.intermediate.dense")
        x = x + linear(h * 0.5 * (1 + erf(h / math.sqrt(2))), f"{layer}.output.dense")
    return linear(norm(x, "layernorm")[:, 0], "classifier")


def as_timm(t, depth):
    """The tensors of a ViT file of Hugging Face under timm's names, query, key and value as one."""
    names = {
        "vit.embeddings.cls_token": "cls_token",
        "vit.embeddings.position_embeddings": "pos_embed",
        "vit.embeddings.patch_embeddings.projection.": "patch_embed.proj.",
        "vit.layernorm.": "norm.",
        "classifier.": "head.",
    }
    parts = {
        "layernorm_before": "norm1",
        "layernorm_after": "norm2",
        "attention.output.dense": "attn.proj",
        "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2",
    }
    for n in range(depth):
        for old, new in parts.items():
            names[f"vit.encoder.layer.{n}.{old}."] = f"blocks.{n}.{new}."
    timm = {
        new + name.removeprefix(old): x
        for name, x in t.items()
        for old, new in names.items()
        if name.startswith(old)
    }
    for n in range(depth):
        for leaf in ("weight", "bias"):
            attention = f"vit.encoder.layer.{n}.attention.attention"
            parts_of_it = [t[f"{attention}.{name}.{leaf}"] for name in ("query", "key", "value")]
            timm[f"blocks.{n}.attn.qkv.{leaf}"] = np.concatenate(parts_of_it)
    return timm
