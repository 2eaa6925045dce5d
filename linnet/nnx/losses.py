"""Losses of classifiers and language models.

``softmax_cross_entropy`` takes logits. ``chunked_softmax_cross_entropy`` takes what goes into the
last layer, and never holds the logits of a whole batch: for large vocabularies, where these are the
largest array of a training step. With ``reduction="mean"`` it is the fastest way on a GPU.

Example:
  >>> import jax, jax.numpy as jnp
  >>> from linnet import nnx
  >>> table = nnx.Embed(1000, 16, rngs=nnx.Rngs(0))
  >>> tokens = jax.random.randint(jax.random.key(0), (4, 9), 0, 1000)
  >>> @nnx.jit
  ... def loss_of(table):
  ...     return nnx.losses.chunked_softmax_cross_entropy(
  ...         table(tokens[:, :-1]),
  ...         table.embedding[...],
  ...         tokens[:, 1:],
  ...         transposed=True,
  ...         reduction="mean",
  ...     )
  >>> logits = table.attend(table(tokens[:, :-1]))
  >>> whole = nnx.losses.softmax_cross_entropy(logits, tokens[:, 1:]).mean()
  >>> bool(jnp.allclose(loss_of(table), whole))
  True
"""

from linnet.functional.losses import (
    chunked_softmax_cross_entropy as chunked_softmax_cross_entropy,
    softmax_cross_entropy as softmax_cross_entropy,
)

__all__ = ["chunked_softmax_cross_entropy", "softmax_cross_entropy"]
