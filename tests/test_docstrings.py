"""Every public name says what it does, takes, returns and raises, and shows it in an example.

Functions and classes that are defined in Linnet and that a module of ``MODULES`` shows, and those
that one of ``SUBMODULES`` defines, need a summary, ``Args:`` with every parameter, ``Returns:`` or
``Yields:``, ``Raises:`` for what they raise themselves, and an ``Example:``, which the doctests
run. "Arguments as for ``X``" stands for those of ``X``. Errors and warnings need a summary alone;
an alias is what it is a name for. ``linnet.functional`` shows modules; in them, functions without
``Args:`` are helpers of the layers.
"""

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from linnet import functional

MODULES = """
nnx linen io training functional core
struct traverse_util serialization cursor jax_utils config errors
""".split()

# Modules that programs import by name; what they import themselves is not theirs.
SUBMODULES = """
io.names
training.checkpoints training.common_utils training.dynamic_scale training.early_stopping
training.lr_schedule training.orbax_utils training.prefetch_iterator training.train_state
""".split()

# Parameters that every class of a family has; the base class describes them.
OF_THE_FAMILY = {"linen": {"parent", "name"}}

# Parameters that programs do not give.
NOT_FOR_PROGRAMS = {"self", "cls", "_copy", "_split_transpose"}

# What only the other rooms use has a summary alone. It is not in ``__all__``, as these modules have
# none.
FOR_OTHER_ROOMS = set(
    """
config.Applied config.Reusable config.add_switch config.apply_value config.env_flag
config.value_block jax_utils.partially traverse_util.check_mapping traverse_util.iter_entries
traverse_util.put_leaf traverse_util.taken_place
""".split()
)

# Classes without an example, and a public name of the same family that has one.
IN_FAMILY_OF = {
    "cursor.ParentKey": "cursor.Cursor",
    "nnx.BatchStat": "nnx.Variable",
    "nnx.Cache": "nnx.Variable",
    "nnx.Carry": "nnx.scan",
    "nnx.CollectivesReport": "nnx.collectives",
    "nnx.Everything": "nnx.All",
    "nnx.FlatState": "nnx.to_flat_state",
    "nnx.Intermediate": "nnx.pop",
    "nnx.LoRAParam": "nnx.LoRA",
    "nnx.MergeContext": "nnx.merge_context",
    "nnx.NodeStates": "nnx.to_tree",
    "nnx.Nothing": "nnx.All",
    "nnx.OptArray": "nnx.Optimizer",
    "nnx.OptState": "nnx.Optimizer",
    "nnx.OptVariable": "nnx.Optimizer",
    "nnx.Param": "nnx.Variable",
    "nnx.Perturbation": "nnx.Variable",
    "nnx.RngCount": "nnx.RngStream",
    "nnx.RngKey": "nnx.RngStream",
    "nnx.RngState": "nnx.RngStream",
    "nnx.ShardingReport": "nnx.fsdp",
    "nnx.SplitContext": "nnx.split_context",
    "nnx.UpdateContext": "nnx.update_context",
    "training.dynamic_scale.DynamicScaleResult": "training.dynamic_scale.DynamicScale",
    "traverse_util.EmptyNode": "traverse_util.flatten_dict",
    "traverse_util.TraverseAttr": "traverse_util.Traversal",
    "traverse_util.TraverseCompose": "traverse_util.Traversal",
    "traverse_util.TraverseEach": "traverse_util.Traversal",
    "traverse_util.TraverseFilter": "traverse_util.Traversal",
    "traverse_util.TraverseId": "traverse_util.Traversal",
    "traverse_util.TraverseItem": "traverse_util.Traversal",
    "traverse_util.TraverseMerge": "traverse_util.Traversal",
    "traverse_util.TraverseTree": "traverse_util.Traversal",
}

# Constructors that only raise: programs derive classes, which have constructors of their own.
NO_CONSTRUCTOR = {"struct.PyTreeNode"}


def public_objects() -> dict[str, Any]:
    """The functions and classes that the modules show, each under its first name."""
    found: dict[int, tuple[str, Any]] = {}
    for module_name in MODULES:
        module = importlib.import_module(f"linnet.{module_name}")
        names = getattr(module, "__all__", None) or [n for n in vars(module) if n[0] != "_"]
        for name in names:
            value = getattr(module, name)
            is_ours = str(getattr(value, "__module__", "")).startswith("linnet.")
            if is_ours and (inspect.isclass(value) or inspect.isroutine(value)):
                found.setdefault(id(value), (f"{module_name}.{name}", value))
    for module_name in SUBMODULES:
        module = importlib.import_module(f"linnet.{module_name}")
        for name, value in vars(module).items():
            is_here = str(getattr(value, "__module__", "")).startswith(module.__name__)
            if name[0] != "_" and is_here and (inspect.isclass(value) or inspect.isroutine(value)):
                found.setdefault(id(value), (f"{module_name}.{name}", value))
    for info in pkgutil.iter_modules(functional.__path__):
        module = importlib.import_module(f"{functional.__name__}.{info.name}")
        for name, value in vars(module).items():
            is_here = getattr(value, "__module__", "") == module.__name__
            if name[0] == "_" or not is_here or not inspect.isroutine(value):
                continue
            if section(docstring_of(value), "Args") is not None:
                found.setdefault(id(value), (f"functional.{info.name}.{name}", value))
    return dict(found.values())


def is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Exception)


def docstring_of(value: Any) -> str:
    own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    return inspect.cleandoc(own or "")


