"""The command ``python -m linnet --to-nnx``, and the function behind it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import libcst as cst

from linnet.errors import LayerArgumentError
from linnet.migration.converting import Conversion, Converter
from linnet.migration.tracing import trace


def to_nnx(source: str, *, example: str | None = None, folder: str | None = None) -> Conversion:
    """Rewrites a Linen program for NNX.

    Args:
      source: the program.
      example: a call of a model, as ``Model(10)(jnp.ones((1, 28, 28, 1)))``. The program is then
        imported, and the call traced, to find sizes that its source does not say.
      folder: where the program stands, so that it can import what is beside it.

    Returns:
      The text of the converted program, and remarks on what was converted and what was left.

    Raises:
      LayerArgumentError: the example is no call of a Linen module.

    Example:
      >>> from linnet.migration import to_nnx
      >>> converted = to_nnx('''
      ... from linnet import linen as nn
      ...
      ... class Model(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return nn.Dense(10)(x)
      ... ''')
      >>> print(converted.text.strip())
      from linnet import nnx
      <BLANKLINE>
      class Model(nnx.Module):
          def __init__(self, *, in_features: int, rngs: nnx.Rngs):
              self.Dense_0 = nnx.Linear(in_features, 10, rngs=rngs)
      <BLANKLINE>
          def __call__(self, x):
              return self.Dense_0(x)
    """
    traced = None if example is None else trace(source, example, folder)
    return Converter(source, traced).convert()


def main(arguments: list[str]) -> int:
    """Runs the command.

    Args:
      arguments: the program, ``-o`` and where to write it, ``--example`` and a call.

    Returns:
      0 if everything was converted, 1 if something was left with a comment, 2 for an error.
    """
    parser = argparse.ArgumentParser(
        prog="python -m linnet --to-nnx", description="Rewrites a Linen program for NNX."
    )
    parser.add_argument("program", help="the file to convert")
    parser.add_argument("-o", "--output", help="where to write; by default the output is printed")
    parser.add_argument(
        "--example",
        help="a call of a model, as 'Model(10)(jnp.ones((1, 28, 28, 1)))'; the program is imported "
        "and the call is traced, to find the sizes of inputs",
    )
    given = parser.parse_args(arguments)
    path = Path(given.program)
    try:
        source = path.read_text(encoding="utf-8")
        found = to_nnx(source, example=given.example, folder=str(path.parent))
    except (OSError, LayerArgumentError, SyntaxError, cst.ParserSyntaxError) as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 2
    if given.output is None:
        print(found.text, end="")
    else:
        Path(given.output).write_text(found.text, encoding="utf-8")
    print(report(found, str(path)), file=sys.stderr)
    return 1 if found.left else 0


def report(found: Conversion, path: str) -> str:
    """What was converted and what was left, by line."""
    lines = [
        f"{path}:{remark.line}: {'left: ' if remark.left else ''}{remark.text}"
        for remark in found.remarks
    ]
    left = len(found.left)
    ending = "everything was converted" if not left else f"{left} to look at, each has a comment"
    return "\n".join([*lines, f"{path}: {ending}"])
