"""Where models and TrainStates come from: ``model.init`` becomes a construction, with its sizes."""

from __future__ import annotations

import re
from typing import Any

import libcst as cst

from linnet.migration.bindings import (
    COLLECTION,
    MODEL,
    PARAMS,
    VARIABLES,
    Binding,
    BindingScope,
    size_text,
)
from linnet.migration.layers import Layer
from linnet.migration.making import call_text, parameters_of
from linnet.migration.names import code, dotted, keywords_of, positional_of
from linnet.migration.program import ClassModel, LinenProgram
from linnet.migration.values import LeftAlone, constant


class Building:
    """Models that are built where Linen initialises them."""

    program: LinenProgram
    analyses: dict[str, Any]
    states: set[str]  # the program's own classes of TrainStates

    def binding_of(self, node: Any, scope: BindingScope) -> Binding | None:
        raise NotImplementedError

    def expr(self, node: Any, scope: BindingScope) -> Any:
        raise NotImplementedError

    def changed(self, line: Any, *texts: str) -> list[Any]:
        raise NotImplementedError

    def model_made(self, node: Any) -> cst.Call | None:
        """A call that makes a model."""
        if isinstance(node, cst.Call):
            name = dotted(node.func)
            if name in self.analyses or self.program.layer(node.func) is not None:
                return node
            if name in self.program.left:
                raise LeftAlone(f"{name} was left as it is", node)
        return None

    def is_initialised(self, name: str) -> bool:
        """Whether the program initialises a model; it is then built where it is."""
        return re.search(rf"\b{re.escape(name)}\.init\b", self.program.module.code) is not None

    def init_call(self, node: Any, scope: BindingScope) -> tuple[Binding, cst.Call, str] | None:
        """``model.init(...)``, perhaps compiled or frozen, or with ``["params"]`` after it."""
        collection = ""
        node = self.unwrapped(node)
        if isinstance(node, cst.Subscript) and len(node.slice) == 1:
            key = constant(code(node.slice[0].slice))
            if isinstance(key, str):
                node, collection = self.unwrapped(node.value), key
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Call):
            inner = node.func
            if self.program.names.meaning(inner.func) == "jax.jit" and len(inner.args) == 1:
                node = node.with_changes(func=inner.args[0].value)
        if (
            isinstance(node, cst.Call)
            and isinstance(node.func, cst.Attribute)
            and node.func.attr.value == "init"
        ):
            owner = dotted(node.func.value)
            binding = scope.find(owner) if owner is not None else None
            if binding is not None and binding.sort == MODEL:
                return binding, node, collection
        return None

    def unwrapped(self, node: Any) -> Any:
        """What ``freeze`` or ``unfreeze`` is called with; anything else as it is."""
        while isinstance(node, cst.Call) and len(node.args) == 1:
            meaning = self.program.names.meaning(node.func) or ""
            if not meaning.startswith("core.") or not meaning.endswith("freeze"):
                break
            node = node.args[0].value
        return node

    def initialised(self, line: Any, name: str, init: Any, scope: BindingScope) -> list[Any]:
        binding, call, collection = init
        if binding.constructor is None or dict.get(scope, binding.model) is not binding:
            raise LeftAlone("a model that was made elsewhere is initialised", line)
        binding.built = True
        scope[name] = Binding(VARIABLES, binding.model)
        if collection:
            scope[name] = self.collection(binding, collection)
        return [self.built(line, binding.model, binding.constructor, call, scope)]

    def collection(self, owner: Binding, name: str) -> Binding:
        sort = PARAMS if name == "params" else COLLECTION
        return Binding(sort, owner.model, name, optimizer=owner.optimizer)

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
            keys = {
                constant(code(e.key)): code(e.value)
                for e in argument.value.elements
                if isinstance(e, cst.DictElement)
            }
            # Layers of NNX may want streams that Linen's did not ask for.
            first = keys.pop("params", "0")
            return ", ".join([first, *(f"{name}={key}" for name, key in keys.items())])
        if re.search(rf"\b{re.escape(text)}\s*=\s*(?:{{|dict\()", self.program.module.code):
            return f"0, **{text}"
        return text

    def sizes(self, analysis: Any, init: cst.Call | None, line: Any) -> list[str]:
        """The sizes that a constructor wants, from the inputs that ``init`` is given."""
        model: ClassModel = analysis.model
        given = {} if init is None else self.arguments_by_name(model, init)
        found = []
        for name in analysis.wanted_symbols():
            symbol = analysis.symbols[name]
            size = None
            if symbol.origin is not None and symbol.origin.item is None:
                node = given.get(symbol.origin.parameter)
                size = None if node is None else size_text(node, symbol.axis)
                if size is None:
                    calls = self.program.traced.inputs.get(("", model.name), [])
                    shapes: set[Any] = {c.get(symbol.origin.parameter) for c in calls}
                    if len(shapes) == 1 and None not in shapes:
                        size = str(shapes.pop()[symbol.axis])
            if size is None:
                raise LeftAlone(f"{model.name} wants {name}, which is not known here", line)
            found.append(f"{name}={size}")
        return found

    def arguments_by_name(self, model: ClassModel, init: cst.Call) -> dict[str, cst.BaseExpression]:
        keywords = keywords_of(init)
        method = constant(code(keywords.pop("method"))) if "method" in keywords else model.main
        names = parameters_of(model.methods[method or model.main])
        return dict(zip(names, positional_of(init)[1:], strict=False)) | keywords

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

    # ---- TrainStates ----------------------------------------------------------------------------

    def is_train_state(self, node: cst.CSTNode) -> bool:
        meaning = self.program.names.meaning(node) or ""
        return meaning.endswith("train_state.TrainState") or dotted(node) in self.states

    def created_state(self, node: cst.Call, scope: BindingScope) -> Binding | None:
        if not isinstance(node.func, cst.Attribute) or node.func.attr.value != "create":
            return None
        owner = node.func.value
        if not self.is_train_state(owner):
            return None
        keywords = keywords_of(node)
        function = keywords.get("apply_fn")
        name = dotted(function.value) if isinstance(function, cst.Attribute) else None
        binding = scope.find(name) if name is not None else None
        params = keywords.get("params")
        of_params = None if params is None else self.binding_of(params, scope)
        if binding is None or binding.sort != MODEL or of_params is None or "tx" not in keywords:
            raise LeftAlone("a TrainState of something else than a model and its parameters", node)
        for name, value in keywords.items():
            if name not in ("apply_fn", "params", "tx") and self.binding_of(value, scope) is None:
                raise LeftAlone(
                    f"a TrainState with {name}, which is no collection of a model", node
                )
        return binding

    def optimizer_text(self, node: cst.Call, scope: BindingScope) -> str:
        binding = self.created_state(node, scope)
        assert binding is not None
        tx = keywords_of(node)["tx"]
        return f"nnx.Optimizer({binding.model}, {code(self.expr(tx, scope))}, wrt=nnx.Param)"

    def optimizer_name(self, state: str) -> str:
        return "optimizer" if state in ("state", "ts", "train_state") else f"{state}_optimizer"
