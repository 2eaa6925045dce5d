"""What the converter knows about a value of a Linen program, without running it.

A module in NNX is built before it is called, so each expression belongs to one of two stages. What
can be computed from the constructor's arguments is `Static`. Of arrays, which exist in a call only,
the sizes of the last axes are followed (`Array`), as texts that are valid in a constructor.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping
from typing import Any

import libcst as cst


class LeftAlone(Exception):
    """Something is not understood, so that the class or function that has it stays as it is."""

    def __init__(self, reason: str, node: cst.CSTNode | None = None):
        super().__init__(reason)
        self.reason = reason
        self.node = node


class NotStatic(Exception):
    """An expression depends on the arguments of a call."""


@dataclasses.dataclass(frozen=True)
class ArrayOrigin:
    """An argument of a method, or an element of it; ``strides`` are those of convolutions since."""

    method: str
    parameter: str
    item: int | None = None
    strides: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Value:
    """Something that exists in a call, of which nothing is known."""


UNKNOWN = Value()


@dataclasses.dataclass(frozen=True)
class Static(Value):
    """What a constructor can compute: its text there, and the expression that it stands for."""

    text: str
    meaning: str | None = None

    def resolved(self) -> str:
        return self.meaning or self.text


@dataclasses.dataclass(frozen=True)
class Array(Value):
    """An array, with what is known of the sizes of its last axes (None for an unknown size).

    ``origin`` is the argument that has the same number of axes and the same sizes before ``tail``.
    """

    tail: tuple[str | None, ...] = ()
    origin: ArrayOrigin | None = None

    def with_last(self, *sizes: str | None, removed: int = 1) -> Array:
        """The array after its last axes were replaced."""
        tail = (*self.tail[:-removed], *sizes) if len(self.tail) > removed else sizes
        return Array(tuple(tail), self.origin if len(sizes) == removed else None)


@dataclasses.dataclass(frozen=True)
class ShapeOf(Value):
    """``x.shape`` of an array."""

    array: Array


@dataclasses.dataclass(frozen=True)
class Several(Value):
    """A tuple or list."""

    items: tuple[Value, ...]


@dataclasses.dataclass(frozen=True)
class Repeated(Value):
    """What a comprehension gives: items that are alike."""

    item: Value


@dataclasses.dataclass(frozen=True)
class RecordValue(Value):
    """An instance of a dataclass or named tuple of the program."""

    fields: Mapping[str, Value]


@dataclasses.dataclass(frozen=True)
class Made(Value):
    """A submodule; ``creation`` is where it is made."""

    creation: Any


@dataclasses.dataclass(frozen=True)
class Making(Value):
    """Something that makes a submodule when it is called: a class, a partial, a lifted class."""

    factory: Any


@dataclasses.dataclass(frozen=True)
class Group(Value):
    """A list or dict of submodules by key, or, with ``each``, a list of submodules made alike."""

    members: Mapping[Any, Value]
    each: Value | None = None


@dataclasses.dataclass(frozen=True)
class Listed(Value):
    """A list of arrays that a call fills; the constructor keeps the sizes in a list too."""

    name: str


def substitute(text: str, meanings: Mapping[str, str]) -> str:
    """An expression with names and ``self.name`` attributes replaced by other expressions."""

    class Replace(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            return parse(meanings[node.id]) if node.id in meanings else node

        def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
            text = ast.unparse(node)
            return parse(meanings[text]) if text in meanings else self.generic_visit(node)

    return ast.unparse(Replace().visit(parse(text)))


def parse(text: str) -> ast.expr:
    """The syntax tree of an expression."""
    return ast.parse(f"({text}\n)", mode="eval").body


def names_in(text: str) -> set[str]:
    """The names that a piece of code mentions."""
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}


def attributes_in(text: str) -> set[str]:
    """The attributes of ``self`` that an expression mentions."""
    return {
        node.attr
        for node in ast.walk(parse(text))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.value.id == "self"
    }


def elements(text: str) -> list[str] | None:
    """The texts of the elements of a tuple or list that is written out, or None."""
    node = parse(text)
    if isinstance(node, ast.Tuple | ast.List):
        if any(isinstance(item, ast.Starred) for item in node.elts):
            return None
        return [ast.unparse(item) for item in node.elts]
    return None


def constant(text: str | None) -> Any:
    """The value of a literal, or None."""
    try:
        return None if text is None else ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError):
        return None


def normal(text: str) -> str:
    """An expression in one way of writing it, so that equal ones compare equal."""
    return ast.unparse(parse(text))


def join(left: Value, right: Value) -> Value:
    """What is known after a branch: what both say, and otherwise what one of them says."""
    if left == right or right == UNKNOWN:
        return left
    if left == UNKNOWN:
        return right
    for one, other in ((left, right), (right, left)):
        if isinstance(one, Group) and other == Several(()):
            return one
    if isinstance(left, Array) and isinstance(right, Array):
        origin = left.origin if left.origin == right.origin else None
        tail = left.tail or right.tail
        if not tail and (left.origin or right.origin):
            return left if left.origin else right
        return Array(tail, origin)
    if (
        isinstance(left, Several)
        and isinstance(right, Several)
        and len(left.items) == len(right.items)
    ):
        return Several(tuple(map(join, left.items, right.items)))
    if isinstance(left, Array):
        return left
    return right if isinstance(right, Array) else UNKNOWN
