"""``flax.version``."""

from linnet.as_flax.names import FLAX_VERSION

__version__ = FLAX_VERSION
