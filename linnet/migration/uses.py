"""Expressions of a program that use a model, its variables or its TrainState."""

from __future__ import annotations

from typing import Any

import libcst as cst

from linnet.migration.bindings import (
    GRADIENT,
    MODEL,
    PARAMS,
    PLAIN,
    STATE,
    STATE_ATTRIBUTES,
    VARIABLES,
    Binding,
    BindingScope,
    Function,
)
from linnet.migration.emitting import expression
from linnet.migration.names import Replacing, code, dotted
from linnet.migration.values import LeftAlone


class Uses(Replacing):
    """Rewrites the uses of models and their variables in an expression."""

    def __init__(self, training: Any, scope: BindingScope):
        super().__init__()
        self.training = training
        self.scope = scope

    def replacement(self, node: Any) -> Any:
        if isinstance(node, cst.Lambda):
            inner = BindingScope(self.scope)
            for param in node.params.params:
                inner[param.name.value] = Binding(PLAIN)
            return node.with_changes(body=self.training.expr(node.body, inner))
        if isinstance(node, cst.Arg):
            return node.with_changes(value=node.value.visit(self))
        if isinstance(node, cst.Call):
            return self.call(node)
        if isinstance(node, cst.Attribute):
            return self.attribute(node)
        if isinstance(node, cst.Subscript):
            applied = self.first_of_apply(node)
            return self.value(node) if applied is None else applied
        if isinstance(node, cst.Name):
            return self.value(node)
        return None

    def value(self, node: Any) -> Any:
        if isinstance(node, cst.Name):
            binding = self.scope.find(node.value)
            known = self.training.functions.get(node.value)
            if binding is None and known is not None and (known.parameters or known.returned):
                raise LeftAlone(f"{node.value} is passed on", node)
            here = dict.get(self.scope, node.value)
            if here is not None and not here.built:
                raise LeftAlone(f"{node.value} is used before it is initialised", node)
        found = self.training.binding_of(node, self.scope)
        return None if found is None else expression(self.training.read(found, node))

    def first_of_apply(self, node: cst.Subscript) -> Any:
        """``model.apply(..., mutable=...)[0]``: the model has the updates already."""
        if not isinstance(node.value, cst.Call) or code(node.slice[0]) != "0":
            return None
        applied = self.training.apply_call(node.value, self.scope)
        return expression(applied.text) if applied is not None and applied.returns_updates else None

    def bind_call(self, node: cst.Call) -> Any:
        """``model.bind(variables)``: the model itself."""
        if not isinstance(node.func, cst.Attribute) or node.func.attr.value != "bind":
            return None
        owner = self.scope.find(dotted(node.func.value) or "")
        if owner is None or owner.sort != MODEL or len(node.args) != 1:
            return None
        variables = self.training.binding_of(node.args[0].value, self.scope)
        if variables is None or variables.sort != VARIABLES or variables.model != owner.model:
            return None
        return cst.Name(owner.model)

    def attribute(self, node: cst.Attribute) -> Any:
        owner = self.scope.find(dotted(node.value) or "")
        name = node.attr.value
        if owner is not None and owner.sort == STATE:
            if name == "step":
                return expression(f"{owner.optimizer}.step[...]")
            if name == "opt_state":
                return expression(f"{owner.optimizer}.opt_state")
            if name in STATE_ATTRIBUTES:
                raise LeftAlone(f"the use of {code(node)}", node)
        linens = ("apply", "init", "bind", "tabulate")
        if owner is not None and owner.sort == MODEL and name in linens:
            raise LeftAlone(f"the use of {code(node)}", node)
        found = self.value(node)
        return found if found is not None else node.with_changes(value=node.value.visit(self))

    def call(self, node: cst.Call) -> Any:
        applied = self.training.apply_call(node, self.scope)
        if applied is not None:
            if applied.returns_updates:
                raise LeftAlone("apply with mutable inside of an expression", node)
            self.training.converted.append(node)
            return expression(applied.text)
        model = self.bind_call(node)
        if model is not None:
            return model
        self.check_unknown(node)
        made = self.training.model_made(node)
        if made is not None:
            raise LeftAlone(f"{code(node.func)} is made inside of an expression", node)
        gradient = self.gradient(node)
        if gradient is not None:
            return gradient
        name = dotted(node.func) or ""
        function = self.training.functions.get(name)
        if function is not None:
            return node.with_changes(args=self.arguments(node, function))
        if self.training.is_gradient(node) and node.args:
            inner = self.training.functions.get(dotted(node.args[0].value) or "")
            if inner is not None and inner.parameters:
                new = code(node.func).replace("jax.", "nnx.", 1)
                return node.with_changes(func=expression(new))
        return None

    def check_unknown(self, node: cst.Call) -> None:
        """Refuses uses of models that were not recognised as such."""
        name = node.func.attr.value if isinstance(node.func, cst.Attribute) else ""
        known = self.training.program.names.meaning(node.func)
        given = code(node.args[0].value) if node.args else ""
        if name in ("apply_fn", "apply_gradients", "lazy_init", "init_with_output") or (
            name == "apply" and known is None and "params" in given
        ):
            raise LeftAlone(f"the use of {code(node.func)}", node)

    def gradient(self, node: cst.Call) -> Any:
        """``jax.grad(loss)(params, ...)``, or the same through a name."""
        inner = node.func
        named = self.scope.find(dotted(inner) or "")
        is_named = named is not None and named.sort == GRADIENT
        if not is_named and not self.training.is_gradient(inner):
            return None
        if not node.args:
            return None
        binding = self.training.binding_of(node.args[0].value, self.scope)
        if binding is None or binding.sort != PARAMS:
            return None
        if not is_named:
            assert isinstance(inner, cst.Call)
            if any(a.keyword and a.keyword.value == "argnums" for a in inner.args):
                raise LeftAlone("gradients with argnums", node)
            text = code(inner.func).replace("jax.", "nnx.", 1)
            inner = inner.with_changes(func=expression(text))
        first = node.args[0].with_changes(value=expression(binding.model))
        rest = [self.training.expr(a, self.scope) for a in node.args[1:]]
        return node.with_changes(func=inner, args=[first, *rest])

    def arguments(self, node: cst.Call, function: Function) -> list[cst.Arg]:
        """The arguments of a converted function: models for states and parameters."""
        names = [p.name.value for p in function.node.params.params]
        found: list[cst.Arg] = []
        for position, argument in enumerate(node.args):
            if argument.star:
                found.append(self.training.expr(argument, self.scope))
                continue
            name = argument.keyword.value if argument.keyword else names[position]
            wanted = function.parameters.get(name)
            given = self.training.binding_of(argument.value, self.scope)
            if wanted is None or wanted.sort == MODEL:
                found.append(self.training.expr(argument, self.scope))
                continue
            if given is None or given.sort != wanted.sort or argument.keyword is not None:
                raise LeftAlone(f"{code(node.func)} is given {code(argument.value)}", node)
            if wanted.sort != STATE and wanted.model in names:
                continue
            models = [given.model, given.optimizer] if given.sort == STATE else [given.model]
            found += [cst.Arg(cst.Name(model)) for model in models]
        return [a.with_changes(comma=cst.MaybeSentinel.DEFAULT) for a in found]
