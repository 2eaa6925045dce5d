"""A whole program: its classes in turn, its helpers, its imports, and what is done around them."""

from __future__ import annotations

import dataclasses
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from linnet import linen, nnx
from linnet.migration.bindings import calls_in
from linnet.migration.emitting import ClassEmitter, expression, statements, with_keyword_only
from linnet.migration.layers import KEPT_FUNCTIONS, RENAMED_FUNCTIONS
from linnet.migration.names import assignment_in, code, dotted
from linnet.migration.program import Again, ClassModel, Helper, LinenProgram, Restart
from linnet.migration.rendering import Renderer, call_text
from linnet.migration.stages import ClassAnalysis
from linnet.migration.tracing import TracedExample
from linnet.migration.training import Training
from linnet.migration.values import LeftAlone, NotStatic

# Functions that Linen and NNX have under one name, with the same meaning for arrays.
SAME_FUNCTIONS = set(
    """dot_product_attention make_attention_mask make_causal_mask combine_masks avg_pool max_pool
    min_pool pool one_hot with_partitioning logical_axis_rules initializers""".split()
)


@dataclasses.dataclass
class Remark:
    """Something that the report says about a line of the program.

    Args:
      line: the number of the line; 0 where it is not known.
      text: what is said.
      left: whether something was left as it is there.
    """

    line: int
    text: str
    left: bool = False


@dataclasses.dataclass
class Conversion:
    """A converted program.

    Args:
      text: the program.
      remarks: what was converted and what was left, by line.
    """

    text: str
    remarks: list[Remark]

    @property
    def left(self) -> list[Remark]:
        return [remark for remark in self.remarks if remark.left]


