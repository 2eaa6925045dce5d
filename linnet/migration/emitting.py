"""The converted class: a constructor, and the methods with their submodules referred to."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import libcst as cst

from linnet.migration.feeding import CallEdit
from linnet.migration.making import list_name, parameters_of
from linnet.migration.names import code, dotted, keywords_of
from linnet.migration.program import ClassModel, Creation, Field
from linnet.migration.rendering import Renderer, call_text, scan_options, stacked
from linnet.migration.stages import ClassAnalysis
from linnet.migration.values import LeftAlone, constant


def statements(text: str) -> list[Any]:
    """The statements of a piece of code."""
    return list(cst.parse_module(text).body)


def expression(text: str) -> cst.BaseExpression:
    return cst.parse_expression(text)


class MethodRewriter(cst.CSTTransformer):
    """Rewrites the body of one method."""

    def __init__(self, analysis: ClassAnalysis, renderer: Renderer, method: str):
        super().__init__()
        self.analysis = analysis
        self.renderer = renderer
        self.method = method
        self.in_setup = method == "setup"
        self.iterators: list[str] = []
        self.targets: set[cst.CSTNode] = set()
        self.held: list[cst.EmptyLine] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.AssignTarget | cst.AnnAssign):
            self.targets.add(node.target)
        return True

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        found = self.changed(original_node, updated_node)
        container = self.analysis.wrapped.get(original_node)
        if container is not None and self.in_setup:
            return cst.Call(expression(container), [cst.Arg(found)])
        return found

    def changed(self, original: Any, updated: Any) -> Any:
        text = self.analysis.replacements.get(original)
        if text is not None:
            match = re.match(r"next\((\w+)\)", text)
            if match and match[1] not in self.iterators:
                self.iterators.append(match[1])
            if self.in_setup or original not in self.analysis.lifted:
                return expression(text) if self.in_setup else self.rewritten(text)
        creation = self.analysis.creations.get(original)
        if creation is not None and self.in_setup:
            return expression(self.renderer.render(creation))
        if isinstance(original, cst.Call):
            return self.call(original, updated)
        if isinstance(original, cst.Attribute):
            return self.attribute(original, updated)
        if isinstance(original, cst.UnaryOperation) and isinstance(original.operator, cst.Not):
            if code(updated.expression) == "(not self.deterministic)":
                return expression("self.deterministic")
            if code(original.expression) == "self.is_initializing()":
                return expression("True")
        if isinstance(original, cst.SimpleStatementLine):
            return self.statement_line(original, updated)
        if isinstance(original, cst.IndentedBlock):
            return self.block(updated)
        return updated

    def attribute(self, original: cst.Attribute, updated: cst.Attribute) -> cst.BaseExpression:
        if dotted(original.value) != "self":
            return updated
        name = original.attr.value
        if name in self.analysis.late_names and not self.in_setup:
            return cst.Name(name)
        renamed = self.analysis.renamed.get(name, name)
        if renamed != name:
            updated = updated.with_changes(attr=cst.Name(renamed))
        is_param = renamed in self.analysis.params.values() and name in self.analysis.attributes
        if is_param and original not in self.targets and not self.in_setup:
            return expression(f"{code(updated)}[...]")
        return updated

    def call(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression:
        name = dotted(original.func) or ""
        if name.startswith("self.") and name[5:] not in self.analysis.model.all_methods:
            found = self.own_call(name[5:], updated)
            if found is not None:
                return found
        if name.startswith("self.") and name[5:] in self.analysis.model.methods:
            late = sorted(self.analysis.method_late.get(name[5:], ()))
            added = [cst.Arg(cst.Name(n), keyword=cst.Name(n), equal=_EQUAL) for n in late]
            return updated.with_changes(args=[*updated.args, *added]) if added else updated
        creation = self.analysis.lifted.get(original)
        if creation is not None:
            return expression(self.lifted_call(creation, updated, original))
        edit = self.analysis.edits.get(original)
        return updated if edit is None else self.edited(updated, edit)

    def own_call(self, name: str, node: cst.Call) -> cst.BaseExpression | None:
        arguments = [argument.value for argument in node.args]
        if name == "make_rng":
            stream = constant(code(arguments[0])) if arguments else "default"
            if isinstance(stream, str) and stream.isidentifier():
                return expression(f"self.rngs.{stream}()")
            return expression(f"self.rngs[{code(arguments[0])}]()")
        if name == "has_rng":
            return expression("(not self.deterministic)")
        if name == "is_initializing":
            return cst.Name("False")
        if name == "has_variable":
            return cst.Name("True")
        if name == "sow":
            variable_type = self.analysis.program.variable_type(constant(code(arguments[0])))
            first = node.args[0].with_changes(value=expression(variable_type))
            return node.with_changes(args=[first, *node.args[1:]])
        return None

    def lifted_call(self, creation: Creation, node: cst.Call, original: cst.Call) -> str:
        """A call of a lifted class."""
        reference = code(node.func)
        positional = [code(a.value) for a in node.args if a.keyword is None]
        if any(a.star for a in node.args):
            raise LeftAlone("a lifted class is called with * or **", original)
        named = [f"{a.keyword.value}={code(a.value)}" for a in node.args if a.keyword is not None]
        target = creation.factory.target
        if isinstance(target, ClassModel):
            late = self.analysis.program_class(target).method_late.get("__call__", set())
            named += [
                f"{key}={code(self.rewritten(text))}"
                for key, text in creation.late.items()
                if key in late
            ]
        elif creation.late:
            raise LeftAlone("a lifted layer with arguments that depend on the call", original)
        first, rest = positional[0], positional[1:]
        lift = creation.factory.lifts[0]
        if lift.name == "remat":
            options = [f"{k}={lift.option(k)}" for k in ("policy", "prevent_cse") if lift.option(k)]
            inner = ", ".join(["x", *rest, *named])
            arguments = ", ".join([f"lambda layer, x: layer({inner})", *options])
            return f"nnx.remat({arguments})({reference}, {first})"
        if lift.name == "vmap":
            return self.vmap_call(creation, reference, positional, named)
        if stacked(creation):
            return self.stack_call(creation, reference, first, rest, named)
        return self.scan_call(creation, reference, first, rest, named)

    def stack_call(self, creation: Creation, reference: str, first: str, rest, named) -> str:
        lift = creation.factory.lifts[0]
        axes = self.in_axes(lift.option("in_axes", "0"), len(rest), creation)
        scanned = [text for text, axis in zip(rest, axes, strict=True) if axis == "0"]
        others = [text for text, axis in zip(rest, axes, strict=True) if axis != "0"]
        if any(axis not in ("0", "broadcast") for axis in axes):
            raise LeftAlone("a scan over layers with inputs along other axes than 0", creation.node)
        mapped = iter([f"x{i}" for i in range(len(scanned))] if len(scanned) != 1 else ["x"])
        passed = iter([f"arg{i}" for i in range(len(others))])
        arguments = [next(mapped) if axis == "0" else next(passed) for axis in axes]
        taken, xs = "_", "None"
        if scanned:
            taken, xs = "x", scanned[0]
        if len(scanned) > 1:
            taken, xs = "xs", f"({', '.join(scanned)})"
            arguments = [f"xs[{a[1:]}]" if a.startswith("x") else a for a in arguments]
        extra = [a for a in arguments if a.startswith("arg")]
        parameters = ", ".join(["layer", "carry", taken, *extra])
        inner = ", ".join(["carry", *arguments, *named])
        step = f"lambda {parameters}: layer({inner})"
        reverse = [f"reverse={lift.option('reverse')}"] if lift.option("reverse") else []
        trailing = [xs, *others] if others or scanned else []
        return call_text(f"{reference}.scan", [step, first, *trailing, *reverse])

    def scan_call(self, creation: Creation, reference: str, first: str, rest, named) -> str:
        lift = creation.factory.lifts[0]
        axes = self.in_axes(lift.option("in_axes", "0"), len(rest), creation)
        axes = ["None" if axis == "broadcast" else axis for axis in axes]
        split = lift.option("split_rngs")
        if re.search(r"""["'](?!params)\w+["']\s*:\s*False""", split):
            raise LeftAlone("a scan whose turns share random keys", creation.node)
        state = "None"
        if re.search(r"""["'](?!params)\w+["']\s*:\s*True""", split):
            state = "nnx.StateAxes({nnx.RngState: nnx.Carry, ...: None})"
        names = ["x"] if len(rest) == 1 else [f"x{i}" for i in range(len(rest))]
        parameters = ", ".join(["cell", "carry", *names])
        inner = ", ".join(["carry", *names, *named])
        step = f"lambda {parameters}: cell({inner})"
        in_axes = ", ".join([state, "nnx.Carry", *axes])
        out_axes = f"(nnx.Carry, {lift.option('out_axes', '0')})"
        options = scan_options(lift)
        head = call_text(
            "nnx.scan", [step, f"in_axes=({in_axes})", f"out_axes={out_axes}{options}"]
        )
        return f"{head}({', '.join([reference, first, *rest])})"

    def vmap_call(self, creation: Creation, reference: str, positional: list[str], named) -> str:
        lift = creation.factory.lifts[0]
        axes = self.in_axes(lift.option("in_axes", "0"), len(positional), creation)
        layers = stacked(creation)
        if len(creation.factory.lifts) > 1:
            raise LeftAlone("a vmap of another lifted transform", creation.node)
        names = ["x"] if len(positional) == 1 else [f"x{i}" for i in range(len(positional))]
        step = f"lambda {', '.join(['layer', *names])}: layer({', '.join([*names, *named])})"
        in_axes = ", ".join(["0" if layers else "None", *axes])
        head = f"nnx.vmap({step}, in_axes=({in_axes}), out_axes={lift.option('out_axes', '0')})"
        place = f"{reference}.stacked" if layers else reference
        return f"{head}({', '.join([place, *positional])})"

    def in_axes(self, text: str, count: int, creation: Creation) -> list[str]:
        """The axis of each argument after the carry."""
        node = expression(text)
        given: list[Any] = [node] * count
        if isinstance(node, cst.Tuple):
            given = [element.value for element in node.elements]
        found = []
        for axis in given:
            meaning = self.analysis.program.names.meaning(axis)
            found.append("broadcast" if meaning == "linen.broadcast" else code(axis))
        if len(found) != count:
            raise LeftAlone("a scan with another number of axes than arguments", creation.node)
        return found

    def edited(self, node: cst.Call, edit: CallEdit) -> cst.Call:
        """A call with other arguments."""
        if edit.swapped:
            key, *shape = node.args
            plain = [a.with_changes(comma=cst.MaybeSentinel.DEFAULT) for a in (*shape, key)]
            plain[-1] = cst.Arg(expression(f"nnx.Rngs({code(key.value)})"))
            return node.with_changes(args=plain)
        arguments = []
        for position, argument in enumerate(node.args):
            plain = argument.keyword is None and not argument.star
            if plain and position and edit.named:
                name = edit.named[position - 1]
                argument = argument.with_changes(keyword=cst.Name(name), equal=_EQUAL)
            elif argument.keyword is not None and argument.keyword.value in dict(edit.renamed):
                renamed = dict(edit.renamed)[argument.keyword.value]
                argument = argument.with_changes(keyword=cst.Name(renamed))
            arguments.append(argument)
        given = keywords_of(node)
        added = [
            cst.Arg(self.rewritten(text), keyword=cst.Name(name), equal=_EQUAL)
            for name, text in edit.added
            if name not in given
        ]
        if added and arguments:
            comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
            arguments[-1] = arguments[-1].with_changes(comma=comma)
        return node.with_changes(args=[*arguments, *added])

    def rewritten(self, text: str) -> cst.BaseExpression:
        """An argument that moved from a constructor to a call."""
        found = expression(text).visit(self)
        assert isinstance(found, cst.BaseExpression)
        return found

    # ---- statements ------------------------------------------------------------------------------

    def statement_line(
        self, original: cst.SimpleStatementLine, updated: cst.SimpleStatementLine
    ) -> Any:
        if original in self.analysis.dropped and not self.in_setup:
            return self.removed(updated)
        small = original.body[0]
        if self.in_setup and isinstance(small, cst.Assign):
            creation = self.analysis.unrolled.get(small.value)
            if creation is not None and creation.carried is not None:
                return cst.FlattenSentinel(
                    self.unrolled(creation, updated, code(small.targets[0].target))
                )
        return updated

    def unrolled(self, creation: Creation, line: cst.SimpleStatementLine, target: str) -> list[Any]:
        """Layers of a list whose inputs have different sizes: a loop that carries the size."""
        assert creation.carried is not None
        first, following = creation.carried
        loop_target, iterable = creation.loops[-1]
        shadow = f"{creation.path}_features"
        text = "\n".join(
            [
                f"{target} = nnx.List([])",
                f"{shadow} = {first}",
                f"for {loop_target} in {iterable}:",
                *_indented(f"{target}.append({self.renderer.render(creation, 12)})"),
                f"    {shadow} = {following}",
            ]
        )
        found = statements(text)
        found[0] = found[0].with_changes(leading_lines=line.leading_lines)
        return found

    def removed(self, line: cst.SimpleStatementLine) -> Any:
        """A statement that is not needed any more; its comments stay."""
        self.held += [empty for empty in line.leading_lines if empty.comment is not None]
        if line.trailing_whitespace.comment is not None:
            self.held.append(cst.EmptyLine(comment=line.trailing_whitespace.comment))
        return cst.RemoveFromParent()

    def block(self, updated: cst.IndentedBlock) -> cst.IndentedBlock:
        held, self.held = self.held, []
        body = list(updated.body)
        if held and body:
            first: Any = body[0]
            body[0] = first.with_changes(leading_lines=[*held, *first.leading_lines])
        return updated.with_changes(body=body or statements("pass"))


_EQUAL = cst.AssignEqual(
    whitespace_before=cst.SimpleWhitespace(""), whitespace_after=cst.SimpleWhitespace("")
)


class ClassEmitter:
    """Writes one converted class."""

    def __init__(self, analysis: ClassAnalysis, renderer: Renderer):
        self.analysis = analysis
        self.renderer = renderer
        self.model = analysis.model

    def emit(self) -> cst.ClassDef:
        node = self.model.node
        body: list[Any] = []
        field_lines: dict[str, cst.SimpleStatementLine] = {}
        constructor_at = None
        for statement in node.body.body:
            if isinstance(statement, cst.SimpleStatementLine) and isinstance(
                statement.body[0], cst.AnnAssign
            ):
                name = statement.body[0].target
                if isinstance(name, cst.Name):
                    field_lines[name.value] = statement
                    constructor_at = len(body) if constructor_at is None else constructor_at
                    continue
            if isinstance(statement, cst.FunctionDef):
                if statement.name.value == "setup":
                    constructor_at = len(body)
                    continue
                constructor_at = len(body) if constructor_at is None else constructor_at
                body.append(self.method(statement))
                continue
            body.append(statement)
        constructor = self.constructor(field_lines)
        position = len(body) if constructor_at is None else constructor_at
        setup = self.model.setup
        leading = [] if setup is None else list(setup.leading_lines)
        blank = [cst.EmptyLine(indent=False)] if position and not leading else leading
        if not position:
            blank = [line for line in blank if line.comment is not None]
        body.insert(position, constructor.with_changes(leading_lines=blank))
        if position + 1 < len(body) and isinstance(body[position + 1], cst.FunctionDef):
            following: Any = body[position + 1]
            lines = list(following.leading_lines)
            if not any(line.comment is None for line in lines):
                lines = [cst.EmptyLine(indent=False), *lines]
            body[position + 1] = following.with_changes(leading_lines=lines)
        bases = [self.base(base) for base in node.bases if base.keyword is None]
        return node.with_changes(body=node.body.with_changes(body=body), bases=bases)

    def base(self, base: cst.Arg) -> cst.Arg:
        if self.analysis.program.names.meaning(base.value) == "linen.Module":
            return base.with_changes(value=expression("nnx.Module"))
        return base

    def method(self, node: cst.FunctionDef) -> cst.FunctionDef:
        name = node.name.value
        rewriter = MethodRewriter(self.analysis, self.renderer, name)
        new = node.visit(rewriter)
        assert isinstance(new, cst.FunctionDef)
        decorators = [d for d in new.decorators if not self.unneeded(d.decorator)]
        if len(decorators) < len(new.decorators):
            lines = [*new.leading_lines, *new.lines_after_decorators]
            new = new.with_changes(leading_lines=lines, lines_after_decorators=[])
        new = new.with_changes(decorators=decorators)
        new = _without_first_blank(self.without_unused(node, new))
        iterators = [
            f"{local} = iter(self.{prefix})"
            for prefix in sorted(self.analysis.program.listed.get(self.model.name, ()))
            if (local := list_name(prefix)) in rewriter.iterators
        ]
        if iterators:
            new = _after_docstring(new, statements("\n".join(iterators)))
        late = self.analysis.method_late.get(name, set())
        return _with_parameters(new, self.model, [n for n in self.analysis.late_names if n in late])

    def unneeded(self, decorator: cst.BaseExpression) -> bool:
        names = self.analysis.program.names
        if self.analysis.program.is_compact(decorator):
            return True
        meaning = names.meaning(decorator) or ""
        if meaning == "linen.nowrap":
            return True
        parts: list[Any] = [decorator]
        if isinstance(decorator, cst.Call):
            parts = [decorator.func, *(a.value for a in decorator.args)]
        if any((names.meaning(part) or "").startswith("linen.") for part in parts):
            raise LeftAlone(f"the decorator {code(decorator)}", decorator)
        return False

    def without_unused(self, old: cst.FunctionDef, new: cst.FunctionDef) -> cst.FunctionDef:
        """Leaves out local names that only the constructor needs now."""
        before = _name_counts(old.body)
        while True:
            counts = _name_counts(new.body)
            unused = {
                code(line)
                for line, assigned in self.analysis.bound_in.items()
                if line not in self.analysis.dropped
                if all(static and counts[n] <= 1 < before[n] for n, static in assigned)
            }
            remover = _RemoveLines(unused)
            smaller = new.visit(remover)
            assert isinstance(smaller, cst.FunctionDef)
            if not remover.removed:
                return new
            new = smaller

    # ---- the constructor -------------------------------------------------------------------------

    def constructor(self, field_lines: dict[str, Any]) -> cst.FunctionDef:
        analysis = self.analysis
        late = set(analysis.program.late_fields.get(self.model.name, ()))
        fields = [field for field in self.model.fields if field.name not in late]
        head = self.signature(fields)
        lines: list[str] = []
        for field in fields:
            lines += self.field_text(field, field_lines.get(field.name))
        if analysis.uses_mode:
            lines.append("# Set by train() and eval(); in Linen it was whether a key was passed.")
            lines.append("self.deterministic = False")
        if analysis.uses_rngs:
            lines.append("self.rngs = rngs.fork()")
        body = [*lines, *self.renderer.body()]
        text = "\n".join([head, *("    " + line for line in body)] if body else [head, "    pass"])
        found = statements(text)[0]
        assert isinstance(found, cst.FunctionDef)
        if self.model.setup is not None:
            rewriter = MethodRewriter(analysis, self.renderer, "setup")
            setup = self.model.setup.visit(rewriter)
            assert isinstance(setup, cst.FunctionDef)
            kept = found.body.body if body else []
            found = found.with_changes(body=found.body.with_changes(body=[*kept, *setup.body.body]))
        return found

    def signature(self, fields: list[Field]) -> str:
        parameters = ["self"]
        for field in fields:
            annotation = f": {field.annotation}" if field.annotation else ""
            default = _default(field)
            equals = "" if default is None else f" = {default}" if annotation else f"={default}"
            parameters.append(f"{field.name}{annotation}{equals}")
        parameters.append("*")
        for name in self.analysis.wanted_symbols():
            shape = name.endswith("_shape") and self.analysis.symbols[name].origin is None
            parameters.append(f"{name}: {'tuple[int, ...]' if shape else 'int'}")
        parameters.append("rngs: nnx.Rngs")
        short = f"def __init__({', '.join(parameters)}):"
        if len(short) <= 84:
            return short
        inner = f"    {', '.join(parameters)}"
        if len(inner) <= 80:
            return f"def __init__(\n{inner}\n):"
        return "def __init__(\n" + "".join(f"    {p},\n" for p in parameters) + "):"

    def field_text(self, field: Field, line: Any) -> list[str]:
        comments = []
        trailing = ""
        if line is not None:
            comments = [empty.comment.value for empty in line.leading_lines if empty.comment]
            comment = line.trailing_whitespace.comment
            trailing = f"  {comment.value}" if comment is not None else ""
        factory = _default_factory(field)
        value = field.name
        if factory is not None:
            value = f"{factory}() if {field.name} is None else {field.name}"
        return [*comments, f"self.{field.name} = {value}{trailing}"]


def _default_factory(field: Field) -> str | None:
    match = re.search(r"default_factory=(.+?)\)?$", field.default or "")
    is_field = re.match(r"([\w.]*\.)?field\(", field.default or "")
    return match[1] if match and is_field else None


def _default(field: Field) -> str | None:
    if _default_factory(field) is not None:
        return "None"
    is_field = re.match(r"([\w.]*\.)?field\(", field.default or "")
    match = re.search(r"default=(.+?)(, \w+=|\)$)", field.default or "") if is_field else None
    return match[1] if match else None if is_field else field.default


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in text.splitlines()]