def section(doc: str, *titles: str) -> str | None:
    """The text of a section, without its title; None if there is none."""
    start = re.search(rf"^({'|'.join(titles)}):\n", doc, re.MULTILINE)
    if start is None:
        return None
    text = doc[start.end() :]
    end = re.search(r"^\S", text, re.MULTILINE)
    return text[: end.start()] if end else text


PUBLIC = public_objects()


def parameters_of(value: Any) -> Iterator[str]:
    """The parameters of a function, or of a constructor that the class itself defines."""
    if inspect.isclass(value):
        if "__init__" not in vars(value):  # dataclasses have one too
            return
        value = vars(value)["__init__"]
    yield from inspect.signature(value).parameters


def named_in(arguments: str) -> set[str]:
    """The names that a section ``Args:`` begins its entries with."""
    entries = re.findall(r"^  (?! )(.*?):(?:\s|$)", arguments, re.MULTILINE | re.DOTALL)
    return {name.lstrip("*") for entry in entries for name in re.split(r",\s*", entry)}


def raises_in(value: Any) -> bool:
    """Whether there is a ``raise`` in a function, or in the constructor or call of a class."""
    functions: Iterable[Any] = [value]
    if inspect.isclass(value):
        functions = (vars(value).get(name) for name in ("__init__", "__post_init__", "__call__"))
    return any(_raises(function) for function in functions)


def _raises(function: Any) -> bool:
    function = inspect.unwrap(function) if callable(function) else None
    if not inspect.isfunction(function) or not function.__module__.startswith("linnet."):
        return False
    if function.__code__.co_filename.startswith("<"):  # made by dataclasses
        return False
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    described = section(docstring_of(function), "Raises") is not None
    raises = (node for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc)
    return not described and any(not _is_abstract(node) for node in raises)


def _is_abstract(node: ast.Raise) -> bool:
    """``raise NotImplementedError`` without a text: a method that subclasses define."""
    return isinstance(node.exc, ast.Name) and node.exc.id == "NotImplementedError"


def returns_something(value: Any) -> bool:
    if inspect.isclass(value):
        return False
    annotation = inspect.signature(value).return_annotation
    return annotation not in (None, "None", "NoReturn", "Never")


def lacking(name: str, value: Any) -> Iterator[str]:
    """The parts of the template that a docstring lacks."""
    doc = docstring_of(value)
    if not doc:
        yield "a docstring"
        return
    if not re.match(r"[^\n]+(\n[^\n]+)*?[.:](\n|$)", doc):
        yield "a summary that ends with a full stop"
    if is_error(value):
        return
    family = OF_THE_FAMILY.get(name.partition(".")[0], set())
    if name in FOR_OTHER_ROOMS:
        return
    if name not in NO_CONSTRUCTOR:
        if not re.search(r"[Aa]rguments\s+(and\s+\w+\s+)?as\s+for\s+``", doc):
            known = named_in(section(doc, "Args", "Attributes") or "")
            wanted = [n for n in parameters_of(value) if n not in NOT_FOR_PROGRAMS | family | known]
            if wanted:
                yield f"Args: {', '.join(wanted)}"
        if returns_something(value) and section(doc, "Returns", "Yields") is None:
            yield "Returns:"
        if section(doc, "Raises") is None and raises_in(value):
            yield "Raises:"
    if name not in IN_FAMILY_OF and ">>>" not in doc:
        yield "an example"


@pytest.mark.parametrize("module", MODULES)
def test_public_names_follow_the_template(module):
    missing = {
        name: parts
        for name, value in PUBLIC.items()
        if name.startswith(f"{module}.") and (parts := list(lacking(name, value)))
    }
    assert not missing, "\n".join(f"{name} lacks {', '.join(p)}" for name, p in missing.items())


def test_exemptions_are_needed():
    for name in FOR_OTHER_ROOMS | NO_CONSTRUCTOR:
        assert name in PUBLIC
    for name, relative in IN_FAMILY_OF.items():
        assert inspect.isclass(PUBLIC[name]), f"{name} is a function, and needs an example"
        assert ">>>" not in docstring_of(PUBLIC[name]), f"{name} has an example"
        assert ">>>" in docstring_of(PUBLIC[relative]), f"{relative} has none"


def whole(x: int, *rest: int, factor: float = 1.0) -> float:
    """Adds numbers.

    Args:
      x: a number.
      *rest: more of them.
      factor: what the
        sum is multiplied by.

    Returns:
      The sum.

    Raises:
      ValueError: there is one only.

    Example:
      >>> whole(1, 2)
      3.0
    """
    if not rest:
        raise ValueError("one number")
    return factor * (x + sum(rest))


@pytest.mark.parametrize(
    ("left_out", "part"),
    [
        ("", ""),
        ("      *rest: more of them.\n", "Args: rest"),
        ("    Args:\n", "Args: x, rest, factor"),
        ("    Returns:\n      The sum.\n", "Returns:"),
        ("    Raises:\n      ValueError: there is one only.\n", "Raises:"),
        ("      >>> whole(1, 2)\n", "an example"),
    ],
)
def test_a_missing_part_is_noticed(left_out, part, monkeypatch):
    doc = inspect.getdoc(whole)
    assert doc is not None
    left_out = textwrap.indent(textwrap.dedent(left_out), "  " * left_out.startswith("      "))
    assert left_out in doc
    monkeypatch.setattr(whole, "__doc__", doc.replace(left_out, ""))
    monkeypatch.setattr(whole, "__module__", "linnet.whole")
    assert list(lacking("nnx.whole", whole)) == ([part] if part else [])
