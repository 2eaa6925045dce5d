"""The plan of the house is kept: who may import whom, what nobody imports, how large a file gets.

`ROOMS` lists folders, and files that stand for themselves, from the ground up. A file imports from
its own folder and from what is listed before it, at the top of the file or inside a function alike.
Linnet's own modules are imported at the top; only heavy packages are imported where they are used,
and the few modules of `LATE_IMPORTS_OF_OURS`. No files import one another in a circle.
"""

import ast
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

from linnet import nnx
from tests.subprocesses import run_program

PACKAGE = Path(__file__).parents[1] / "linnet"

# Paths are relative to linnet/. What stands on one line does not import one another.
ROOMS = """
errors/ config.py typing.py ids.py
functional/
serialization.py
struct.py traverse_util.py tables.py cursor.py frozen_dict.py
core/
jax_utils.py
nnx/pytreelib/
nnx/variablelib/
nnx/filterlib.py nnx/traversals.py
nnx/statelib.py
nnx/graphlib/
nnx/rnglib/
nnx/modules/
nnx/transforms/
nnx/nn/
nnx/spmd.py nnx/sharding.py nnx/communication.py
nnx/training/
nnx/summary.py
io/exported.py io/shared/
io/names/
io/weights/ io/checkpoint/
io/exporting.py
io/__init__.py
training/
linen/
nnx/bridge/
nnx/compat.py nnx/containers.py nnx/graph.py nnx/helpers.py nnx/initializers.py nnx/losses.py
nnx/metrics.py nnx/module.py nnx/object.py nnx/optimizer.py nnx/reprlib.py nnx/tracers.py
nnx/visualization.py
nnx/__init__.py
experimental/
as_flax/
__init__.py
migration/
__main__.py
"""
RANK_OF_PATH = {
    path: rank for rank, line in enumerate(ROOMS.strip().splitlines()) for path in line.split()
}

PEERS = {"flax", "equinox", "haiku", "torch"}
FUNCTIONAL_MAY_IMPORT = {"jax", "numpy", "linnet"} | sys.stdlib_module_names
LOADED_WHEN_FIRST_USED = [
    "orbax",
    "optax",
    "treescope",
    "rich",
    "safetensors",
    "msgpack",
    "libcst",
]
LOADED_LATE = {
    *LOADED_WHEN_FIRST_USED,
    "tensorstore",
    "etils",
    "fcntl",
    "matplotlib",
    "tensorboardX",
    "IPython",
}

IMPORTING_FUNCTIONS = {"import_module", "__import__", "resolve_name"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)

# Stands for a module that a call imports and the text does not show. Few may import it.
ANY_OF_OURS = "linnet"

# The modules of our own that are imported inside a function, by calls.
LATE_IMPORTS_OF_OURS = {
    ("__init__.py", ANY_OF_OURS),  # the parts load when they are first used
    ("nnx/__init__.py", "linnet.nnx.bridge"),  # brings Linen along, which few programs use
    ("__main__.py", "linnet.migration"),  # needs libcst, which takes a while to import
    # Programs written for Flax name what is to be imported.
    ("as_flax/check.py", "linnet.as_flax.facade"),
    ("as_flax/check.py", ANY_OF_OURS),
    ("as_flax/facade.py", ANY_OF_OURS),
    ("as_flax/finder.py", ANY_OF_OURS),
}

MOST_LINES = 700

FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}


def room_of(file: str) -> str | None:
    """The folder or file in `ROOMS` that covers a file."""
    covering = [p for p in RANK_OF_PATH if file == p or (p.endswith("/") and file.startswith(p))]
    return max(covering, key=len, default=None)


class Import(NamedTuple):
    line: int
    name: str
    """Dotted; `from a import b` has `a.b`, relative or not."""
    is_late: bool
    """Whether it stands inside a function."""
    is_for_types: bool
    """Whether it stands under `if TYPE_CHECKING:`."""


