"""Expressions of a Linen method: what they are worth to a constructor, and what they make."""

from __future__ import annotations

import ast
import re
from typing import Any

import libcst as cst

from linnet.migration.feeding import Feeder
from linnet.migration.layers import SAME_SHAPE
from linnet.migration.making import DERIVED, Line
from linnet.migration.names import (
    Replacing,
    code,
    dotted,
    keywords_of,
    positional_of,
    target_names,
)
from linnet.migration.program import UNSUPPORTED_METHODS
from linnet.migration.values import (
    UNKNOWN,
    Array,
    Group,
    LeftAlone,
    Listed,
    Made,
    Making,
    NotStatic,
    RecordValue,
    Repeated,
    Several,
    ShapeOf,
    Static,
    Value,
    constant,
    elements,
    join,
    names_in,
    normal,
    substitute,
)


class Expressions(Feeder):
    """Evaluates expressions. ``env`` holds what is known of the local names."""

    allow_rngs = False

    def comprehension(self, clause: cst.CompFor, element: cst.BaseExpression) -> Value:
        raise NotImplementedError

    def own_call(self, name: str, node: cst.Call) -> Value | None:
        raise NotImplementedError

    # ---- text that is valid in a constructor ----------------------------------------------------

    def static(self, node: cst.BaseExpression) -> str:
        """An expression as text for the constructor; NotStatic where it depends on a call."""
        found = node.visit(_StaticText(self))
        assert isinstance(found, cst.BaseExpression)
        return code(found)

    def try_static(self, node: cst.BaseExpression) -> str | None:
        try:
            return self.static(node)
        except NotStatic:
            return None

    def resolved(self, text: str) -> str:
        """An expression in which local names are replaced by what they stand for."""
        meanings = {
            name: value.meaning
            for name, value in self.env.items()
            if isinstance(value, Static) and value.meaning is not None
        }
        return substitute(text, meanings)

    # ---- evaluation ------------------------------------------------------------------------------

    def eval(self, node: cst.BaseExpression) -> Value:
        """What is known of an expression. Submodules that it makes are noted."""
        method = getattr(self, f"eval_{type(node).__name__}", None)
        found = method(node) if method is not None else None
        if found is not None:
            return found
        text = self.try_static(node)
        if text is not None:
            return Static(text, self.resolved(text))
        if method is None:
            self.eval_children(node)
        return UNKNOWN

    def eval_children(self, node: cst.CSTNode) -> None:
        for child in node.children:
            if isinstance(child, cst.BaseExpression):
                self.eval(child)
            else:
                self.eval_children(child)

    def eval_Name(self, node: cst.Name) -> Value | None:
        found = self.env.get(node.value)
        if found is not None:
            return found
        factory = self.factory_named(node)
        return None if factory is None else Making(factory)

    def eval_Attribute(self, node: cst.Attribute) -> Value | None:
        if dotted(node.value) == "self":
            return self.own_attribute(node.attr.value, node)
        factory = self.factory_named(node)
        if factory is not None:
            return Making(factory)
        owner = self.eval(node.value)
        attr = node.attr.value
        if isinstance(owner, RecordValue):
            return owner.fields.get(attr, UNKNOWN)
        if isinstance(owner, Array):
            if attr == "shape":
                return ShapeOf(owner)
            if attr in ("T", "mT"):
                return Array()
            whole = owner.origin is not None and not owner.tail
            return owner if attr == "value" and not whole else UNKNOWN
        return None if isinstance(owner, Static) else UNKNOWN

    def own_attribute(self, name: str, node: cst.CSTNode) -> Value | None:
        """``self.name``."""
        self.check_own(name, node)
        if name in self.late_names:
            self.uses_late(name)
            return UNKNOWN
        if name in self.attributes:
            return self.attributes[name]
        factory = self.program.factory_fields.get((self.model.name, name))
        if factory is not None:
            return Making(factory)
        field = self.model.field(name)
        if field is not None:
            is_module = re.search(r"\bModule\b", field.annotation or "")
            return UNKNOWN if is_module else Static(f"self.{name}")
        return UNKNOWN

    def check_own(self, name: str, node: cst.CSTNode) -> None:
        is_own = (
            self.model.field(name) is not None
            or name in self.attributes
            or name in self.model.methods
        )
        if name in UNSUPPORTED_METHODS and not is_own:
            raise LeftAlone(f"self.{name} has no counterpart", node)

    def eval_Subscript(self, node: cst.Subscript) -> Value | None:
        owner = self.eval(node.value)
        indices = [element.slice for element in node.slice]
        only = indices[0].value if isinstance(indices[0], cst.Index) else None
        key = constant(code(only)) if only is not None and len(indices) == 1 else None
        if isinstance(owner, ShapeOf):
            size = None if not isinstance(key, int) else self.size(owner.array, key)
            return UNKNOWN if size is None else Static(size, size)
        if (
            isinstance(owner, Several)
            and isinstance(key, int)
            and key in range(-len(owner.items), len(owner.items))
        ):
            return owner.items[key]
        if isinstance(owner, Repeated):
            return owner.item
        if isinstance(owner, Listed):
            index = None if only is None else self.try_static(only)
            return Array((None,)) if index is None else Array((f"{owner.name}[{index}]",))
        if isinstance(owner, Group):
            return owner.members.get(key) or owner.each or UNKNOWN
        if isinstance(owner, Array):
            return self.sliced(owner, indices)
        if isinstance(owner, Static):
            return None
        self.eval_children(node.slice[0])
        return UNKNOWN

    def sliced(self, array: Array, indices: list[cst.BaseSlice]) -> Value:
        """An array after ``x[...]``: whether the last axes are still there."""
        texts = [code(index) for index in indices]
        if texts[-1] == "None":
            return Array((*array.tail, "1"))
        if all(text in (":", "None", "...") for text in texts):
            return array if "None" not in texts else Array(self.tail_of(array))
        last = indices[-1]
        if texts[0] == "..." and len(texts) == 2:
            if isinstance(last, cst.Slice) and texts[-1] != ":":
                return array.with_last(self.slice_size(last, array))
            if isinstance(last, cst.Index):
                return Array(array.tail[:-1])
        return Array(self.tail_of(array))

    def slice_size(self, index: cst.Slice, array: Array) -> str | None:
        """The size of ``x[..., a:b]``."""
        ends = [
            None if part is None else self.try_static(part) for part in (index.lower, index.upper)
        ]
        lower, upper = ends
        if index.lower is None and upper is not None and not upper.startswith("-"):
            return self.resolved(upper)
        if index.upper is None and lower is not None and not lower.startswith("-"):
            size = self.size(array, -1)
            return None if size is None else normal(f"({size}) - ({self.resolved(lower)})")
        return None

    def eval_Tuple(self, node: cst.Tuple | cst.List) -> Value | None:
        if any(isinstance(element, cst.StarredElement) for element in node.elements):
            return None
        items = tuple(self.eval(element.value) for element in node.elements)
        if items and all(isinstance(item, Static) for item in items):
            return None
        if items and all(isinstance(item, Made) for item in items) and self.in_setup:
            return Group(dict(enumerate(items)))
        return Several(items)

    eval_List = eval_Tuple

    def eval_Dict(self, node: cst.Dict) -> Value | None:
        members = {}
        for element in node.elements:
            if not isinstance(element, cst.DictElement):
                return None
            key, value = constant(code(element.key)), self.eval(element.value)
            if key is not None:
                members[key] = value
        if members and all(isinstance(value, Made | Group) for value in members.values()):
            return Group(members)
        return None

    def eval_BinaryOperation(self, node: cst.BinaryOperation) -> Value | None:
        left, right = self.eval(node.left), self.eval(node.right)
        if isinstance(left, Static) and isinstance(right, Static):
            return None
        if isinstance(node.operator, cst.MatrixMultiply):
            size = self.size(right, -1) if isinstance(right, Array) and right.tail else None
            return left.with_last(size) if isinstance(left, Array) else UNKNOWN
        return self.elementwise(left, right)

    def elementwise(self, left: Value, right: Value) -> Value:
        """What broadcasting gives; an axis of size 1 is the other's."""
        arrays = [value for value in (left, right) if isinstance(value, Array)]
        if not arrays:
            return UNKNOWN
        wide = [array for array in arrays if not (array.tail and array.tail[-1] in ("1", None))]
        chosen = wide or arrays
        lasting = [a for a in chosen if not any(map(self.is_local, a.tail))]
        return (lasting or chosen)[0]

    def eval_UnaryOperation(self, node: cst.UnaryOperation) -> Value | None:
        inner = self.eval(node.expression)
        if isinstance(inner, Static):
            return None
        return UNKNOWN if isinstance(node.operator, cst.Not) else inner

    def eval_IfExp(self, node: cst.IfExp) -> Value | None:
        test = self.try_static(node.test)
        with self.branching(test):
            first, second = self.eval(node.body), self.eval(node.orelse)
        if isinstance(first, Static) and isinstance(second, Static):
            return None
        if isinstance(first, Made) and isinstance(second, Made):
            return Several((first, second)) if first != second else first
        return join(first, second)

    def eval_Comparison(self, node: cst.Comparison) -> Value | None:
        if self.try_static(node) is not None:
            return None
        self.eval_children(node)
        return UNKNOWN

    def eval_Lambda(self, node: cst.Lambda) -> Value | None:
        if self.makes_modules(node.body):
            raise LeftAlone("a lambda makes submodules or variables", node)
        return None if self.try_static(node) is not None else UNKNOWN

    def eval_ListComp(self, node: Any) -> Value | None:
        if not self.makes_modules(node.elt) and not self.touches_modules(node):
            return None if self.try_static(node) is not None else UNKNOWN
        return self.grouped(self.comprehension(node.for_in, node.elt))

    eval_GeneratorExp = eval_ListComp

    def eval_DictComp(self, node: cst.DictComp) -> Value | None:
        if not self.makes_modules(node.value):
            return None if self.try_static(node) is not None else UNKNOWN
        return self.grouped(self.comprehension(node.for_in, node.value))

    def grouped(self, item: Value) -> Value:
        return Group({}, item) if isinstance(item, Made) else Repeated(item)

    # ---- calls -----------------------------------------------------------------------------------

    def eval_Call(self, node: cst.Call) -> Value | None:
        name = dotted(node.func)
        if name is not None and name.startswith("self."):
            found = self.own_call(name.removeprefix("self."), node)
            if found is not None:
                return found
        function = self.program.names.meaning(node.func, self.env)
        if function in DERIVED:
            factory = self.derived_factory(function, node)
            if factory is not None:
                return Making(factory)
        if function is not None and function.startswith("linen."):
            self.check_linen(function, node)
        if isinstance(node.func, cst.Attribute) and name is None:
            return self.method_call(node.func, node)
        inner = node.func.func if isinstance(node.func, cst.Call) else None
        maker = None if inner is None else dotted(inner)
        field = maker[5:] if maker is not None and maker.startswith("self.") else ""
        if (
            inner is not None
            and self.model.field(field)
            and self.factory_of(inner) is None
            and field not in self.late_names
        ):
            raise LeftAlone(f"what {maker} makes is not known here", node)
        owner = self.eval(node.func)
        if isinstance(owner, Making):
            return Made(self.make(owner.factory, node))
        if isinstance(owner, Made):
            return self.feed(owner.creation, node, "__call__")
        made = [x for x in owner.items if isinstance(x, Made)] if isinstance(owner, Several) else []
        if made and isinstance(owner, Several) and len(made) == len(owner.items):
            results = [self.feed(item.creation, node, "__call__") for item in made]
            return join(results[0], results[-1])
        if isinstance(node.func, cst.Attribute):
            return self.method_call(node.func, node)
        if name in self.program.records and name not in self.env:
            return self.record(name, node)
        return self.function_call(node, function)

    def record(self, name: str, node: cst.Call) -> Value:
        fields = self.program.records[name]
        values = {}
        for position, argument in enumerate(node.args):
            key = argument.keyword.value if argument.keyword else None
            key = key or (fields[position] if position < len(fields) else "")
            values[key] = self.eval(argument.value)
        return RecordValue(values)

    def method_call(self, function: cst.Attribute, node: cst.Call) -> Value | None:
        """``owner.method(...)`` where the owner is an array, a submodule, or anything else."""
        owner, method = self.eval(function.value), function.attr.value
        if isinstance(owner, Made):
            return self.feed(owner.creation, node, method)
        if method == "append" and isinstance(function.value, cst.Name) and len(node.args) == 1:
            item = self.eval(node.args[0].value)
            if isinstance(item, Made):
                self.env[function.value.value] = Group({}, item)
                return UNKNOWN
        if isinstance(owner, Listed):
            return self.list_method(owner, method, node)
        if isinstance(owner, Array):
            return self.array_method(owner, method, node)
        if owner == UNKNOWN and method in ("reshape", "astype"):
            return self.array_method(Array(), method, node)
        meaning = self.program.names.meaning(function, self.env)
        if isinstance(owner, Static) or meaning is not None or owner is UNKNOWN:
            return self.function_call(node, meaning)
        return UNKNOWN

    def list_method(self, owner: Listed, method: str, node: cst.Call) -> Value:
        """A list of arrays: the constructor does the same to the list of sizes."""
        values, _ = self.eval_arguments(node)
        if method == "append" and len(values) == 1:
            size = self.size(values[0], -1)
            self.lines.append(Line(f"{owner.name}.append({size})"))
            return UNKNOWN
        if method == "pop":
            name = f"{owner.name}_last"
            arguments = ", ".join(self.static(a.value) for a in node.args)
            self.lines.append(Line(f"{name} = {owner.name}.pop({arguments})"))
            return Array((name,))
        return UNKNOWN

    def array_method(self, array: Array, method: str, node: cst.Call) -> Value:
        arguments = positional_of(node)
        self.eval_arguments(node)
        if method in ("astype", "clip", "block_until_ready", "copy", "round"):
            return array
        if method == "reshape":
            shape = arguments[0] if len(arguments) == 1 else None
            parts = _parts(shape) if shape is not None else arguments
            return self.reshaped(parts if parts is not None else [shape])
        if method in ("mean", "sum", "max", "min", "std", "var", "prod", "any", "all"):
            return self.reduced(array, node, arguments)
        if method in ("at", "transpose", "swapaxes", "ravel"):
            return Array()
        return UNKNOWN

    def reshaped(self, parts: list[Any]) -> Value:
        """An array of the given shape: sizes at the end as far as they are known."""
        tail: list[str | None] = []
        for part in reversed(parts):
            text = None if part is None else self.try_static(part)
            if text is None or constant(text) == -1:
                break
            tail.insert(0, self.resolved(text))
        return Array(tuple(tail))

    def reduced(self, array: Array, node: cst.Call, arguments: list[Any]) -> Value:
        """An array after a sum or the like over some axes."""
        given = keywords_of(node)
        axis = given.get("axis", arguments[0] if arguments else None)
        axes = constant(code(axis)) if axis is not None else None
        keeps = "keepdims" in given and code(given["keepdims"]) == "True"
        if axes is None:
            return Array() if axis is None else UNKNOWN
        axes = axes if isinstance(axes, tuple) else (axes,)
        if -1 in axes:
            return array.with_last("1") if keeps else Array(array.tail[:-1])
        return array if keeps else Array(self.tail_of(array)[-1:])

    def eval_arguments(self, node: cst.Call) -> tuple[list[Value], dict[str, Value]]:
        """The values of the arguments of a call, by position and by name."""
        by_position, by_name = [], {}
        for argument in node.args:
            value = self.eval(argument.value)
            if argument.keyword is not None:
                by_name[argument.keyword.value] = value
            elif argument.star == "":
                by_position.append(value)
            else:
                by_position.append(UNKNOWN)
        return by_position, by_name

    def function_call(self, node: cst.Call, function: str | None) -> Value | None:
        """A call of a function that is no method of this class."""
        by_position, by_name = self.eval_arguments(node)
        values = [*by_position, *by_name.values()]
        if all(isinstance(value, Static) for value in values) and self.try_static(node) is not None:
            return None
        last = (function or "").rpartition(".")[2]
        arguments = positional_of(node)
        first = by_position[0] if by_position else next(iter(by_name.values()), UNKNOWN)
        if function is None:
            # A function of the program, or one that was passed in: an activation keeps the shape.
            own = isinstance(self.eval(node.func), Static) and len(by_position) == 1
            return first if own and isinstance(first, Array) else UNKNOWN
        if last in SAME_SHAPE:
            arrays = [value for value in by_position if isinstance(value, Array)]
            return arrays[0] if arrays else first if isinstance(first, Array) else UNKNOWN
        if last in ("avg_pool", "max_pool", "min_pool", "pool") and isinstance(first, Array):
            return Array((self.size(first, -1),))
        if last == "one_hot" and len(arguments) > 1:
            text = self.try_static(arguments[1])
            return Array((None if text is None else self.resolved(text),))
        return self.array_function(last, node, first, by_position)

    def array_function(self, name: str, node: cst.Call, first: Value, values: Any) -> Value:
        arguments = positional_of(node)
        keywords = {name: code(value) for name, value in keywords_of(node).items()}
        if name in ("concatenate", "hstack") and isinstance(first, Several | Repeated):
            return self.concatenated(
                first, keywords.get("axis", code(arguments[1]) if len(arguments) > 1 else "0")
            )
        if name == "stack" and isinstance(first, Several):
            return Array(self.tail_of(first.items[0]) if isinstance(first.items[0], Array) else ())
        if name in ("zeros", "ones", "full", "empty") and arguments:
            return self.reshaped(_parts(arguments[0]) or [None])
        if name in ("normal", "uniform") and len(arguments) > 1:
            shape = values[1]
            if isinstance(shape, ShapeOf):
                return shape.array
            return self.reshaped(_parts(arguments[1]) or [None])
        if not isinstance(first, Array):
            return UNKNOWN
        if name == "reshape" and len(arguments) > 1:
            return self.reshaped(_parts(arguments[1]) or [arguments[1]])
        if name in ("mean", "sum", "max", "min", "std", "var", "prod"):
            return self.reduced(first, node, arguments[1:])
        if name in ("squeeze", "take_along_axis"):
            return Array()
        if name == "expand_dims":
            axis = keywords.get("axis", code(arguments[1]) if len(arguments) > 1 else "0")
            return Array((*first.tail, "1")) if axis == "-1" else Array(self.tail_of(first))
        if (
            name in ("split", "array_split")
            and keywords.get("axis", code(arguments[2]) if len(arguments) > 2 else "0") == "-1"
        ):
            parts = self.try_static(arguments[1])
            size = self.size(first, -1)
            if parts is not None and size is not None and elements(parts) is None:
                return Repeated(first.with_last(normal(f"({size}) // ({self.resolved(parts)})")))
        if name == "pad":
            return Array(self.tail_of(first))
        return UNKNOWN

    def concatenated(self, first: Several | Repeated, axis: str) -> Value:
        items = first.items if isinstance(first, Several) else (first.item,)
        arrays = [item for item in items if isinstance(item, Array)]
        if not arrays:
            return UNKNOWN
        if axis != "-1":
            return Array(self.tail_of(arrays[0])[-1:])
        sizes = [self.size(item, -1) if isinstance(item, Array) else None for item in items]
        if None in sizes or not isinstance(first, Several):
            return Array((None,))
        return arrays[0].with_last(normal(" + ".join(f"({size})" for size in sizes)))

    # ---- shapes ----------------------------------------------------------------------------------

    def is_local(self, text: str | None) -> bool:
        """Whether a size is a variable of the constructor, which other classes do not see."""
        return text is None or any(
            name.endswith("_features") and name not in self.symbols for name in names_in(text)
        )

    def tail_of(self, array: Array) -> tuple[str | None, ...]:
        """The sizes at the end, at least that of the last axis."""
        return array.tail or (self.size(array, -1),)


