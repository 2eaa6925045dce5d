"""What the names of a program are to its models: variables, parameters, a TrainState."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import libcst as cst

from linnet.migration.names import all_nodes, code, dotted
from linnet.migration.values import constant

# What a name stands for: a model, its variables or one collection of them, a TrainState, something
# made from them, or something else.
MODEL, VARIABLES, PARAMS, COLLECTION, STATE, UPDATES, GRADIENT, PLAIN = (
    "model variables params collection state updates gradient plain".split()
)


@dataclasses.dataclass
class Binding:
    """What a local name is: its sort, and the name of its model and optimizer."""

    sort: str
    model: str = "model"
    collection: str = ""
    constructor: cst.Call | None = None
    optimizer: str = "optimizer"
    built: bool = True  # False until the converted program builds the model
    stale: bool = False  # the name holds values from before an update of the model


@dataclasses.dataclass
class Function:
    """A function whose parameters are models after the conversion.

    ``parameters`` are the bindings of its parameters by position; ``returned`` says for each value
    that it returns what became of it, where it returns one of these.
    """

    node: cst.FunctionDef
    parameters: dict[str, Binding]
    returned: list[str | None] = dataclasses.field(default_factory=list)


class AppliedModel(NamedTuple):
    """``model.apply(variables, ...)`` as a call of the model."""

    text: str
    returns_updates: bool


class AppliedGradients(NamedTuple):
    """``state.apply_gradients(grads=...)`` as an update of the optimizer."""

    state: Binding
    text: str


class BindingScope(dict[str, Binding]):
    """The bindings of a function or module, and of those around it."""

    def __init__(self, outer: BindingScope | None = None):
        super().__init__()
        self.outer = outer

    def find(self, name: str) -> Binding | None:
        if name in self:
            return self[name]
        return self.outer.find(name) if self.outer is not None else None


NO_SPACE = cst.SimpleWhitespace("")
HOLDERS = (VARIABLES, PARAMS, COLLECTION, STATE)
STATE_ATTRIBUTES = ("step", "opt_state", "tx", "apply_fn", "apply_gradients", "replace", "create")


def size_text(node: cst.BaseExpression, axis: int) -> str | None:
    """The size of an axis of an argument: written out where the array is made on the spot."""
    if (
        isinstance(node, cst.Call)
        and (dotted(node.func) or "").endswith(("ones", "zeros"))
        and node.args
    ):
        shape = constant(code(node.args[0].value))
        if isinstance(shape, tuple | list) and -len(shape) <= axis < len(shape):
            return str(shape[axis])
    if isinstance(node, cst.Name | cst.Attribute | cst.Subscript | cst.Call):
        return f"{code(node)}.shape[{axis}]"
    return None


def comments_of(*nodes: cst.CSTNode) -> list[str]:
    """The comments in and around statements."""
    return [n.value for node in nodes for n in all_nodes(node) if isinstance(n, cst.Comment)]


def calls_in(node: cst.CSTNode) -> list[cst.Call]:
    """All calls in a piece of code."""
    return [n for n in all_nodes(node) if isinstance(n, cst.Call)]
