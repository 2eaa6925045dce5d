"""``python -m linnet --check``: which Flax names a program uses, and which of them Linnet lacks.

Programs are read, never run. What an import binds is followed through aliases and attributes:
``import flax.linen as nn`` makes ``nn.Dense`` a use of ``flax.linen.Dense``. What Linnet has is
looked up in Linnet itself. Methods of objects, and names that are computed, are not seen.
"""

import ast
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from linnet.as_flax.names import linnet_name_of

_ABSENT = object()
_TOLERANT = {"ImportError", "ModuleNotFoundError", "AttributeError", "Exception", "BaseException"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True)
class Use:
    """One place where a program uses a name of Flax.

    Args:
      file: the file.
      line: the line in it.
      name: the name, from ``flax`` on.
      optional: whether the program can do without it: it catches the error, or only type checkers
        see the place.
    """

    file: str
    line: int
    name: str
    optional: bool = False


def check(paths: Iterable[str]) -> int:
    """Prints which Flax names in files and folders Linnet has and lacks.

    Args:
      paths: Python files, and folders with such files in them.

    Returns:
      The exit code: 0 if Linnet has every name, 1 if not, 2 if there was something else to read
      than Python.

    Example:
      >>> import tempfile
      >>> file = tempfile.NamedTemporaryFile("w", suffix=".py")
      >>> _ = file.write("from flax import nnx; nnx.Linear"); file.flush()
      >>> check([file.name])
      1 file, 2 names of Flax: Linnet has all of them.
        flax: nnx
        flax.nnx: Linear
      0
    """
    uses, unread = [], []
    files = sorted({file for path in paths for file in _files_of(path)})
    for file in files:
        try:
            with open(file, "rb") as opened:
                uses += uses_in(opened.read(), file)
        except (OSError, SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None)
            unread.append(f"{file}:{line or 1}: cannot be read: {error}")
    has = {name: linnet_has(name) for name in {use.name for use in uses}}
    for use in uses:
        if not has[use.name]:
            without = " (the program can do without it)" if use.optional else ""
            print(f"{use.file}:{use.line}: Linnet has no {use.name}{without}")
    for line in unread:
        print(line, file=sys.stderr)
    lacking = {name for name, found in has.items() if not found}
    print(_summary(len(files), has.keys() - lacking, lacking))
    needed = any(not has[use.name] and not use.optional for use in uses)
    return 2 if unread or not files else int(needed)


def linnet_has(name: str) -> bool:
    """Whether Linnet has a name of Flax.

    Args:
      name: the dotted name, from ``flax`` on.

    Returns:
      True if it has.

    Example:
      >>> linnet_has("flax.nnx.Linear.__call__"), linnet_has("flax.linen.nowhere.Dense")
      (True, False)
    """
    return _resolve(name) is not _ABSENT


def uses_in(source: str | bytes, file: str) -> list[Use]:
    """The names of Flax that a program uses, each with its place, in order.

    Args:
      source: the program.
      file: its name, for ``Use.file``.

    Returns:
      The uses, by line.

    Example:
      >>> [use.name for use in uses_in("import flax.linen as nn; nn.Dense(nn.relu)", "a.py")]
      ['flax.linen', 'flax.linen.Dense', 'flax.linen.relu']
    """
    reader = _Reader(file)
    reader.read(ast.parse(source, file))
    return sorted(dict.fromkeys(reader.uses), key=lambda use: use.line)


def _resolve(name: str) -> Any:
    """What stands under a name of Flax: an object of Linnet, or ``_ABSENT``."""
    first, *steps = name.split(".")
    module, found = first, import_module("linnet.as_flax.facade")
    for step in steps:
        inner = None if module is None else f"{module}.{step}"
        home = None if inner is None else linnet_name_of(inner)
        if home is not None:
            module, found = inner, import_module(home)
        elif module is not None or isinstance(found, type):
            module, found = None, getattr(found, step, _ABSENT)
        if found is _ABSENT:
            break
    return found


