"""The programs of the pages that Linnet was specified by run unchanged, and print what they show.

The programs are the pages' cells, without their comments, with a few checks of ours after them. One
thing differs from a page: its mesh was made when axes were Auto by default, and says so here.
"""

from pathlib import Path

import pytest

import linnet
from tests.subprocesses import run_python

HERE = Path(__file__).parent
ROOT = Path(linnet.__file__).parents[1]

PRINTS = {
    "key_concepts": [
        "[ 0.04119061 -0.2629074 ]",
        "[ 0.310975   -0.43336964]",
        ".bias",
        ".kernel",
        "1.0040143  -0.9063372  -0.7481722  -1.1713669",
        "1.7448074   0.5050189",
        "model.dim = 4",
        "Code path based on static data value works fine.",
        "Code path based on JAX data value throws error",
        "ShapeDtypeStruct(shape=(4, 4), dtype=float32)",
        "67,084,290 (268.3 MB)",
        "8,190 (32.8 KB)",
        "(None, 'model')",
    ],
    "basics_objects": ["optimizer.step.value = Array(1, dtype=uint32)", "y.shape = (3, 10)"],
    "basics_pytrees": [
        "y.shape = (3, 5), model.count[...] = Array(1, dtype=int32, weak_type=True)",
        "model.w sum: 4.1854",
        "doubled.w sum: 8.3709",
        ".count.value: Array(1, dtype=int32, weak_type=True)",
        "0.8423141 , 0.18237865, 0.2271781 , 0.12072563, 0.19181347",
        "[1797259609 2579123966]",
        "[ 928981903 3453687069]",
        "1.2956359 ,  1.3550105 , -0.40960556",
        "RngState: 2 (12 B)",
        "tag='default'",
        "optimizer.step[...] = Array(1, dtype=uint32)",
        "shared Variable references",
        "y = 4.0, model.a[...] = 2.0, model.b[...] = 2.0",
        "Count: 1 (4 B), Param: 10 (40 B), Total: 11 (44 B)",
        "hijax=True",
        "v[...] = 2",
    ],
    "linen_column": [],
    "nnx_column": [],
}


def without_space(text):
    return "".join(text.split())


@pytest.mark.parametrize("name", PRINTS)
def test_a_page_runs_unchanged_and_prints_what_it_shows(name):
    # Nearly all the time goes into compiling; all the digits of one page need all of it.
    saves = "0" if name == "key_concepts" else "1"
    environment = {"PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": saves}
    done = run_python("-m", "linnet", HERE / f"{name}.py", **environment)
    shown = without_space(done.stdout)
    assert [text for text in PRINTS[name] if without_space(text) not in shown] == []
