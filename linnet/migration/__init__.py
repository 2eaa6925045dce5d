"""Linen programs rewritten for NNX."""

from linnet.migration.converting import Conversion as Conversion, Converter as Converter


def to_nnx(source: str, traced=None) -> Conversion:
    return Converter(source, traced).convert()
