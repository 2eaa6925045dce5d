"""Programs that run in a process of their own, and tests that need several devices."""

import json
import os
import subprocess
import sys
import textwrap
import traceback

import jax


def run_program(program, *arguments, check=True, **environment):
    """Runs the text of a program with arguments and environment variables.

    A program that fails makes the test fail, unless ``check=False``.
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )
    assert not check or done.returncode == 0, done.stderr
    return done


class Cases(dict):
    """The cases of a module that runs as a program with several devices: functions by name.

    Used as a decorator it adds a function. The module ends with ``run_on_four_devices`` or
    ``run_on_devices``, and the test module gets the texts of what went wrong from ``failures_of``.
    """

    def __call__(self, f):
        self[f.__name__] = f
        return f

    def run_on_four_devices(self):
        self.run_on_devices(4)

    def run_on_devices(self, count):
        jax.config.update("jax_num_cpu_devices", count)
        results = {}
        for name, run in self.items():
            try:
                run()
            except Exception:
                results[name] = traceback.format_exc()
        print(json.dumps(results))


def failures_of(module):
    program = [sys.executable, "-m", module.__name__]
    done = subprocess.run(program, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