class Converter:
    """Converts one module."""

    def __init__(self, source: str, traced: TracedExample | None = None):
        self.wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
        self.module = self.wrapper.module
        self.positions = self.wrapper.resolve(PositionProvider)
        self.program = LinenProgram(self.module, traced)
        self.analyses: dict[str, ClassAnalysis] = {}
        self.renderers: dict[str, Renderer] = {}
        self.remarks: list[Remark] = []
        self.new_texts: dict[cst.CSTNode, str] = {}

    def line_number(self, node: cst.CSTNode | None, default: cst.CSTNode | None = None) -> int:
        for candidate in (node, default):
            if candidate is not None and candidate in self.positions:
                return self.positions[candidate].start.line
        return 0

    # ---- analysis --------------------------------------------------------------------------------

    def analyse(self) -> None:
        """Analyses all classes, again and again until nothing new is learned."""
        for _ in range(100):
            self.analyses, self.renderers = {}, {}
            self.program.variable_types.clear()
            self.program.left.clear()
            try:
                self.learn_from_module()
                for name in self.in_order():
                    while not self.analyse_class(name):
                        pass
                return
            except Restart:
                continue
        raise AssertionError("the analysis does not come to an end")

    def in_order(self) -> list[str]:
        """The classes, those that others use first."""
        found: list[str] = []
        waiting = list(self.program.classes)
        while waiting:
            ready = [n for n in waiting if self.uses(n) <= set(found)] or waiting[:1]
            found += ready
            waiting = [n for n in waiting if n not in ready]
        return found

    def uses(self, name: str) -> set[str]:
        model = self.program.classes[name]
        found = {n for n in _names(model.node) if n in self.program.classes and n != name}
        for (owner, _), factory in self.program.factory_fields.items():
            if owner == name and factory.class_name in self.program.classes:
                found.add(factory.class_name)
        return found

    def analyse_class(self, name: str) -> bool:
        """Analyses a class, and says whether that came to an end."""
        if name in self.program.left:
            return True
        model = self.program.classes[name]
        try:
            left = [base for base in model.bases if base in self.program.left]
            if left:
                raise LeftAlone(f"{left[0]}, which it inherits from, was left as it is", model.node)
            bases = [self.program.classes[b] for b in model.bases if b in self.program.classes]
            if model.setup is None and any("setup" in base.all_methods for base in bases):
                raise LeftAlone("it inherits setup from another class", model.node)
            if model.compact is None and any(base.compact for base in bases):
                raise LeftAlone("it inherits a compact method from another class", model.node)
            analysis = ClassAnalysis(self.program, model, self.analyses)
            analysis.run()
            renderer = Renderer(analysis)
            renderer.complete()
            self.check(ClassEmitter(analysis, renderer).emit())
        except NotStatic:
            self.program.leave(name, LeftAlone("what it makes depends on the call", model.node))
            return True
        except Again:
            return False
        except Restart:
            raise
        except Exception as error:  # a gap in the converter must not break a program
            self.program.leave(name, _as_left(error))
            return True
        self.analyses[name] = analysis
        self.renderers[name] = renderer
        return True

    def check(self, node: cst.ClassDef) -> None:
        """Refuses a converted class in which something of Linen or an unconverted class remains."""
        for method in node.body.body:
            if not isinstance(method, cst.FunctionDef):
                continue
            inside = method.name.value == "__init__"
            for call in calls_in(method.body):
                made = dotted(call.func) or ""
                if made in self.program.classes and (not inside or made in self.program.left):
                    raise LeftAlone(f"{made} is made where that is not understood", node)
                meaning = self.program.names.meaning(call.func) or ""
                found = getattr(linen, meaning.removeprefix("linen."), None)
                if meaning.startswith("linen.") and isinstance(found, type):
                    raise LeftAlone(
                        f"{code(call.func)} is used in a way that is not understood", node
                    )

    def learn_from_module(self) -> None:
        """Classes that are passed to others outside of all methods."""
        for statement in self.module.body:
            if isinstance(statement, cst.ClassDef):
                for value in _defaults(statement):
                    self.learn_default(statement.name.value, *value)
            else:
                self.learn_assignment(statement)
                for call in calls_in(statement):
                    self.learn_call(call)

    def learn_assignment(self, statement: Any) -> None:
        """``Conv = partial(nn.Conv, ...)`` at the top of a module."""
        small = assignment_in(statement)
        if small is None:
            return
        name = code(small.targets[0].target)
        empty = ClassModel(cst.ClassDef(cst.Name("_"), cst.IndentedBlock([])), "", [], [], {}, None)
        scope = ClassAnalysis(self.program, empty, self.analyses)
        factory = scope.factory_named(small.value)
        if factory is None and isinstance(small.value, cst.Call):
            function = self.program.names.meaning(small.value.func)
            if function == "functools.partial" and small.value.args:
                inner = scope.factory_named(small.value.args[0].value)
                factory = None if inner is None else scope.partial(inner, small.value)
        if factory is not None and name not in self.program.factories:
            self.new_texts[small.value] = factory.text
            self.program.factories[name] = dataclasses.replace(factory, text=name)

    def learn_default(self, owner: str, field: str, value: cst.BaseExpression) -> None:
        model = self.program.classes.get(owner)
        if model is None:
            return
        factory = ClassAnalysis(self.program, model, self.analyses).factory_named(value)
        if factory is not None:
            self.program.learn_factory(owner, field, factory)

    def learn_call(self, call: cst.Call) -> None:
        target, arguments = call.func, list(call.args)
        if self.program.names.meaning(target) == "functools.partial" and arguments:
            target, arguments = arguments[0].value, arguments[1:]
        model = self.program.classes.get(dotted(target) or "")
        if model is None:
            return
        scope = ClassAnalysis(self.program, model, self.analyses)
        for position, argument in enumerate(arguments):
            name = argument.keyword.value if argument.keyword else None
            if name is None and position < len(model.fields):
                name = model.fields[position].name
            factory = scope.factory_named(argument.value)
            if factory is not None and name is not None:
                self.program.learn_factory(model.name, name, factory)

    # ---- writing ---------------------------------------------------------------------------------

    def convert(self) -> Conversion:
        self.analyse()
        body: list[Any] = []
        for statement in self.module.body:
            if isinstance(statement, cst.ClassDef) and statement.name.value in self.program.classes:
                body.append(self.converted_class(statement))
            elif (
                isinstance(statement, cst.FunctionDef)
                and statement.name.value in self.program.helpers
            ):
                body.append(self.converted_helper(self.program.helpers[statement.name.value]))
            else:
                small = assignment_in(statement)
                if small is not None and small.value in self.new_texts:
                    new = expression(self.new_texts[small.value])
                    statement = statement.deep_replace(small.value, new)
                body.append(statement)
        body = self.with_training(body)
        body = self.with_variable_types(body)
        module: Any = self.module.with_changes(body=body).visit(_Renamer(self.program))
        module = module.visit(_Imports(self.program, _names(module)))
        return Conversion(module.code, sorted(self.remarks, key=lambda remark: remark.line))

    def converted_class(self, node: cst.ClassDef) -> cst.ClassDef:
        name = node.name.value
        error = self.program.left.get(name)
        if error is not None:
            at = self.line_number(error.node, node)
            self.remarks.append(Remark(at, f"{name} was left as it is: {error.reason}", left=True))
            return commented(node, f"linnet: left as it is (line {at}): {error.reason}.")
        new = ClassEmitter(self.analyses[name], self.renderers[name]).emit()
        renderer = self.renderers[name]
        self.remarks.append(Remark(self.line_number(node), f"{name} was converted"))
        if renderer.traced_sizes:
            sizes = "; ".join(dict.fromkeys(renderer.traced_sizes))
            self.remarks.append(
                Remark(self.line_number(node), f"{name}: sizes from the example: {sizes}")
            )
            new = commented(new, f"linnet: sizes of the example call: {sizes}.")
        if renderer.asked:
            asked = ", ".join(dict.fromkeys(renderer.asked))
            text = f"{name}: the sizes {asked} could not be found out; pass them to the constructor"
            self.remarks.append(Remark(self.line_number(node), text))
            new = commented(new, f"linnet: pass {asked}, which could not be found out.")
        if renderer.uses_stack:
            self.remarks.append(
                Remark(self.line_number(node), f"{name} uses nnx.Stack, which Linnet alone has")
            )
        return new

    def converted_helper(self, helper: Helper) -> cst.FunctionDef:
        """A function that makes a layer takes its input size and ``rngs``."""
        layer = helper.layer
        arguments = [layer.size_name] if layer.sizes else []
        fields = layer.fields
        for position, argument in enumerate(helper.call.args):
            name = argument.keyword.value if argument.keyword else None
            text = code(argument.value)
            if argument.star:
                arguments.append(argument.star + text)
            elif name is None:
                in_place = fields[position] in layer.first
                arguments.append(text if in_place else f"{layer.nnx_name(fields[position])}={text}")
            elif name not in ("name", "parent"):
                arguments.append(f"{layer.nnx_name(name)}={text}")
        stars = [a for a in arguments if a.startswith("**")]
        plain = [a for a in arguments if not a.startswith("**")]
        new = expression(call_text(f"nnx.{layer.nnx}", [*plain, "rngs=rngs", *stars], 4))
        node = helper.node.deep_replace(helper.call, new)
        assert isinstance(node, cst.FunctionDef)
        names = [layer.size_name, "rngs"] if layer.sizes else ["rngs"]
        self.remarks.append(Remark(self.line_number(helper.node), f"{helper.name} was converted"))
        return with_keyword_only(node, [cst.Param(cst.Name(name)) for name in names])

    def with_training(self, body: list[Any]) -> list[Any]:
        """Converts what the program does with its models, all of it or nothing."""
        training = Training(self.program, self.analyses)
        try:
            found = training.run(body)
        except Exception as error:  # a gap in the converter must not break a program
            return self.with_comments(body, _as_left(error))
        for node in training.converted:
            if self.line_number(node):
                self.remarks.append(
                    Remark(self.line_number(node), "the use of a model was converted")
                )
        return found

    def with_comments(self, body: list[Any], error: LeftAlone) -> list[Any]:
        """Says at each use of a model what to do."""
        at = self.line_number(error.node)
        where = f" (line {at})" if at else ""
        self.remarks.append(
            Remark(at, f"the uses of models were left as they are: {error.reason}", left=True)
        )
        commenter = _Commenter(self, f"{error.reason}{where}")
        return [
            statement if isinstance(statement, cst.ClassDef) else statement.visit(commenter)
            for statement in body
        ]

    def with_variable_types(self, body: list[Any]) -> list[Any]:
        """Declares the Variable types of the program's own collections before the first class."""
        if not self.program.variable_types:
            return body
        text = "\n\n\n".join(
            f'class {name}(nnx.Variable):\n    """The collection {collection} of Linen."""'
            for collection, name in sorted(self.program.variable_types.items())
        )
        at = next(
            i
            for i, s in enumerate(body)
            if isinstance(s, cst.ClassDef) and s.name.value in self.analyses
        )
        blank = [cst.EmptyLine(indent=False)] * 2
        new = [s.with_changes(leading_lines=blank) for s in statements(text)]
        return [*body[:at], *new, *body[at:]]


