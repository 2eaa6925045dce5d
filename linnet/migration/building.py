"""``model.init`` as the construction of a model: its sizes and its keys."""

from __future__ import annotations

import re
from typing import Any

import libcst as cst

from linnet.migration.bindings import BindingScope, size_text
from linnet.migration.layers import Layer
from linnet.migration.making import call_text, parameters_of
from linnet.migration.names import code, dotted
from linnet.migration.program import ClassModel, LinenProgram
from linnet.migration.values import LeftAlone, constant


class Building:
    """Models that are built where Linen initialises them."""

    program: LinenProgram
    analyses: dict[str, Any]

    def expr(self, node: Any, scope: BindingScope) -> Any:
        raise NotImplementedError

    def changed(self, line: Any, *texts: str) -> list[Any]:
        raise NotImplementedError

    def built(
        self, line: Any, name: str, made: cst.Call, init: cst.Call | None, scope: BindingScope
    ) -> Any:
        arguments = [code(self.expr(a, scope)).rstrip(",") for a in made.args]
        target = dotted(made.func) or ""
        layer = self.program.layer(made.func)
        if layer is not None:
            arguments, target = self.layer_arguments(made, layer, init), f"nnx.{layer.nnx}"
        else:
            arguments += self.sizes(self.analyses[target], init, line)
        key = "0" if init is None else self.key_text(init.args[0])
        text = f"{name} = {call_text(target, [*arguments, f'rngs=nnx.Rngs({key})'], 0)}"
        return self.changed(line, text)[0]

    def key_text(self, argument: cst.Arg) -> str:
        text = code(argument.value)
        match = re.fullmatch(r"jax\.random\.(?:key|PRNGKey)\((\d+)\)", text)
        if match is not None:
            return match[1]
        if isinstance(argument.value, cst.Dict):
            pairs = [
                f"{constant(code(e.key))}={code(e.value)}"
                for e in argument.value.elements
                if isinstance(e, cst.DictElement)
            ]
            return ", ".join(pairs)
        return text

    def sizes(self, analysis: Any, init: cst.Call | None, line: Any) -> list[str]:
        """The sizes that a constructor wants, from the inputs that ``init`` is given."""
        model: ClassModel = analysis.model
        given = {} if init is None else self.bound(model, init)
        found = []
        for name in analysis.wanted_symbols():
            symbol = analysis.symbols[name]
            size = None
            if symbol.origin is not None and symbol.origin.item is None:
                node = given.get(symbol.origin.parameter)
                size = None if node is None else size_text(node, symbol.axis)
                if size is None:
                    calls = self.program.traced.get(("inputs", "", model.name), [])
                    shapes = {c.get(symbol.origin.parameter) for c in calls}
                    if len(shapes) == 1 and None not in shapes:
                        size = str(shapes.pop()[symbol.axis])
            if size is None:
                raise LeftAlone(f"{model.name} wants {name}, which is not known here", line)
            found.append(f"{name}={size}")
        return found

    def bound(self, model: ClassModel, init: cst.Call) -> dict[str, cst.BaseExpression]:
        keywords = {a.keyword.value: a.value for a in init.args if a.keyword is not None}
        method = constant(code(keywords.pop("method"))) if "method" in keywords else model.main
        names = parameters_of(model.methods[method or model.main])
        positional = [a.value for a in init.args[1:] if a.keyword is None]
        return dict(zip(names, positional, strict=False)) | keywords

    def layer_arguments(self, made: cst.Call, layer: Layer, init: cst.Call | None) -> list[str]:
        if init is None or len(init.args) < 2 or layer.sizes == "axes":
            raise LeftAlone(f"a {layer.linen} whose input is not known", made)
        size = size_text(init.args[1].value, -1) if layer.sizes else None
        given = {
            (a.keyword.value if a.keyword else layer.fields[i]): code(a.value)
            for i, a in enumerate(made.args)
        }
        first = [given.pop(name) for name in layer.first if name in given]
        rest = [f"{layer.nnx_name(name)}={text}" for name, text in given.items()]
        return [*([size] if size else []), *first, *rest]
