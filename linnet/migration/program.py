"""The classes and functions of one program, and what the analysis has found out about them."""

from __future__ import annotations

import dataclasses
from collections.abc import Container

import libcst as cst

from linnet.migration.layers import LAYERS, Layer
from linnet.migration.names import Names, code
from linnet.migration.tracing import TracedExample
from linnet.migration.values import ArrayOrigin, LeftAlone, Value

# Methods of Linen's Module that have no counterpart in a converted class.
UNSUPPORTED_METHODS = (
    "get_variable put_variable bind unbind clone copy scope variables is_mutable_collection "
    "init init_with_output apply lazy_init".split()
)


@dataclasses.dataclass
class Field:
    """A field of a Linen module: an argument of its constructor."""

    name: str
    annotation: str | None
    default: str | None


@dataclasses.dataclass(frozen=True)
class Symbol:
    """An argument that the converted constructor has beyond the fields: a size.

    ``origin`` and ``axis`` say which argument of which method has it; without them the analysis did
    not find out, and the user is asked.
    """

    name: str
    origin: ArrayOrigin | None = None
    axis: int = -1


@dataclasses.dataclass
class ClassModel:
    """A Linen module of the program."""

    node: cst.ClassDef
    name: str
    bases: list[str]
    fields: list[Field]
    methods: dict[str, cst.FunctionDef]
    compact: str | None
    inherited: dict[str, cst.FunctionDef] = dataclasses.field(default_factory=dict)

    @property
    def all_methods(self) -> dict[str, cst.FunctionDef]:
        return {**self.inherited, **self.methods}

    @property
    def setup(self) -> cst.FunctionDef | None:
        return self.methods.get("setup")

    @property
    def main(self) -> str:
        """The method that the sizes are taken from: the compact one, or ``__call__``."""
        if self.compact is not None:
            return self.compact
        return "__call__" if "__call__" in self.methods else next(iter(self.methods), "__call__")

    def field(self, name: str) -> Field | None:
        return next((field for field in self.fields if field.name == name), None)


@dataclasses.dataclass
class Helper:
    """A function of the program that makes a layer and returns it."""

    node: cst.FunctionDef
    layer: Layer
    call: cst.Call
    parameters: list[str]

    @property
    def name(self) -> str:
        return self.node.name.value


@dataclasses.dataclass(frozen=True)
class Factory:
    """What makes submodules: a layer, class or helper, with arguments already given.

    ``text`` is the factory in the converted constructor; ``given_before`` are arguments that it
    has, as texts; ``late`` are arguments that depend on the call, as texts that are valid there.
    """

    target: Layer | ClassModel | Helper
    text: str
    given_before: tuple[tuple[str, str], ...] = ()
    late: tuple[tuple[str, str], ...] = ()
    lifts: tuple[Lift, ...] = ()

    @property
    def prefix(self) -> str:
        """The start of the automatic names of what it makes."""
        words = {"scan": "Scan", "remat": "Checkpoint", "vmap": "Vmap"}
        return "".join(words[lift.name] for lift in self.lifts) + self.class_name

    @property
    def class_name(self) -> str:
        return self.target.name if isinstance(self.target, ClassModel) else self.layer.linen

    @property
    def layer(self) -> Layer:
        """The layer that is made, by its own class or by a helper."""
        assert not isinstance(self.target, ClassModel)
        return self.target.layer if isinstance(self.target, Helper) else self.target


@dataclasses.dataclass(frozen=True)
class Lift:
    """A lifted transform around a class: its name, and its arguments as texts."""

    name: str
    options: tuple[tuple[str, str], ...]

    def option(self, name: str, default: str = "") -> str:
        return dict(self.options).get(name, default)


class Restart(Exception):
    """A fact was learned that classes analysed before did not know of."""


class Again(Exception):
    """A fact was learned that the analysis of the same class did not know of."""


