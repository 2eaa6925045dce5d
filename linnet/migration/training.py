"""What a program does with its models: ``init``, ``apply``, gradients, and TrainState.

A model of NNX holds its variables, so that names for variables, parameters and train states go
away: reading parameters becomes ``nnx.state(model, nnx.Param)``, assigning them
``nnx.update(model, ...)``, a TrainState becomes the model and an ``nnx.Optimizer``. Either all uses
of these names are understood and converted, or none is, and each gets a comment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from typing import Any

import libcst as cst

from linnet.migration.bindings import (
    COLLECTION,
    GRADIENT,
    HOLDERS,
    MODEL,
    NO_SPACE,
    PARAMS,
    PLAIN,
    STATE,
    STATE_ATTRIBUTES,
    UPDATES,
    VARIABLES,
    AppliedGradients,
    AppliedModel,
    Binding,
    BindingScope,
    Function,
    calls_in,
    comments_of,
)
from linnet.migration.building import Building
from linnet.migration.emitting import expression, statements
from linnet.migration.names import assignment_in, code, dotted, keywords_of, target_names
from linnet.migration.program import VARIABLE_TYPES, LinenProgram
from linnet.migration.uses import Uses
from linnet.migration.values import LeftAlone, constant, names_in


class Training(Building):
    """Converts the statements outside of the classes."""

    def __init__(self, program: LinenProgram, analyses: dict[str, Any]):
        self.program = program
        self.analyses = analyses
        self.functions: dict[str, Function] = {}
        self.states = set()
        for statement in program.module.body:
            if isinstance(statement, cst.ClassDef) and any(
                self.is_train_state(base.value) for base in statement.bases
            ):
                self.states.add(statement.name.value)
        self.converted: list[cst.CSTNode] = []
        self.returns: Any = None
        self.held: list[cst.EmptyLine] = []
        self.before: list[str] = []  # statements that go before the one that is converted

    def run(self, body: list[Any]) -> list[Any]:
        """The converted statements of a module; LeftAlone where something is not understood."""
        functions = [s for s in body if isinstance(s, cst.FunctionDef)]
        for node in functions:
            found = self.parameters(node)
            if found:
                self.functions[node.name.value] = Function(node, found)
        while sum(self.learn_from_calls(node) for node in functions):
            pass
        # What a function returns is known when it was converted once.
        for _ in range(4):
            before = {name: list(function.returned) for name, function in self.functions.items()}
            with contextlib.suppress(LeftAlone):
                self.convert(body)
            after = {name: list(function.returned) for name, function in self.functions.items()}
            if before == after:
                break
        return self.convert(body)

    def convert(self, body: list[Any]) -> list[Any]:
        self.converted, self.held, self.before = [], [], []
        scope = BindingScope()
        for statement in body:
            # Functions may use models that the module makes after them.
            small = assignment_in(statement)
            made = None if small is None else self.model_made(small.value)
            if small is not None and made is not None:
                name = code(small.targets[0].target)
                scope[name] = Binding(MODEL, name, constructor=made)
        found = self.block(body, scope)
        self.check_built(scope)
        return found

    def learn_from_calls(self, node: cst.FunctionDef) -> bool:
        """Whether a parameter was found to be a state or the like, as it is passed on as one."""
        names = [param.name.value for param in node.params.params]
        learned = False
        for call in calls_in(node.body):
            inner = self.functions.get(dotted(call.func) or "")
            if inner is None or inner.node is node:
                continue
            wanted = [param.name.value for param in inner.node.params.params]
            for name, argument in zip(wanted, call.args, strict=False):
                given = dotted(argument.value)
                binding = inner.parameters.get(name)
                if binding is None or given not in names or argument.keyword or argument.star:
                    continue
                known = self.functions.setdefault(node.name.value, Function(node, {}))
                if given not in known.parameters and binding.sort == STATE:
                    known.parameters[given] = dataclasses.replace(binding)
                    learned = True
        return learned

    def check_built(self, scope: BindingScope) -> None:
        for name, binding in scope.items():
            if not binding.built:
                raise LeftAlone(
                    f"{name} is initialised elsewhere than where it is made", binding.constructor
                )

    # ---- what parameters are ---------------------------------------------------------------------

    def parameters(self, node: cst.FunctionDef) -> dict[str, Binding]:
        """The parameters of a function that are states, parameters or models, by their use."""
        found: dict[str, Binding] = {}
        text = code(node.body)
        for param in (*node.params.params, *node.params.kwonly_params):
            name = param.name.value
            escaped = re.escape(name)
            if re.search(rf"\b{escaped}\.(apply_fn|apply_gradients)\b", text):
                found[name] = Binding(STATE)
            elif match := re.search(
                rf"""(\w+)\.apply\w*\(\s*{{\s*["']params["']\s*:\s*{escaped}\b""", text
            ):
                found[name] = Binding(PARAMS, match[1] if ".apply_fn" not in match[0] else "")
            elif match := re.search(rf"\b(\w+)\.apply\(\s*{escaped}\s*[,)]", text):
                found[name] = Binding(VARIABLES, match[1])
            elif re.search(rf"\b{escaped}\.(apply|init)\(", text):
                found[name] = Binding(MODEL, name)
        return found

    # ---- statements ------------------------------------------------------------------------------

    def block(self, body: Any, scope: BindingScope) -> list[Any]:
        found: list[Any] = []
        for statement in body:
            found += self.statement(statement, scope)
        return found

    def statement(self, node: Any, scope: BindingScope) -> list[Any]:
        if isinstance(node, cst.ClassDef):
            return [node]
        if isinstance(node, cst.FunctionDef):
            return [self.function(node, scope)]
        if isinstance(node, cst.SimpleStatementLine):
            if len(node.body) == 1:
                new = self.with_comments(node, self.small_statement(node, node.body[0], scope))
                before, self.before = self.before, []
                return [s for text in before for s in statements(text)] + new
            for small in node.body:
                self.check_plain(small, scope)
            return [node]
        if hasattr(node, "body") and isinstance(node.body, cst.IndentedBlock):
            return [self.compound(node, scope)]
        return [self.expr(node, scope)]

    def with_comments(self, old: Any, new: list[Any]) -> list[Any]:
        """New statements in the place of an old one, whose comments stay."""
        lost = [comment for comment in comments_of(old) if comment not in comments_of(*new)]
        lines = [*self.held, *(cst.EmptyLine(comment=cst.Comment(text)) for text in lost)]
        self.held = []
        if not new:
            leading = list(old.leading_lines)
            known = comments_of(*leading)
            inside = [x for x in lines if x.comment and x.comment.value not in known]
            self.held = [*(leading if known else []), *inside]
        elif lines:
            first = new[0]
            new = [first.with_changes(leading_lines=[*first.leading_lines, *lines]), *new[1:]]
        return new

    def compound(self, node: Any, scope: BindingScope) -> Any:
        """A loop, branch or with statement: its header, and what is inside."""
        changes: dict[str, Any] = {}
        for name in ("test", "iter"):
            if hasattr(node, name):
                changes[name] = self.expr(getattr(node, name), scope)
        if isinstance(node, cst.With):
            changes["items"] = [i.with_changes(item=self.expr(i.item, scope)) for i in node.items]
        if self.before:
            raise LeftAlone("apply with the variables of another model in a condition", node)
        inner = self.block(node.body.body, scope)
        changes["body"] = node.body.with_changes(body=inner or statements("pass"))
        orelse = getattr(node, "orelse", None)
        if orelse is not None:
            changes["orelse"] = self.compound(orelse, scope)
        return node.with_changes(**changes)

    def small_statement(self, line: Any, small: Any, scope: BindingScope) -> list[Any]:
        if isinstance(small, cst.Assign) and len(small.targets) == 1:
            found = self.assignment(line, small.targets[0].target, small.value, scope)
            if found is not None:
                return found
        if isinstance(small, cst.Return) and small.value is not None:
            return self.returning(line, small, scope)
        if isinstance(small, cst.Expr) and isinstance(small.value, cst.Call):
            function = self.functions.get(dotted(small.value.func) or "")
            if function is not None and "changed" in function.returned:
                raise LeftAlone("a call changes a model, but its result is not used", line)
        if isinstance(small, cst.Import | cst.ImportFrom):
            return [line]
        return [line.with_changes(body=[self.expr(small, scope)])]

    def assignment(
        self, line: Any, target: Any, value: Any, scope: BindingScope
    ) -> list[Any] | None:
        """An assignment; None where it has nothing to do with models."""
        name = target.value if isinstance(target, cst.Name) else None
        if name is not None:
            made = self.model_made(value)
            if made is not None:
                later = self.is_initialised(name)
                scope[name] = Binding(MODEL, name, constructor=made, built=not later)
                return [] if later else [self.built(line, name, made, None, scope)]
        init = self.init_call(value, scope)
        if init is not None and name is not None:
            return self.initialised(line, name, init, scope)
        binding = self.binding_of(value, scope)
        if binding is not None and name is not None:
            if isinstance(value, cst.Name):
                raise LeftAlone(f"{name} is a second name for {value.value}", line)
            scope[name] = dataclasses.replace(binding)
            return self.noted(line, [])
        if isinstance(target, cst.Tuple) and isinstance(value, cst.Tuple):
            if len(target.elements) == len(value.elements) and any(
                self.model_made(element.value) for element in value.elements
            ):
                return self.one_by_one(line, target, value, scope)
            bindings = [self.binding_of(element.value, scope) for element in value.elements]
            if bindings and all(bindings) and len(bindings) == len(target.elements):
                for element, found in zip(target.elements, bindings, strict=True):
                    assert found is not None
                    scope[code(element.value)] = found
                return self.noted(line, [])
        popped = self.popped(line, target, value, scope)
        if popped is not None:
            return popped
        return self.call_assignment(line, target, name, value, scope)

    def one_by_one(self, line: Any, target: Any, value: Any, scope: BindingScope) -> list[Any]:
        """``model, x = Model(), f()`` as two assignments."""
        pairs = [(t.value, v.value) for t, v in zip(target.elements, value.elements, strict=True)]
        found: list[Any] = []
        for position, (place, item) in enumerate(pairs):
            if target_names(target) & names_in(code(item)):
                raise LeftAlone("values that depend on what is assigned beside them", line)
            small = cst.Assign([cst.AssignTarget(place)], item)
            one = line.with_changes(body=[small])
            if position:
                one = cst.SimpleStatementLine([small])
            found += self.small_statement(one, small, scope)
        return self.noted(line, found)

    def popped(self, line: Any, target: Any, value: Any, scope: BindingScope) -> list[Any] | None:
        """``rest, params = variables.pop("params")``, or of a plain dict ``params = ...``."""
        if not (isinstance(value, cst.Call) and isinstance(value.func, cst.Attribute)):
            return None
        if value.func.attr.value != "pop" or len(value.args) != 1:
            return None
        name, owner = constant(code(value.args[0].value)), value.func.value
        names = target.elements if isinstance(target, cst.Tuple) else [target]
        places = [getattr(place, "value", place) for place in names]
        init = self.init_call(owner, scope)
        binding = self.binding_of(owner, scope)
        if not isinstance(name, str) or len(places) > 2:
            return None
        if init is not None:
            new = self.initialised(line, "", init, scope)
            binding = scope.pop("")
        elif binding is not None and binding.sort == VARIABLES:
            new = self.noted(line, [])
        else:
            return None
        if len(places) == 2:
            scope[code(places[0])] = dataclasses.replace(binding)
        scope[code(places[-1])] = self.collection(binding, name)
        return new

    def call_assignment(
        self, line: Any, target: Any, name: Any, value: Any, scope: BindingScope
    ) -> Any:
        if isinstance(value, cst.Call):
            state = self.created_state(value, scope)
            if state is not None and name is not None:
                optimizer = self.optimizer_name(name)
                scope[name] = Binding(STATE, state.model, optimizer=optimizer)
                return self.changed(line, f"{optimizer} = {self.optimizer_text(value, scope)}")
            updated = self.gradients_applied(value, scope)
            if updated is not None and name is not None:
                self.outdate(updated.state, name, scope)
                scope[name] = dataclasses.replace(updated.state, stale=False)
                return self.changed(line, updated.text)
            applied = self.apply_call(value, scope)
            if applied is not None and applied.returns_updates:
                return self.mutable_apply(line, target, applied.text, scope)
            function = self.functions.get(dotted(value.func) or "")
            if function is not None:
                return self.call_of_converted(line, target, value, function, scope)
            if self.is_gradient(value) and name is not None:
                scope[name] = Binding(GRADIENT)
            compiled = self.compiled(value)
            if compiled is not None and name is not None:
                self.functions[name] = compiled
                return self.changed(line, f"{name} = nnx.jit({code(value.args[0].value)})")
        binding = scope.find(name) if name is not None else None
        if binding is not None and binding.sort == PARAMS:
            new = f"nnx.update({binding.model}, {code(self.expr(value, scope))})"
            self.outdate(binding, name, scope)
            return self.changed(line, new)
        if binding is not None and binding.sort in (STATE, VARIABLES, UPDATES):
            raise LeftAlone(f"{name} gets a value that is not understood", line)
        return None

    def outdate(self, binding: Binding, name: str | None, scope: BindingScope) -> None:
        """Marks other names for values of the model as stale, after an update of the model."""
        current: BindingScope | None = scope
        while current is not None:
            for other, found in current.items():
                if other != name and found.model == binding.model and found.sort in HOLDERS:
                    found.stale = True
            current = current.outer

    def compiled(self, node: cst.Call) -> Function | None:
        """``jax.jit(function)`` of a converted function."""
        if self.program.names.meaning(node.func) != "jax.jit" or len(node.args) != 1:
            return None
        return self.functions.get(dotted(node.args[0].value) or "")

    def changed(self, line: Any, *texts: str) -> list[Any]:
        new = [statement for text in texts for statement in statements(text)]
        new[0] = new[0].with_changes(
            leading_lines=line.leading_lines, trailing_whitespace=line.trailing_whitespace
        )
        self.converted.append(line)
        return new

    def noted(self, line: Any, new: list[Any]) -> list[Any]:
        self.converted.append(line)
        return new

    # ---- variables -------------------------------------------------------------------------------

    def binding_of(self, node: Any, scope: BindingScope) -> Binding | None:
        """What an expression is, where it is nothing but variables of a model."""
        node = self.unwrapped(node)
        if isinstance(node, cst.Name):
            binding = scope.find(node.value)
            if binding is not None and binding.stale:
                raise LeftAlone(f"{node.value} holds values from before an update", node)
            known = binding is not None and binding.sort not in (MODEL, PLAIN, GRADIENT)
            return binding if known else None
        if isinstance(node, cst.Subscript) and len(node.slice) == 1:
            owner = self.binding_of(node.value, scope)
            key = constant(code(node.slice[0].slice))
            if owner is not None and owner.sort in (VARIABLES, UPDATES) and isinstance(key, str):
                return self.collection(owner, key)
        if isinstance(node, cst.Attribute):
            owner = self.binding_of(node.value, scope)
            if (
                owner is not None
                and owner.sort == STATE
                and node.attr.value not in STATE_ATTRIBUTES
            ):
                if node.attr.value not in (*VARIABLE_TYPES, *self.program.variable_types):
                    raise LeftAlone(f"{code(node)}, which is no collection of a model", node)
                return self.collection(owner, node.attr.value)
        if isinstance(node, cst.Dict):
            return self.dict_of_collections(node, scope)
        return None

    def dict_of_collections(self, node: cst.Dict, scope: BindingScope) -> Binding | None:
        """``{"params": params, ...}`` with the collections of one model."""
        models, names = set(), []
        for element in node.elements:
            binding = self.binding_of(element.value, scope)
            if isinstance(element, cst.StarredDictElement):
                if binding is None or binding.sort not in (VARIABLES, UPDATES):
                    return None
            else:
                assert isinstance(element, cst.DictElement)
                key = constant(code(element.key))
                if binding is None or binding.sort not in (PARAMS, COLLECTION):
                    return None
                if binding.sort == PARAMS and key != "params":
                    return None
                if binding.collection not in ("", key):
                    return None
                names.append(key)
            models.add(binding.model)
        if len(models) != 1:
            return None
        return Binding(VARIABLES, models.pop(), " ".join(names))

    def read(self, binding: Binding, node: Any) -> str:
        """The values of a collection of a model."""
        if binding.sort == PARAMS:
            return f"nnx.state({binding.model}, nnx.Param)"
        if binding.sort == COLLECTION:
            return f"nnx.state({binding.model}, {self.program.variable_type(binding.collection)})"
        if binding.sort == UPDATES:
            return "None"
        what = "a TrainState" if binding.sort == STATE else "variables"
        raise LeftAlone(f"{code(node)}, which is {what}, is used as a whole", node)

    # ---- calls -----------------------------------------------------------------------------------

    def apply_call(self, node: cst.Call, scope: BindingScope) -> AppliedModel | None:
        """A call of ``model.apply``, if it is one."""
        if not isinstance(node.func, cst.Attribute) or node.func.attr.value not in (
            "apply",
            "apply_fn",
        ):
            return None
        owner = scope.find(dotted(node.func.value) or "")
        if owner is None or owner.sort not in (MODEL, STATE):
            return None
        if not node.args or node.args[0].keyword is not None:
            raise LeftAlone("apply without variables", node)
        variables = self.binding_of(node.args[0].value, scope)
        if variables is None or variables.sort != VARIABLES:
            raise LeftAlone("apply with other variables than those of the model", node)
        if variables.model != owner.model:
            self.hand_over(owner, variables, node, scope)
        keywords = keywords_of(node)
        mutable = "mutable" in keywords and code(keywords["mutable"]) not in ("False", "[]")
        method = ""
        if "method" in keywords:
            given = code(keywords["method"])
            text = constant(given) or given.rpartition(".")[2]
            method = f".{text}"
        kept = [
            self.expr(a, scope)
            for a in node.args[1:]
            if a.keyword is None or a.keyword.value not in ("rngs", "mutable", "method")
        ]
        one_line = "\n" not in "".join(code(a) for a in kept)
        if kept:
            last = node.args[-1]
            changed = {"comma": last.comma, "whitespace_after_arg": last.whitespace_after_arg}
            kept[-1] = kept[-1].with_changes(**changed)
        changes: dict[str, Any] = {"func": expression(f"{owner.model}{method}"), "args": kept}
        if one_line and "#" not in code(node):
            kept = [
                a.with_changes(comma=cst.MaybeSentinel.DEFAULT, whitespace_after_arg=NO_SPACE)
                for a in kept
            ]
            changes |= {"args": kept, "whitespace_before_args": NO_SPACE}
        return AppliedModel(code(node.with_changes(**changes)), mutable)

    def hand_over(self, to: Binding, variables: Binding, node: Any, scope: BindingScope) -> None:
        """Copies variables to another model of the same class, which is called with them."""
        source = scope.find(variables.model)
        made = [None if b is None else b.constructor for b in (to, source)]
        names = {None if call is None else dotted(call.func) for call in made}
        if dict.get(scope, to.model) is not to or len(names) > 1 or None in names:
            raise LeftAlone("apply with other variables than those of the model", node)
        types = [self.program.variable_type(name) for name in variables.collection.split()]
        which = f"({', '.join(types)})" if len(types) > 1 else (types or ["..."])[0]
        text = f"nnx.update({to.model}, nnx.state({variables.model}, {which}))"
        self.before += [text] if text not in self.before else []

    def mutable_apply(self, line: Any, target: Any, text: str, scope: BindingScope) -> list[Any]:
        """``out, updates = model.apply(..., mutable=...)``: the model has the updates already."""
        if not isinstance(target, cst.Tuple) or len(target.elements) != 2:
            raise LeftAlone("apply with mutable, whose results are not taken apart", line)
        first, second = (element.value for element in target.elements)
        if not isinstance(second, cst.Name):
            raise LeftAlone("apply with mutable, whose updates have no name", line)
        scope[second.value] = Binding(UPDATES)
        return self.changed(line, f"{code(first).strip('()')} = {text}")

    def is_gradient(self, node: cst.CSTNode) -> bool:
        if not isinstance(node, cst.Call):
            return False
        return self.program.names.meaning(node.func) in ("jax.grad", "jax.value_and_grad")

    def gradients_applied(self, node: Any, scope: BindingScope) -> AppliedGradients | None:
        """A call of ``state.apply_gradients``, if it is one."""
        if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute):
            return None
        if node.func.attr.value != "apply_gradients":
            return None
        owner = scope.find(dotted(node.func.value) or "")
        grads = keywords_of(node).get("grads")
        if owner is None or owner.sort != STATE or grads is None:
            raise LeftAlone("apply_gradients of something else than a TrainState", node)
        text = f"{owner.optimizer}.update({owner.model}, {code(self.expr(grads, scope))})"
        return AppliedGradients(owner, text)

    def call_of_converted(
        self, line: Any, target: Any, value: Any, function: Function, scope: BindingScope
    ) -> Any:
        """A call of a function that took or returned what models hold now."""
        text = code(self.expr(value, scope))
        targets = [e.value for e in target.elements] if isinstance(target, cst.Tuple) else [target]
        returned = function.returned
        if not any(returned):
            return self.changed(line, f"{code(target)} = {text}")
        if len(returned) != len(targets):
            raise LeftAlone("what a function returns is not taken apart", line)
        kept = []
        for place, what in zip(targets, returned, strict=True):
            if what is None:
                kept.append(code(place))
            elif what == "made":
                name = code(place)
                optimizer = self.optimizer_name(name)
                scope[name] = Binding(STATE, "model", optimizer=optimizer)
                scope["model"] = Binding(MODEL, "model", constructor=value)
                kept += ["model", optimizer]
            else:
                given = scope.find(code(place))
                if given is None or given.sort not in HOLDERS:
                    raise LeftAlone(f"{code(place)} is a second name for what a model holds", line)
                self.outdate(given, code(place), scope)
        return self.changed(line, f"{', '.join(kept)} = {text}" if kept else text)

    # ---- functions -------------------------------------------------------------------------------

    def function(self, node: cst.FunctionDef, outer: BindingScope) -> cst.FunctionDef:
        scope = BindingScope(outer)
        known = self.functions.get(node.name.value)
        bindings = known.parameters if known is not None else self.parameters(node)
        names = [param.name.value for param in node.params.params]
        for name, binding in bindings.items():
            if not binding.model:
                binding.model = self.model_around(outer)
            scope[name] = dataclasses.replace(binding)
            if binding.sort == STATE and binding.model in names:
                raise LeftAlone(f"{node.name.value} takes a TrainState and a model", node)
        for name in names:
            scope.setdefault(name, Binding(PLAIN))
        before = len(self.converted)
        around = self.returns
        self.returns = Function(node, bindings)
        body = self.block(node.body.body, scope)
        result, self.returns = self.returns, around
        self.check_built(scope)
        if known is not None:
            known.returned = result.returned
        elif any(result.returned) or bindings:
            self.functions[node.name.value] = result
        new = node.with_changes(body=node.body.with_changes(body=body or statements("pass")))
        if bindings:
            new = self.with_parameters(new, scope, bindings)
        if len(self.converted) > before or bindings:
            new = new.with_changes(
                decorators=[self.decorator(d, bool(bindings)) for d in new.decorators]
            )
            self.converted.append(node)
        return new

    def model_around(self, scope: BindingScope) -> str:
        """The model that parameters belong to: the one of the functions around, or ``model``."""
        current: BindingScope | None = scope
        while current is not None:
            for binding in current.values():
                if binding.sort in (MODEL, STATE, PARAMS):
                    return binding.model
            current = current.outer
        return "model"

    def with_parameters(
        self, node: cst.FunctionDef, scope: BindingScope, bindings: Any
    ) -> cst.FunctionDef:
        """Models in the place of states and parameters."""
        parameters = []
        for param in node.params.params:
            binding = bindings.get(param.name.value)
            names = [param.name.value]
            if binding is not None and binding.sort == STATE:
                names = [binding.model, binding.optimizer]
            elif binding is not None and binding.sort in (PARAMS, VARIABLES):
                model = scope[param.name.value].model
                taken = {p.name.value for p in (*node.params.params, *parameters)}
                names = [] if model in taken and model != param.name.value else [model]
            if names == [param.name.value]:
                parameters.append(param)
            else:
                parameters += [cst.Param(cst.Name(name)) for name in names]
        return node.with_changes(params=node.params.with_changes(params=parameters))

    def decorator(self, node: cst.Decorator, takes_models: bool) -> cst.Decorator:
        text = code(node.decorator)
        meaning = self.program.names.meaning(node.decorator)
        if meaning == "jax.jit" and takes_models:
            return node.with_changes(decorator=expression("nnx.jit"))
        if takes_models and "jit" in text:
            raise LeftAlone(f"the decorator {text} of a function that takes a model", node)
        return node

    def returning(self, line: Any, small: cst.Return, scope: BindingScope) -> list[Any]:
        """``return``: states, parameters and updates go away, as the model holds them."""
        value = small.value
        items: list[Any] = [value]
        if isinstance(value, cst.Tuple):
            items = [element.value for element in value.elements]
        kept, before, what = [], [], []
        for item in items:
            created = self.created_state(item, scope) if isinstance(item, cst.Call) else None
            applied = self.gradients_applied(item, scope)
            binding = self.binding_of(item, scope)
            if created is not None:
                kept += [created.model, self.optimizer_text(item, scope)]
                what.append("made")
            elif applied is not None:
                before.append(applied.text)
                what.append("changed")
            elif binding is not None and binding.sort in (STATE, PARAMS):
                if binding.sort == STATE and self.made_here(binding, scope):
                    kept += [binding.model, binding.optimizer]
                    what.append("made")
                else:
                    what.append("changed")
            else:
                kept.append(code(self.expr(item, scope)))
                what.append(None)
        if not any(what):
            return [line.with_changes(body=[self.expr(small, scope)])]
        if self.returns.returned not in ([], what):
            raise LeftAlone("a function returns a model in one place and not in another", line)
        self.returns.returned = what
        new = [f"return {', '.join(kept)}"] if kept else []
        return self.changed(line, *before, *new) if before or new else self.noted(line, [])

    def made_here(self, binding: Binding, scope: BindingScope) -> bool:
        """Whether a model was made in the function that returns it."""
        found = dict.get(scope, binding.model)
        return found is not None and found.constructor is not None

    # ---- expressions -----------------------------------------------------------------------------

    def expr(self, node: Any, scope: BindingScope) -> Any:
        return node.visit(Uses(self, scope))

    def check_plain(self, node: Any, scope: BindingScope) -> None:
        if code(self.expr(node, scope)) != code(node):
            raise LeftAlone("several statements on a line", node)
