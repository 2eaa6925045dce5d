"""Generation: a model that predicts the next token goes on with a prompt."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from linnet.errors import LayerArgumentError, RngsError, type_text
from linnet.functional.sampling import sample_logits
from linnet.nnx.modules.module import iter_modules
from linnet.nnx.modules.views import view
from linnet.nnx.nn.linear import Embed
from linnet.nnx.nn.params import draw_key
from linnet.nnx.transforms import fori_loop, jit, while_loop
from linnet.nnx.variablelib.operators import value_of

Array = jax.Array
ModelCall = Callable[[Any, Array, Array], Array]


def generate(
    model: Any,
    prompt: Any,
    max_new_tokens: int,
    *,
    temperature: Any = 0.0,
    top_k: int | None = None,
    top_p: Any = None,
    stop_tokens: Sequence[int] | int = (),
    pad_token: int = 0,
    cache_length: int | None = None,
    rngs: Any = None,
    call: ModelCall | None = None,
) -> Array:
    """Goes on with a prompt, token by token, in one compiled call.

    The prompt is read in one pass. Then each token takes one pass over itself alone, because the
    attention layers keep the keys and values of the tokens before (``nnx.MultiHeadAttention`` with
    ``decode=True``). The model is not changed: its layers are used through ``nnx.view`` with
    ``decode=True``, ``deterministic=True`` and an empty cache. A length of prompt that was not seen
    before is compiled anew. On a GPU two calls may go different ways where two tokens are almost
    equally likely, because cuDNN's attention over more than 128 positions does not always give the
    same last bit.

    Args:
      model: called as ``model(tokens, positions)``, or as ``model(tokens)`` if it has no second
        parameter, or one with a default and without ``pos`` in its name. Both are integers of shape
        ``(batch, length)``; returns logits, ``(batch, length, classes)``. A model that counts
        positions from the tokens it is given would count anew for each new token: it has to take
        them, or be called by ``call``.
      prompt: the tokens to go on with, integers of shape ``(batch, length)`` or ``(length,)``. All
        rows have one length.
      max_new_tokens: how many tokens to add.
      temperature: 0 for the most likely token each time; otherwise tokens are drawn from the logits
        divided by it. One number, or one for each row, as for ``top_p``.
      top_k: draw among the ``top_k`` most likely tokens.
      top_p: draw among the most likely tokens that together have this probability.
      stop_tokens: a sequence ends after one of these, or this one; when all have ended, the loop
        ends.
      pad_token: what follows the end of a sequence.
      cache_length: how many positions the cache has room for; by default as many as are needed.
      rngs: where the keys of the draws come from: an ``nnx.Rngs`` (its stream ``sample``, or the
        default one), a stream or a key.
      call: a function ``(model, tokens, positions)`` to use in place of the model's own call. For
        another function everything is compiled anew, so define it once.

    Returns:
      The new tokens, int32, of shape ``(batch, max_new_tokens)`` or ``(max_new_tokens,)``.

    Raises:
      LayerArgumentError: an argument does not fit, as far as its numbers are known (under
        ``jax.jit`` they are not), no layer of the model has a cache, or it does not return logits.
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
    tokens = _tokens(prompt)
    largest = _largest_token(prompt, tokens)
    count = _whole_number("max_new_tokens", max_new_tokens, 1)
    top_k = None if top_k is None else _whole_number("top_k", top_k, 1)
    stops, pad = _stop_tokens(stop_tokens), _whole_number("pad_token", pad_token)
    room = _room(tokens.shape[-1], count, cache_length)
    batch = tokens.shape[0] if tokens.ndim == 2 else 1
    is_drawn = _is_drawn(batch, temperature, top_k, top_p)
    if is_drawn and rngs is None:
        raise RngsError(
            f"nnx.generate draws tokens at temperature {temperature}, but has no keys.\n"
            "Fix: pass rngs=nnx.Rngs(0), or temperature=0 for the most likely token each time."
        )
    new, for_classes = _compiled()(
        model,
        tokens if tokens.ndim == 2 else tokens[None],
        draw_key(model, rngs, "sample") if is_drawn else None,
        temperature if is_drawn else None,
        top_p,
        call=_model_call(model) if call is None else call,
        new_tokens=count,
        top_k=top_k,
        stop_tokens=stops,
        pad_token=pad,
        room=room,
    )
    _check_known(model, largest, for_classes.shape[-1])
    return new if tokens.ndim == 2 else new[0]


