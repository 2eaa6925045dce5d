"""Running a script, a module or a text as ``python`` itself would.

The program gets a ``__main__`` module of its own, with the attributes that ``python`` gives it, so
that ``pickle``, ``inspect`` and ``multiprocessing`` find what they find without Linnet. A traceback
begins with the program's first line.
"""

import linecache
import os
import sys
from collections.abc import Callable
from importlib.abc import InspectLoader
from importlib.machinery import BuiltinImporter, ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import decode_source, find_spec
from io import open_code
from types import CodeType, ModuleType
from typing import Any, NoReturn


def run_script(path: str, arguments: list[str]) -> None:
    """``python path arguments``; the path may be a folder or archive with a ``__main__.py``."""
    sys.argv[:] = [path, *arguments]
    if os.path.isdir(path) or _is_archive(path):
        _start_path_with(path)
        spec = PathFinder.find_spec("__main__", [path])
        if spec is None:
            _leave(f"can't find '__main__' module in {path!r}")
        _run_spec(spec)
        return
    try:
        with open_code(path) as file:
            source = file.read()
    except OSError as error:
        _leave(f"can't open file {os.path.abspath(path)!r}: [Errno {error.errno}] {error.strerror}")
    _start_path_with(os.path.dirname(os.path.realpath(path)))
    full = os.path.abspath(path)
    _run(
        lambda: compile(source, full, "exec", dont_inherit=True),
        __file__=full,
        __cached__=None,
        __loader__=SourceFileLoader("__main__", full),
    )


def run_module(name: str, arguments: list[str]) -> None:
    """``python -m name arguments``; the current folder stays first on the path."""
    sys.argv[:] = ["-m", *arguments]
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    if spec is None:
        package = name.removesuffix(".__main__")
        is_package = package != name
        _leave(
            f"No module named {name}"
            + (f"; {package!r} is a package and cannot be directly executed" * is_package)
        )
    sys.argv[0] = spec.origin or name
    _run_spec(spec)


def run_text(text: str, arguments: list[str]) -> None:
    """``python -c text arguments``."""
    sys.argv[:] = ["-c", *arguments]
    _start_path_with("")
    if sys.version_info >= (3, 13):  # where tracebacks show the lines of such a program
        linecache.cache["<string>"] = (len(text), None, text.splitlines(keepends=True), "<string>")
    _run(lambda: compile(text, "<string>", "exec", dont_inherit=True), __loader__=BuiltinImporter)


def run_input(arguments: list[str]) -> None:
    """``python - arguments``: the program is what comes from the standard input."""
    source = decode_source(sys.stdin.buffer.read())
    sys.argv[:] = ["-", *arguments]
    _start_path_with("")
    _run(lambda: compile(source, "<stdin>", "exec", dont_inherit=True), __loader__=BuiltinImporter)


def _run_spec(spec: ModuleSpec) -> None:
    loader: Any = spec.loader
    if not hasattr(loader, "get_code"):
        _leave(f"{spec.name} has no code that could be run")
    _run(
        lambda: loader.get_code(spec.name),
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=loader,
        __package__=spec.parent,
        __spec__=spec,
    )


def _run(compiled: Callable[[], CodeType], **attributes: Any) -> None:
    """Runs code as the module ``__main__``."""
    main = ModuleType("__main__")
    main.__dict__.update({"__builtins__": __builtins__, **attributes})
    sys.modules["__main__"] = main
    try:
        _Code(compiled()).exec_module(main)
    except SystemExit:
        raise
    except BaseException as error:
        _report(error, main)
        raise


class _Code(InspectLoader):
    """A loader for code that is compiled already; its ``exec_module`` runs the code in a module."""

    def __init__(self, code: CodeType):
        self.code = code

    def get_code(self, fullname: str) -> CodeType:
        return self.code

    def get_source(self, fullname: str) -> str | None:
        return None


def _report(error: BaseException, main: ModuleType) -> None:
    """Shows an error as ``python`` would, without the frames above the program's own.

    The caller raises it again, for the exit code and ``python -i``, but it is not shown twice.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals is not main.__dict__:
        trace = trace.tb_next
    shown = error.with_traceback(trace)
    hook = sys.excepthook
    sys.last_type, sys.last_value, sys.last_traceback = type(error), shown, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = shown
    hook(type(error), shown, trace)

    def silent(*_: Any) -> None:
        sys.excepthook = hook
        sys.last_traceback = trace

    sys.excepthook = silent


def _start_path_with(folder: str) -> None:
    """Puts the program's folder where ``python -m`` has put the current one."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _is_archive(path: str) -> bool:
    return os.path.isfile(path) and PathFinder.find_spec("__main__", [path]) is not None


def _leave(problem: str) -> NoReturn:
    print(f"{sys.executable}: {problem}", file=sys.stderr)
    sys.exit(2 if problem.startswith("can't open") else 1)
