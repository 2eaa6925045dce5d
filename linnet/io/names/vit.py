"""Vision transformers as Hugging Face and timm store them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from linnet.io.names import blocks
from linnet.io.names.rules import NameMap, Rule

_HEADS = ("query", "key", "value")


def vit() -> NameMap:
    """The map for ViT files of Hugging Face.

    The files have ``vit.encoder.layer.0.attention.attention.query.weight`` and so on, with or
    without ``vit.`` in front. The model is the one of ``timm_vit``, with ``pooler/dense`` where the
    file has it.

    Example:
      >>> from linnet.io import names
      >>> names.vit().rules[0].stored, names.vit().rules[0].paths
      (('~embeddings.cls_token',), ('cls_token',))
    """
    layer, path = "~encoder.layer.*", "blocks/*"
    attention = f"{layer}.attention.attention"
    rules = itertools.chain(
        [
            Rule("~embeddings.cls_token", "cls_token"),
            Rule("~embeddings.position_embeddings", "pos_embed"),
        ],
        _patches("~embeddings.patch_embeddings.projection"),
        blocks.norm(f"{layer}.layernorm_before", f"{path}/norm1"),
        *(blocks.head_projection(f"{attention}.{name}", f"{path}/attn/{name}") for name in _HEADS),
        blocks.from_heads(f"{layer}.attention.output.dense", f"{path}/attn/out"),
        blocks.norm(f"{layer}.layernorm_after", f"{path}/norm2"),
        blocks.linear(f"{layer}.intermediate.dense", f"{path}/mlp/fc1"),
        blocks.linear(f"{layer}.output.dense", f"{path}/mlp/fc2"),
        blocks.norm("~layernorm", "norm"),
        blocks.linear("~pooler.dense", "pooler/dense"),
        blocks.linear("classifier", "head"),
    )
    return NameMap(list(rules), prefixes=("vit.", ""))


def timm_vit() -> NameMap:
    """The map for ViT files of timm, where query, key and value are one tensor.

    The files have ``blocks.0.attn.qkv.weight`` and so on. The model has

    - ``cls_token`` and ``pos_embed``, parameters as they are in the file;
    - ``patch_embed/proj``, an ``nnx.Conv``;
    - in each ``blocks/*``, listed or stacked: ``norm1``, ``norm2``, ``mlp/fc1``, ``mlp/fc2``, and
      ``attn`` with ``query``, ``key``, ``value``, ``out`` (``nnx.MultiHeadAttention``, or linear
      layers) or with ``qkv`` and ``proj``;
    - ``norm`` and ``head``.

    The activation is ``nnx.gelu(x, approximate=False)``; ``epsilon`` of the norms is 1e-6 in timm
    and 1e-12 in Hugging Face's models.

    Example:
      >>> from linnet.io import names
      >>> names.timm_vit().rules[1]
      Rule(stored=('pos_embed',), paths=('pos_embed',), ...)
    """
    layer, path = "blocks.*", "blocks/*"
    heads = [f"{path}/attn/{name}" for name in _HEADS]
    rules = itertools.chain(
        [Rule("cls_token", "cls_token"), Rule("pos_embed", "pos_embed")],
        _patches("patch_embed.proj"),
        blocks.norm(f"{layer}.norm1", f"{path}/norm1"),
        blocks.fused_heads(f"{layer}.attn.qkv", heads),
        blocks.linear(f"{layer}.attn.qkv", f"{path}/attn/qkv"),
        blocks.from_heads(f"{layer}.attn.proj", f"{path}/attn/out"),
        blocks.linear(f"{layer}.attn.proj", f"{path}/attn/proj"),
        blocks.norm(f"{layer}.norm2", f"{path}/norm2"),
        blocks.linear(f"{layer}.mlp.fc1", f"{path}/mlp/fc1"),
        blocks.linear(f"{layer}.mlp.fc2", f"{path}/mlp/fc2"),
        blocks.norm("norm", "norm"),
        blocks.linear("head", "head"),
    )
    return NameMap(list(rules))


def _patches(stored: str) -> Iterator[Rule]:
    axes = "width channel row column -> row column channel width"
    yield Rule(f"{stored}.weight", "patch_embed/proj/kernel", axes)
    yield Rule(f"{stored}.bias", "patch_embed/proj/bias")
