"""What a name in a program means, by its imports and their aliases; local names hide them."""

from __future__ import annotations

import builtins
from collections.abc import Container, Iterator
from typing import Any

import libcst as cst

# The packages that programs import Linen and NNX from; names are looked up without them.
ROOTS = ("flax.", "linnet.")


def code(node: cst.CSTNode) -> str:
    """The text of a node, without the comments around it."""
    return cst.Module([]).code_for_node(node).strip()


def all_nodes(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """A node and all that is inside of it, in the order of the text."""
    yield node
    for child in node.children:
        yield from all_nodes(child)


def keywords_of(call: cst.Call) -> dict[str, cst.BaseExpression]:
    """The arguments of a call that are given by name."""
    return {a.keyword.value: a.value for a in call.args if a.keyword is not None}


def positional_of(call: cst.Call) -> list[cst.BaseExpression]:
    """The arguments of a call that are given by position."""
    return [a.value for a in call.args if a.keyword is None]


def assignment_in(statement: cst.CSTNode) -> cst.Assign | None:
    """The assignment that a statement is, to one name."""
    small = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
    if isinstance(small, cst.Assign) and isinstance(small.targets[0].target, cst.Name):
        return small
    return None


def dotted(node: cst.CSTNode) -> str | None:
    """``a.b.c`` as text, where the node is made of names and attributes alone."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        start = dotted(node.value)
        return None if start is None else f"{start}.{node.attr.value}"
    return None


def _short(name: str) -> str:
    for root in ROOTS:
        name = name.removeprefix(root)
    return name


class Replacing(cst.CSTTransformer):
    """Puts ``replacement(node)``, unless it is None, in the place of a node."""

    def __init__(self):
        super().__init__()
        self.done: dict[cst.CSTNode, Any] = {}

    def replacement(self, node: Any) -> Any:
        raise NotImplementedError

    def on_visit(self, node: cst.CSTNode) -> bool:
        new = self.replacement(node)
        if new is not None:
            self.done[node] = new
        return new is None

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        return self.done.get(original_node, updated_node)


class Names:
    """What the names at the top of a module stand for.

    ``meaning`` gives ``linen.Dense`` for ``nn.Dense`` after ``import flax.linen as nn``, for
    ``Dense`` after ``from flax.linen import Dense``, and ``jax.numpy.mean`` for ``jnp.mean``.
    """

    def __init__(self, module: cst.Module):
        self.imported: dict[str, str] = {}
        self.defined: set[str] = set()
        self._read(module)

    def _read(self, module: cst.Module) -> None:
        for statement in module.body:
            self.defined.update(assigned_names(statement))
            for node in _imports(statement):
                self._import(node)

    def _import(self, node: cst.Import | cst.ImportFrom) -> None:
        if isinstance(node, cst.Import):
            for alias in node.names:
                name = dotted(alias.name) or ""
                if alias.asname is not None:
                    self.imported[code(alias.asname.name)] = _short(name)
                else:
                    top = name.partition(".")[0]
                    self.imported.setdefault(top, top)
        elif not isinstance(node.names, cst.ImportStar) and node.module is not None:
            start = "" if node.relative else dotted(node.module) or ""
            for alias in node.names:
                name = dotted(alias.name) or ""
                local = name if alias.asname is None else code(alias.asname.name)
                self.imported[local] = _short(f"{start}.{name}")

    def meaning(self, node: cst.CSTNode, hidden: Container[str] = ()) -> str | None:
        """The full name of what a name or attribute means, or None; ``hidden`` are local names."""
        name = dotted(node)
        if name is None:
            return None
        top, _, rest = name.partition(".")
        if top in hidden:
            return None
        if top in self.imported:
            full = self.imported[top] + (f".{rest}" if rest else "")
            return _short(full)
        return None

    def is_global(self, name: str) -> bool:
        """Whether a name is bound at the top of the module, or is built in."""
        return name in self.imported or name in self.defined or hasattr(builtins, name)


def _imports(node: cst.CSTNode) -> Iterator[cst.Import | cst.ImportFrom]:
    if isinstance(node, cst.Import | cst.ImportFrom):
        yield node
    elif isinstance(
        node, cst.SimpleStatementLine | cst.If | cst.Try | cst.IndentedBlock | cst.Else
    ):
        for child in node.children:
            yield from _imports(child)


def assigned_names(node: cst.CSTNode) -> set[str]:
    """The names that a statement binds, those inside functions and classes left out."""
    found: set[str] = set()
    if isinstance(node, cst.FunctionDef | cst.ClassDef):
        return {node.name.value}
    if isinstance(node, cst.Import | cst.ImportFrom | cst.Lambda | cst.BaseComp):
        return found
    if isinstance(node, cst.AssignTarget | cst.AnnAssign | cst.AugAssign | cst.NamedExpr | cst.For):
        found |= target_names(node.target)
    elif isinstance(node, cst.AsName):
        found |= target_names(node.name)
    for child in node.children:
        found |= assigned_names(child)
    return found


def target_names(target: cst.CSTNode) -> set[str]:
    """The plain names among the targets of an assignment."""
    if isinstance(target, cst.Name):
        return {target.value}
    if isinstance(target, cst.Tuple | cst.List):
        return {name for element in target.elements for name in target_names(element.value)}
    if isinstance(target, cst.StarredElement):
        return target_names(target.value)
    return set()
