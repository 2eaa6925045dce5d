"""Calls of submodules: the sizes of their inputs, and what is known of their outputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import libcst as cst

from linnet.migration.layers import Layer
from linnet.migration.making import Maker, parameters_of
from linnet.migration.names import code
from linnet.migration.program import ClassModel, Creation, Helper
from linnet.migration.values import (
    UNKNOWN,
    Array,
    Group,
    LeftAlone,
    Made,
    RecordValue,
    Repeated,
    Several,
    Value,
    attributes_in,
    constant,
    elements,
    names_in,
    normal,
    substitute,
)


@dataclasses.dataclass
class CallEdit:
    """How the arguments of a call change: names for those after the first, and arguments added."""

    named: tuple[str, ...] = ()
    added: tuple[tuple[str, str], ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    swapped: bool = False


class Feeder(Maker):
    """Calls of submodules: the sizes of their inputs and outputs."""

    def feed(self, creation: Creation, node: cst.Call, method: str) -> Value:
        """A call of a submodule: notes the sizes of its input; what is known of its output."""
        values, named = self.eval_arguments(node)
        factory = creation.factory
        creation.called = True
        if factory.lifts and method == "__call__":
            self.lifted[node] = creation
        edit = self.call_edit(creation, method)
        if edit != CallEdit() and not (factory.lifts and method == "__call__"):
            self.edits[node] = edit
        if isinstance(factory.target, ClassModel):
            return self.feed_class(creation, factory.target, method, values, named)
        layer = factory.layer
        self.attribute_edit(creation, layer, node)
        if method == "attend":
            return Array((self.text_of(creation, "num_embeddings"),))
        if method != "__call__":
            return UNKNOWN
        given = (
            values[layer.fed] if layer.fed < len(values) else next(iter(named.values()), UNKNOWN)
        )
        found = self.feed_layer(creation, layer, given)
        return Several((UNKNOWN, found)) if factory.lifts and layer.output != "cell" else found

    def call_edit(self, creation: Creation, method: str) -> CallEdit:
        target = creation.factory.target
        if isinstance(target, ClassModel):
            analysed = self.program_class(target)
            wanted = analysed.method_late.get(method, set())
            added = tuple((k, v) for k, v in creation.late.items() if k in wanted)
            return CallEdit(added=added)
        layer = creation.factory.layer
        if method == "initialize_carry":
            return CallEdit(swapped=True)
        if method != "__call__":
            return CallEdit()
        renamed = {"Dropout": (("rng", "rngs"),), "RNN": (("init_key", "rngs"),)}
        added = tuple((k, v) for k, v in creation.late.items() if k in layer.late)
        return CallEdit(layer.keyword_only, added, renamed.get(layer.linen, ()))

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
        same = padding is None or constant(padding) == "SAME"
        if not same or creation.argument("input_dilation") or array.origin is None:
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
                missing = set(helper.parameters) - set(creation.given)
                return text if names_in(text).isdisjoint(missing) else None
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
            return self.feed_layer(value.creation, value.creation.factory.layer, given)
        return given

    def feed_class(
        self, creation: Creation, model: ClassModel, method: str, values: Any, named: Any
    ) -> Value:
        analysed = self.program_class(model)
        if method not in model.methods:
            return UNKNOWN
        names = parameters_of(model.methods[method])
        arguments = dict(zip(names, values, strict=False)) | named
        scanned = any(lift.name == "scan" for lift in creation.factory.lifts)
        for symbol in analysed.symbols.values():
            if symbol.origin is None or symbol.origin.method != method:
                creation.sizes.setdefault(symbol.name, None)
                continue
            value: Any = arguments.get(symbol.origin.parameter, UNKNOWN)
            if symbol.origin.item is not None:
                items: tuple[Value, ...] = value.items if isinstance(value, Several) else ()
                at = symbol.origin.item
                value = items[at] if at < len(items) else UNKNOWN
            if creation.sizes.get(symbol.name) is None:
                creation.sizes[symbol.name] = self.size(value, symbol.axis)
        creation.fed = True
        returned = analysed.returns.get(method, UNKNOWN)
        found = self.translated(creation, analysed, arguments, returned)
        if scanned and isinstance(found, Several) and len(found.items) == 2:
            carry = values[0] if values and isinstance(values[0], Array) else found.items[0]
            return Several((carry, Repeated(found.items[1])))
        return found

    def program_class(self, model: ClassModel) -> Any:
        raise NotImplementedError

    def translated(self, creation: Creation, analysed: Any, arguments: dict, value: Value) -> Value:
        """What a method of a submodule returns, in terms of this class."""
        if isinstance(value, Several):
            return Several(
                tuple(self.translated(creation, analysed, arguments, v) for v in value.items)
            )
        if isinstance(value, RecordValue):
            return RecordValue(
                {
                    k: self.translated(creation, analysed, arguments, v)
                    for k, v in value.fields.items()
                }
            )
        if isinstance(value, Array):
            source = None
            if value.origin is not None and value.origin.item is None:
                source = arguments.get(value.origin.parameter)
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


def _axes(creation: Creation) -> tuple[int, ...]:
    """The axes that a general dense layer contracts."""
    text = creation.argument("axis")
    axes = -1 if text is None else constant(text)
    if axes is None or creation.argument("batch_dims") not in (None, "()"):
        raise LeftAlone(
            "a DenseGeneral with batch_dims, or whose axis is not a literal", creation.node
        )
    return axes if isinstance(axes, tuple) else (axes,)
