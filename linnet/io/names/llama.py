"""Llama, and models built like it, as Hugging Face stores them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal

from linnet.errors import NameMapError
from linnet.io.names import blocks
from linnet.io.names.rules import NameMap, Rule


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

    Args:
      rotary: which features of a head the model turns together. The files are made for
        ``halves``: feature ``i`` with feature ``i + dim / 2``. For a model that turns ``pairs``,
        ``2 i`` with ``2 i + 1`` as in Meta's own code, the rows of query and key are put in that
        order; their kernels then need an axis for the heads.

    Raises:
      NameMapError: ``rotary`` is neither.

    Example:
      >>> from linnet.io import names
      >>> mine = names.llama().with_paths({"layers/*/self_attn": "layers/*/attention"})
      >>> mine.rules[3].paths
      ('layers/*/attention/q_proj/kernel',)
    """
    if rotary not in ("halves", "pairs"):
        raise NameMapError(
            f"rotary says which features a model turns together, but got {rotary!r}.\n"
            "Fix: rotary='halves' (the default), or rotary='pairs'."
        )
    rules = itertools.chain(
        blocks.embedding("~embed_tokens", "embed_tokens"),
        blocks.norm("~layers.*.input_layernorm", "layers/*/input_layernorm"),
        _attention("~layers.*.self_attn", "layers/*/self_attn", rotary),
        blocks.norm("~layers.*.post_attention_layernorm", "layers/*/post_attention_layernorm"),
        blocks.linear("~layers.*.mlp.gate_proj", "layers/*/mlp/gate_proj"),
        blocks.linear("~layers.*.mlp.up_proj", "layers/*/mlp/up_proj"),
        blocks.linear("~layers.*.mlp.down_proj", "layers/*/mlp/down_proj"),
        blocks.norm("~norm", "norm"),
        blocks.linear("lm_head", "lm_head"),
    )
    return NameMap(
        list(rules),
        prefixes=("model.", ""),
        ignored=("~layers.*.self_attn.rotary_emb.inv_freq", "~rotary_emb.inv_freq"),
        tied={"lm_head.weight": "~embed_tokens.weight"},
    )


def _attention(stored: str, path: str, rotary: str) -> Iterator[Rule]:
    for short, long in (("q", "query"), ("k", "key"), ("v", "value")):
        for name in (f"{short}_proj", long):
            if rotary == "pairs" and short != "v":
                yield from _paired(f"{stored}.{short}_proj", f"{path}/{name}")
            else:
                yield from blocks.head_projection(f"{stored}.{short}_proj", f"{path}/{name}")
    for name in ("o_proj", "out"):
        yield from blocks.from_heads(f"{stored}.o_proj", f"{path}/{name}")


def _paired(stored: str, path: str) -> Iterator[Rule]:
    two = {"two": 2}
    axes = "(head two half) width -> width head (half two)"
    yield Rule(f"{stored}.weight", f"{path}/kernel", axes, sizes=two)
    yield Rule(f"{stored}.bias", f"{path}/bias", "(head two half) -> head (half two)", sizes=two)
