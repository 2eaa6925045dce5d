"""Random keys of scopes: a key, and the names and numbers that are still to be folded into it.

A scope's key is the caller's key with the path of the scope folded in. Most scopes never draw, so
that the path is only noted, and folded in when a key is drawn. What is folded in is a hash of the
names, which is the same in every process.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np

from linnet import config
from linnet.typing import PRNGFoldable, PRNGKey


@functools.partial(jax.tree_util.register_dataclass, data_fields=["rng"], meta_fields=["suffix"])
@dataclasses.dataclass(frozen=True)
class LazyRng:
    """A random key with names and numbers that are folded into it when it is used.

    Args:
      rng: the key.
      suffix: names and numbers.

    Example:
      >>> import jax
      >>> from linnet.core.scope import LazyRng
      >>> rng = LazyRng.create(jax.random.key(0), "encoder")
      >>> LazyRng.create(rng, 1).suffix
      ('encoder', 1)
      >>> jax.random.key_data(rng.as_jax_rng()).tolist()
      [2560436580, 647266580]
    """

    rng: PRNGKey
    suffix: tuple[PRNGFoldable, ...]

    def as_jax_rng(self) -> PRNGKey:
        """The key with everything folded in."""
        return fold_in_static(self.rng, self.suffix)

    @staticmethod
    def create(rng: LazyRng | PRNGKey, *suffix: PRNGFoldable) -> LazyRng:
        """A LazyRng with more to fold in.

        Args:
          rng: a key, or a LazyRng, whose own names and numbers come first.
          *suffix: names and numbers.

        Returns:
          The LazyRng.
        """
        if isinstance(rng, LazyRng):
            return LazyRng(rng.rng, rng.suffix + suffix)
        return LazyRng(rng, suffix)

    def clear_suffix(self) -> LazyRng:
        """The same with everything folded in and nothing left to fold."""
        return LazyRng(self.as_jax_rng(), ())

    def replace(self, **updates: object) -> LazyRng:
        """A copy with another key or another suffix."""
        return dataclasses.replace(self, **updates)  # pyright: ignore[reportArgumentType]


def fold_in_static(rng: PRNGKey, data: tuple[PRNGFoldable, ...]) -> PRNGKey:
    """Folds names and numbers into a key, all at once, as Flax does."""
    if not data:
        return rng
    return jax.random.fold_in(rng, _hash(data, config.flax_fix_rng_separator))


@functools.lru_cache(maxsize=4096)
def _hash(data: tuple[PRNGFoldable, ...], separated: bool) -> np.uint32:
    digest = hashlib.sha1(usedforsecurity=False)
    for part in data:
        if separated:  # or ("ab", "c") and ("a", "bc") would be the same
            digest.update(b"\0")
        if isinstance(part, str):
            digest.update(part.encode("utf-8"))
        elif isinstance(part, int):
            digest.update(part.to_bytes((part.bit_length() + 7) // 8, "big"))
        else:
            raise ValueError(f"Only names and numbers can be folded into a key, not {part!r}.")
    return np.uint32(int.from_bytes(digest.digest()[:4], "big"))


def is_valid_rng(rng: object) -> bool:
    """Whether something is one JAX key, typed or as raw key data, or a LazyRng of one."""
    if isinstance(rng, LazyRng):
        return is_valid_rng(rng.rng)
    if not isinstance(rng, jax.Array | np.ndarray):
        return False
    if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        return rng.shape == ()
    return rng.dtype == np.uint32 and rng.shape in ((2,), (4,))