# ---- arguments ----------------------------------------------------------------------------------


def _tokens(prompt: Any) -> Array:
    try:
        tokens = jnp.asarray(value_of(prompt))
    except (TypeError, ValueError, OverflowError) as error:
        lengths = _row_lengths(prompt)
        problem = str(error).partition("\n")[0].rstrip(".")
        if len(lengths) > 1:
            problem = f"got rows of the lengths {lengths}"
        raise LayerArgumentError(
            "nnx.generate takes a prompt of integers of shape (batch, length) or (length,), but "
            f"{problem}.\n"
            "Fix: pass an array of integers; prompts of different lengths in calls of their own."
        ) from error
    if tokens.ndim not in (1, 2) or tokens.size == 0 or tokens.dtype.kind not in "iu":
        raise LayerArgumentError(
            "nnx.generate takes a prompt of integers of shape (batch, length) or (length,), not "
            f"empty, but got {type_text(tokens)}.\n"
            "Fix: begin with a token that stands for the start of a text."
        )
    return tokens


def _row_lengths(prompt: Any) -> list[int]:
    try:
        return sorted({len(row) for row in prompt})
    except TypeError:
        return []


def _largest_token(prompt: Any, tokens: Array) -> int:
    """The largest token of the prompt, or 0 if it is not known; refuses negative ones."""
    if not _is_known(tokens):
        return 0
    # Not those that were converted to int32, if they came as integers of 64 bits.
    numbers = prompt if isinstance(prompt, np.ndarray) else np.asarray(tokens)
    least = int(numbers.min())
    if least < 0:
        raise LayerArgumentError(
            f"nnx.generate takes tokens from 0 on, but the prompt has {least}.\n"
            "Fix: leave out what fills up shorter prompts; those of one length go in one call."
        )
    return int(numbers.max())


def _check_known(model: Any, token: int, classes: int) -> None:
    """Refuses a token that neither the logits nor any embedding of the model has."""
    if token < classes:
        return
    sizes = [m.num_embeddings for _, m in iter_modules(model, graph=True) if isinstance(m, Embed)]
    if sizes and token >= max(sizes):
        raise LayerArgumentError(
            f"nnx.generate got the token {token} in the prompt, but {type(model).__name__} knows "
            f"{classes} tokens, and its largest nnx.Embed has {max(sizes)} vectors.\n"
            "Fix: use the tokenizer that the model was trained with, or a larger vocabulary."
        )


def _is_known(value: Any) -> bool:
    """Whether the numbers are known, and on this machine."""
    return not any(
        isinstance(x, Tracer) or not getattr(x, "is_fully_addressable", True)
        for x in jax.tree.leaves(value)
    )


