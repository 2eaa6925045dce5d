"""What the scripts of this folder share: a process for each mode, clocks, ceilings and the table.

A script names its modes and builds a `Workload` for one. Called by a user it starts itself once for
each mode, so that no mode sees another's memory, compilations or settings, and prints one table.
"""

import argparse
import dataclasses
import importlib.util
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()


@dataclasses.dataclass
class Workload:
    """One thing to time, and the least that it has to do."""

    run: Callable[[int], Any]  # the i-th step; gives something to wait for
    wait: Callable[[Any], Any]
    peak: Callable[[], int]  # bytes
    flops: float  # of the products in one step
    moved: float  # the fewest bytes that one step reads and writes
    items: int  # tokens, images, ... of one step
    lower: Callable[[], Any] | None = None  # a JAX step lowered, for its HLO
    name: str = ""


# Timing, in the process of a mode.


def measure(workload: Workload, *, blocks: int, steps: int) -> dict[str, Any]:
    """The median time of a step over blocks of steps, with the least and the most."""
    out = workload.run(0)
    workload.wait(out)
    first = time.perf_counter() - STARTED
    for i in range(1, 4):
        out = workload.run(i)
    workload.wait(out)
    times = []
    for block in range(blocks):
        start = time.perf_counter()
        for i in range(steps):
            out = workload.run(block * steps + i)
        workload.wait(out)
        times.append((time.perf_counter() - start) / steps * 1e3)
    ms = statistics.median(times)
    return {
        "name": workload.name,
        "ms": ms,
        "least_ms": min(times),
        "most_ms": max(times),
        "items_per_s": workload.items / ms * 1e3,
        "peak_gib": workload.peak() / 2**30,
        "first_s": first,
        "flops": workload.flops,
        "moved": workload.moved,
        "value": number(out),
    }


def number(out: Any) -> float | None:
    """The loss, where a step gives one."""
    return float(out) if getattr(out, "ndim", None) == 0 else None


def jax_clock() -> dict[str, Any]:
    """How to wait for JAX, and its peak of memory."""
    import jax

    def peak() -> int:
        return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)

    return {"wait": jax.block_until_ready, "peak": peak}


def torch_clock() -> dict[str, Any]:
    """The same of PyTorch."""
    import torch

    if not torch.cuda.is_available():
        return {"wait": lambda out: out, "peak": lambda: 0}
    return {"wait": lambda _: torch.cuda.synchronize(), "peak": torch.cuda.max_memory_allocated}


def torch_device_and_compile() -> tuple[str, Callable[..., Any]]:
    """The GPU and `torch.compile`, or the CPU and nothing, for a quick look."""
    import torch

    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")
        return "cuda", torch.compile
    return "cpu", lambda model, **_: model


def ceilings(*, quick: bool) -> dict[str, Any]:
    """What the device reaches on one large product and on one large copy."""
    import jax
    import jax.numpy as jnp

    def seconds(function: Callable[..., Any], *args: Any) -> float:
        function = jax.jit(function)
        jax.block_until_ready([function(*args) for _ in range(3)])
        times = []
        for _ in range(5):
            start = time.perf_counter()
            jax.block_until_ready([function(*args) for _ in range(4)])
            times.append((time.perf_counter() - start) / 4)
        return statistics.median(times)

    side, length = (256, 2**20) if quick else (8192, 2**29)
    a, b = (jax.random.normal(jax.random.key(i), (side, side), jnp.bfloat16) for i in range(2))
    rate = 2 * side**3 / seconds(jnp.matmul, a, b)
    x = jax.random.normal(jax.random.key(2), (length,))
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "flops_per_s": rate,
        "bytes_per_s": 2 * x.nbytes / seconds(lambda x: x + 1, x),
    }


# Starting the modes, and their table.