class LinenProgram:
    """The parts of a module that matter, and facts that hold across its classes."""

    def __init__(self, module: cst.Module, traced: TracedExample | None = None):
        self.module = module
        self.names = Names(module)
        self.traced = traced or TracedExample()
        self.classes: dict[str, ClassModel] = {}
        self.records: dict[str, list[str]] = {}
        self.helpers: dict[str, Helper] = {}
        self.left: dict[str, LeftAlone] = {}
        # Facts that grow while classes are analysed; each new one starts the analysis again.
        self.late_fields: dict[str, list[str]] = {}
        self.factory_fields: dict[tuple[str, str], Factory] = {}
        self.listed: dict[str, set[str]] = {}
        # Factories that are made at the top of the module, by name.
        self.factories: dict[str, Factory] = {}
        # The Variable types of the program's own collections, by collection.
        self.variable_types: dict[str, str] = {}
        self._read()

    def _read(self) -> None:
        for statement in self.module.body:
            if isinstance(statement, cst.ClassDef):
                self._read_class(statement)
            elif isinstance(statement, cst.FunctionDef):
                helper = self._helper(statement)
                if helper is not None:
                    self.helpers[helper.name] = helper

    def _read_class(self, node: cst.ClassDef) -> None:
        name = node.name.value
        given = [base.value for base in node.bases if base.keyword is None]
        bases = [self.names.meaning(base) or code(base) for base in given]
        fields, methods, compact = self._members(node)
        if any(base == "linen.Module" or base in self.classes for base in bases):
            inherited = [self.classes[base] for base in bases if base in self.classes]
            methods_of_bases: dict[str, cst.FunctionDef] = {}
            for base in reversed(inherited):
                known = {field.name for field in fields}
                fields = [f for f in base.fields if f.name not in known] + fields
                methods_of_bases |= base.all_methods
            self.classes[name] = ClassModel(
                node, name, bases, fields, methods, compact, methods_of_bases
            )
        elif fields:
            self.records[name] = [field.name for field in fields]

    def _members(self, node: cst.ClassDef):
        fields: list[Field] = []
        methods: dict[str, cst.FunctionDef] = {}
        compact = None
        for statement in node.body.body:
            if isinstance(statement, cst.FunctionDef):
                methods[statement.name.value] = statement
                if any(self.is_compact(d.decorator) for d in statement.decorators):
                    compact = statement.name.value
            elif isinstance(statement, cst.SimpleStatementLine):
                for small in statement.body:
                    if isinstance(small, cst.AnnAssign) and isinstance(small.target, cst.Name):
                        fields.append(_field(small))
        return fields, methods, compact

    def is_compact(self, decorator: cst.BaseExpression) -> bool:
        return self.names.meaning(decorator) in ("linen.compact", "linen.module.compact")

    def layer(self, node: cst.CSTNode, hidden: Container[str] = ()) -> Layer | None:
        """The Linen layer that a name means."""
        meaning = self.names.meaning(node, hidden)
        if meaning is not None and meaning.startswith("linen."):
            return LAYERS.get(meaning.rpartition(".")[2])
        return None

    def _helper(self, node: cst.FunctionDef) -> Helper | None:
        """A function whose last statement returns a new layer."""
        if not isinstance(node.body, cst.IndentedBlock) or not node.body.body:
            return None
        last = node.body.body[-1]
        if not isinstance(last, cst.SimpleStatementLine) or len(last.body) != 1:
            return None
        result = last.body[0]
        if not isinstance(result, cst.Return) or not isinstance(result.value, cst.Call):
            return None
        layer = self.layer(result.value.func)
        if layer is None:
            return None
        parameters = node.params
        names = [p.name.value for p in (*parameters.params, *parameters.kwonly_params)]
        return Helper(node, layer, result.value, names)

    def leave(self, name: str, error: LeftAlone) -> None:
        self.left.setdefault(name, error)

    def learn_late(self, owner: str, field: str) -> None:
        """A field of a class is given a value that depends on a call."""
        known = self.late_fields.setdefault(owner, [])
        if field not in known:
            known.append(field)
            raise Restart

    def learn_factory(self, owner: str, field: str, factory: Factory) -> None:
        """A field of a class is given something that makes submodules."""
        late = tuple((name, f"{field}_{name}") for name, _ in factory.late)
        given = tuple((name, "") for name, _ in factory.given_before)
        found = dataclasses.replace(factory, text=f"self.{field}", late=late, given_before=given)
        known = self.factory_fields.get((owner, field))
        if known is None:
            self.factory_fields[owner, field] = found
            raise Restart
        if known.prefix != found.prefix:
            raise LeftAlone(
                f"the field {field} of {owner} is given {known.prefix} in one place and "
                f"{found.prefix} in another"
            )
        if set(found.late) - set(known.late):
            late = known.late + tuple(pair for pair in found.late if pair not in known.late)
            self.factory_fields[owner, field] = dataclasses.replace(known, late=late)
            raise Restart

    def learn_listed(self, owner: str, prefix: str) -> None:
        """Submodules with an automatic name are made in a loop or a branch: they go to a list."""
        known = self.listed.setdefault(owner, set())
        if prefix not in known:
            known.add(prefix)
            raise Again

    def variable_type(self, collection: str) -> str:
        """The Variable type of a collection; an own collection gets a class of its own."""
        from_table = VARIABLE_TYPES.get(collection)
        if from_table is not None:
            return from_table
        name = "".join(part.capitalize() for part in collection.split("_"))
        if name in self.names.defined or name in self.names.imported:
            name += "Variable"
        self.variable_types[collection] = name
        return name


VARIABLE_TYPES = {
    "params": "nnx.Param",
    "batch_stats": "nnx.BatchStat",
    "cache": "nnx.Cache",
    "intermediates": "nnx.Intermediate",
    "perturbations": "nnx.Perturbation",
}


def _field(node: cst.AnnAssign) -> Field:
    assert isinstance(node.target, cst.Name)
    default = None if node.value is None else code(node.value)
    return Field(node.target.value, code(node.annotation.annotation), default)


@dataclasses.dataclass
class Creation:
    """One place where submodules are made.

    Args:
      factory: what makes them.
      node: the call in the program.
      given: the arguments there that the converted constructor gets, by Linen's name, as texts.
      rest: ``*args`` and ``**kwargs`` that are passed on, as texts.
      inner: submodules among the arguments, by name.
      path: the name in Linen, where it is known; the start of the names for those in a list.
      reference: the submodule in a call, as text; ``target`` where the constructor puts it.
      sizes: arguments of the constructor that say how large the input is, as texts.
      late: arguments of the constructor that a call gets instead.
      loops: targets and iterables of the comprehension it stands in.
      carried: sizes of the input for the first submodule of a list, and for the others.
    """

    factory: Factory
    node: cst.Call
    given: dict[str, str]
    rest: list[str]
    inner: dict[str, Value]
    path: str = ""
    reference: str = ""
    target: str = ""
    sizes: dict[str, str | None] = dataclasses.field(default_factory=dict)
    late: dict[str, str] = dataclasses.field(default_factory=dict)
    loops: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    carried: tuple[str, str] | None = None
    fed: bool = False
    called: bool = False

    def argument(self, name: str) -> str | None:
        """The text of an argument, given here or before."""
        return {**dict(self.factory.given_before), **self.given}.get(name)