def imports_of(tree: ast.AST, file: str) -> Iterator[Import]:
    """Each import of a file, as a statement or as a call."""
    package = ".".join(["linnet", *Path(file).parts[:-1]])
    calls = names_of_importing_functions(tree)
    late = nodes_in(node for node in ast.walk(tree) if isinstance(node, FUNCTIONS))
    for_types = nodes_in(
        statement for node in ast.walk(tree) if is_type_checking(node) for statement in node.body
    )
    for node in ast.walk(tree):
        for name in names_imported_by(node, package, calls):
            yield Import(node.lineno, name, node in late, node in for_types)


def nodes_in(trees: Iterable[ast.AST]) -> set[ast.AST]:
    return {node for tree in trees for node in ast.walk(tree)}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def names_of_importing_functions(tree: ast.AST) -> set[str]:
    """What `import_module` and its like are called in a file."""
    aliases = (
        alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    )
    renamed = {alias.asname for alias in aliases if alias.name in IMPORTING_FUNCTIONS}
    return IMPORTING_FUNCTIONS | (renamed - {None})


def names_imported_by(node: ast.AST, package: str, calls: set[str]) -> Iterator[str]:
    match node:
        case ast.Import():
            yield from (alias.name for alias in node.names)
        case ast.ImportFrom():
            module = absolute_name("." * node.level + (node.module or ""), package)
            yield from (f"{module}.{alias.name}" for alias in node.names)
        case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called)) if called in calls:
            yield name_in_call(node, package)


def name_in_call(call: ast.Call, package: str) -> str:
    """The module that a call imports, or `ANY_OF_OURS` where the text does not show it."""
    # The second argument of __import__ is no package, but names the one that the file is in.
    positions = ("name", "package", "locals", "fromlist", "level")
    given = dict(zip(positions, call.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in call.keywords}
    match given.get("name"), given.get("level", ast.Constant(0)):
        case ast.Constant(value=str(name)), ast.Constant(value=int(level)):
            name = name.replace(":", ".")  # pkgutil.resolve_name("package.module:object")
        case _:
            return ANY_OF_OURS
    match given.get("package"):
        case ast.Constant(value=str(named)):
            package = named
        case ast.AST() as hidden if name.startswith(".") and ast.unparse(hidden) != "__package__":
            return ANY_OF_OURS
    return absolute_name("." * level + name, package)


def absolute_name(name: str, package: str) -> str:
    """A dotted name without the dots that it may begin with."""
    below = name.lstrip(".")
    level = len(name) - len(below)
    if not level:
        return name
    parts = package.split(".")
    return ".".join([*parts[: len(parts) - level + 1], *below.split(".")]).rstrip(".")


def file_of(name: str, files=FILES) -> str | None:
    """The file of linnet/ that a dotted name lives in: its own, or that of the module it is in."""
    parts = name.split(".")
    if parts[0] != "linnet":
        return None
    for end in range(len(parts), 0, -1):
        path = "/".join(parts[1:end])
        for candidate in (f"{path}.py", f"{path}/__init__.py".lstrip("/")):
            if candidate in files:
                return candidate
    return None


def closing_over_themselves(function: ast.FunctionDef) -> Iterator[ast.FunctionDef]:
    """The functions made in another one that use their own name."""
    for inner in ast.walk(function):
        if isinstance(inner, ast.FunctionDef) and inner is not function:
            used = (node.id for node in ast.walk(inner) if isinstance(node, ast.Name))
            if inner in function.body and inner.name in used:
                yield inner


def complaints_about(file: str, source: str, files=FILES) -> Iterator[str]:
    """Everything in one file that the house rules forbid, each with its place."""
    tree = ast.parse(source)
    here = room_of(file)
    if here is None:
        yield f"{file}: has no room; give it one in ROOMS"
        return

    for line, name, is_late, _ in imports_of(tree, file):
        top = name.partition(".")[0]
        if top in PEERS:
            yield f"{file}:{line}: imports {top}"
        if here == "functional/" and top not in FUNCTIONAL_MAY_IMPORT:
            yield f"{file}:{line}: imports {top}, but functional/ imports JAX alone"
        if f"{name}.".startswith("jax._src."):
            yield f"{file}:{line}: imports {name}, which is private to JAX"
        is_heavy = top in LOADED_LATE or name.startswith("jax.experimental")
        if is_late and not is_heavy and (file, name) not in LATE_IMPORTS_OF_OURS:
            yield f"{file}:{line}: imports {name} inside a function"
        target = file_of(name, files)
        there = room_of(target) if target else None
        if here == "as_flax/" and target == "__init__.py":
            continue  # it imports what a program names, which nothing here depends on
        if there is not None and there != here and RANK_OF_PATH[there] >= RANK_OF_PATH[here]:
            yield f"{file}:{line}: {here} imports {name} from {there}, which is not before it"

    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="exec") | ast.Attribute(attr="exec")):
                yield f"{file}:{node.lineno}: calls exec"
            case ast.Attribute(value=ast.Name(id="jax"), attr="_src"):
                yield f"{file}:{node.lineno}: uses jax._src, which is private to JAX"
            case ast.FunctionDef():
                for inner in closing_over_themselves(node):
                    yield (
                        f"{file}:{inner.lineno}: {inner.name} closes over itself, so what it holds "
                        "is freed by the garbage collector alone"
                    )

    if (lines := source.count("\n")) > MOST_LINES:
        yield f"{file}: {lines} lines, more than {MOST_LINES}; it wants a wall"