def _parts(node: Any) -> list[Any] | None:
    """The elements of a tuple that is written out; None stands for what cannot be told."""
    if isinstance(node, cst.Tuple | cst.List):
        return [
            None if isinstance(element, cst.StarredElement) else element.value
            for element in node.elements
        ]
    return None


class _StaticText(Replacing):
    """Rewrites an expression for the constructor; refuses what depends on a call."""

    def __init__(self, analysis: Expressions):
        super().__init__()
        self.analysis = analysis
        self.bound_names: set[str] = set()

    def replacement(self, node: cst.CSTNode) -> cst.CSTNode | None:
        own = getattr(self, type(node).__name__.lower(), None)
        if own is not None:
            return own(node)
        if isinstance(node, cst.Lambda):
            for parameter in node.params.params:
                self.bound_names.add(parameter.name.value)
            return node.with_changes(body=node.body.visit(self))
        if isinstance(node, cst.CompFor):
            self.bound_names |= target_names(node.target)
            return None
        if isinstance(node, cst.BaseSimpleComp | cst.DictComp):
            inner: cst.CompFor | None = node.for_in
            while inner is not None:
                self.bound_names |= target_names(inner.target)
                inner = inner.inner_for_in
        return None

    def name(self, node: cst.Name) -> cst.CSTNode:
        name = node.value
        if name in self.bound_names:
            return node
        value = self.analysis.env.get(name)
        if value is None:
            if name in self.analysis.local_names or not self.analysis.program.names.is_global(name):
                raise NotStatic(name)
            self.analysis.check_static_name(node)
            return node
        return self.of_value(value)

    def of_value(self, value: Value | None) -> cst.CSTNode:
        if isinstance(value, Static):
            return cst.parse_expression(value.text)
        if isinstance(value, Making) and not value.factory.late and value.factory.text:
            return cst.parse_expression(value.factory.text)
        if isinstance(value, Made) and value.creation.target.startswith("self."):
            return cst.parse_expression(value.creation.target)
        raise NotStatic

    def attribute(self, node: cst.Attribute) -> cst.CSTNode:
        if dotted(node.value) == "self":
            return self.of_value(self.analysis.own_attribute(node.attr.value, node))
        self.analysis.check_static_name(node)
        return node.with_changes(value=node.value.visit(self))

    def arg(self, node: cst.Arg) -> cst.CSTNode:
        return node.with_changes(value=node.value.visit(self))

    def subscript(self, node: cst.Subscript) -> cst.CSTNode | None:
        is_size = isinstance(node.value, cst.Attribute) and node.value.attr.value == "shape"
        return self.of_value(self.analysis.eval(node)) if is_size else None

    def comparison(self, node: cst.Comparison) -> cst.CSTNode | None:
        text = self.analysis.compared_shapes(node)
        return None if text is None else cst.parse_expression(text)

    def call(self, node: cst.Call) -> cst.CSTNode | None:
        name = dotted(node.func)
        if name == "self.is_initializing":
            return cst.Name("False")
        if name == "self.make_rng" and self.analysis.allow_rngs:
            stream = node.args[0].value if node.args else cst.SimpleString('"params"')
            return cst.parse_expression(f"rngs[{code(stream)}]()")
        if name is not None and name.startswith("self."):
            raise NotStatic
        if name == "len" and len(node.args) == 1:
            value = self.analysis.eval(node.args[0].value)
            if isinstance(value, ShapeOf):
                raise NotStatic
        if self.analysis.factory_of(node.func) is not None:
            raise NotStatic
        return None


def is_false(text: str | None) -> bool:
    """Whether an expression is a literal that counts as false."""
    try:
        return text is not None and not ast.literal_eval(text)
    except ValueError:
        return False
