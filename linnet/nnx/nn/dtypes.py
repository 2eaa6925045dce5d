"""Which dtype a layer computes in."""

from linnet.functional.dtypes import canonicalize_dtype as canonicalize_dtype
from linnet.functional.dtypes import promote_dtype as promote_dtype
