"""Constructors as text: what a class makes, with its sizes, and the lines around it."""

from __future__ import annotations

import re

from linnet.migration.bindings import comments_of
from linnet.migration.layers import DROPPED, Layer
from linnet.migration.making import Block, Line, call_text
from linnet.migration.program import ClassModel, Creation, Lift, Symbol
from linnet.migration.stages import ClassAnalysis
from linnet.migration.values import (
    Group,
    LeftAlone,
    Made,
    Several,
    Static,
    Value,
    constant,
    names_in,
)


class Renderer:
    """Writes the constructor's lines of one class."""

    def __init__(self, analysis: ClassAnalysis):
        self.analysis = analysis
        self.program = analysis.program
        self.model = analysis.model
        self.traced_sizes: list[str] = []
        self.asked: list[str] = []
        self.uses_stack = False

    # ---- sizes -----------------------------------------------------------------------------------

    def complete(self) -> None:
        """Finds the sizes that the analysis did not: in the trace, or by asking for them."""
        for creation in self.analysis.creations.values():
            self.check_called(creation)
            for name in self.wanted(creation):
                if creation.sizes.get(name) is None:
                    creation.sizes[name] = self.traced(creation, name) or self.ask(creation, name)
        texts = ["\n".join(self.body())]
        for creation in self.analysis.creations.values():
            texts.append(self.render(creation))
            texts += creation.carried or ()
        texts += [
            text
            for node, text in self.analysis.replacements.items()
            if node in self.analysis.declared
        ]
        for text in texts:
            self.analysis.used_symbols |= names_in(text)
        symbols = self.analysis.symbols
        asked = [n for n in self.analysis.wanted_symbols() if symbols[n].origin is None]
        self.asked = list(dict.fromkeys([*self.asked, *asked]))

    def check_called(self, creation: Creation) -> None:
        """Refuses arguments that depend on a call, where no call of the submodule was seen."""
        if creation.late and not creation.called:
            what = f"{', '.join(creation.late)} of {creation.factory.class_name}"
            raise LeftAlone(f"{what} depends on the call, which is not seen", creation.node)

    def wanted(self, creation: Creation) -> list[str]:
        """The sizes that a constructor takes."""
        target = creation.factory.target
        if isinstance(target, ClassModel):
            return self.analysis.program_class(target).wanted_symbols()
        layer = creation.factory.layer
        return [layer.size_name] if layer.sizes else []

    def traced(self, creation: Creation, name: str) -> str | None:
        """A size that all calls of the example had."""
        listed = creation.target.startswith(("append ", "setattr ", "each "))
        calls = [
            shapes
            for (owner, child), found in self.program.traced.inputs.items()
            if owner == self.model.name
            if child == creation.path or (listed and child.rpartition("_")[0] == creation.path)
            for shapes in found
        ]
        sizes = {self.traced_size(name, shapes, creation) for shapes in calls}
        if len(sizes) != 1 or None in sizes:
            return None
        (size,) = sizes
        self.traced_sizes.append(f"{creation.path}: {name}={size}")
        return size

    def traced_size(self, name: str, shapes: dict, creation: Creation) -> str | None:
        target = creation.factory.target
        if isinstance(target, ClassModel):
            symbol = self.analysis.program_class(target).symbols[name]
            if symbol.origin is None:
                return None
            shape = shapes.get(symbol.origin.parameter)
            if symbol.origin.item is not None:
                shape = shapes.get((symbol.origin.parameter, symbol.origin.item))
            axis = symbol.axis
            return None if shape is None or len(shape) <= axis else str(shape[axis])
        layer = creation.factory.layer
        shape = shapes.get(layer.fed)
        if shape is None:
            return None
        axes = constant(creation.argument("axis") or "-1") if layer.sizes == "axes" else -1
        if isinstance(axes, tuple):
            return repr(tuple(shape[axis] for axis in axes))
        return str(shape[axes])

    def ask(self, creation: Creation, name: str) -> str:
        """An argument of the constructor, for a size that could not be found out."""
        stem = re.sub(r"\W", "_", creation.path or creation.factory.prefix)
        asked = f"{stem}_{name}"
        if asked not in self.analysis.symbols:
            self.analysis.symbols[asked] = Symbol(asked)
            self.asked.append(asked)
        return asked

    # ---- what is made ----------------------------------------------------------------------------

    def render(self, creation: Creation, indent: int = 8) -> str:
        lifts = [lift.name for lift in creation.factory.lifts]
        if ("scan" in lifts or lifts[:1] == ["vmap"]) and stacked(creation):
            return self.stack(creation, indent)
        return self.constructor(creation, indent)

    def constructor(self, creation: Creation, indent: int) -> str:
        target, factory = creation.factory.target, creation.factory
        if isinstance(target, Layer):
            return call_text(factory.text, self.layer_arguments(creation, target), indent)
        sizes = [f"{name}={creation.sizes[name]}" for name in self.wanted(creation)]
        given = self.all_given(creation)
        fields = {name: text for name, text in given.items() if name not in creation.late}
        named = self.named(creation, fields)
        return call_text(factory.text, [*named, *sizes, "rngs=rngs", *creation.rest], indent)

    def all_given(self, creation: Creation) -> dict[str, str]:
        texts = dict(creation.given)
        texts.update({name: self.inner(value) for name, value in creation.inner.items()})
        order = [a.keyword.value if a.keyword else None for a in creation.node.args]
        known = [name for name in order if name in texts]
        first = [name for name in texts if name not in known]
        return {name: texts[name] for name in (*first, *known)}

    def named(self, creation: Creation, fields: dict[str, str]) -> list[str]:
        """Arguments as they were given, by position or by name, but for those that went away."""
        by_name = {a.keyword.value for a in creation.node.args if a.keyword}
        return [
            text if name not in by_name and not creation.late else f"{name}={text}"
            for name, text in fields.items()
            if name not in ("name", "parent")
        ]

    def layer_arguments(self, creation: Creation, layer: Layer) -> list[str]:
        given = self.all_given(creation)
        if layer.linen == "Sequential":
            inside = given["layers"].strip()
            if not inside.startswith(("[", "(")):
                return [f"*{inside}"]
            return [part for part in [inside[1:-1].strip().rstrip(",")] if part]
        if layer.linen == "Einsum" and creation.argument("use_bias") != "False":
            raise LeftAlone("an Einsum with a bias, whose shape NNX wants to know", creation.node)
        first = [name for name in layer.first if name in given]
        in_order = first == list(layer.first[: len(first)])
        size = [str(creation.sizes[layer.size_name])] if layer.sizes else []
        positional = [given[name] for name in first] if in_order else []
        if layer.linen in ("MultiHeadDotProductAttention", "MultiHeadAttention", "SelfAttention"):
            arguments = [*positional, *size] if positional else [f"in_features={size[0]}"]
            if "decode" not in given and "decode" not in dict(creation.factory.given_before):
                given["decode"] = "False"
        else:
            arguments = [*size, *positional]
        for name, text in given.items():
            if name in creation.late or (in_order and name in first) or name in DROPPED:
                continue
            renamed = layer.nnx_name(name)
            if layer.linen == "Einsum" and name == "use_bias":
                continue
            if renamed not in layer.accepted:
                raise LeftAlone(f"nnx.{layer.nnx} has no argument {name}", creation.node)
            axes = name in ("axis", "feature_axes", "reduction_axes")
            if axes and layer.size_name == "num_features" and constant(text) != -1:
                raise LeftAlone(f"{layer.linen} with {name}={text}", creation.node)
            arguments.append(f"{renamed}={text}")
        return [*arguments, *(["rngs=rngs"] if layer.rngs else []), *creation.rest]

    def inner(self, value: Value) -> str:
        """Submodules among the arguments of a constructor."""
        if isinstance(value, Made):
            target = value.creation.target
            return target if target.startswith("self.") else self.render(value.creation)
        if isinstance(value, Static):
            return value.text
        if isinstance(value, Several | Group):
            items = value.items if isinstance(value, Several) else tuple(value.members.values())
            if isinstance(value, Group) and value.each is not None:
                raise LeftAlone("a list of submodules as an argument")
            return f"[{', '.join(map(self.inner, items))}]"
        raise LeftAlone("a submodule among arguments that are not understood")

    def stack(self, creation: Creation, indent: int) -> str:
        """An ``nnx.Stack`` of layers that were scanned or mapped."""
        scan = creation.factory.lifts[0]
        remats = creation.factory.lifts[1:]
        if scan.name not in ("scan", "vmap") or any(lift.name != "remat" for lift in remats):
            raise LeftAlone("lifted transforms in this order", creation.node)
        length = scan.option("length" if scan.name == "scan" else "axis_size")
        if not length:
            raise LeftAlone(f"a {scan.name} over layers without their number", creation.node)
        self.uses_stack = True
        maker = f"lambda rngs: {self.constructor(creation, indent + 4)}"
        arguments = [maker, length, "rngs=rngs"]
        if remats:
            arguments.append(f"remat={remats[0].option('policy', 'True')}")
        if scan.option("unroll"):
            arguments.append(f"unroll={scan.option('unroll')}")
        partition = re.search(r"""["'](\w+)["']\s*}""", scan.option("metadata_params"))
        if partition is not None:
            arguments.append(f'partition="{partition[1]}"')
        return call_text("nnx.Stack", arguments, indent)

    # ---- lines -----------------------------------------------------------------------------------

    def texts(self, line: Line, indent: int) -> list[str]:
        if isinstance(line.content, str):
            return [line.content]
        creation = line.content
        text = self.render(creation, indent)
        comments = comments_of(creation.node)
        verb, _, rest = creation.target.partition(" ")
        if verb == "setattr":
            return [*comments, call_text("setattr", ["self", rest, text], indent)]
        if verb == "append":
            return [*comments, f"self.{rest}.append({text})"]
        return [*comments, f"{creation.target} = {text}"]

    def body(self) -> list[str]:
        """The lines of the constructor for what a compact method makes."""
        lines = self.analysis.lines
        needed = self.needed(lines)
        found = self.write(lines, needed, 0)
        listed = self.program.listed.get(self.model.name, ())
        used = {c.factory.prefix for c in self.analysis.creations.values()}
        return [
            *(f"self.{prefix} = nnx.List([])" for prefix in sorted(listed) if prefix in used),
            *found,
        ]

    def needed(self, lines: list[Line | Block]) -> set[str]:
        """The local names that the constructor has to compute."""
        names: set[str] = set()
        while True:
            before = len(names)
            for text in self.needed_texts(lines, names):
                names |= names_in(text)
            if len(names) == before:
                return names

    def needed_texts(self, lines: list[Line | Block], names: set[str]) -> list[str]:
        found: list[str] = []
        for line in lines:
            if isinstance(line, Block):
                inner = self.needed_texts(line.lines, names)
                if inner and line.header != "else":
                    found.append(f"{line.header}: pass")
                found += inner
            elif line.needed or defined_by(line) in names:
                found.append("\n".join(self.texts(line, 8)))
        return found

    def write(self, lines: list[Line | Block], needed: set[str], level: int) -> list[str]:
        found: list[str] = []
        pad = "    " * level
        for position, line in enumerate(lines):
            if isinstance(line, Block):
                inner = self.write(line.lines, needed, level + 1)
                following = lines[position + 1] if position + 1 < len(lines) else None
                has_else = isinstance(following, Block) and following.header == "else"
                if not inner and line.header.startswith("if ") and has_else:
                    assert isinstance(following, Block)
                    if self.write(following.lines, needed, level + 1):
                        inner = [f"{pad}    pass"]
                if inner:
                    found += [f"{pad}{line.header}:", *inner]
            elif line.needed or defined_by(line) in needed:
                for text in self.texts(line, 8 + 4 * level):
                    found += [pad + part for part in text.splitlines()]
        return found