def parser(doc: str | None, modes: list[str]) -> argparse.ArgumentParser:
    """The options that all scripts have."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modes", nargs="*", default=modes, help=f"default: {' '.join(modes)}")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that it runs")
    parser.add_argument("--blocks", type=int, default=6, help="how many times to take")
    parser.add_argument("--steps", type=int, default=5, help="steps in each")
    parser.add_argument("--limit", type=float, default=240, help="seconds that a mode may take")
    parser.add_argument("--out", help="a file to which the rows are added, as JSON lines")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


def main(
    script: str,
    args: argparse.Namespace,
    build: Callable[[str, argparse.Namespace], Iterable[Workload]],
) -> list[dict[str, Any]]:
    """Runs one mode, if this is its process; otherwise all modes and prints their table."""
    if args.worker == "ceilings":
        print(json.dumps(ceilings(quick=args.quick)), flush=True)
        return []
    if args.worker:
        for workload in build(args.worker, args):
            row = measure(workload, blocks=args.blocks, steps=args.steps)
            print(json.dumps({"mode": args.worker, **row}), flush=True)
        return []
    limits = start(script, args, "ceilings")[0]
    rows = []
    for mode in args.modes:
        if (peer := missing_peer(mode)) is not None:
            print(f"{mode}: left out, {peer} is not installed", flush=True)
            continue
        found = start(script, args, mode)
        rows += found
        for row in found:
            print(json.dumps(row), flush=True)
            if args.out:
                with Path(args.out).open("a") as file:
                    print(json.dumps({"script": Path(script).stem, **row, **limits}), file=file)
    print("\n" + table(rows, limits), flush=True)
    return rows


def missing_peer(mode: str) -> str | None:
    package = mode.partition("/")[0]
    return None if importlib.util.find_spec(package) else package


def start(script: str, args: argparse.Namespace, mode: str) -> list[dict[str, Any]]:
    """The rows that a mode prints in a process of its own."""
    command = [sys.executable, script, "--worker", mode]
    for name, value in vars(args).items():
        if name in ("modes", "worker", "out", "limit") or value is None or value is False:
            continue
        values = value if isinstance(value, list) else [] if value is True else [value]
        command += [f"--{name.replace('_', '-')}", *map(str, values)]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=args.limit, check=False
        )
    except subprocess.TimeoutExpired:
        return [{"mode": mode, "failed": f"took more than {args.limit:g} s"}]
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    if run.returncode or not rows:
        print(run.stderr[-3000:], file=sys.stderr, flush=True)
        lines = run.stderr.strip().splitlines() or ["printed nothing"]
        errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
        rows.append({"mode": mode, "failed": (errors or lines)[-1][:200]})
    return rows


def table(rows: list[dict[str, Any]], limits: dict[str, Any]) -> str:
    """The rows in Markdown, with the floors that the measured ceilings give."""
    if "failed" in limits:
        limits = {"device": limits["failed"], "jax": "", "flops_per_s": 1e12, "bytes_per_s": 1e12}
    lines = [
        f"{limits['device']}, JAX {limits['jax']}: products {limits['flops_per_s'] / 1e12:.3g} "
        f"TFLOP/s, copies {limits['bytes_per_s'] / 1e9:.4g} GB/s.",
        "",
        "| mode | ms | least, most | items/s | peak GiB | first s | floor, ms: products, bytes "
        "| times the floor | value |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        label = " ".join(filter(None, [row["mode"], row.get("name")]))
        if "failed" in row:
            lines.append(f"| {label} | {row['failed'].replace('|', ' ')} |" + " |" * 7)
            continue
        products = row["flops"] / limits["flops_per_s"] * 1e3
        moved = row["moved"] / limits["bytes_per_s"] * 1e3
        value = "" if row["value"] is None else f"{row['value']:.4g}"
        lines.append(
            f"| {label} | {row['ms']:.2f} | {row['least_ms']:.2f}, {row['most_ms']:.2f} "
            f"| {row['items_per_s']:,.0f} | {row['peak_gib']:.2f} | {row['first_s']:.1f} "
            f"| {products:.2f}, {moved:.2f} | {row['ms'] / max(products, moved):.2f} | {value} |"
        )
    return "\n".join(lines)
