"""Running a piece of a program in a process of its own."""

import os
from pathlib import Path

from tests.subprocesses import run_program

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def environment(**more):
    paths = os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", **more}


def run(program, *arguments, check=True, devices=None, **env):
    """Runs Python text, which may import the helpers of this folder."""
    paths = environment(PYTHONWARNINGS="ignore", **env)
    return run_program(program, *arguments, check=check, devices=devices, **paths)
