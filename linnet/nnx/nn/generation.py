"""Generation: a model that predicts the next token goes on with a prompt."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from linnet.errors import LayerArgumentError, RngsError
from linnet.functional.sampling import sample_logits
from linnet.nnx.modules.views import view
from linnet.nnx.nn.params import draw_key
from linnet.nnx.transforms import fori_loop, jit, while_loop
from linnet.nnx.variablelib.variable import type_text

Array = jax.Array
Call = Callable[[Any, Array, Array], Array]


def generate(
    model: Any,
    prompt: Any,
    max_new_tokens: int,
    *,
    temperature: Any = 0.0,
    top_k: int | None = None,
    top_p: Any = None,
    stop_tokens: Sequence[int] = (),
    pad_token: int = 0,
    cache_length: int | None = None,
    rngs: Any = None,
    call: Call | None = None,
) -> Array:
    """Goes on with a prompt, token by token, in one compiled call.

    The prompt is read in one pass. Then each token takes one pass over itself alone, because the
    attention layers keep the keys and values of the tokens before (``nnx.MultiHeadAttention`` with
    ``decode=True``). The model is not changed: its layers are used through ``nnx.view`` with
    ``decode=True``, ``deterministic=True`` and an empty cache. A length of prompt that was not seen
    before is compiled anew.

    Args:
      model: called as ``model(tokens, positions)``, or as ``model(tokens)`` if it has no second
        parameter, or one with a default and without ``pos`` in its name. Both are integers of shape
        ``(batch, length)``; returns logits, ``(batch, length, classes)``. A model that counts
        positions from the tokens it is given would count anew for each new token: it has to take
        them, or be called by ``call``.
      prompt: the tokens to go on with, integers of shape ``(batch, length)`` or ``(length,)``.
      max_new_tokens: how many tokens to add.
      temperature: 0 for the most likely token each time; otherwise tokens are drawn from the logits
        divided by it.
      top_k: draw among the ``top_k`` most likely tokens.
      top_p: draw among the most likely tokens that together have this probability.
      stop_tokens: a sequence ends after one of these; when all have ended, the loop ends.
      pad_token: what follows the end of a sequence.
      cache_length: how many positions the cache has room for; by default as many as are needed.
      rngs: where the keys of the draws come from: an ``nnx.Rngs`` (its stream ``sample``, or the
        default one), a stream or a key.
      call: a function ``(model, tokens, positions)`` to use in place of the model's own call. For
        another function everything is compiled anew, so define it once.

    Returns:
      The new tokens, int32, of shape ``(batch, max_new_tokens)`` or ``(max_new_tokens,)``.

    Raises:
      LayerArgumentError: an argument does not fit, or no layer of the model has a cache.
      RngsError: tokens are to be drawn and there are no keys.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> class Model(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.embed = nnx.Embed(16, 8, rngs=rngs)
      ...         self.attention = nnx.MultiHeadAttention(2, 8, rngs=rngs)
      ...     def __call__(self, tokens):
      ...         x = self.embed(tokens)
      ...         return self.embed.attend(x + self.attention(x, is_causal=True))
      >>> model = Model(nnx.Rngs(0))
      >>> nnx.generate(model, jnp.array([[1, 2, 3]]), 4).shape
      (1, 4)
      >>> prompt, rngs = jnp.array([1, 2]), nnx.Rngs(0)
      >>> nnx.generate(model, prompt, 4, temperature=0.8, top_p=0.9, rngs=rngs).shape
      (4,)
    """
    tokens = jnp.asarray(prompt)
    needed = tokens.shape[-1] + max_new_tokens if tokens.ndim else 0
    _check(tokens, max_new_tokens, top_k, needed, cache_length)
    is_drawn = not (isinstance(temperature, (int, float)) and temperature == 0)
    if is_drawn and rngs is None:
        raise RngsError(
            f"nnx.generate draws tokens at temperature {temperature}, but has no keys.\n"
            "Fix: pass rngs=nnx.Rngs(0), or temperature=0 for the most likely token each time."
        )
    new = _compiled()(
        model,
        tokens if tokens.ndim == 2 else tokens[None],
        draw_key(model, rngs, "sample") if is_drawn else None,
        temperature if is_drawn else None,
        top_p if is_drawn else None,
        call=_model_call(model) if call is None else call,
        new_tokens=int(max_new_tokens),
        top_k=top_k if is_drawn else None,
        stop_tokens=tuple(int(token) for token in stop_tokens),
        pad_token=pad_token,
        # Fused attention wants an even number of keys.
        room=needed + needed % 2 if cache_length is None else cache_length,
    )
    return new if tokens.ndim == 2 else new[0]


def _check(
    tokens: Array, max_new_tokens: int, top_k: int | None, needed: int, cache_length: int | None
) -> None:
    if tokens.ndim not in (1, 2) or tokens.size == 0 or tokens.dtype.kind not in "iu":
        raise LayerArgumentError(
            "nnx.generate takes a prompt of integers of shape (batch, length) or (length,), not "
            f"empty, but got {type_text(tokens)}.\n"
            "Fix: begin with a token that stands for the start of a text."
        )
    for name, value in (("max_new_tokens", max_new_tokens), ("top_k", top_k)):
        if value is not None and value < 1:
            raise LayerArgumentError(
                f"nnx.generate takes {name} from 1 on, but got {value}.\nFix: give a larger number."
            )
    if cache_length is not None and cache_length < needed:
        raise LayerArgumentError(
            f"nnx.generate needs room for {needed} positions, those of the prompt and "
            f"{max_new_tokens} more, but got cache_length={cache_length}.\n"
            "Fix: leave it out, give a larger one, or ask for fewer tokens."
        )


def _with_positions(model: Any, tokens: Array, positions: Array) -> Array:
    return model(tokens, positions)


def _without_positions(model: Any, tokens: Array, positions: Array) -> Array:
    return model(tokens)


def _model_call(model: Any) -> Call:
    parameters = inspect.signature(model).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    # An optional parameter of another name, such as mask or train, is not for positions.
    second = [p for p in positional[1:2] if p.default is p.empty or "pos" in p.name]
    return _with_positions if takes_any or second else _without_positions


@functools.cache
def _compiled() -> Any:
    static = ("call", "new_tokens", "top_k", "stop_tokens", "pad_token", "room")
    return jit(_generate, static_argnames=static)


def _generate(
    model: Any,
    prompt: Array,
    key: Any,
    temperature: Any,
    top_p: Any,
    *,
    call: Call,
    new_tokens: int,
    top_k: int | None,
    stop_tokens: tuple[int, ...],
    pad_token: int,
    room: int,
) -> Array:
    batch, length = prompt.shape
    writer = _with_cache(model, batch, room)
    stops = jnp.asarray(stop_tokens, jnp.int32)

    def next_tokens(writer: Any, number: Any, tokens: Array, ended: Array, positions: Array) -> Any:
        logits = call(writer, tokens, jnp.broadcast_to(positions, tokens.shape))
        step_key = None if key is None else jax.random.fold_in(key, number)
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        new = jnp.where(ended, pad_token, sample_logits(logits[:, -1], step_key, **options))
        return new, ended | jnp.isin(new, stops)

    def body(number: Any, carry: Any) -> Any:
        writer, token, ended, out = carry
        position = jnp.full((1, 1), length - 1) + number
        token, ended = next_tokens(writer, number, token[:, None], ended, position)
        return writer, token, ended, out.at[:, number].set(token)

    none_ended = jnp.zeros(batch, bool)
    token, ended = next_tokens(writer, 0, prompt, none_ended, jnp.arange(length)[None])
    out = jnp.full((batch, new_tokens), pad_token, jnp.int32).at[:, 0].set(token)
    carry = (writer, token, ended, out)
    if not stop_tokens:  # a loop of known length never waits for the host
        return fori_loop(1, new_tokens, body, carry)[-1]

    def goes_on(numbered: Any) -> Any:
        number, (_, _, ended, _) = numbered
        return (number < new_tokens) & ~jnp.all(ended)

    def step(numbered: Any) -> Any:
        number, carry = numbered
        return number + 1, body(number, carry)

    return while_loop(goes_on, step, (jnp.int32(1), carry))[1][-1]


def _with_cache(model: Any, batch: int, room: int) -> Any:
    """A view of the model whose layers have an empty cache and drop nothing."""
    try:
        writer = view(model, decode=True, batch_size=batch, max_length=room)
    except ValueError as error:
        raise LayerArgumentError(
            f"nnx.generate found no layer with a cache in {type(model).__name__}.\n"
            "Fix: use nnx.MultiHeadAttention, or give your layer a method set_view(decode, "
            "batch_size, max_length) that makes its cache."
        ) from error
    return view(writer, deterministic=True, raise_if_not_found=False)