def _after_docstring(node: cst.FunctionDef, new: list[Any]) -> cst.FunctionDef:
    body = list(node.body.body)
    position = 1 if node.get_docstring() is not None else 0
    return node.with_changes(
        body=node.body.with_changes(body=[*body[:position], *new, *body[position:]])
    )


def _without_first_blank(node: cst.FunctionDef) -> cst.FunctionDef:
    """A method whose body does not begin with an empty line, after statements were removed."""
    first, *rest = node.body.body
    lines = list(getattr(first, "leading_lines", ()))
    while lines and lines[0].comment is None:
        del lines[0]
    first = first.with_changes(leading_lines=lines)
    return node.with_changes(body=node.body.with_changes(body=[first, *rest]))


def _with_parameters(node: cst.FunctionDef, model: ClassModel, names: list[str]) -> cst.FunctionDef:
    """A method that also takes what were fields that depend on the call."""
    known = parameters_of(node)
    added = []
    for name in names:
        if name in known:
            raise LeftAlone(f"{name} is a field and an argument of {node.name.value}", node)
        field = model.field(name)
        default = None if field is None or field.default is None else expression(field.default)
        annotation = None
        if field is not None and field.annotation is not None:
            annotation = cst.Annotation(expression(field.annotation))
        added.append(cst.Param(cst.Name(name), annotation=annotation, default=default))
    return with_keyword_only(node, added) if added else node


def with_keyword_only(node: cst.FunctionDef, added: list[cst.Param]) -> cst.FunctionDef:
    """A function with more keyword-only parameters."""
    params = node.params
    star = params.star_arg
    star = cst.ParamStar() if isinstance(star, cst.MaybeSentinel) else star
    kwonly = [*params.kwonly_params, *added]
    return node.with_changes(params=params.with_changes(star_arg=star, kwonly_params=kwonly))


def _name_counts(node: cst.CSTNode) -> Counter[str]:
    """How often each name is used; names of attributes and arguments are left out."""
    if isinstance(node, cst.Attribute | cst.Arg):
        return _name_counts(node.value)
    counts = Counter([node.value] if isinstance(node, cst.Name) else [])
    for child in node.children:
        counts += _name_counts(child)
    return counts


class _RemoveLines(cst.CSTTransformer):
    """Removes statements by their text."""

    def __init__(self, texts: set[str]):
        super().__init__()
        self.texts = texts
        self.removed = False

    def leave_SimpleStatementLine(self, original_node: Any, updated_node: Any) -> Any:
        if code(original_node) in self.texts:
            self.removed = True
            return cst.RemoveFromParent()
        return updated_node
