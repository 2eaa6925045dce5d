"""The plan of the house is kept: who may import whom, what nobody imports, how large a file gets.

`ROOMS` lists folders, and files that stand for themselves, from the ground up. A file imports from
its own folder and from what is listed before it, at the top of the file or inside a function alike.
Linnet's own modules are imported at the top; only heavy packages are imported where they are used.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from linnet import nnx

PACKAGE = Path(__file__).parents[1] / "linnet"

# Paths are relative to linnet/. What stands on one line does not import one another.
ROOMS = """
errors/ config.py typing.py ids.py
functional/
serialization.py
struct.py traverse_util.py tables.py cursor.py
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
io/
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

MOST_LINES = 700

FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}


def room_of(file: str) -> str | None:
    """The folder or file in `ROOMS` that covers a file."""
    covering = [p for p in RANK_OF_PATH if file == p or (p.endswith("/") and file.startswith(p))]
    return max(covering, key=len, default=None)


def imports_of(tree: ast.AST, file: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import; `from a import b` gives `a.b`, relative or not."""
    package = ["linnet", *Path(file).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            name = node.args[0]
            yield node.lineno, name.value if isinstance(name, ast.Constant) else "linnet"
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            module = start + (node.module.split(".") if node.module else [])
            for alias in node.names:
                yield node.lineno, ".".join([*module, alias.name])


def late_imports_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module) of each import inside a function."""
    functions = [
        n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    for node in {inner for function in functions for inner in ast.walk(function)}:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or "."


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

    for line, name in imports_of(tree, file):
        top = name.partition(".")[0]
        if top in PEERS:
            yield f"{file}:{line}: imports {top}"
        if here == "functional/" and top not in FUNCTIONAL_MAY_IMPORT:
            yield f"{file}:{line}: imports {top}, but functional/ imports JAX alone"
        if f"{name}.".startswith("jax._src."):
            yield f"{file}:{line}: imports {name}, which is private to JAX"
        target = file_of(name, files)
        there = room_of(target) if target else None
        if here == "as_flax/" and target == "__init__.py":
            continue  # it imports what a program names, which nothing here depends on
        if there is not None and there != here and RANK_OF_PATH[there] >= RANK_OF_PATH[here]:
            yield f"{file}:{line}: {here} imports {name} from {there}, which is not before it"

    for line, name in late_imports_of(tree):
        if name.partition(".")[0] not in LOADED_LATE and not name.startswith("jax.experimental"):
            yield f"{file}:{line}: imports {name} inside a function"

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
        ("nnx/filterlib.py", "import_module('linnet.nnx.spmd')", ":1: nnx/filterlib.py imports"),
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


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("nnx/spmd.py", "from .filterlib import Filter\nfrom linnet import errors"),
        ("nnx/spmd.py", "if TYPE_CHECKING:\n    from .filterlib import Filter"),
        ("nnx/__init__.py", "from .spmd import Spec as Spec"),
        ("functional/linear.py", "import math\nimport numpy\nfrom jax import lax"),
        ("io/orbax.py", "def f():\n    import orbax.checkpoint"),
    ],
)
def test_house_rules_allow(file, source):
    files = {"errors.py", "nnx/__init__.py", "nnx/spmd.py", "nnx/filterlib.py"}
    assert not list(complaints_about(file, source, files))


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
        f"print(*sorted((set(sys.modules) - before) & {set(LOADED_WHEN_FIRST_USED)}))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [], "loaded by `import linnet.nnx`, not when first used"


PACKAGES = sorted(path.parent for path in PACKAGE.rglob("__init__.py"))


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_the_overview_of_a_folder_names_its_files(folder):
    overview = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
    parts = {path.parent.name for path in folder.glob("*/__init__.py")}
    unnamed = {name for name in files | parts if not re.search(rf"\b{name}\b", overview)}
    assert not unnamed