def _files_of(path: str) -> Iterator[str]:
    if not os.path.isdir(path):
        yield path
        return
    for folder, inner, files in os.walk(path):
        inner[:] = [name for name in inner if not name.startswith((".", "__pycache__"))]
        yield from (os.path.join(folder, file) for file in files if file.endswith(".py"))


def _summary(files: int, fine: Iterable[str], lacking: set[str]) -> str:
    by_module: dict[str, list[str]] = {}
    for name in sorted(fine):
        module, _, last = name.rpartition(".")
        if module:
            by_module.setdefault(module, []).append(last)
    total = len(lacking) + sum(map(len, by_module.values()))
    count = f"{files} file{'s' * (files != 1)}, {total} name{'s' * (total != 1)} of Flax"
    state = f"Linnet lacks {len(lacking)}" if lacking else "Linnet has all of them"
    lines = [f"  {module}: {', '.join(names)}" for module, names in by_module.items()]
    if lacking and lines:
        lines.insert(0, "It has:")
    return "\n".join([f"{count}: {state}.", *lines])


@dataclass
class _Scope:
    """The names bound in a module, class or function: to a name of Flax, or None."""

    is_class: bool = False
    names: dict[str, str | None] = field(default_factory=dict)


class _Reader:
    """Reads the tree of one program and notes what it uses of Flax."""

    def __init__(self, file: str):
        self.file = file
        self.uses: list[Use] = []
        self.scopes: list[_Scope] = []
        self.tolerant = 0

    def read(self, tree: ast.Module) -> None:
        self._enter(tree, tree.body)

    def _note(self, node: ast.AST, name: str) -> None:
        line = getattr(node, "lineno", 1)
        self.uses.append(Use(self.file, line, name, self.tolerant > 0))

    # ---- scopes ---------------------------------------------------------------------------------

    def _enter(self, owner: ast.AST, body: Iterable[ast.AST]) -> None:
        """Reads the body of what has names of its own."""
        body = list(body)
        scope = _Scope(isinstance(owner, ast.ClassDef))
        bound = [name for node in body for name in _bound_in(node)]
        if isinstance(owner, _FUNCTIONS):
            bound += [node.arg for node in ast.walk(owner.args) if isinstance(node, ast.arg)]
        scope.names.update(dict.fromkeys(bound))
        self.scopes.append(scope)
        # An import below a function is in force when the function is called.
        for node in body:
            self._bind_imports(node)
        self._bind_aliases(body)
        for node in body:
            self._visit(node)
        self.scopes.pop()

    def _bind_imports(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                if root == "flax":
                    self.scopes[-1].names[alias.asname or root] = (
                        alias.name if alias.asname else root
                    )
        elif isinstance(node, ast.ImportFrom) and _is_flax(node):
            for alias in node.names:
                self.scopes[-1].names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        for inner in _same_scope(node):
            self._bind_imports(inner)

    def _bind_aliases(self, body: list[ast.AST]) -> None:
        """Follows ``linear = nnx.nn.linear`` where the name is bound once."""
        names = [name for node in body for name in _bound_in(node)]
        for inner in (inner for node in body for inner in _within(node)):
            match inner:
                case ast.Assign(targets=[ast.Name(id=target)]) if names.count(target) == 1:
                    name = self._flax_name(inner.value)
                    if name is not None and (name == "flax" or linnet_name_of(name) is not None):
                        self.scopes[-1].names[target] = name

    def _lookup(self, name: str) -> str | None:
        for depth, scope in enumerate(reversed(self.scopes)):
            if name in scope.names and not (scope.is_class and depth > 0):
                return scope.names[name]
        return None

    # ---- what is used ---------------------------------------------------------------------------

    def _flax_name(self, node: ast.AST) -> str | None:
        """The name of Flax that an expression stands for."""
        match node:
            case ast.Name():
                return self._lookup(node.id)
            case ast.Attribute():
                base = self._flax_name(node.value)
                return None if base is None else f"{base}.{node.attr}"
            case ast.Call(args=[ast.Constant(value=str(name))]) if (
                ast.unparse(node.func).endswith(("import_module", "__import__"))
                and name.partition(".")[0] == "flax"
            ):
                return name
        return None

    def _visit(self, node: ast.AST) -> None:
        match node:
            case ast.Import():
                for alias in node.names:
                    if alias.name.partition(".")[0] == "flax":
                        self._note(node, alias.name)
            case ast.ImportFrom():
                for alias in node.names if _is_flax(node) else []:
                    star = alias.name == "*"
                    module = node.module or ""
                    self._note(node, module if star else f"{module}.{alias.name}")
            case ast.Attribute(ctx=ast.Load()) if (name := self._flax_name(node)) is not None:
                self._note(node, name)
                if not isinstance(node.value, (ast.Name, ast.Attribute)):
                    self._visit(node.value)
            case ast.Call(
                func=ast.Name(id="getattr"), args=[of, ast.Constant(value=str(last))]
            ) if (base := self._flax_name(of)) is not None:
                self._note(node, f"{base}.{last}")
            case ast.Call() if (name := self._flax_name(node)) is not None:
                self._note(node, name)
            case ast.Try() if _catches_imports(node):
                self.tolerant += 1
                self._visit_all(node.body)
                self.tolerant -= 1
                self._visit_all([*node.handlers, *node.orelse, *node.finalbody])
            case ast.If() if ast.unparse(node.test).endswith("TYPE_CHECKING"):
                self.tolerant += 1
                self._visit_all(node.body)
                self.tolerant -= 1
                self._visit_all(node.orelse)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._visit_all([*node.decorator_list, *_signature(node)])
                self._enter(node, node.body)
            case ast.Lambda():
                self._visit_all(_signature(node))
                self._enter(node, [node.body])
            case ast.ClassDef():
                self._visit_all([*node.decorator_list, *node.bases, *node.keywords])
                self._enter(node, node.body)
            case _ if isinstance(node, _COMPREHENSIONS):
                self._enter(node, ast.iter_child_nodes(node))
            case _:
                self._visit_all(ast.iter_child_nodes(node))

    def _visit_all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self._visit(node)


def _is_flax(node: ast.ImportFrom) -> bool:
    return not node.level and (node.module or "").partition(".")[0] == "flax"


def _signature(node: Any) -> list[ast.AST]:
    """Defaults and annotations, which belong to the scope around a function."""
    arguments = node.args
    annotated = [a.annotation for a in ast.walk(arguments) if isinstance(a, ast.arg)]
    parts = [
        *arguments.defaults,
        *arguments.kw_defaults,
        *annotated,
        getattr(node, "returns", None),
    ]
    return [part for part in parts if part is not None]


def _catches_imports(node: ast.Try) -> bool:
    for handler in node.handlers:
        if handler.type is None:
            return True
        caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        if any(ast.unparse(one).rpartition(".")[2] in _TOLERANT for one in caught):
            return True
    return False


def _same_scope(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes directly below one, unless they have a scope of their own."""
    if not isinstance(node, (*_FUNCTIONS, ast.ClassDef, *_COMPREHENSIONS)):
        yield from ast.iter_child_nodes(node)


def _within(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for inner in _same_scope(node):
        yield from _within(inner)


def _bound_in(node: ast.AST) -> Iterator[str]:
    """The names that a statement binds in the scope it stands in."""
    for inner in _within(node):
        match inner:
            case ast.Name(ctx=ast.Store() | ast.Del()):
                yield inner.id
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield inner.name
            case ast.alias():
                yield inner.asname or inner.name.partition(".")[0]
            case ast.ExceptHandler() if inner.name:
                yield inner.name
