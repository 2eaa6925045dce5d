"""Writes down what Flax gives for the catalogue of layers: ``flax_layers.json``.

    .venv-bench/bin/python -m tests.linen.write_flax_layers

For each entry the variables that ``init`` makes from seed 0, the output, the collections that a
call wrote, for 8-bit contractions the gradients (their next scales are among them), each with
shape, dtype and digest; and the number of operations in the trace of a call.
"""

import importlib
import json
import warnings
from pathlib import Path

from benchmarks.layers import count_equations
from tests.linen.catalogue import CATALOGUE, gradients, summary, traced

FILE = Path(__file__).parent / "flax_layers.json"


def main():
    warnings.simplefilter("ignore")
    linen = importlib.import_module("flax.linen")
    rows = {}
    for entry in CATALOGUE:
        variables = entry.variables(linen)
        out, new = entry.apply(linen, variables)
        rows[str(entry)] = {
            "variables": summary(variables),
            "output": summary(out),
            "written": summary(new),
            "operations": count_equations(traced(entry, linen, variables).jaxpr),
        }
        if "Fp8" in entry.layer:
            rows[str(entry)]["gradients"] = summary(gradients(entry, linen, variables))
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    FILE.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
