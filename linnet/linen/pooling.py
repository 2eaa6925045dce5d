"""Pooling, as ``linen`` offers it."""

from linnet.functional.pooling import (
    avg_pool as avg_pool,
    max_pool as max_pool,
    min_pool as min_pool,
    pool as pool,
)
