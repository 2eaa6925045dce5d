"""Programs that run in a process of their own, and tests that need several devices."""

import json
import os
import socket
import subprocess
import sys
import textwrap
import time
import traceback

import jax


def run_program(program, *arguments, check=True, devices=None, **environment):
    """Runs the text of a program with arguments and environment variables.

    A program that fails makes the test fail, unless ``check=False``. With ``devices`` it has that
    many, of the CPU.
    """
    if devices is not None:
        environment |= {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    return run_python("-c", textwrap.dedent(program), *arguments, check=check, **environment)


def run_python(*arguments, check=True, folder=None, text=None, **environment):
    """Runs Python with arguments and environment variables, in a folder, with a text to read.

    A run that fails makes the test fail, unless ``check=False``.
    """
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        input=text,
        env=os.environ | environment,
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def run_together(program, folder, count=2, devices=2, seconds=90):
    """Runs the text of a program in several processes of one run, each with some CPU devices.

    Each has the path of a folder in `folder`, its number in `number`, and prints `all well` at the
    end. Returns what they printed.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    logs = [folder / f"output_{number}" for number in range(count)]
    started = []
    for number, log in enumerate(logs):
        begin = _BEGIN.format(
            devices=devices, address=address, count=count, number=number, folder=str(folder)
        )
        command = [sys.executable, "-W", "ignore", "-c", begin + textwrap.dedent(program)]
        with log.open("w") as file:
            started.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT))
    end = time.monotonic() + seconds
    while any(one.poll() is None for one in started) and time.monotonic() < end:
        if any(one.poll() for one in started):
            end = min(end, time.monotonic() + 10)
        time.sleep(0.1)
    for one in started:
        one.kill()
    codes = [one.wait() for one in started]
    outputs = [log.read_text() for log in logs]
    assert codes == [0] * count, "\n\n".join([str(codes), *outputs])
    assert all("all well\n" in output for output in outputs), outputs
    return outputs


_BEGIN = """
import jax
number, folder = {number}, {folder!r}
jax.config.update("jax_num_cpu_devices", {devices})
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(
    "{address}", {count}, number, initialization_timeout=60, heartbeat_timeout_seconds=10,
    shutdown_timeout_seconds=10,
)

def error_of(action):
    try:
        action()
    except Exception as error:
        return f"{{type(error).__name__}}: {{error}} {{getattr(error, '__notes__', '')}}"
    return "no error"

"""


class Cases(dict):
    """The cases of a module that runs as a program with several devices: functions by name.

    Used as a decorator it adds a function. The module ends with ``run_on_four_devices`` or
    ``run_on_devices``. The test module imports it as ``cases`` and its tests take ``failures``, the
    texts of what went wrong.
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
    done = run_python("-m", module.__name__)
    return json.loads(done.stdout.splitlines()[-1])
