"""Random numbers: named streams of keys.

``streams`` has ``Rngs``, ``RngStream`` and their Variables; ``splitting`` splits, forks and reseeds
the streams that an object holds.
"""

from linnet.nnx.rnglib.splitting import (
    backup_keys,
    fork_rngs,
    reseed,
    restore_rngs,
    split_rngs,
    with_rngs,
)
from linnet.nnx.rnglib.streams import RngCount, RngKey, Rngs, RngState, RngStream

__all__ = [
    "RngCount",
    "RngKey",
    "RngState",
    "RngStream",
    "Rngs",
    "backup_keys",
    "fork_rngs",
    "reseed",
    "restore_rngs",
    "split_rngs",
    "with_rngs",
]
