"""Submodules of a Linen module: where they are made, what they are called with, how they are written.

A submodule is made in the constructor of the converted class. What its own constructor wants to know
of its input is found where it is called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import libcst as cst

from linnet import linen
from linnet.migration.layers import DROPPED, KEPT_FUNCTIONS, Layer
from linnet.migration.names import code, dotted
from linnet.migration.program import (
    ClassModel,
    Creation,
    Factory,
    Helper,
    Lift,
    Program,
    Symbol,
)
from linnet.migration.values import (
    UNKNOWN,
    Array,
    Group,
    LeftAlone,
    Made,
    Making,
    NotStatic,
    Origin,
    Record,
    Repeated,
    Several,
    Static,
    Value,
    attributes_in,
    constant,
    elements,
    names_in,
    normal,
    substitute,
)


@dataclasses.dataclass
class Line:
    """A line of the constructor: text, or a submodule that is made; ``needed`` in any case."""

    content: str | Creation
    needed: bool = False


@dataclasses.dataclass
class Block:
    """A loop or branch of the constructor: its header, and what is inside."""

    header: str
    lines: list[Line | Block]


@dataclasses.dataclass
class CallEdit:
    """How the arguments of a call change: names for arguments by position, and arguments added."""

    named: tuple[str, ...] = ()
    start: int = 1
    added: tuple[tuple[str, str], ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    swapped: bool = False


class Maker:
    """What a class makes. `Expressions` and `ClassAnalysis` complete it."""

    program: Program
    model: ClassModel

    def __init__(self, program: Program, model: ClassModel):
        self.program = program
        self.model = model
        self.env: dict[str, Value] = {}
        self.local_names: set[str] = set()
        self.attributes: dict[str, Value] = {}
        self.symbols: dict[str, Symbol] = {}
        self.creations: dict[cst.CSTNode, Creation] = {}
        self.replacements: dict[cst.CSTNode, str] = {}
        self.edits: dict[cst.CSTNode, CallEdit] = {}
        self.lifted: dict[cst.CSTNode, Creation] = {}
        self.lines: list[Line | Block] = []
        self.counts: dict[str, int] = {}
        self.method = model.main
        self.in_setup = False
        self.depth = 0
        self.late_depth = 0
        self.loops: list[tuple[str, str]] = []
        self.params: dict[str, str] = {}
        self.variables: dict[str, str] = {}
        self.returns: dict[str, Value] = {}
        self.method_late: dict[str, set[str]] = {}
        self.uses_rngs = False
        self.uses_mode = False
        self.notes: list[tuple[cst.CSTNode | None, str]] = []
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
        """What is made inside is not always made: if ``test`` holds, or depending on the call."""
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
        if is_module and self.program.layer(node.func if isinstance(node, cst.Call) else node) is None:
            raise LeftAlone(f"linen.{name} has no counterpart in NNX that keeps its parameters", node)
        lifted = "jit cond switch while_loop custom_vjp vjp jvp map_variables remat_scan".split()
        if name in lifted or name in ("scan", "remat", "checkpoint", "vmap", "share_scope", "BatchApply"):
            raise LeftAlone(f"linen.{name} is used here in a way that is not converted", node)

    def check_static_name(self, node: cst.CSTNode) -> None:
        meaning = self.program.names.meaning(node, self.env)
        if meaning is not None and meaning.startswith("linen.") and self.program.layer(node) is None:
            self.check_linen(meaning, node)

    def makes_modules(self, node: cst.CSTNode) -> bool:
        """Whether a piece of code makes submodules, parameters or variables."""
        if isinstance(node, cst.Call):
            name = dotted(node.func)
            if name in ("self.param", "self.variable") or self.factory_of(node.func) is not None:
                return True
        return any(self.makes_modules(child) for child in node.children)

    def touches_modules(self, node: cst.CSTNode) -> bool:
        """Whether a piece of code mentions a submodule."""
        if isinstance(node, cst.Name) and isinstance(self.env.get(node.value), Made | Group):
            return True
        name = dotted(node) or ""
        if name.startswith("self.") and isinstance(self.attributes.get(name[5:]), Made | Group):
            return True
        return any(self.touches_modules(child) for child in node.children)

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
        bound, late, parts = [], [], [factory.text]
        for position, argument in enumerate(node.args[1:]):
            if argument.star:
                raise LeftAlone("a partial of a module with * or **", node)
            name = argument.keyword.value if argument.keyword else names[position]
            text = self.try_static(argument.value)
            if text is not None:
                bound.append((name, self.resolved(text)))
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
            factory, text=text, bound=(*factory.bound, *bound), late=(*factory.late, *late)
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

    def symbol(self, origin: Origin, axis: int) -> Symbol:
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
        if name in taken:
            name = f"{what}_{ending}" if f"{what}_{ending}" not in taken else f"{origin.method}_{what}_{ending}"
        found = self.symbols[name] = Symbol(name, origin, axis)
        return found

    def item_of(self, array: Array, number: int) -> Origin | None:
        origin = array.origin
        if origin is None or origin.item is not None or array.tail or origin.strides:
            return None
        return dataclasses.replace(origin, item=number)

    def unpacked(self, array: Array) -> bool:
        """Whether an argument was seen to be a tuple."""
        return False

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
        if left.origin is None or right.origin is None:
            raise NotStatic
        plain = [dataclasses.replace(side.origin, strides=()) for side in (left, right) if side.origin]
        sizes = [self.size(side, -1) for side in (left, right)]
        if plain[0] != plain[1] or None in sizes:
            raise NotStatic
        strides = [s for s in left.origin.strides if s not in right.origin.strides]
        strides += [s for s in right.origin.strides if s not in left.origin.strides]
        parts = [f"{sizes[0]} != {sizes[1]}"] if sizes[0] != sizes[1] else []
        parts += [f"{stride} not in (1, (1,), (1, 1), (1, 1, 1))" for stride in dict.fromkeys(strides)]
        test = " or ".join(parts) or "False"
        return f"({test})" if isinstance(operator, cst.NotEqual) else f"(not ({test}))"

    # ---- calling ---------------------------------------------------------------------------------

    def feed(self, creation: Creation, node: cst.Call, method: str) -> Value:
        """A call of a submodule: notes the sizes of its input; what is known of its output."""
        values, named = self.eval_arguments(node)
        factory = creation.factory
        if factory.lifts and method == "__call__":
            self.lifted[node] = creation
        edit = self.call_edit(creation, method)
        if edit != CallEdit() and not (factory.lifts and method == "__call__"):
            self.edits[node] = edit
        if isinstance(factory.target, ClassModel):
            return self.feed_class(creation, factory.target, method, values, named)
        layer = factory.target.layer if isinstance(factory.target, Helper) else factory.target
        self.attribute_edit(creation, layer, node)
        if method == "attend":
            return Array((self.text_of(creation, "num_embeddings"),))
        if method != "__call__":
            return UNKNOWN
        given = values[layer.fed] if layer.fed < len(values) else next(iter(named.values()), UNKNOWN)
        found = self.feed_layer(creation, layer, given)
        return Several((UNKNOWN, found)) if factory.lifts and layer.output != "cell" else found

    def call_edit(self, creation: Creation, method: str) -> CallEdit:
        target = creation.factory.target
        if isinstance(target, ClassModel):
            analysed = self.program_class(target)
            wanted = analysed.method_late.get(method, set())
            added = tuple((k, v) for k, v in creation.late.items() if k in wanted)
            return CallEdit(added=added)
        layer = target.layer if isinstance(target, Helper) else target
        if method == "initialize_carry":
            return CallEdit(swapped=True)
        if method != "__call__":
            return CallEdit()
        renamed = {"Dropout": (("rng", "rngs"),), "RNN": (("init_key", "rngs"),)}
        added = tuple((k, v) for k, v in creation.late.items() if k in layer.late)
        return CallEdit(layer.keyword_only, 1, added, renamed.get(layer.linen, ()))

    def attribute_edit(self, creation: Creation, layer: Layer, node: cst.Call) -> None:
        """Arguments of a constructor that depend on the call, and that the call does not take."""
        others = {k: v for k, v in creation.late.items() if k not in layer.late}
        if not others:
            return
        for name in others:
            if layer.nnx_name(name) not in layer.accepted or name in layer.first:
                raise LeftAlone(f"{layer.linen} is given {name}, which depends on the call", node)
        start = creation.reference if node.func is creation.node else code(node.func)
        settings = ", ".join(f"{name}={text}" for name, text in others.items())
        self.replacements[node.func] = f"nnx.with_attributes({start}, {settings})"

    def feed_layer(self, creation: Creation, layer: Layer, given: Value) -> Value:
        if layer.inner:
            return self.feed_inner(creation, given)
        if layer.sizes and not creation.fed:
            creation.fed = True
            creation.sizes[layer.size_name] = self.layer_size(creation, layer, given)
        array = given if isinstance(given, Array) else Array()
        if layer.output == "same":
            return array
        features = self.text_of(creation, "features")
        if layer.output == "features":
            return self.after_conv(creation, layer, array.with_last(features))
        if layer.output == "appended":
            return Array((features,))
        if layer.output == "axes":
            axes = _axes(creation)
            sizes = elements(features) if features is not None else None
            tail = tuple(sizes) if sizes is not None else (features,)
            return array.with_last(*tail, removed=len(axes))
        if layer.output == "attention":
            out = self.text_of(creation, "out_features")
            return array if out is None else array.with_last(out)
        if layer.output == "cell":
            return Several((UNKNOWN, Array((features,))))
        return Array()

    def after_conv(self, creation: Creation, layer: Layer, array: Array) -> Array:
        """Whether the axes before the last keep their sizes."""
        if layer.linen == "Dense":
            return array
        padding, strides = (creation.argument(name) for name in ("padding", "strides"))
        others = ("input_dilation",)
        same = padding is None or constant(padding) == "SAME"
        if not same or any(creation.argument(name) for name in others) or array.origin is None:
            return Array(array.tail)
        if layer.linen != "Conv":
            return Array(array.tail)
        if strides is None or constant(strides) in (1, (1,), (1, 1), (1, 1, 1)):
            return array
        strides = self.resolved(strides)
        origin = dataclasses.replace(array.origin, strides=(*array.origin.strides, strides))
        return Array(array.tail, origin)

    def layer_size(self, creation: Creation, layer: Layer, given: Value) -> str | None:
        if layer.sizes == "features":
            return self.size(given, -1)
        sizes = [self.size(given, axis) for axis in _axes(creation)]
        if None in sizes:
            return None
        return str(sizes[0]) if len(sizes) == 1 else f"({', '.join(map(str, sizes))})"

    def text_of(self, creation: Creation, name: str) -> str | None:
        """An argument of a constructor, with local names replaced by what they stand for."""
        target = creation.factory.target
        text = creation.argument(name)
        if isinstance(target, Helper) and text is None:
            text = self.helper_text(creation, target, name)
        return None if not text else self.resolved(text)

    def helper_text(self, creation: Creation, helper: Helper, name: str) -> str | None:
        """What a helper passes to its layer, in terms of what the helper is given."""
        fields = helper.layer.fields
        for position, argument in enumerate(helper.call.args):
            key = argument.keyword.value if argument.keyword else None
            if key is None and not argument.star and position < len(fields):
                key = fields[position]
            if key == name:
                text = substitute(code(argument.value), creation.given)
                return text if names_in(text).isdisjoint(set(helper.parameters) - set(creation.given)) else None
        return None

    def feed_inner(self, creation: Creation, given: Value) -> Value:
        """A layer around layers: they are called with what it is called with."""
        layer = creation.factory.target
        assert isinstance(layer, Layer)
        found = [creation.inner.get(name) for name in layer.inner]
        if layer.linen == "Sequential":
            items = found[0].items if isinstance(found[0], Several) else ()
            if isinstance(found[0], Group):
                items = tuple(found[0].members.values())
            for item in items:
                given = self.feed_value(item, given)
            return given
        outputs = [self.feed_value(item, given) for item in found if item is not None]
        outputs = [out.items[-1] if isinstance(out, Several) else out for out in outputs]
        if creation.argument("return_carry") is not None:
            return Several((UNKNOWN, outputs[0])) if outputs else UNKNOWN
        if layer.linen == "Bidirectional" and len(outputs) == 2:
            sizes = [self.size(out, -1) for out in outputs]
            if None not in sizes:
                return Array((normal(f"({sizes[0]}) + ({sizes[1]})"),))
            return Array((None,))
        return outputs[0] if outputs else UNKNOWN

    def feed_value(self, value: Value, given: Value) -> Value:
        """A submodule, function or class that is called with one value inside of another layer."""
        if isinstance(value, Made):
            target = value.creation.factory.target
            if isinstance(target, ClassModel):
                return self.feed_class(value.creation, target, "__call__", [given], {})
            layer = target.layer if isinstance(target, Helper) else target
            return self.feed_layer(value.creation, layer, given)
        return given

    def feed_class(self, creation: Creation, model: ClassModel, method: str, values, named) -> Value:
        analysed = self.program_class(model)
        if method not in model.methods:
            return UNKNOWN
        names = parameters_of(model.methods[method])
        bound = dict(zip(names, values, strict=False)) | named
        scanned = any(lift.name == "scan" for lift in creation.factory.lifts)
        for symbol in analysed.symbols.values():
            if symbol.origin is None or symbol.origin.method != method:
                creation.sizes.setdefault(symbol.name, None)
                continue
            value = bound.get(symbol.origin.parameter)
            if symbol.origin.item is not None:
                items = value.items if isinstance(value, Several) else ()
                value = items[symbol.origin.item] if symbol.origin.item < len(items) else None
            if creation.sizes.get(symbol.name) is None:
                creation.sizes[symbol.name] = self.size(value, symbol.axis)
        creation.fed = True
        found = self.translated(creation, analysed, bound, analysed.returns.get(method, UNKNOWN))
        if scanned and isinstance(found, Several) and len(found.items) == 2:
            carry = values[0] if values and isinstance(values[0], Array) else found.items[0]
            return Several((carry, Repeated(found.items[1])))
        return found

    def program_class(self, model: ClassModel) -> Any:
        raise NotImplementedError

    def translated(self, creation: Creation, analysed: Any, bound: dict, value: Value) -> Value:
        """What a method of a submodule returns, in terms of this class."""
        if isinstance(value, Several):
            return Several(tuple(self.translated(creation, analysed, bound, v) for v in value.items))
        if isinstance(value, Record):
            return Record(
                {k: self.translated(creation, analysed, bound, v) for k, v in value.fields.items()}
            )
        if isinstance(value, Array):
            source = None
            if value.origin is not None and value.origin.item is None:
                source = bound.get(value.origin.parameter)
            if not value.tail:
                return source if isinstance(source, Array) else Array()
            tail = tuple(self.translate(creation, analysed, text) for text in value.tail)
            return Array(tail)
        return UNKNOWN

    def translate(self, creation: Creation, analysed: Any, text: str | None) -> str | None:
        if text is None:
            return None
        meanings: dict[str, str] = {}
        for field in analysed.model.fields:
            given = creation.argument(field.name) or field.default
            if given:
                meanings[f"self.{field.name}"] = self.resolved(given)
        meanings |= {name: size for name, size in creation.sizes.items() if size is not None}
        missing = [f"self.{name}" for name in attributes_in(text) if f"self.{name}" not in meanings]
        names = names_in(text) - {"self"} - set(meanings)
        if missing or any(not self.program.names.is_global(name) for name in names):
            return None
        return normal(substitute(text, meanings))


WIDTH = 88

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


def _axes(creation: Creation) -> tuple[int, ...]:
    """The axes that a general dense layer contracts."""
    text = creation.argument("axis")
    axes = -1 if text is None else constant(text)
    if axes is None or creation.argument("batch_dims") not in (None, "()"):
        raise LeftAlone("a DenseGeneral with batch_dims, or whose axis is not a literal", creation.node)
    return axes if isinstance(axes, tuple) else (axes,)


def parameters_of(node: cst.FunctionDef) -> list[str]:
    """The names of the parameters of a method, without ``self``."""
    params = node.params
    return [p.name.value for p in (*params.posonly_params, *params.params, *params.kwonly_params)][1:]


def list_name(prefix: str) -> str:
    """The local name for an iterator over a list of submodules."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", prefix).lower() + "_layers"


__all__ = ["KEPT_FUNCTIONS", "Block", "CallEdit", "Line", "Maker", "Static", "list_name", "parameters_of"]
