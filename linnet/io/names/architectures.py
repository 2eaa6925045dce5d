"""Maps for well-known architectures, as Hugging Face and timm store them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal

from linnet.errors import NameMapError
from linnet.io.names.rules import (
    NameMap,
    Rule,
    embedding,
    from_heads,
    fused_heads,
    head_projection,
    linear,
    norm,
)

_HEADS = ("query", "key", "value")


def gpt2() -> NameMap:
    """The map for GPT-2 files of Hugging Face.

    The files have ``wte.weight``, ``h.0.attn.c_attn.weight`` and so on, with or without
    ``transformer.`` in front; their linear layers are stored as ``(in, out)``. The model has

    - ``wte/embedding``, ``wpe/embedding``, ``ln_f/scale`` and ``ln_f/bias``;
    - in each ``h/*``, listed or stacked: ``ln_1``, ``ln_2``, ``mlp/c_fc``, ``mlp/c_proj``, and
      ``attn`` with ``query``, ``key``, ``value``, ``out`` (``nnx.MultiHeadAttention``, or linear
      layers) or with ``c_attn`` and ``c_proj``;
    - ``lm_head/kernel``, if it does not use ``wte.attend``; the file may leave it out, as it equals
      ``wte``.

    The activation is ``nnx.gelu(x, approximate=True)``, and ``epsilon`` of the norms is 1e-5.

    Returns:
      The map.

    Example:
      >>> from linnet.io import names
      >>> mine = names.gpt2().with_paths({"h": "blocks", "blocks/*/ln_1": "blocks/*/norm1"})
      >>> [rule.paths for rule in mine.rules if rule.stored == ("~h.*.ln_1.weight",)]
      [('blocks/*/norm1/scale',)]
    """
    heads = [f"h/*/attn/{name}" for name in _HEADS]
    rules = itertools.chain(
        embedding("~wte", "wte"),
        embedding("~wpe", "wpe"),
        norm("~h.*.ln_1", "h/*/ln_1"),
        fused_heads("~h.*.attn.c_attn", heads, is_transposed=False),
        linear("~h.*.attn.c_attn", "h/*/attn/c_attn", is_transposed=False),
        from_heads("~h.*.attn.c_proj", "h/*/attn/out", is_transposed=False),
        linear("~h.*.attn.c_proj", "h/*/attn/c_proj", is_transposed=False),
        norm("~h.*.ln_2", "h/*/ln_2"),
        linear("~h.*.mlp.c_fc", "h/*/mlp/c_fc", is_transposed=False),
        linear("~h.*.mlp.c_proj", "h/*/mlp/c_proj", is_transposed=False),
        norm("~ln_f", "ln_f"),
        linear("lm_head", "lm_head"),
    )
    return NameMap(
        list(rules),
        prefixes=("", "transformer."),
        ignored=("~h.*.attn.bias", "~h.*.attn.masked_bias"),
        tied={"lm_head.weight": "~wte.weight"},
    )


def llama(*, rotary: Literal["halves", "pairs"] = "halves") -> NameMap:
    """The map for Llama files of Hugging Face, and of models with the same names.

    The files have ``model.layers.0.self_attn.q_proj.weight`` and so on, with or without
    ``model.`` in front. The model has

    - ``embed_tokens/embedding``, ``norm/scale``, and ``lm_head/kernel`` if it does not use
      ``embed_tokens.attend``; the file may leave that out, as it equals ``embed_tokens``;
    - in each ``layers/*``, listed or stacked: ``input_layernorm/scale``,
      ``post_attention_layernorm/scale``, ``mlp/gate_proj``, ``mlp/up_proj``, ``mlp/down_proj``, and
      ``self_attn`` with ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj`` or ``query``, ``key``,
      ``value``, ``out``, whose kernels are ``(width, heads * dim)`` or ``(width, heads, dim)``.

    Key and value may have fewer heads than the query. Biases are taken where the model has them.
    ``nnx.MultiHeadAttention`` rotates queries and keys with ``nnx.RoPE``, in its cache too, if it
    is built as in the example; tables that a ``RoPE`` keeps are not looked for in the file.

    Args:
      rotary: which features of a head the model rotates together. The files are made for
        ``halves``, as ``nnx.RoPE`` does: feature ``i`` with ``i + dim / 2``. For ``pairs``,
        ``2 i`` with ``2 i + 1`` as in Meta's own code, the rows of query and key are put in that
        order; their kernels then need an axis for the heads.

    Returns:
      The map.

    Raises:
      NameMapError: ``rotary`` is neither.

    Example:
      >>> from linnet.io import names
      >>> mine = names.llama().with_paths({"layers/*/self_attn": "layers/*/attention"})
      >>> mine.rules[3].paths
      ('layers/*/attention/q_proj/kernel',)

      The attention of such a model, with four queries for each key:

      >>> import functools
      >>> from linnet import nnx
      >>> rotary = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE(theta=5e5))
      >>> layer = nnx.MultiHeadAttention(
      ...     8, 64, num_kv_heads=2, use_bias=False, attention_fn=rotary, rngs=nnx.Rngs(0)
      ... )
    """
    if rotary not in ("halves", "pairs"):
        raise NameMapError(
            f"rotary says which features a model rotates together, but got {rotary!r}.\n"
            "Fix: rotary='halves' (the default), or rotary='pairs'."
        )
    rules = itertools.chain(
        embedding("~embed_tokens", "embed_tokens"),
        norm("~layers.*.input_layernorm", "layers/*/input_layernorm"),
        _llama_attention("~layers.*.self_attn", "layers/*/self_attn", rotary),
        norm("~layers.*.post_attention_layernorm", "layers/*/post_attention_layernorm"),
        linear("~layers.*.mlp.gate_proj", "layers/*/mlp/gate_proj"),
        linear("~layers.*.mlp.up_proj", "layers/*/mlp/up_proj"),
        linear("~layers.*.mlp.down_proj", "layers/*/mlp/down_proj"),
        norm("~norm", "norm"),
        linear("lm_head", "lm_head"),
    )
    return NameMap(
        list(rules),
        prefixes=("model.", ""),
        ignored=("~layers.*.self_attn.rotary_emb.inv_freq", "~rotary_emb.inv_freq"),
        tied={"lm_head.weight": "~embed_tokens.weight"},
    )


def _llama_attention(stored: str, path: str, rotary: str) -> Iterator[Rule]:
    for short, long in (("q", "query"), ("k", "key"), ("v", "value")):
        for name in (f"{short}_proj", long):
            if rotary == "pairs" and short != "v":
                yield from _paired(f"{stored}.{short}_proj", f"{path}/{name}")
            else:
                yield from head_projection(f"{stored}.{short}_proj", f"{path}/{name}")
    for name in ("o_proj", "out"):
        yield from from_heads(f"{stored}.o_proj", f"{path}/{name}")


def _paired(stored: str, path: str) -> Iterator[Rule]:
    two = {"two": 2}
    axes = "(head two half) width -> width head (half two)"
    yield Rule(f"{stored}.weight", f"{path}/kernel", axes, sizes=two)
    yield Rule(f"{stored}.bias", f"{path}/bias", "(head two half) -> head (half two)", sizes=two)


def vit() -> NameMap:
    """The map for ViT files of Hugging Face.

    The files have ``vit.encoder.layer.0.attention.attention.query.weight`` and so on, with or
    without ``vit.`` in front. The model is the one of ``timm_vit``, with ``pooler/dense`` where the
    file has it.

    Returns:
      The map.

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
        norm(f"{layer}.layernorm_before", f"{path}/norm1"),
        *(head_projection(f"{attention}.{name}", f"{path}/attn/{name}") for name in _HEADS),
        from_heads(f"{layer}.attention.output.dense", f"{path}/attn/out"),
        norm(f"{layer}.layernorm_after", f"{path}/norm2"),
        linear(f"{layer}.intermediate.dense", f"{path}/mlp/fc1"),
        linear(f"{layer}.output.dense", f"{path}/mlp/fc2"),
        norm("~layernorm", "norm"),
        linear("~pooler.dense", "pooler/dense"),
        linear("classifier", "head"),
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

    Returns:
      The map.

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
        norm(f"{layer}.norm1", f"{path}/norm1"),
        fused_heads(f"{layer}.attn.qkv", heads),
        linear(f"{layer}.attn.qkv", f"{path}/attn/qkv"),
        from_heads(f"{layer}.attn.proj", f"{path}/attn/out"),
        linear(f"{layer}.attn.proj", f"{path}/attn/proj"),
        norm(f"{layer}.norm2", f"{path}/norm2"),
        linear(f"{layer}.mlp.fc1", f"{path}/mlp/fc1"),
        linear(f"{layer}.mlp.fc2", f"{path}/mlp/fc2"),
        norm("norm", "norm"),
        linear("head", "head"),
    )
    return NameMap(list(rules))


def _patches(stored: str) -> Iterator[Rule]:
    axes = "width channel row column -> row column channel width"
    yield Rule(f"{stored}.weight", "patch_embed/proj/kernel", axes)
    yield Rule(f"{stored}.bias", "patch_embed/proj/bias")
