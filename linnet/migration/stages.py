"""The two stages of a Linen method: what belongs into the constructor, and what stays in the call.

`ClassAnalysis` runs through the statements of a class once, as an interpreter would, and collects
the lines of the converted constructor beside the replacements in its methods.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import libcst as cst

from linnet.migration.declaring import Declaring
from linnet.migration.expressions import is_false
from linnet.migration.making import Block, Line, parameters_of
from linnet.migration.names import all_nodes, assigned_names, code, dotted, target_names
from linnet.migration.program import ClassModel, Creation, LinenProgram
from linnet.migration.values import (
    UNKNOWN,
    Array,
    ArrayOrigin,
    Group,
    LeftAlone,
    Listed,
    Made,
    Making,
    Repeated,
    Several,
    ShapeOf,
    Static,
    Value,
    elements,
    join,
    names_in,
    normal,
    substitute,
)


class ClassAnalysis(Declaring):
    """What the converter finds out about one class."""

    def __init__(self, program: LinenProgram, model: ClassModel, others: dict[str, Any]):
        super().__init__(program, model)
        self.others = others
        self.renamed: dict[str, str] = {}
        self.dropped: set[Any] = set()
        self.wrapped: dict[cst.CSTNode, str] = {}
        self.unrolled: dict[cst.CSTNode, Creation] = {}
        self.bound_in: dict[cst.CSTNode, list[tuple[str, bool]]] = {}
        self.results: list[Value] = []
        self.calls: list[str] = []
        self.called: dict[str, set[str]] = {}
        self.used_symbols: set[str] = set()
        self.declared: set[cst.CSTNode] = set()
        # Sizes that are variables of the constructor, as other classes may write them.
        self.closed: dict[str, str | None] = {}

    def program_class(self, model: ClassModel) -> ClassAnalysis:
        found = self.others.get(model.name)
        if found is None:
            raise LeftAlone(f"{model.name} is used before it is defined, or was left as it is")
        return found

    def wanted_symbols(self) -> list[str]:
        """The sizes that the constructor takes."""
        return [name for name in self.symbols if name in self.used_symbols]

    def run(self) -> None:
        """Analyses the class."""
        if self.model.setup is not None:
            self.in_setup = True
            self.method = "setup"
            self.run_method("setup", {})
            self.in_setup = False
        for name in dict.fromkeys([self.model.main, *self.model.methods]):
            if name in self.model.methods and name != "setup" and name not in self.returns:
                self.method = name
                self.enter(name)
        for name, callees in self.called.items():
            for callee in callees:
                self.method_late.setdefault(name, set()).update(self.method_late.get(callee, ()))

    def enter(self, name: str) -> None:
        """Runs a method as it is called from outside."""
        node = self.model.methods[name]
        is_helper = name.startswith("_") and name in set().union(*self.called.values())
        may_make = name == self.model.compact or is_helper
        if not may_make and self.makes_modules(node.body):
            raise LeftAlone(f"{name} makes submodules, but is neither compact nor setup", node)
        if any(code(d.decorator) in ("staticmethod", "classmethod") for d in node.decorators):
            return
        arguments: dict[str, Value] = {
            parameter: Array(origin=ArrayOrigin(name, parameter))
            for parameter in parameters_of(node)
        }
        self.returns[name] = self.run_method(name, arguments)

    def run_method(self, name: str, arguments: dict[str, Value]) -> Value:
        node = self.model.all_methods[name]
        saved = (self.env, self.local_names, self.results, self.method)
        self.env, self.results, self.method = dict(arguments), [], name
        self.local_names = assigned_names(node.body) | set(parameters_of(node))
        self.calls.append(name)
        try:
            self.run_block(node.body)
            found = self.results
            return functools.reduce(join, found) if found else UNKNOWN
        finally:
            self.calls.pop()
            self.env, self.local_names, self.results, self.method = saved

    # ---- statements ------------------------------------------------------------------------------

    def run_block(self, block: Any) -> None:
        for statement in block.body:
            self.run_statement(statement)

    def run_statement(self, node: Any) -> None:
        if isinstance(node, cst.SimpleStatementLine):
            for small in node.body:
                self.run_small(small, node)
        elif isinstance(node, cst.For):
            self.run_for(node)
        elif isinstance(node, cst.If):
            self.run_if(node)
        elif isinstance(node, cst.With):
            for item in node.items:
                self.eval(item.item)
            self.run_block(node.body)
        elif isinstance(node, cst.FunctionDef):
            if self.makes_modules(node.body):
                raise LeftAlone(f"the function {node.name.value} makes submodules", node)
            self.env[node.name.value] = UNKNOWN
        elif self.makes_modules(node):
            raise LeftAlone("submodules are made inside a statement of this kind", node)
        else:
            for name in assigned_names(node):
                self.env[name] = UNKNOWN

    def without_constructor_names(self, value: Value) -> Value:
        """A value that is returned, without variables of the constructor where that is possible."""
        if isinstance(value, Several):
            return Several(tuple(map(self.without_constructor_names, value.items)))
        if isinstance(value, Array) and any(name in self.closed for name in value.tail if name):
            return Array(tuple(self.closed.get(t) or t if t else t for t in value.tail))
        return value

    def run_small(self, node: Any, line: Any) -> None:
        if isinstance(node, cst.Assign):
            value = self.eval(node.value)
            for target in node.targets:
                self.bind(target.target, value, node.value, line)
        elif isinstance(node, cst.AnnAssign) and node.value is not None:
            self.bind(node.target, self.eval(node.value), node.value, line)
        elif isinstance(node, cst.AugAssign):
            value = self.elementwise(self.eval(node.target), self.eval(node.value))
            if isinstance(node.target, cst.Name):
                self.env[node.target.value] = value
        elif isinstance(node, cst.Return):
            value = UNKNOWN if node.value is None else self.eval(node.value)
            self.results.append(self.without_constructor_names(value))
        elif isinstance(node, cst.Expr):
            self.eval(node.value)

    def bind(self, target: Any, value: Value, node: Any, line: Any) -> None:
        """An assignment to one target."""
        if isinstance(target, cst.Name):
            self.bind_name(target.value, value, line)
        elif isinstance(target, cst.Tuple | cst.List):
            self.bind_several(target, value, line)
        elif isinstance(target, cst.Attribute) and dotted(target.value) == "self":
            self.bind_attribute(target.attr.value, value, node)

    def bind_name(self, name: str, value: Value, line: Any) -> None:
        if line is not None:
            self.bound_in.setdefault(line, []).append((name, isinstance(value, Static)))
        if value == Several(()) and self.method == self.model.compact:
            self.env[name] = Listed(f"{name}_features")
            self.lines.append(Line(f"{name}_features = []"))
        elif isinstance(value, Static):
            meaning = value.resolved()
            known = name not in names_in(meaning)
            self.env[name] = Static(name, meaning if known else None)
            if not self.in_setup and value.text != name:
                self.lines.append(Line(f"{name} = {value.text}"))
        elif isinstance(value, Making):
            factory = value.factory
            if self.in_setup:
                if factory.lifts or factory.late:
                    raise LeftAlone("a lifted class in setup", line)
            else:
                self.dropped.add(line)
                if "(" in factory.text:
                    self.lines.append(Line(f"{name} = {factory.text}"))
            if self.in_setup or "(" in factory.text:
                factory = dataclasses.replace(factory, text=name)
            self.env[name] = Making(factory)
        else:
            self.env[name] = value

    def bind_several(self, target: Any, value: Value, line: Any) -> None:
        elements_of = [element.value for element in target.elements]
        starred = any(isinstance(e, cst.StarredElement) for e in target.elements)
        count = len(elements_of)
        for position, element in enumerate(elements_of):
            item: Value = UNKNOWN
            if isinstance(value, ShapeOf):
                axis = position - count
                passed = any(isinstance(e, cst.StarredElement) for e in target.elements[position:])
                name = element.value if isinstance(element, cst.Name) else ""
                if not passed and self.used_later(name):
                    size = self.size(value.array, axis)
                    item = UNKNOWN if size is None else Static(size, size)
            elif starred:
                item = UNKNOWN
            elif isinstance(value, Several) and len(value.items) == count:
                item = value.items[position]
            elif isinstance(value, Repeated):
                item = value.item
            elif isinstance(value, Static):
                parts = elements(value.text) or []
                text = parts[position] if len(parts) == count else f"{value.text}[{position}]"
                item = Static(text, self.resolved(text))
            elif isinstance(value, Array):
                origin = self.item_of(value, position)
                item = Array(value.tail, origin)
            if isinstance(element, cst.Name):
                self.bind_name(element.value, item, line)

    def used_later(self, name: str) -> bool:
        """Whether a size that was unpacked is used to make something."""
        node = self.model.methods.get(self.method)
        return node is not None and name in self.made_with(node)

    def made_with(self, node: cst.CSTNode) -> set[str]:
        """The names in what is assigned, and in the arguments of calls that make submodules."""
        found: set[str] = set()
        for inner in all_nodes(node):
            if isinstance(inner, cst.Call) and self.makes_itself(inner):
                found = found.union(*(_names(argument.value) for argument in inner.args))
            elif isinstance(inner, cst.Assign):
                found |= _names(inner.value)
        return found

    def bind_attribute(self, name: str, value: Value, node: Any) -> None:
        if not self.in_setup:
            return
        if isinstance(value, Static):
            self.attributes[name] = Static(f"self.{name}")
            return
        self.attributes[name] = value
        if isinstance(value, Made):
            value.creation.path = name
            value.creation.reference = value.creation.target = f"self.{name}"
        elif isinstance(value, Group):
            self.bind_group(name, value, node)
        elif isinstance(value, Making):
            raise LeftAlone(f"self.{name} is a class of submodules", node)
        if node in self.params and self.params[node] != name:
            self.renamed[name] = self.params[node]
        if node in self.variables and self.variables[node] != name:
            self.renamed[name] = self.variables[node]

    def bind_group(self, name: str, group: Group, node: Any) -> None:
        is_dict = isinstance(node, cst.Dict | cst.DictComp)
        self.wrapped[node] = "nnx.Dict" if is_dict else "nnx.List"
        members = list(group.members.items()) + ([(None, group.each)] if group.each else [])
        for key, member in members:
            if isinstance(member, Group):
                inner = _element(node, key)
                if inner is None:
                    raise LeftAlone("submodules in nested lists", node)
                self.bind_group(f"{name}_{key}", member, inner)
            elif isinstance(member, Made):
                creation = member.creation
                creation.path = name if key is None else f"{name}_{key}"
                creation.target = f"self.{name}[{key!r}]" if key is not None else f"each {name}"
                if key is None and isinstance(node, cst.ListComp):
                    self.unrolled[node] = creation

    # ---- loops and branches ----------------------------------------------------------------------

    def run_for(self, node: cst.For) -> None:
        header = self.try_static(node.iter)
        if header is None and self.listed_in(node.iter):
            header = self.sizes_of_lists(node.iter)
        if header is None:
            self.run_loop_over(node)
            return
        names = target_names(node.target)
        lists = self.list_targets(node)
        target = code(node.target)
        for name in lists:
            target = re.sub(rf"\b{name}\b", f"{name}_features", target)

        def body() -> None:
            for name in lists:
                self.env[name] = Array((f"{name}_features",))
            self.run_block(node.body)

        self.run_static_loop([(target, header)], names - set(lists), body, node.body)

    def listed_in(self, node: cst.CSTNode) -> bool:
        """Whether an expression mentions a list of arrays."""
        return any(isinstance(self.env.get(name), Listed) for name in _names(node))

    def sizes_of_lists(self, node: cst.BaseExpression) -> str | None:
        """An iterable for the constructor, with sizes in the place of arrays."""
        saved = dict(self.env)
        for name, value in saved.items():
            if isinstance(value, Listed):
                self.env[name] = Static(value.name)
        try:
            return self.try_static(node)
        finally:
            self.env = saved

    def list_targets(self, node: cst.For) -> list[str]:
        """The variables of a loop that come from lists of arrays."""
        call = node.iter if isinstance(node.iter, cst.Call) else None
        function = None if call is None else dotted(call.func)
        if call is None or function in ("reversed", "list"):
            return [code(node.target)] if self.listed_in(node.iter) else []
        sources = [argument.value for argument in call.args if argument.keyword is None]
        targets = node.target.elements if isinstance(node.target, cst.Tuple) else []
        places = [element.value for element in targets]
        if function == "enumerate":
            places = places[1:]
        pairs = zip(places, sources, strict=False)
        return [code(place) for place, source in pairs if self.listed_in(source)]

    def run_static_loop(self, heads: Any, names: set[str], body: Any, node: cst.CSTNode) -> None:
        """A loop that the constructor can run too; sizes that change in it get a variable there."""
        entry, outer, counts = dict(self.env), self.lines, dict(self.counts)
        end = self.loop_once(names, body)
        shadows: dict[str, str] = {}
        for name in sorted(assigned_names(node)):
            before, after = entry.get(name), end.get(name)
            if isinstance(before, Array) and isinstance(after, Array) and before != after:
                if before.tail[-1:] == after.tail[-1:] and before.tail:
                    continue
                first = self.size(before, -1)
                if first is not None and after.tail[-1:] != (first,):
                    shadows[name] = first
        if shadows:
            self.env, self.lines, self.counts = dict(entry), outer, counts
            for name, first in shadows.items():
                if first != f"{name}_features":
                    self.lines.append(Line(f"{name}_features = {first}"))
                self.env[name] = Array((f"{name}_features",))
            outer = self.lines
            end = self.loop_once(names, body)
            for name in shadows:
                size = self.size(end.get(name), -1)
                if size is None:
                    raise LeftAlone(f"the size of {name} changes in a loop in an unknown way", node)
                if size != f"{name}_features":
                    self.lines.append(Line(f"{name}_features = {size}"))
        inner: list[Line | Block] = self.lines
        self.lines = outer
        for target, iterable in reversed(heads):
            inner = [Block(f"for {target} in {iterable}", inner)]
        self.lines.extend(inner)
        self.env = {name: join(end.get(name, UNKNOWN), entry.get(name, UNKNOWN)) for name in end}
        for name, value in end.items():
            if not isinstance(value, Array) or not value.tail:
                continue
            last = self.after_loop(value.tail[-1], heads)
            if name in shadows:
                self.closed[f"{name}_features"] = last
                self.env[name] = Array((f"{name}_features" if value.tail[-1] else None,))
            elif last != value.tail[-1]:
                self.env[name] = Array((last,))

    def loop_once(self, names: set[str], body: Any) -> dict[str, Value]:
        self.lines = []
        for name in names:
            self.env[name] = Static(name)
        self.depth += 1
        try:
            body()
        finally:
            self.depth -= 1
        return self.env

    def after_loop(self, text: str | None, heads: Any) -> str | None:
        """A size in terms of a loop's variables, after the loop: with their last values."""
        if text is None:
            return None
        meanings: dict[str, str] = {}
        for target, iterable in heads:
            meanings |= _last_values(target, iterable)
        unknown = {n for target, _ in heads for n in names_in(target)} - set(meanings)
        for name in names_in(text):
            if self.closed.get(name):
                meanings[name] = str(self.closed[name])
        if not names_in(text).isdisjoint(unknown):
            return None
        return normal(substitute(text, {k: self.resolved(v) for k, v in meanings.items()}))

    def run_loop_over(self, node: cst.For) -> None:
        """A loop over submodules, or over something that exists in a call only."""
        value = self.eval(node.iter)
        if self.makes_modules(node.body):
            raise LeftAlone("submodules are made in a loop whose length depends on the call", node)
        inner = [a.value for a in node.iter.args] if isinstance(node.iter, cst.Call) else []
        groups = [found for v in (value, *map(self.eval, inner)) if (found := _grouped(v))]
        group = groups[0] if groups else None
        turns = max((len(found.members) for found in groups), default=0)
        if turns:
            for position in range(turns):
                self.bind_loop_target(node, value, position)
                self.run_block(node.body)
            return
        entry = dict(self.env)
        self.bind_loop_target(node, value, 0)
        self.run_block(node.body)
        for name in sorted(assigned_names(node.body)):
            before, after = entry.get(name), self.env.get(name)
            if not isinstance(before, Array) or not isinstance(after, Array) or before == after:
                continue
            first = self.size(before, -1)
            after_size = self.size(after, -1)
            if first is None or after_size is None or first == after_size:
                continue
            self.carry(group, first, after_size)
            loops = group.each.creation.loops if group and isinstance(group.each, Made) else []
            last = self.after_loop(after_size, loops)
            self.env[name] = Array((last,))

    def carry(self, group: Group | None, first: str, following: str) -> None:
        """The submodules of a list are called in turn, with other sizes than the first."""
        if group is None or not isinstance(group.each, Made):
            return
        creation = group.each.creation
        is_unrolled = any(other.node is creation.node for other in self.unrolled.values())
        names = [name for name, size in creation.sizes.items() if size == first]
        for name in names:
            if creation.target.startswith("each ") and is_unrolled:
                creation.carried = (first, following)
                creation.sizes[name] = f"{creation.path}_features"
            else:
                raise LeftAlone("layers of a list have inputs of different sizes", creation.node)

    def bind_loop_target(self, node: cst.For, value: Value, position: int) -> None:
        target = node.target
        names = (
            [element.value for element in target.elements] if isinstance(target, cst.Tuple) else []
        )
        call = node.iter if isinstance(node.iter, cst.Call) else None
        function = None if call is None else dotted(call.func)
        if call is not None and function in ("enumerate", "zip", "reversed", "list"):
            given = [argument.value for argument in call.args if not argument.keyword]
            values = [_item(self.eval(argument), position) for argument in given]
            if function == "enumerate":
                values = [UNKNOWN, *values]
            if function in ("reversed", "list"):
                values, names = values[:1], [target]
            for name, item in zip(names, values, strict=False):
                self.bind(name, item, None, None)
        else:
            self.bind(target, _item(value, position), None, None)

    def run_if(self, node: cst.If) -> None:
        test = self.try_static(node.test)
        if test is None:
            self.eval(node.test)
        entry, outer = dict(self.env), self.lines
        branches = []
        parts = [node.body] + ([] if node.orelse is None else [node.orelse])
        for part in parts:
            self.env, self.lines = dict(entry), []
            with self.branching(test):
                if isinstance(part, cst.If):
                    self.run_if(part)
                elif part is node.body and is_false(test):
                    pass
                else:
                    self.run_block(part.body if isinstance(part, cst.Else) else part)
            branches.append((self.env, self.lines))
        if len(branches) == 1:
            branches.append((dict(entry), []))
        self.lines = outer
        self.merge(test, branches)

    def merge(self, test: str | None, branches: Any) -> None:
        """Goes on after a branch; sizes that differ get a variable in the constructor."""
        (first, first_lines), (second, second_lines) = branches
        merged: dict[str, Value] = {}
        for name in {**first, **second}:
            one, other = first.get(name, UNKNOWN), second.get(name, UNKNOWN)
            merged[name] = join(one, other)
            if isinstance(one, Static) and isinstance(other, Static) and one != other:
                merged[name] = Static(name)
            if test is None or one == other or is_false(test):
                continue
            if isinstance(one, Array) and isinstance(other, Array):
                sizes = self.size(one, -1), self.size(other, -1)
                if None not in sizes and sizes[0] != sizes[1]:
                    shadow = f"{name}_features"
                    for size, lines in zip(sizes, (first_lines, second_lines), strict=True):
                        if size != shadow:
                            lines.append(Line(f"{shadow} = {size}"))
                    self.closed[shadow] = None
                    merged[name] = Array((shadow,))
        self.env = merged
        if test is None:
            self.lines += [*first_lines, *second_lines]
        elif is_false(test):
            self.lines += second_lines
        else:
            if test.startswith("(") and normal(test) == test[1:-1]:
                test = test[1:-1]
            self.lines.append(Block(f"if {test}", first_lines))
            self.lines.append(Block("else", second_lines))

    def comprehension(self, clause: cst.CompFor, element: cst.BaseExpression) -> Value:
        """Submodules that a comprehension makes or calls: a loop in the constructor."""
        if clause.inner_for_in is not None or clause.ifs:
            raise LeftAlone(
                "submodules in a comprehension with conditions or several loops", clause
            )
        header = self.try_static(clause.iter)
        found: list[Value] = []
        names = target_names(clause.target)
        saved = {name: self.env.get(name) for name in names}
        if header is None:
            self.bind(clause.target, _item(self.eval(clause.iter), 0), None, None)
            return self.eval(element)
        head = (code(clause.target), header)
        self.loops.append(head)

        def body() -> None:
            found.append(self.eval(element))

        try:
            if self.in_setup:
                self.loop_once(names, body)
            else:
                self.run_static_loop([head], names, body, element)
        finally:
            self.loops.pop()
            for name, value in saved.items():
                if value is None:
                    self.env.pop(name, None)
                else:
                    self.env[name] = value
        return found[-1]


