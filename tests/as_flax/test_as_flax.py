"""Programs written for Flax run on Linnet: what they see of Python, of Flax and of each other.

Each process costs seconds, so one program checks many things. A folder with a package called
``flax`` stands for an installed Flax where one is needed.
"""

import os
import re
import textwrap
from pathlib import Path

import pytest

import linnet
from linnet.as_flax import children, names
from tests.subprocesses import run_python

HERE = Path(__file__).parent
ROOT = Path(linnet.__file__).parents[1]
OUTCOMES = "tests.against_flax.outcomes"


def python(*arguments, folder, check=True, text=None, **environment):
    """Runs Python in a folder, with this Linnet on the path and warnings as errors."""
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | environment
    return run_python(*arguments, folder=folder, check=check, text=text, **environment)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


@pytest.fixture
def other_flax(tmp_path):
    """A folder with a package ``flax`` and libraries that use it, as if they were installed."""
    write(tmp_path / "flax/__init__.py", "__version__ = 'real'\nfrom flax import core\n")
    write(tmp_path / "flax/core.py", "class Real: pass\n")
    write(tmp_path / "flax/nnx.py", "from . import core\nReal = core.Real\nimport uses_it\n")
    write(tmp_path / "uses_it.py", "import flax.core\nfrom flax import core\n")
    write(
        tmp_path / "needs_real/__init__.py",
        """
        import flax.nnx as nnx
        from flax.core import Real

        def late():
            import flax
            from flax import core
            return flax.__version__, core.Real
        """,
    )
    return tmp_path


# ---- programs -----------------------------------------------------------------------------------


def test_a_program_sees_what_python_would_show_it(tmp_path):
    file = write(tmp_path / "program.py", (HERE / "what_it_sees.py").read_text(encoding="utf-8"))
    # A sitecustomize of the user's is run in child processes as without Linnet.
    write(
        tmp_path / "site/sitecustomize.py", "import sys, types\nsys.modules['here_first'] = sys\n"
    )
    path = os.pathsep.join([str(tmp_path / "site"), str(ROOT)])
    done = python(
        "-m", "linnet", "program.py", file, "--flag", folder=tmp_path, check=False, PYTHONPATH=path
    )
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and lines[-1] == 'KeyError: "the program\'s own"', done.stderr
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].startswith(f'  File "{file}", line ') and lines[1].endswith(", in <module>")
    assert not any("linnet" in line or "importlib" in line for line in lines), done.stderr
    assert done.stdout.split() == ["0.12.8", f"['{tmp_path / 'site'}',", f"'{ROOT}']"]


def test_modules_texts_and_folders(tmp_path):
    show = "import sys; print(sys.argv, __name__, __package__, __spec__ and __spec__.name, flax)\n"
    write(tmp_path / "package/__main__.py", "from .inner import flax\n" + show)
    write(tmp_path / "package/__init__.py", "")
    write(tmp_path / "package/inner.py", "import flax\n")
    write(tmp_path / "folder/__main__.py", "import beside\nfrom beside import flax\n" + show)
    write(tmp_path / "folder/beside.py", "import flax\n")
    run = ["-m", "linnet"]
    facade = ROOT / "linnet/as_flax/facade.py"
    module = f"<module 'flax' from '{facade}'>\n"

    text = "import flax, sys; print(sys.argv, '__file__' in globals(), sys.path[0] == '', flax)"
    done = python(*run, "-c", text, "-x", folder=tmp_path)
    assert done.stdout == f"['-c', '-x'] False True {module}"
    done = python(*run, "-m", "package", "--check", folder=tmp_path)
    assert done.stdout == (
        f"['{tmp_path}/package/__main__.py', '--check'] __main__ package package.__main__ {module}"
    )
    done = python(*run, "folder", "1", folder=tmp_path)
    assert done.stdout == f"['folder', '1'] __main__  __main__ {module}"
    done = python(*run, "-", "2", folder=tmp_path, text="import flax\n" + show)
    assert done.stdout == f"['-', '2'] __main__ None None {module}"

    done = python(*run, "-c", "1 +", folder=tmp_path, check=False)
    assert done.returncode == 1 and done.stderr.startswith('  File "<string>", line 1\n    1 +')
    done = python(*run, "-c", "import sys; sys.exit(7)", folder=tmp_path, check=False)
    assert done.returncode == 7 and not done.stderr
    for arguments, code, message in [
        (["nowhere.py"], 2, "can't open file "),
        (["-m", "nowhere"], 1, "No module named nowhere"),
        (["-m", "json"], 1, "No module named json.__main__; 'json' is a package and cannot be"),
        (["--unknown"], 1, "python -m linnet: --unknown is no option or lacks its value"),
        ([], 1, "python -m linnet: which program?"),
    ]:
        done = python(*run, *arguments, folder=tmp_path, check=False)
        assert done.returncode == code and message in done.stderr
    assert f"the API of Flax {names.FLAX_VERSION}" in python(*run, "--version", folder=ROOT).stdout


# ---- an installed Flax --------------------------------------------------------------------------