def cycle_in(imports: dict[str, set[str]]) -> list[str]:
    """Files that import one another in a circle, the first again at the end, or nothing."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1][::-1]  # each before what imports it
    return []


def files_imported_by(file: str, source: str, files=FILES) -> set[str]:
    """The files that must be run before this one."""
    found = imports_of(ast.parse(source), file)
    names = (one.name for one in found if not (one.is_late or one.is_for_types))
    return {target for name in names if (target := file_of(name, files))} - {file}


def test_house_rules():
    assert FILES, f"no Python files under {PACKAGE}"
    found = [
        complaint
        for file, path in FILES.items()
        for complaint in complaints_about(file, path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        (
            "nnx/filterlib.py",
            "from linnet.nnx import spmd",
            "from nnx/spmd.py, which is not before",
        ),
        ("nnx/filterlib.py", "from . import spmd", "from nnx/spmd.py, which is not before it"),
        ("nnx/filterlib.py", "from .spmd import Spec", "from nnx/spmd.py, which is not before it"),
        (
            "nnx/filterlib.py",
            "import linnet.nnx.spmd as m",
            "from nnx/spmd.py, which is not before",
        ),
        (
            "nnx/filterlib.py",
            "def f():\n    from .spmd import Spec",
            ":2: nnx/filterlib.py imports",
        ),
        (
            "nnx/filterlib.py",
            "if TYPE_CHECKING:\n    from .spmd import Spec",
            ":2: nnx/filterlib.py",
        ),
        ("nnx/filterlib.py", "from linnet import nnx", "from nnx/__init__.py, which is not before"),
        (
            "nnx/graphlib/walk.py",
            "from ..spmd import Spec",
            "from nnx/spmd.py, which is not before",
        ),
        ("nnx/spmd.py", "def f():\n    from .filterlib import All", "inside a function"),
        (
            "errors/general.py",
            "from ..functional import dense",
            "from functional/, which is not before it",
        ),
        ("functional/linear.py", "import optax", "functional/ imports JAX alone"),
        ("nnx/module.py", "import flax.nnx", "imports flax"),
        ("nnx/module.py", "from jax._src import core", "private to JAX"),
        ("nnx/module.py", "from jax import _src", "private to JAX"),
        ("nnx/module.py", "import jax\njax._src.core", ":2: uses jax._src"),
        ("nnx/module.py", "exec('x = 1')", "calls exec"),
        ("nnx/module.py", "def f():\n    def g():\n        g()\n", "g closes over itself"),
        ("nnx/module.py", "\n" * 701, "701 lines"),
        ("nnx/attic.py", "", "has no room"),
    ],
)
def test_house_rules_are_noticed(file, source, complaint):
    files = {"functional/__init__.py", "nnx/__init__.py", "nnx/spmd.py", "nnx/filterlib.py"}
    assert complaint in "\n".join(complaints_about(file, source, files))


CALLS_THAT_IMPORT_SPMD = [
    "import_module('linnet.nnx.spmd')",
    "import_module(name='linnet.nnx.spmd')",
    "import_module('.spmd', 'linnet.nnx')",
    "import_module('..spmd', package='linnet.nnx.graphlib')",
    "import_module('.spmd', __package__)",
    "importlib.import_module('linnet.nnx.spmd')",
    "from importlib import import_module as load\nload('linnet.nnx.spmd')",
    "__import__('linnet.nnx.spmd')",
    "__import__('spmd', globals(), locals(), ['Spec'], 1)",
    "__import__('spmd', globals(), level=1)",
    "builtins.__import__('linnet.nnx.spmd')",
    "pkgutil.resolve_name('linnet.nnx.spmd')",
    "pkgutil.resolve_name('linnet.nnx.spmd:Spec')",
    "from pkgutil import resolve_name as find\nfind('linnet.nnx.spmd')",
]
CALLS_THAT_HIDE_WHAT_THEY_IMPORT = [
    "import_module(name)",
    "import_module(f'linnet.{name}')",
    "import_module(*names)",
    "import_module(**arguments)",
    "import_module('.spmd', package)",
    "__import__('spmd', globals(), locals(), (), level)",
]


@pytest.mark.parametrize("source", CALLS_THAT_IMPORT_SPMD)
def test_a_call_that_imports_is_noticed(source):
    complaints = "\n".join(complaints_about("nnx/filterlib.py", source))
    assert "from nnx/spmd.py, which is not before it" in complaints
    assert "inside a function" not in complaints


@pytest.mark.parametrize("source", CALLS_THAT_HIDE_WHAT_THEY_IMPORT)
def test_a_call_that_hides_what_it_imports_is_noticed(source):
    complaints = "\n".join(complaints_about("nnx/filterlib.py", source))
    assert "imports linnet from __init__.py, which is not before it" in complaints


@pytest.mark.parametrize("head", ["def f():", "async def f():", "class A:\n    def f(self):"])
@pytest.mark.parametrize(
    "statement",
    [
        "from .spmd import Spec",
        "from .orbax import Spec",
        "from . import orbax",
        "import linnet.nnx.spmd",
        *(text for text in CALLS_THAT_IMPORT_SPMD if "\n" not in text),
        *CALLS_THAT_HIDE_WHAT_THEY_IMPORT,
    ],
)
def test_a_late_import_of_ours_is_noticed(head, statement):
    source = f"{head}\n        {statement}"
    line = source.count("\n") + 1
    complaints = "\n".join(complaints_about("nnx/summary.py", source))
    assert re.search(rf"^nnx/summary.py:{line}: imports linnet\S* inside a function", complaints)


def test_a_late_import_in_a_lambda_is_noticed():
    (complaint,) = complaints_about("nnx/summary.py", "load = lambda: __import__('linnet.ids')")
    assert complaint == "nnx/summary.py:1: imports linnet.ids inside a function"


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("nnx/spmd.py", "from .filterlib import Filter\nfrom linnet import errors"),
        ("nnx/spmd.py", "if TYPE_CHECKING:\n    from .filterlib import Filter"),
        ("nnx/__init__.py", "from .spmd import Spec as Spec"),
        ("functional/linear.py", "import math\nimport numpy\nfrom jax import lax"),
        ("io/checkpoint/orbax.py", "def f():\n    import orbax.checkpoint"),
        ("io/checkpoint/orbax.py", "def f():\n    from orbax import checkpoint"),
        ("io/checkpoint/orbax.py", "def f():\n    import_module('orbax.checkpoint')"),
        ("nnx/__init__.py", "def f():\n    import_module('linnet.nnx.bridge')"),
        ("nnx/spmd.py", "import_module('.filterlib', 'linnet.nnx')"),
        ("nnx/spmd.py", "import_module('json')\nself.import_(name)\nfind_spec(name)"),
    ],
)
def test_house_rules_allow(file, source):
    files = {"errors.py", "nnx/__init__.py", "nnx/spmd.py", "nnx/filterlib.py"}
    assert not list(complaints_about(file, source, files))


@pytest.mark.parametrize("path", RANK_OF_PATH)
def test_every_room_exists(path):
    assert (PACKAGE / path).is_dir() if path.endswith("/") else path in FILES


def test_every_late_import_that_is_allowed_exists():
    found = {
        (file, one.name)
        for file, path in FILES.items()
        for one in imports_of(ast.parse(path.read_text(encoding="utf-8")), file)
        if one.is_late
    }
    assert found >= LATE_IMPORTS_OF_OURS


def test_no_files_import_one_another():
    imports = {
        file: files_imported_by(file, path.read_text(encoding="utf-8"))
        for file, path in FILES.items()
    }
    assert not (cycle := cycle_in(imports)), " imports ".join(cycle)


@pytest.mark.parametrize(
    ("last", "is_cycle"),
    [
        ("from .walk import f", True),
        ("if TYPE_CHECKING:\n    from .walk import f", False),
        ("if typing.TYPE_CHECKING:\n    from .walk import f", False),
        ("if TYPE_CHECKING:\n    f = 1\nelse:\n    from .walk import f", True),
        ("def g():\n    from .walk import f", False),
    ],
)
def test_files_that_import_one_another_are_noticed(last, is_cycle):
    sources = {
        "nnx/graphlib/walk.py": "from linnet.nnx.graphlib import build",
        "nnx/graphlib/build.py": "import_module('.update', __package__)",
        "nnx/graphlib/update.py": last,
    }
    imports = {file: files_imported_by(file, text, sources) for file, text in sources.items()}
    cycle = cycle_in(imports)
    assert set(cycle) == (sources.keys() if is_cycle else set())
    assert all(after in imports[before] for before, after in itertools.pairwise(cycle))


def test_a_class_name_means_one_thing():
    homes = {}
    for file, path in FILES.items():
        # Linen and NNX have layers of the same names; a program imports from one of the two.
        world = "linen" if file.startswith(("core/", "linen/")) else "nnx"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes.setdefault((world, node.name), []).append(file)
    twice = {name: files for name, files in homes.items() if len(files) > 1}
    # Flax has two: flax.training's and, over split modules, nnx's.
    # So has Linen: names of axes around values, and beside them. The bridge has modules of its own.
    known = {("nnx", "TrainState"), ("nnx", "Module"), ("linen", "AxisMetadata")}
    assert twice.keys() == known, twice


def test_nnx_shows_its_api_alone():
    assert dir(nnx) == sorted(nnx.__all__)
    assert not {"modules", "bulk", "statics", "locate", "annotations"} & set(nnx.__all__)
    assert all(hasattr(nnx, name) for name in nnx.__all__)


def test_import_stays_cheap():
    program = (
        "import sys, jax; before = set(sys.modules); import linnet.nnx;"
        f"late = {{'linnet.core', 'linnet.linen', *{LOADED_WHEN_FIRST_USED}}};"
        "print(*sorted((set(sys.modules) - before) & late))"
    )
    run = run_program(program)
    assert run.stdout.split() == [], "loaded by `import linnet.nnx`, not when first used"


PACKAGES = sorted(path.parent for path in PACKAGE.rglob("__init__.py"))


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_the_overview_of_a_folder_names_its_files(folder):
    overview = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
    parts = {path.parent.name for path in folder.glob("*/__init__.py")}
    unnamed = {name for name in files | parts if not re.search(rf"\b{name}\b", overview)}
    assert not unnamed
