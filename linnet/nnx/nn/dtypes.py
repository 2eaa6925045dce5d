"""Which dtype a layer computes in."""

from linnet.functional.dtypes import (
    canonicalize_dtype as canonicalize_dtype,
    promote_dtype as promote_dtype,
)