class _Renamer(cst.CSTTransformer):
    """Writes nnx.relu for nn.relu, outside of what was left as it is."""

    def __init__(self, program: LinenProgram):
        super().__init__()
        self.program = program
        self.in_class = False

    def visit_ClassDef(self, node: cst.ClassDef) -> bool:
        self.in_class = node.name.value in self.program.classes
        return node.name.value not in self.program.left

    def leave_ClassDef(self, original_node: cst.ClassDef, updated_node: cst.ClassDef) -> Any:
        self.in_class = False
        return updated_node

    def visit_Import(self, node: cst.Import) -> bool:
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return False

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> Any:
        return self.renamed(original_node) or updated_node

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> Any:
        if self.program.names.imported.get(original_node.value, "").startswith("linen."):
            return self.renamed(original_node) or updated_node
        return updated_node

    def renamed(self, node: cst.CSTNode) -> cst.BaseExpression | None:
        meaning = self.program.names.meaning(node)
        if meaning is None or not meaning.startswith("linen."):
            return None
        name = meaning.removeprefix("linen.")
        layer = self.program.layer(node)
        if self.in_class and (name == "Module" or layer is not None):
            return expression("nnx.Module" if layer is None else f"nnx.{layer.nnx}")
        top = name.partition(".")[0]
        if ("." in name and top not in SAME_FUNCTIONS) or name in KEPT_FUNCTIONS:
            return None
        if name in RENAMED_FUNCTIONS:
            return expression(f"nnx.{RENAMED_FUNCTIONS[name]}")
        same = getattr(nnx, name, None) is getattr(linen, name, object())
        if top in SAME_FUNCTIONS or (same and not isinstance(getattr(nnx, name), type)):
            return expression(f"nnx.{name}")
        return None


