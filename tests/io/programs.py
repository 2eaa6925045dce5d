"""Running a piece of a program in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def environment(**more):
    paths = os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", **more}


def run(program, *arguments, check=True, **env):
    """Runs Python text; its arguments are in sys.argv[1:]."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment(**env),
        check=False,
    )
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done