def test_an_installed_flax_is_not_loaded_unless_a_library_is_excluded(other_flax):
    program = """
    import sys, subprocess, flax.nnx, uses_it, needs_real
    from linnet import as_flax, nnx

    assert flax.__version__ == "0.12.8" and flax.nnx is nnx and uses_it.flax is flax
    assert needs_real.nnx.__name__ == "flax.nnx" and needs_real.late() == ("real", needs_real.Real)
    assert needs_real.Real.__module__ == "flax.core" and needs_real.nnx.uses_it is uses_it
    import flax.core
    assert flax.core is uses_it.core is sys.modules["linnet.core"]

    child = "import needs_real, flax; print(needs_real.late()[0], flax.__version__)"
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
    assert done.stdout == "real 0.12.8\\n", done.stderr

    as_flax.uninstall()
    import flax
    assert flax.__version__ == "real" and sys.modules["flax.nnx"] is needs_real.nnx
    """
    path = os.pathsep.join([str(other_flax), str(ROOT)])
    python(
        *("-m", "linnet", "--exclude", "needs_real", "-c", textwrap.dedent(program)),
        folder=other_flax,
        PYTHONPATH=path,
    )


def test_from_code_and_in_notebooks(other_flax):
    program = """
    import os, sys
    before = dict(os.environ)
    import linnet
    from linnet import as_flax
    assert "jax" not in sys.modules

    as_flax.install()
    as_flax.install()
    import flax, uses_it
    assert flax.__version__ == "0.12.8" and as_flax.is_installed()
    flax.struct.dataclass
    as_flax.uninstall()
    as_flax.uninstall()
    assert not as_flax.is_installed() and not [name for name in sys.modules if "flax." in name[:5]]
    assert dict(os.environ) == before

    linnet.load_ipython_extension(None)
    import flax
    assert flax.__version__ == "0.12.8"
    linnet.unload_ipython_extension(None)

    del sys.modules["uses_it"]
    import flax, uses_it
    assert flax.__version__ == "real"
    try:
        as_flax.install()
    except ImportError as error:
        assert type(error) is linnet.errors.FlaxLoadedError
        print(error)
    """
    path = os.pathsep.join([str(other_flax), str(ROOT)])
    done = python("-c", textwrap.dedent(program), folder=other_flax, PYTHONPATH=path)
    assert done.stdout == (
        "Linnet cannot stand in for Flax: Flax is loaded already, and there would be two sets of "
        "classes. These modules imported it:\n"
        "  - __main__ (uses flax)\n"
        "  - uses_it (uses flax)\n"
        "Fix: start the program with `python -m linnet`, or call linnet.as_flax.install() before "
        "anything imports Flax (in a notebook, restart the kernel first).\n"
    )


def test_pytest_with_the_plugin(tmp_path):
    write(
        tmp_path / "test_one.py",
        """
        import flax
        from flax import nnx

        def test_it_is_linnet():
            assert flax.__version__ == "0.12.8" and nnx.Linear.__module__.startswith("linnet.")
        """,
    )
    arguments = ["-m", "pytest", "-q", "-W", "error", "-p", "linnet.as_flax", "test_one.py"]
    assert "1 passed" in python(*arguments, folder=tmp_path).stdout


def test_the_environment_of_children(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "a" + os.pathsep + "b")
    children.hand_down(["x", "w"])
    assert os.environ["PYTHONPATH"] == os.pathsep.join([children.FOLDER, "a", "b"])
    assert children.excluded_in_environment() == ["w", "x"]
    children.hand_down([])
    assert os.environ["PYTHONPATH"] == os.pathsep.join([children.FOLDER, "a", "b"])
    children.take_back()
    assert os.environ["PYTHONPATH"] == "a" + os.pathsep + "b"
    assert children.INTERPRETER not in os.environ and not children.excluded_in_environment()
    monkeypatch.delenv("PYTHONPATH")
    children.hand_down([])
    assert os.environ["PYTHONPATH"] == children.FOLDER
    children.take_back()
    assert "PYTHONPATH" not in os.environ


# ---- whole programs -----------------------------------------------------------------------------


def test_a_program_for_flax_gives_the_numbers_of_flax():
    done = python("-m", "linnet", HERE / "flax_program.py", folder=ROOT)
    assert done.stdout.endswith(f"results as in Flax {names.FLAX_VERSION}\n")


def compared(*choice, **environment):
    command = ["-m", "linnet", "-m", OUTCOMES, "compare", *choice]
    done = python(*command, folder=ROOT, check=False, LINNET_CHECK_PLANS="0", **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    agreeing, total = re.search(r"(\d+) of (\d+) programs do what Flax does", done.stdout).groups()
    assert agreeing == total
    return int(total)


FILES = {path.stem for path in (ROOT / "tests/against_flax").glob("test_*.py")}
# Adam divides small gradients by their size, and so shows how the compiler rounded.
SHOWING_ROUNDING = {
    "test_guides",
    "test_long_programs",
    "test_optimizers_and_metrics",
    "test_training",
}


@pytest.mark.parametrize("share", ["1/4", "2/4", "3/4", "4/4"])  # for several processes of pytest
def test_programs_that_were_compared_with_flax(share):
    assert compared(share, *sorted(FILES - SHOWING_ROUNDING)) > 230


def test_programs_that_train():
    optimized = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    assert compared("1/1", *sorted(SHOWING_ROUNDING), **optimized) > 50


def test_programs_on_four_devices():
    assert compared("1/1", "device_programs") > 100