class _Imports(cst.CSTTransformer):
    """Puts the import of nnx beside that of Linen, and removes the latter where nothing uses it."""

    def __init__(self, program: LinenProgram, used: set[str]):
        super().__init__()
        self.program = program
        self.used = used
        self.done = program.names.imported.get("nnx") == "nnx"

    def leave_SimpleStatementLine(self, original_node: Any, updated_node: Any) -> Any:
        small = original_node.body[0] if len(original_node.body) == 1 else None
        if not isinstance(small, cst.Import | cst.ImportFrom) or isinstance(
            small.names, cst.ImportStar
        ):
            return updated_node
        root = "linnet" if "linnet" in code(small) else "flax"
        if not any(self.is_linen(small, alias) for alias in small.names):
            return updated_node
        kept = [a for a in small.names if not self.is_linen(small, a) or self.local(a) in self.used]
        new = [] if self.done else statements(f"from {root} import nnx")
        self.done = True
        if kept:
            kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            updated = small.with_changes(names=kept)
            return cst.FlattenSentinel([updated_node.with_changes(body=[updated]), *new])
        if new:
            return new[0].with_changes(
                leading_lines=updated_node.leading_lines,
                trailing_whitespace=updated_node.trailing_whitespace,
            )
        return cst.RemoveFromParent()

    def is_linen(self, node: Any, alias: cst.ImportAlias) -> bool:
        meaning = self.program.names.imported.get(self.local(alias), "")
        text = code(node)
        return (meaning == "linen" or meaning.startswith("linen.")) and (
            "flax" in text or "linnet" in text
        )

    def local(self, alias: cst.ImportAlias) -> str:
        return code(alias.asname.name) if alias.asname is not None else dotted(alias.name) or ""


ADVICE = {
    "init": "build the model with its sizes and rngs=nnx.Rngs(key); it holds its variables",
    "apply": "call the model itself; it holds and updates its variables",
    "apply_fn": "call the model itself; it holds and updates its variables",
    "apply_gradients": "optimizer.update(model, grads)",
    "create": "optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)",
}


class _Commenter(cst.CSTTransformer):
    """Puts a comment above each statement that uses a model in Linen's way."""

    def __init__(self, converter: Converter, reason: str):
        super().__init__()
        self.converter = converter
        self.reason = reason
        self.found: list[str] = []

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> None:
        self.found = []

    def visit_Call(self, node: cst.Call) -> None:
        if not isinstance(node.func, cst.Attribute):
            return
        name = node.func.attr.value
        is_state = name != "create" or "TrainState" in code(node.func)
        if name in ADVICE and is_state and ADVICE[name] not in self.found:
            known = self.converter.program.names.meaning(node.func)
            if known is None or name == "create":
                self.found.append(ADVICE[name])

    def leave_SimpleStatementLine(self, original_node: Any, updated_node: Any) -> Any:
        found, self.found = self.found, []
        for advice in found:
            number = self.converter.line_number(original_node)
            self.converter.remarks.append(Remark(number, f"left as it is: {advice}", left=True))
            updated_node = commented(updated_node, f"linnet: {advice}.")
        return updated_node


def _as_left(error: Exception) -> LeftAlone:
    if isinstance(error, LeftAlone):
        return error
    text = str(error).partition("\n")[0]
    return LeftAlone(f"something in it is not understood ({type(error).__name__}: {text})")


def commented(node: Any, text: str) -> Any:
    """A statement with a comment above it."""
    comment = cst.EmptyLine(comment=cst.Comment(f"# {text}"))
    return node.with_changes(leading_lines=[*node.leading_lines, comment])


def _names(node: cst.CSTNode) -> set[str]:
    """The names that are used; those of imports and attributes are left out."""
    if isinstance(node, cst.Name):
        return {node.value}
    inside = [node.value] if isinstance(node, cst.Attribute) else node.children
    skipped = isinstance(node, cst.Import | cst.ImportFrom)
    return set().union(*map(_names, () if skipped else inside))


def _defaults(node: cst.ClassDef) -> list[tuple[str, cst.BaseExpression]]:
    lines = [s.body[0] for s in node.body.body if isinstance(s, cst.SimpleStatementLine)]
    return [(code(x.target), x.value) for x in lines if isinstance(x, cst.AnnAssign) and x.value]
