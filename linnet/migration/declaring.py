"""What Linen's Module offers its methods: parameters, variables, keys, and other methods."""

from __future__ import annotations

import re

import libcst as cst

from linnet.migration.expressions import Expressions
from linnet.migration.making import Line, parameters_of
from linnet.migration.names import code
from linnet.migration.program import Symbol
from linnet.migration.values import (
    UNKNOWN,
    Array,
    LeftAlone,
    NotStatic,
    Value,
    constant,
    elements,
)


class Declaring(Expressions):
    """``self.param``, ``self.variable``, ``self.make_rng`` and the like."""

    called: dict[str, set[str]]
    calls: list[str]
    declared: set[cst.CSTNode]

    def run_method(self, name: str, arguments: dict[str, Value]) -> Value:
        raise NotImplementedError

    # ---- what Linen's Module offers --------------------------------------------------------------

    def own_call(self, name: str, node: cst.Call) -> Value | None:
        """``self.name(...)``."""
        if name in ("param", "variable") and name not in self.model.methods:
            return self.declare(name, node)
        if name in self.model.all_methods:
            return self.call_method(name, node)
        if name == "make_rng":
            self.uses_rngs = True
            return UNKNOWN
        if name == "has_rng":
            self.uses_mode = True
            return UNKNOWN
        if name == "sow":
            self.program.variable_type(self.literal(node, "the collection of what is sown"))
            self.eval_arguments(node)
            return UNKNOWN
        if name == "perturb":
            values, _ = self.eval_arguments(node)
            return values[1] if len(values) > 1 else UNKNOWN
        if name in ("is_initializing", "has_variable"):
            return None if name == "is_initializing" else UNKNOWN
        self.check_own(name, node)
        return None

    def literal(self, node: cst.Call, what: str) -> str:
        text = constant(code(node.args[0].value)) if node.args else None
        if not isinstance(text, str):
            raise LeftAlone(f"{what} is not a literal", node)
        return text

    def call_method(self, name: str, node: cst.Call) -> Value:
        if name in self.calls:
            raise LeftAlone(f"{name} calls itself", node)
        self.called.setdefault(self.method, set()).add(name)
        values, named = self.eval_arguments(node)
        names = parameters_of(self.model.all_methods[name])
        unknown: dict[str, Value] = dict.fromkeys(names, UNKNOWN)
        arguments = unknown | dict(zip(names, values, strict=False)) | named
        if self.makes_modules(self.model.all_methods[name].body):
            raise LeftAlone(f"{name} makes submodules, but is neither compact nor setup", node)
        return self.run_method(name, arguments)

    def declare(self, function: str, node: cst.Call) -> Value:
        """``self.param`` and ``self.variable``: a Variable of the constructor."""
        start = 1 if function == "variable" else 0
        text = self.declaration(function, node, start)
        name_node = node.args[start].value
        name = constant(code(name_node))
        table = self.params if function == "param" else self.variables
        if isinstance(name, str):
            line, reference = f"self.{name} = {text}", f"self.{name}"
        else:
            line = f"setattr(self, {self.static(name_node)}, {text})"
            reference = f"getattr(self, {code(name_node)})"
        if self.in_setup:
            if not isinstance(name, str):
                raise LeftAlone("a variable of setup whose name is not a literal", node)
            table[node] = name
            self.declared.add(node)
            self.replacements[node] = text
        else:
            table[node] = str(name)
            self.lines.append(Line(line, needed=True))
            self.replacements[node] = reference + ("[...]" if function == "param" else "")
        return self.declared_shape(node, start) if function == "param" else UNKNOWN

    def declaration(self, function: str, node: cst.Call, start: int) -> str:
        if len(node.args) < start + 2:
            raise LeftAlone(f"self.{function} without an initialiser", node)
        collection = "params" if function == "param" else self.literal(node, "a collection")
        self.allow_rngs = True
        try:
            initialiser = self.static(node.args[start + 1].value)
            arguments = [
                (f"{a.keyword.value}=" if a.keyword else "") + self.static(a.value)
                for a in node.args[start + 2 :]
            ]
        except NotStatic:
            name = constant(code(node.args[start].value))
            initialiser = self.try_static(node.args[start + 1].value)
            if function != "param" or initialiser is None or not name:
                raise LeftAlone(
                    f"what self.{function} starts with depends on the call", node
                ) from None
            arguments = [self.asked_shape(name), *map(code, node.args[start + 3 :])]
        finally:
            self.allow_rngs = False
        if any(a.keyword and a.keyword.value == "unbox" for a in node.args):
            raise LeftAlone("self.param with unbox", node)
        if function == "param":
            arguments = ["rngs.params()", *arguments]
        plain = re.fullmatch(r"lambda: (.+)", initialiser, re.DOTALL)
        if plain is not None and not arguments:
            return f"{self.program.variable_type(collection)}({plain[1]})"
        if initialiser.startswith("lambda"):
            initialiser = f"({initialiser})"
        return f"{self.program.variable_type(collection)}({initialiser}({', '.join(arguments)}))"

    def asked_shape(self, name: str) -> str:
        """The shape of a parameter that depends on a call: from the trace, or asked for."""
        shape = self.program.traced.shapes.get((self.model.name, name))
        if shape is not None:
            return repr(shape)
        asked = f"{name}_shape"
        self.symbols[asked] = Symbol(asked)
        return asked

    def declared_shape(self, node: cst.Call, start: int) -> Value:
        if len(node.args) < start + 3:
            return Array()
        text = self.try_static(node.args[start + 2].value)
        sizes = None if text is None else elements(self.resolved(text))
        return Array(tuple(sizes)) if sizes else Array()
