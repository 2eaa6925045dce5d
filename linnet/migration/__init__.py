"""Linen programs rewritten for NNX."""

from linnet.migration.converting import Conversion as Conversion, Converter as Converter
from linnet.migration.tracing import trace as trace
from linnet.migration.weights import load_variables as load_variables


def to_nnx(source: str, example=None) -> Conversion:
    traced = trace(source, example) if example is not None else None
    return Converter(source, traced).convert()
