"""Pooling, as ``linen`` offers it."""

from linnet.functional.pooling import avg_pool as avg_pool
from linnet.functional.pooling import max_pool as max_pool
from linnet.functional.pooling import min_pool as min_pool
from linnet.functional.pooling import pool as pool
