"""The plan of the house is kept: who may import whom, what nobody imports, how large a file gets.

A file imports from its own room and from rooms above it in `ROOMS`. A new file is given its room
here, in the same commit.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "linnet"

# Top to bottom: a later room may import an earlier one. Paths are relative to linnet/; a folder
# covers what is in it unless a longer path is listed.
ROOMS = [
    ("errors", "errors.py"),
    ("functional", "functional/"),
    ("helpers", "struct.py traverse_util.py serialization.py cursor.py jax_utils.py positions.py"),
    (
        "nnx ground",
        "nnx/kinds.py nnx/statics.py nnx/tracing.py nnx/settings.py nnx/reprlib.py nnx/locate.py "
        "nnx/metadata.py nnx/variable_ops.py nnx/var_storage.py nnx/visualization.py "
        "nnx/watch.py nnx/tracing_state.py",
    ),
    ("variablelib", "nnx/variablelib.py nnx/variable_names.py nnx/bulk.py"),
    ("filterlib", "nnx/filterlib.py"),
    ("pytreelib", "nnx/attributes.py nnx/cycles.py nnx/mixed.py nnx/pytreelib.py"),
    ("statelib", "nnx/leaves.py nnx/statelib.py"),
    ("graphlib", "nnx/graphlib/"),
    ("rnglib", "nnx/rnglib.py nnx/rng_tools.py"),
    ("module", "nnx/calling.py nnx/module.py nnx/policies.py nnx/views.py nnx/freezing.py"),
    ("containers", "nnx/containers.py nnx/sequential.py nnx/capturing.py"),
    ("transforms", "nnx/transforms/"),
    ("nn", "nnx/nn/"),
    ("spmd", "nnx/spmd.py"),
    ("nnx training", "nnx/training/"),
    ("nnx tools", "nnx/display.py nnx/call_records.py nnx/summary.py nnx/compat.py"),
    ("core", "core/"),
    ("linen", "linen/"),
    ("bridge", "nnx/bridge/"),
    ("io", "io/"),
    ("training", "training/"),
    # These only re-export under the names users know; inside linnet/ nothing imports them.
    (
        "aliases",
        "__init__.py nnx/__init__.py nnx/graph.py nnx/object.py nnx/helpers.py nnx/optimizer.py "
        "nnx/metrics.py nnx/initializers.py nnx/traversals.py",
    ),
    ("main", "__main__.py"),
]
ROOM_NAMES = [name for name, _ in ROOMS]
RANK_OF_PATH = {path: rank for rank, (_, paths) in enumerate(ROOMS) for path in paths.split()}

PEERS = {"flax", "equinox", "haiku", "torch"}
FUNCTIONAL_MAY_IMPORT = {"jax", "numpy", "linnet"} | sys.stdlib_module_names
LOADED_WHEN_FIRST_USED = ["orbax", "optax", "treescope", "rich", "safetensors", "msgpack"]
MOST_LINES = 700

FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}


def rank_of(file: str) -> int | None:
    """The rank of a file's room, by the longest path in `ROOMS` that covers it."""
    covering = [p for p in RANK_OF_PATH if file == p or (p.endswith("/") and file.startswith(p))]
    return RANK_OF_PATH[max(covering, key=len)] if covering else None


def walk_at_runtime(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that can run: the bodies of `if TYPE_CHECKING:` are left out."""
    yield node
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        children = node.orelse
    else:
        children = ast.iter_child_nodes(node)
    for child in children:
        yield from walk_at_runtime(child)


def imports_of(tree: ast.AST, file: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import; `from a import b` gives `a.b`, relative or not."""
    package = ["linnet", *Path(file).parts[:-1]]
    for node in walk_at_runtime(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            module = start + (node.module.split(".") if node.module else [])
            for alias in node.names:
                yield node.lineno, ".".join([*module, alias.name])


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
    here = rank_of(file)
    if here is None:
        yield f"{file}: has no room; give it one in ROOMS"
        return

    for line, name in imports_of(tree, file):
        top = name.partition(".")[0]
        if top in PEERS:
            yield f"{file}:{line}: imports {top}"
        if ROOM_NAMES[here] == "functional" and top not in FUNCTIONAL_MAY_IMPORT:
            yield f"{file}:{line}: imports {top}, but functional/ imports JAX alone"
        if f"{name}.".startswith("jax._src."):
            yield f"{file}:{line}: imports {name}, which is private to JAX"
        target = file_of(name, files)
        there = rank_of(target) if target else None
        if there is not None and there > here:
            yield (
                f"{file}:{line}: {ROOM_NAMES[here]} imports {name} from {ROOM_NAMES[there]}, "
                "a later room"
            )

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
        ("nnx/filterlib.py", "from linnet.nnx import module", "from module, a later room"),
        ("nnx/filterlib.py", "from . import module", "from module, a later room"),
        ("nnx/filterlib.py", "from .module import Module", "from module, a later room"),
        ("nnx/filterlib.py", "import linnet.nnx.module as m", "from module, a later room"),
        ("nnx/filterlib.py", "def f():\n    from .module import Module", ":2: filterlib imports"),
        ("nnx/filterlib.py", "from linnet import nnx", "from aliases, a later room"),
        ("nnx/graphlib/walk.py", "from ..module import Module", "from module, a later room"),
        ("errors.py", "from .functional import dense", "from functional, a later room"),
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
    files = {"functional/__init__.py", "nnx/__init__.py", "nnx/module.py", "nnx/filterlib.py"}
    assert complaint in "\n".join(complaints_about(file, source, files))


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("nnx/module.py", "from .filterlib import Filter\nfrom linnet import errors"),
        ("nnx/filterlib.py", "if TYPE_CHECKING:\n    from .module import Module"),
        ("nnx/__init__.py", "from .module import Module as Module"),
        ("functional/linear.py", "import math\nimport numpy\nfrom jax import lax"),
        ("io/orbax.py", "import orbax.checkpoint"),
    ],
)
def test_house_rules_allow(file, source):
    files = {"errors.py", "nnx/__init__.py", "nnx/module.py", "nnx/filterlib.py"}
    assert not list(complaints_about(file, source, files))


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
