"""No layer of Linen has arithmetic of its own: contractions, convolutions, reductions are called
in ``linnet/functional/`` alone."""

import ast
from pathlib import Path

import pytest

import linnet

FILES = sorted((Path(linnet.__file__).parent / "linen").glob("*.py"))

CONTRACTIONS = {"dot_general", "einsum", "matmul", "dot", "tensordot", "vdot", "inner", "outer"}
CONVOLUTIONS = {
    "conv",
    "conv_general_dilated",
    "conv_general_dilated_local",
    "conv_general_dilated_patches",
    "conv_transpose",
    "conv_with_general_padding",
    "convolve",
}
REDUCTIONS = {"sum", "mean", "var", "std", "max", "min", "prod", "all", "any", "cumsum", "average"}
REDUCTIONS |= {"reduce", "reduce_window", "logsumexp", "softmax", "standardize", "norm", "psum"}
REDUCTIONS |= {"pmean", "argmax", "argmin", "nansum", "nanmean", "amax", "amin", "median"}
OF_JAX = {"jax", "jnp", "lax"}


def calls_of(source):
    """(line, name) of each call of JAX, and of each method whose name is that of arithmetic."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.BinOp(op=ast.MatMult()):
                yield node.lineno, "@"
            case ast.Call(func=ast.Attribute(value=owner, attr=name)):
                root = owner
                while isinstance(root, ast.Attribute):
                    root = root.value
                by_jax = isinstance(root, ast.Name) and root.id in OF_JAX
                is_module = isinstance(root, ast.Name) and not by_jax
                arithmetic = CONTRACTIONS | CONVOLUTIONS | REDUCTIONS
                if name in arithmetic and (by_jax or not is_module):
                    yield node.lineno, ast.unparse(node.func)
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("jax"):
                for alias in names:
                    if alias.name in CONTRACTIONS | CONVOLUTIONS | REDUCTIONS:
                        yield node.lineno, alias.name


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_arithmetic_is_in_functional(file):
    assert list(calls_of(file.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "jnp.einsum('ab,bc->ac', x, y)",
        "jax.lax.dot_general(x, y, d)",
        "lax.reduce_window(x, 0, f, w, s, p)",
        "x @ y",
        "jax.nn.softmax(x)",
        "(x * x).sum(axis=0)",
        "from jax.lax import conv_general_dilated",
    ],
)
def test_the_rule_is_noticed(source):
    assert list(calls_of(source))


def test_the_rule_allows_functions_of_functional():
    assert not list(calls_of("conv.conv(x)\nlinear.einsum(x)\njnp.zeros(3)\njax.random.normal(k)"))