def _whole_number(name: str, value: Any, least: int | None = None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise LayerArgumentError(
            f"nnx.generate takes whole numbers for {name}, but got {type_text(value)}.\n"
            "Fix: pass an int; inside jax.jit or nnx.jit, one that is static there."
        ) from None
    if least is not None and number < least:
        raise LayerArgumentError(
            f"nnx.generate takes {name} from {least} on, but got {number}.\n"
            "Fix: give a larger number."
        )
    return number


def _stop_tokens(given: Any) -> tuple[int, ...]:
    try:
        several = tuple(given)
    except TypeError:
        several = (given,)
    return tuple(_whole_number("stop_tokens", token) for token in several)


def _room(length: int, count: int, cache_length: int | None) -> int:
    """The number of positions in the cache."""
    needed = length + count
    if cache_length is None:
        return needed + needed % 2  # fused attention wants an even number of keys
    room = _whole_number("cache_length", cache_length)
    if room < needed:
        raise LayerArgumentError(
            f"nnx.generate needs room for {needed} positions, those of the prompt and {count} "
            f"more, but got cache_length={room}.\n"
            "Fix: leave it out, give a larger one, or ask for fewer tokens."
        )
    return room


def _is_drawn(batch: int, temperature: Any, top_k: int | None, top_p: Any) -> bool:
    """Whether tokens are drawn; refuses options that do not fit, as far as they are known."""
    heat = _numbers(
        "temperature",
        temperature,
        batch,
        lambda x: np.isfinite(x) & ((x > 0) | (x == 0).all()),
        "that is 0, or above it for every row",
        "temperature=0 takes the most likely token, 1 draws as the model predicts.",
    )
    if top_p is not None:
        _numbers(
            "top_p",
            top_p,
            batch,
            lambda x: (x > 0) & (x <= 1),
            "above 0 and up to 1",
            "top_p=0.9 draws among tokens that together have nine tenths of the probability.",
        )
    is_drawn = heat is None or bool(heat.any())
    for name, value in (("top_k", top_k), ("top_p", top_p)):
        if value is not None and not is_drawn:
            raise LayerArgumentError(
                f"nnx.generate got {name}={value}, which says what to draw among, but at "
                "temperature 0 it takes the most likely token each time.\n"
                f"Fix: pass temperature=1.0 and rngs=nnx.Rngs(0), or leave {name} out."
            )
    return is_drawn


def _numbers(
    name: str, value: Any, batch: int, fits: Callable[[Any], Any], wanted: str, fix: str
) -> Any:
    """The numbers of an argument, if they are known; refuses those that do not fit."""
    value = value_of(value)
    if not _is_known(value):
        return None
    numbers = np.asarray(value)
    is_real = any(jnp.issubdtype(numbers.dtype, dtype) for dtype in (jnp.floating, jnp.integer))
    if not is_real or numbers.shape not in ((), (1,), (batch,)) or not np.all(fits(numbers)):
        raise LayerArgumentError(
            f"nnx.generate takes a {name} {wanted}, one number or one for each row of the prompt, "
            f"of which there are {batch}, but got "
            f"{numbers.tolist() if is_real else type_text(value)}.\nFix: {fix}"
        )
    return numbers


# ---- the compiled function ----------------------------------------------------------------------


def _with_positions(model: Any, tokens: Array, positions: Array) -> Array:
    return model(tokens, positions)


def _without_positions(model: Any, tokens: Array, positions: Array) -> Array:
    return model(tokens)


def _model_call(model: Any) -> ModelCall:
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
    call: ModelCall,
    new_tokens: int,
    top_k: int | None,
    stop_tokens: tuple[int, ...],
    pad_token: int,
    room: int,
) -> tuple[Array, Array]:
    """The new tokens, and an empty array with an axis for the classes."""
    batch, length = prompt.shape
    writer = _with_cache(model, batch, room)
    stops = jnp.asarray(stop_tokens, jnp.int32)

    def next_tokens(writer: Any, number: Any, tokens: Array, ended: Array, positions: Array) -> Any:
        logits = call(writer, tokens, jnp.broadcast_to(positions, tokens.shape))
        _check_logits(model, logits, batch)
        step_key = None if key is None else jax.random.fold_in(key, number)
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        new = jnp.where(ended, pad_token, sample_logits(logits[:, -1], step_key, **options))
        return new, ended | jnp.isin(new, stops), logits.shape[-1]

    def body(number: Any, carry: Any) -> Any:
        writer, token, ended, out = carry
        position = jnp.full((1, 1), length - 1) + number
        token, ended, _ = next_tokens(writer, number, token[:, None], ended, position)
        return writer, token, ended, out.at[:, number].set(token)

    none_ended = jnp.zeros(batch, bool)
    token, ended, classes = next_tokens(writer, 0, prompt, none_ended, jnp.arange(length)[None])
    for_classes = jnp.zeros((0, classes))  # only its shape is of interest
    out = jnp.full((batch, new_tokens), pad_token, jnp.int32).at[:, 0].set(token)
    carry = (writer, token, ended, out)
    if not stop_tokens:  # a loop of known length never waits for the host
        return fori_loop(1, new_tokens, body, carry)[-1], for_classes

    def goes_on(numbered: Any) -> Any:
        number, (_, _, ended, _) = numbered
        return (number < new_tokens) & ~jnp.all(ended)

    def step(numbered: Any) -> Any:
        number, carry = numbered
        return number + 1, body(number, carry)

    return while_loop(goes_on, step, (jnp.int32(1), carry))[1][-1], for_classes


def _check_logits(model: Any, logits: Any, batch: int) -> None:
    shape = getattr(logits, "shape", ())
    if len(shape) == 3 and shape[0] == batch:
        return
    got = type_text(logits)
    if isinstance(logits, (tuple, list)):
        got = f"a {type(logits).__name__} of {len(logits)}"
    elif not shape:
        got = f"a {type(logits).__name__}"
    raise LayerArgumentError(
        f"nnx.generate takes logits of shape (batch, length, classes) for a batch of {batch}, but "
        f"the call of {type(model).__name__} returned {got}.\n"
        "Fix: pass call=f with a function that returns the logits alone, such as\n"
        "def f(model, tokens, positions): return model(tokens, positions)[0]"
    )


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
