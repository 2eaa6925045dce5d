"""GPT-2 as Hugging Face stores it."""

from __future__ import annotations

import itertools

from linnet.io.names import blocks
from linnet.io.names.rules import NameMap, Rule


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

    Example:
      >>> from linnet.io import names
      >>> mine = names.gpt2().with_paths({"h": "blocks", "blocks/*/ln_1": "blocks/*/norm1"})
      >>> [rule.paths for rule in mine.rules if rule.stored == ("~h.*.ln_1.weight",)]
      [('blocks/*/norm1/scale',)]
    """
    heads = [f"h/*/attn/{name}" for name in ("query", "key", "value")]
    rules = itertools.chain(
        blocks.embedding("~wte", "wte"),
        blocks.embedding("~wpe", "wpe"),
        blocks.norm("~h.*.ln_1", "h/*/ln_1"),
        blocks.fused_heads("~h.*.attn.c_attn", heads, is_transposed=False),
        blocks.linear("~h.*.attn.c_attn", "h/*/attn/c_attn", is_transposed=False),
        [
            Rule(
                "~h.*.attn.c_proj.weight",
                "h/*/attn/out/kernel",
                "(head dim) width -> head dim width",
            )
        ],
        blocks.linear("~h.*.attn.c_proj", "h/*/attn/out", is_transposed=False),
        blocks.linear("~h.*.attn.c_proj", "h/*/attn/c_proj", is_transposed=False),
        blocks.norm("~h.*.ln_2", "h/*/ln_2"),
        blocks.linear("~h.*.mlp.c_fc", "h/*/mlp/c_fc", is_transposed=False),
        blocks.linear("~h.*.mlp.c_proj", "h/*/mlp/c_proj", is_transposed=False),
        blocks.norm("~ln_f", "ln_f"),
        blocks.linear("lm_head", "lm_head"),
    )
    return NameMap(
        list(rules),
        prefixes=("", "transformer."),
        ignored=("~h.*.attn.bias", "~h.*.attn.masked_bias"),
        tied={"lm_head.weight": "~wte.weight"},
    )
