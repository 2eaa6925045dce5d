"""Submodules of a Linen module: what makes them, with which arguments, and under which name.

A submodule is made in the constructor of the converted class. What its own constructor wants to
know of its input is found where it is called, in ``feeding``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import libcst as cst

from linnet import linen
from linnet.migration.layers import DROPPED, Layer
from linnet.migration.names import all_nodes, code, dotted
from linnet.migration.program import (
    ClassModel,
    Creation,
    Factory,
    Helper,
    Lift,
    LinenProgram,
    Symbol,
)
from linnet.migration.values import (
    Array,
    ArrayOrigin,
    Group,
    LeftAlone,
    Made,
    Making,
    NotStatic,
    Several,
    Value,
    constant,
)


@dataclasses.dataclass
class Line:
    """A line of the constructor: text, or a submodule to make; ``needed`` even if it is unused."""

    content: str | Creation
    needed: bool = False


@dataclasses.dataclass
class Block:
    """A loop or branch of the constructor: its header, and what is inside."""

    header: str
    lines: list[Line | Block]


class Maker:
    """The submodules that a class makes; its subclass `Expressions` has the abstract methods."""

    program: LinenProgram
    model: ClassModel

    def __init__(self, program: LinenProgram, model: ClassModel):
        self.program = program
        self.model = model
        self.env: dict[str, Value] = {}
        self.local_names: set[str] = set()
        self.attributes: dict[str, Value] = {}
        self.symbols: dict[str, Symbol] = {}
        self.creations: dict[cst.CSTNode, Creation] = {}
        self.replacements: dict[cst.CSTNode, str] = {}
        self.edits: dict[cst.CSTNode, Any] = {}
        self.lifted: dict[cst.CSTNode, Creation] = {}
        self.lines: list[Line | Block] = []
        self.counts: dict[str, int] = {}
        self.method = model.main
        self.in_setup = False
        self.depth = 0
        self.late_depth = 0
        self.loops: list[tuple[str, str]] = []
        self.params: dict[cst.CSTNode, str] = {}
        self.variables: dict[cst.CSTNode, str] = {}
        self.returns: dict[str, Value] = {}
        self.method_late: dict[str, set[str]] = {}
        self.uses_rngs = False
        self.uses_mode = False
        late = list(program.late_fields.get(model.name, ()))
        for (owner, _), factory in program.factory_fields.items():
            if owner == model.name:
                late += [text for _, text in factory.late]
        self.late_names = late

    def eval(self, node: cst.BaseExpression) -> Value:
        raise NotImplementedError

    def static(self, node: cst.BaseExpression) -> str:
        raise NotImplementedError

    def resolved(self, text: str) -> str:
        raise NotImplementedError

    def try_static(self, node: cst.BaseExpression) -> str | None:
        raise NotImplementedError

    def eval_arguments(self, node: cst.Call) -> tuple[list[Value], dict[str, Value]]:
        raise NotImplementedError

    def uses_late(self, name: str) -> None:
        self.method_late.setdefault(self.method, set()).add(name)

    @contextlib.contextmanager
    def branching(self, test: str | None) -> Iterator[None]:
        """A branch that is taken if ``test`` holds or, without a test, depending on the call."""
        self.depth += 1
        self.late_depth += test is None
        try:
            yield
        finally:
            self.depth -= 1
            self.late_depth -= test is None

    # ---- what makes submodules -------------------------------------------------------------------

    def factory_named(self, node: cst.CSTNode) -> Factory | None:
        """The layer, class or helper that a name means."""
        layer = self.program.layer(node, self.env)
        if layer is not None:
            return Factory(layer, f"nnx.{layer.nnx}")
        name = dotted(node)
        if name is None or name in self.env:
            return None
        if name in self.program.classes:
            return Factory(self.program.classes[name], name)
        if name in self.program.factories:
            return self.program.factories[name]
        if name in self.program.helpers:
            return Factory(self.program.helpers[name], name)
        return None

    def factory_of(self, node: cst.CSTNode) -> Factory | None:
        """The same for what is called: also a local name, a field, or a lifted class."""
        name = dotted(node)
        if name is not None:
            value = self.env.get(name)
            if isinstance(value, Making):
                return value.factory
            if name.startswith("self."):
                return self.program.factory_fields.get((self.model.name, name[5:]))
            return self.factory_named(node)
        if isinstance(node, cst.Call):
            function = self.program.names.meaning(node.func, self.env)
            if function in DERIVED:
                return self.factory_of(node.args[0].value) if node.args else None
        return None

    def check_linen(self, function: str, node: cst.CSTNode) -> None:
        """Refuses names of Linen that nothing is known about."""
        name = function.rpartition(".")[2]
        found = getattr(linen, name, None)
        is_module = isinstance(found, type) and issubclass(found, linen.Module)
        layer = self.program.layer(node.func if isinstance(node, cst.Call) else node)
        if is_module and layer is None:
            raise LeftAlone(
                f"linen.{name} has no counterpart in NNX that keeps its parameters", node
            )
        if name in NOT_CONVERTED:
            raise LeftAlone(f"linen.{name} is used here in a way that is not converted", node)

    def check_static_name(self, node: cst.CSTNode) -> None:
        meaning = self.program.names.meaning(node, self.env) or ""
        if meaning.startswith("linen.") and self.program.layer(node) is None:
            self.check_linen(meaning, node)

    def makes_modules(self, node: cst.CSTNode) -> bool:
        """Whether a piece of code makes submodules, parameters or variables."""
        return any(isinstance(n, cst.Call) and self.makes_itself(n) for n in all_nodes(node))

    def makes_itself(self, node: cst.Call) -> bool:
        """The same for a call, without its arguments."""
        name = dotted(node.func)
        return name in ("self.param", "self.variable") or self.factory_of(node.func) is not None

    def touches_modules(self, node: cst.CSTNode) -> bool:
        """Whether a piece of code mentions a submodule."""
        for name in filter(None, map(dotted, all_nodes(node))):
            known = self.attributes.get(name[5:]) if name[:5] == "self." else self.env.get(name)
            if isinstance(known, Made | Group):
                return True
        return False

    def derived_factory(self, function: str, node: cst.Call) -> Factory | None:
        """``partial(...)`` of a factory, or a lifted one."""
        if not node.args or node.args[0].keyword is not None:
            return None
        inner = self.eval(node.args[0].value)
        if not isinstance(inner, Making):
            if function != "functools.partial":
                raise LeftAlone(f"{code(node.func)} of something else than a class", node)
            return None
        factory = inner.factory
        if function != "functools.partial":
            if any(a.keyword is None for a in node.args[1:]):
                raise LeftAlone(f"{code(node.func)} with arguments by position", node)
            options = tuple((a.keyword.value, code(a.value)) for a in node.args[1:] if a.keyword)
            name = "remat" if function == "linen.checkpoint" else function.removeprefix("linen.")
            lift = Lift(name, options)
            return dataclasses.replace(factory, lifts=(lift, *factory.lifts))
        return self.partial(factory, node)

    def partial(self, factory: Factory, node: cst.Call) -> Factory:
        names = _fields(factory.target)
        given, late, parts = [], [], [factory.text]
        for position, argument in enumerate(node.args[1:]):
            if argument.star:
                raise LeftAlone("a partial of a module with * or **", node)
            name = argument.keyword.value if argument.keyword else names[position]
            text = self.try_static(argument.value)
            if text is not None:
                given.append((name, self.resolved(text)))
                if name not in DROPPED:
                    parts.append(f"{_nnx_name(factory.target, name)}={text}")
                continue
            value = self.eval(argument.value)
            if isinstance(value, Making) and isinstance(factory.target, ClassModel):
                self.program.learn_factory(factory.target.name, name, value.factory)
                parts.append(f"{name}={value.factory.text}")
                late += [(f"{name}_{key}", text) for key, text in value.factory.late]
                continue
            if isinstance(factory.target, ClassModel):
                self.program.learn_late(factory.target.name, name)
            late.append((name, code(argument.value)))
        text = call_text(code(node.func), parts) if len(parts) > 1 else parts[0]
        return dataclasses.replace(
            factory,
            text=text,
            given_before=(*factory.given_before, *given),
            late=(*factory.late, *late),
        )

    # ---- making ----------------------------------------------------------------------------------

    def make(self, factory: Factory, node: cst.Call) -> Creation:
        """Notes that a call makes a submodule."""
        creation = Creation(factory, node, {}, [], {})
        creation.late.update(factory.late)
        for _, text in factory.late:
            if text in self.late_names:
                self.uses_late(text)
        names = _fields(factory.target)
        name_node = None
        for position, argument in enumerate(node.args):
            if argument.star:
                creation.rest.append(argument.star + self.static(argument.value))
                continue
            name = argument.keyword.value if argument.keyword else None
            if name is None:
                if position >= len(names):
                    raise LeftAlone("more arguments than the class has fields", node)
                name = names[position]
            if name == "name":
                name_node = argument.value
            elif name != "parent":
                self.argument(creation, name, argument.value)
        if isinstance(factory.target, ClassModel) and factory.target.name in self.program.left:
            raise LeftAlone(f"{factory.target.name}, which it makes, was left as it is", node)
        creation.loops = list(self.loops)
        if not self.in_setup:
            self.name(creation, name_node)
            self.lines.append(Line(creation, needed=True))
            self.replacements[node] = creation.reference
        elif name_node is not None:
            raise LeftAlone("a submodule of setup with a name of its own", node)
        self.creations[node] = creation
        return creation

    def argument(self, creation: Creation, name: str, node: cst.BaseExpression) -> None:
        """One argument of a constructor: static, a submodule, a factory, or late."""
        target = creation.factory.target
        value = self.eval(node)
        if isinstance(value, Making):
            if not isinstance(target, ClassModel):
                raise LeftAlone(f"a class is passed to {creation.factory.class_name}", node)
            self.program.learn_factory(target.name, name, value.factory)
            creation.given[name] = value.factory.text
            creation.late.update((f"{name}_{key}", text) for key, text in value.factory.late)
            return
        if isinstance(value, Made | Group | Several) and _has_modules(value):
            creation.inner[name] = value
            return
        text = self.try_static(node)
        if text is not None:
            creation.given[name] = text
            return
        if isinstance(target, ClassModel):
            self.program.learn_late(target.name, name)
        elif isinstance(target, Helper):
            raise LeftAlone(f"{target.name} is given {name}, which depends on the call", node)
        creation.late[name] = code(node)

    def name(self, creation: Creation, node: cst.BaseExpression | None) -> None:
        """Where the constructor puts a submodule, and how a call refers to it."""
        if node is not None:
            text = self.try_static(node)
            if text is None:
                raise LeftAlone("the name of a submodule depends on the call", node)
            name = constant(text)
            if isinstance(name, str):
                if self.model.field(name) is not None or name in self.model.all_methods:
                    raise LeftAlone(f"a submodule has the name {name} of a field or method", node)
                creation.path = name
                creation.reference = creation.target = f"self.{name}"
            else:
                creation.reference = f"getattr(self, {code(node)})"
                creation.target = f"setattr {text}"
            return
        prefix = creation.factory.prefix
        if self.depth > self.late_depth:
            self.program.learn_listed(self.model.name, prefix)
        if prefix in self.program.listed.get(self.model.name, ()):
            if self.late_depth:
                raise LeftAlone(
                    f"{prefix} is made in a branch that depends on the call, and in a loop", node
                )
            creation.path = prefix
            creation.reference = f"next({list_name(prefix)})"
            creation.target = f"append {prefix}"
        else:
            number = self.counts.get(prefix, 0)
            self.counts[prefix] = number + 1
            creation.path = f"{prefix}_{number}"
            creation.reference = creation.target = f"self.{creation.path}"

    # ---- sizes -----------------------------------------------------------------------------------

    def size(self, value: Value | None, axis: int) -> str | None:
        """The size of an axis, as text for the constructor, or None."""
        if not isinstance(value, Array):
            return None
        if axis < 0 and len(value.tail) >= -axis:
            return value.tail[axis]
        origin = value.origin
        if origin is None or (origin.strides and axis != 0) or (axis >= 0 and value.tail):
            return None
        return self.symbol(dataclasses.replace(origin, strides=()), axis).name

    def symbol(self, origin: ArrayOrigin, axis: int) -> Symbol:
        """The argument of the converted constructor for the size of an argument of a method."""
        for known in self.symbols.values():
            if known.origin == origin and known.axis == axis:
                return known
        what = origin.parameter + ("" if origin.item is None else str(origin.item))
        ending = "features" if axis == -1 else f"size{axis}" if axis >= 0 else f"size_{-axis}"
        name = f"{what}_{ending}"
        first = parameters_of(self.model.methods[origin.method])[:1]
        if origin.method == self.model.main and [what] == first and axis == -1:
            name = "in_features"
        taken = {field.name for field in self.model.fields} | set(self.symbols)
        for other in (f"{what}_{ending}", f"{origin.method}_{what}_{ending}"):
            name = other if name in taken else name
        found = self.symbols[name] = Symbol(name, origin, axis)
        return found

    def item_of(self, array: Array, number: int) -> ArrayOrigin | None:
        origin = array.origin
        if origin is None or origin.item is not None or array.tail or origin.strides:
            return None
        return dataclasses.replace(origin, item=number)

    def compared_shapes(self, node: cst.Comparison) -> str | None:
        """``a.shape != b.shape`` for the constructor: other features, or strides on the way."""
        if len(node.comparisons) != 1:
            return None
        operator, right = node.comparisons[0].operator, node.comparisons[0].comparator
        sides = [side for side in (node.left, right) if isinstance(side, cst.Attribute)]
        if len(sides) != 2 or any(side.attr.value != "shape" for side in sides):
            return None
        left, right = (self.eval(side.value) for side in sides)
        if not isinstance(operator, cst.NotEqual | cst.Equal):
            raise NotStatic
        if not isinstance(left, Array) or not isinstance(right, Array):
            raise NotStatic
        one, other = left.origin, right.origin
        if one is None or other is None or dataclasses.replace(one, strides=other.strides) != other:
            raise NotStatic
        sizes = [self.size(side, -1) for side in (left, right)]
        if None in sizes:
            raise NotStatic
        strides = [s for s in one.strides if s not in other.strides]
        strides += [s for s in other.strides if s not in one.strides]
        parts = [f"{sizes[0]} != {sizes[1]}"] if sizes[0] != sizes[1] else []
        parts += [
            f"{stride} not in (1, (1,), (1, 1), (1, 1, 1))" for stride in dict.fromkeys(strides)
        ]
        test = " or ".join(parts) or "False"
        return f"({test})" if isinstance(operator, cst.NotEqual) else f"(not ({test}))"


WIDTH = 88

# Names of Linen that are not converted: a class that uses one outside the patterns above stays as
# it is.
NOT_CONVERTED = (
    "jit cond switch while_loop custom_vjp vjp jvp map_variables remat_scan scan remat checkpoint "
    "vmap share_scope BatchApply".split()
)

# What makes one factory from another.
DERIVED = ("functools.partial", "linen.scan", "linen.remat", "linen.checkpoint", "linen.vmap")


def call_text(function: str, arguments: list[str], indent: int = 8) -> str:
    """A call, on several lines where one would be long."""
    short = f"{function}({', '.join(arguments)})"
    if len(short) + indent <= WIDTH or not arguments:
        return short
    arguments = [argument.replace("\n", "\n    ") for argument in arguments]
    inner = f"    {', '.join(arguments)}"
    if len(inner) + indent <= WIDTH:
        return f"{function}(\n{inner}\n)"
    lines = "".join(f"    {argument},\n" for argument in arguments)
    return f"{function}(\n{lines})"


def _fields(target: Layer | ClassModel | Helper) -> list[str]:
    if isinstance(target, Layer):
        return target.fields
    return target.parameters if isinstance(target, Helper) else [f.name for f in target.fields]


def _nnx_name(target: Any, name: str) -> str:
    return target.nnx_name(name) if isinstance(target, Layer) else name


def _has_modules(value: Value) -> bool:
    if isinstance(value, Group):
        return True
    if isinstance(value, Several):
        return any(map(_has_modules, value.items))
    return isinstance(value, Made)


def parameters_of(node: cst.FunctionDef) -> list[str]:
    """The names of the parameters of a method, without ``self``."""
    params = node.params
    every = (*params.posonly_params, *params.params, *params.kwonly_params)
    return [p.name.value for p in every][1:]


def list_name(prefix: str) -> str:
    """The local name for an iterator over a list of submodules."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", prefix).lower() + "_layers"