def defined_by(line: Line) -> str:
    """The local name that a line of text defines."""
    if not isinstance(line.content, str):
        return ""
    popped = re.match(r"\w+ = (\w+)\.pop\(", line.content)
    appended = re.match(r"(\w+)\.append\(", line.content)
    found = popped or appended
    return found[1] if found else line.content.partition(" = ")[0]


def stacked(creation: Creation) -> bool:
    """Whether a scanned class has parameters for each step, and not the same for all."""
    scan = next(lift for lift in creation.factory.lifts if lift.name in ("scan", "vmap"))
    axes, broadcast = scan.option("variable_axes"), scan.option("variable_broadcast")
    if scan.name == "vmap" and re.search(r"""["']params["']\s*:\s*None""", axes):
        return False
    if scan.option("variable_carry", "False") not in ("False", "()", '""', "''"):
        raise LeftAlone("a scan that carries collections", creation.node)
    if "params" in axes:
        if broadcast not in ("", "False") or any(
            v != "0" for v in re.findall(r":\s*([^,}]+)", axes)
        ):
            raise LeftAlone("a scan over layers along other axes than 0", creation.node)
        return True
    if "params" in broadcast and axes in ("", "{}"):
        return False
    raise LeftAlone("a scan whose parameters are neither stacked nor shared", creation.node)


def scan_options(lift: Lift) -> str:
    """Arguments that nnx.scan takes as linen.scan does."""
    names = [name for name in ("length", "reverse", "unroll") if lift.option(name)]
    return "".join(f", {name}={lift.option(name)}" for name in names)