def _grouped(value: Value) -> Group | None:
    if isinstance(value, Group):
        return value
    if isinstance(value, Several):
        return next((found for item in value.items if (found := _grouped(item))), None)
    return None


def _item(value: Value, position: int) -> Value:
    """What a loop over a value gives at a turn."""
    if isinstance(value, Group):
        members = list(value.members.values())
        return value.each or (members[position] if position < len(members) else UNKNOWN)
    if isinstance(value, Repeated):
        return value.item
    if isinstance(value, Several) and value.items:
        return functools.reduce(join, value.items)
    return UNKNOWN


def _element(node: Any, key: Any) -> Any:
    if isinstance(node, cst.List | cst.Tuple) and isinstance(key, int):
        return node.elements[key].value
    return None


def _names(node: cst.CSTNode) -> set[str]:
    return {n.value for n in all_nodes(node) if isinstance(n, cst.Name)}


def _last_values(target: str, iterable: str) -> dict[str, str]:
    """The values of the variables of a loop after it."""
    try:
        function, _, rest = iterable.partition("(")
        inside = rest.removesuffix(")")
        names = [name.strip() for name in target.strip("()").split(",")]
        if function == "range" and len(names) == 1:
            parts = elements(f"({inside},)") or []
            end = parts[-1] if len(parts) <= 2 else ""
            return {names[0]: f"({end}) - 1"} if end else {}
        if function == "enumerate" and len(names) == 2:
            return {names[0]: f"len({inside}) - 1", names[1]: f"({inside})[-1]"}
        if len(names) == 1 and "(" not in iterable:
            return {names[0]: f"({iterable})[-1]"}
    except SyntaxError:
        pass
    return {}
