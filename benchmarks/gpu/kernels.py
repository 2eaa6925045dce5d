"""Which kernels a step spends its time in, and what they move.

    kernels.py SCRIPT MODE [options of the script] [--steps 3] [--top 30] [--save FOLDER]

SCRIPT is training, architectures, decoding or last_layer; MODE is one of its modes. A JAX step is
compiled, its HLO read, and a few steps are run under the profiler; a step of PyTorch is run under
its profiler. Kernels of equal layers are added up. The bytes are those of operands and results by
the HLO, too many where a kernel uses a part of an array; without --save nothing is kept.

On a GPU command buffers are turned off (--command-buffers keeps them): in a CUDA graph a kernel
does not tell which instruction it came from. That adds time between kernels, not to their own.
"""

import argparse
import collections
import dataclasses
import glob
import gzip
import importlib
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import hlo
from harness import Workload

KINDS = {
    "attention": r"fmha|flash|sdpa|attention|cudnn.*softmax",
    "products": r"gemm|cublas|matmul|nvjet|cutlass|xmma|\bdot|ampere_|sm90_|splitK|ynn",
    "convolutions": r"conv(?!ert)|cudnn|implicit",
    "copies": r"memcpy|memset|\bcopy|transpose|concatenate",
    "optimizer": r"adam|multi_tensor|FusedSgd",
}


@dataclasses.dataclass
class Kernel:
    """The calls of one kernel in one step, added up over equal layers."""

    name: str
    part: str
    kind: str
    calls: float = 0
    ms: float = 0
    moved: float = 0  # bytes, 0 where unknown


def kind_of(*texts: str) -> str:
    text = " ".join(texts)
    found = (kind for kind, pattern in KINDS.items() if re.search(pattern, text, re.IGNORECASE))
    return next(found, "fusions")


def base(name: str) -> str:
    """A kernel's name without what tells equal layers apart."""
    return re.sub(r"([._]\d+)+$", "", name)[:70]


# What ran, from a trace in Chrome's format.


def trace_events(path: str) -> list[tuple[str, str, float]]:
    """(kernel, instruction or "", microseconds) of all that ran on the device."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    named = {"process_name": {}, "thread_name": {}}
    for e in events:
        if e.get("ph") == "M" and e.get("name") in named:
            named[e["name"]][e.get("pid"), e.get("tid")] = str(e["args"]["name"])
    processes = {pid: name for (pid, _), name in named["process_name"].items()}
    gpus = {pid for pid, name in processes.items() if "/device:GPU" in name}
    threads = {where: name for where, name in named["thread_name"].items() if where[0] in gpus}
    streams = {where for where, name in threads.items() if name.startswith("Stream")}
    out = []
    for e in events:
        if e.get("ph") != "X":
            continue
        args = e.get("args") or {}
        if e.get("cat") is not None:  # PyTorch's
            wanted = e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")
        elif gpus:  # other lines of a GPU sum up its streams
            wanted = (e["pid"], e.get("tid")) in (streams or threads)
        else:
            wanted = "hlo_op" in args and e["name"] == args["hlo_op"]
        if wanted:
            out.append((e["name"], args.get("hlo_op", ""), float(e.get("dur", 0))))
    return out


def kernels_of(
    events: list[tuple[str, str, float]], listed: list[hlo.Instruction], steps: int
) -> list[Kernel]:
    """The events of a trace by kernel, joined with the instructions they come from."""
    by_name = {i.name: i for i in listed}
    by_kernel = {re.sub(r"[.\-]", "_", i.name): i for i in listed}
    rows: dict[Any, Kernel] = {}
    for name, op, us in events:
        found = by_name.get(op) or by_kernel.get(re.sub(r"[.\-]", "_", name))
        source = found.source if found else ""
        part = hlo.part(source) if found else ""
        kind = kind_of(name, found.what if found else "", found.name if found else "")
        key = (base(name), part, kind)
        row = rows.setdefault(key, Kernel(*key))
        row.calls += 1 / steps
        row.ms += us / 1e3 / steps
        row.moved += (found.moved if found else 0) / steps
    return sorted(rows.values(), key=lambda row: -row.ms)


def kernels_of_hlo(listed: list[hlo.Instruction]) -> list[Kernel]:
    """What would run, without times, by the bytes moved; branches are left out."""
    rows: dict[Any, Kernel] = {}
    for i in listed:
        if not i.branch:
            key = (base(i.name), hlo.part(i.source), kind_of(i.name, i.what))
            row = rows.setdefault(key, Kernel(*key))
            row.calls += i.times
            row.moved += i.moved * i.times
    return sorted(rows.values(), key=lambda row: -row.moved)


# Tables.


def table(rows: list[Kernel], top: int) -> str:
    total = sum(row.ms for row in rows) or 1
    lines = [
        "| ms | share | calls | MB | GB/s | kind | where | kernel |",
        "| ---: | ---: | ---: | ---: | ---: | --- | --- | --- |",
    ]
    for row in rows[:top]:
        time = f"{row.ms:.3f} | {row.ms / total:.1%}" if row.ms else " | "
        rate = f"{row.moved / row.ms / 1e6:.0f}" if row.ms and row.moved else ""
        lines.append(
            f"| {time} | {row.calls:g} | {row.moved / 1e6:.0f} "
            f"| {rate} | {row.kind} | {row.part} | {row.name.replace('|', ' ')} |"
        )
    return "\n".join(lines)


def sums(rows: list[Kernel], by: str) -> str:
    """Times and bytes added up by kind or by place."""
    groups: dict[str, list[Kernel]] = collections.defaultdict(list)
    for row in rows:
        groups[getattr(row, by)].append(row)
    added = [
        (sum(r.ms for r in g), sum(r.moved for r in g), sum(r.calls for r in g), name)
        for name, g in groups.items()
    ]
    lines = [f"| ms | MB | calls | {by} |", "| ---: | ---: | ---: | --- |"]
    for ms, moved, calls, name in sorted(added, reverse=True)[:40]:
        lines.append(f"| {ms:.3f} | {moved / 1e6:.0f} | {calls:g} | {name} |")
    return "\n".join(lines)


# Running a mode.


def profile_jax(workload: Workload, steps: int, folder: str) -> str:
    """Runs some steps under JAX's profiler; gives the path of the trace."""
    import jax

    for i in range(3):
        workload.wait(workload.run(i))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(folder, profiler_options=options):
        for i in range(steps):
            out = workload.run(i)
        workload.wait(out)
    return glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True)[0]


def profile_torch(workload: Workload, steps: int, folder: str) -> str:
    """The same with PyTorch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    for i in range(3):
        workload.wait(workload.run(i))
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for i in range(steps):
            out = workload.run(i)
        workload.wait(out)
    path = f"{folder}/torch.trace.json.gz"
    profiler.export_chrome_trace(path)
    return path


def look_at(workload: Workload, args: argparse.Namespace, is_jax: bool) -> str:
    """The report on one workload."""
    report = [f"# {args.script} {args.mode} {workload.name}".strip()]
    listed: list[hlo.Instruction] = []
    text = ""
    if is_jax and workload.lower is not None:
        compiled = workload.lower().compile()
        text = compiled.as_text()
        listed = hlo.instructions(text)
        memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
        gib = {
            name: getattr(memory, f"{name}_size_in_bytes") / 2**30
            for name in ("argument", "output", "alias", "temp")
        }
        gib["total"] = gib["argument"] + gib["output"] - gib["alias"] + gib["temp"]
        report.append("GiB: " + ", ".join(f"{name} {value:.2f}" for name, value in gib.items()))
        report.append(
            f"XLA counts {cost.get('flops', 0) / 1e12:.2f} TFLOP and "
            f"{cost.get('bytes accessed', 0) / 1e9:.1f} GB."
        )
        report += ["## What the HLO moves", table(kernels_of_hlo(listed), args.top)]
    trace = None
    if not args.hlo_only:
        with tempfile.TemporaryDirectory() as folder:
            profile = profile_jax if is_jax else profile_torch
            path = profile(workload, args.steps, folder)
            rows = kernels_of(trace_events(path), listed, args.steps)
            trace = Path(path).read_bytes()
        busy = sum(row.ms for row in rows)
        report += [f"## What ran: {busy:.2f} ms of kernels a step", sums(rows, "kind")]
        report += [sums(rows, "part")] if listed else []
        report.append(table(rows, args.top))
    out = "\n\n".join(report)
    if args.save:
        save(args, workload.name, out, text, trace)
    return out


def save(args: argparse.Namespace, name: str, report: str, text: str, trace: bytes | None) -> None:
    folder = Path(args.save)
    folder.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^A-Za-z0-9]+", "-", f"{args.script} {args.mode} {name}").strip("-")
    (folder / f"{stem}.md").write_text(report + "\n")
    if text:
        (folder / f"{stem}.hlo.gz").write_bytes(gzip.compress(text.encode()))
    if trace and args.keep_trace:
        (folder / f"{stem}.trace.json.gz").write_bytes(trace)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("script", choices=["training", "architectures", "decoding", "last_layer"])
    parser.add_argument("mode")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--top", type=int, default=30)
    parser.add_argument("--save", help="a folder for the report and the HLO")
    parser.add_argument("--keep-trace", action="store_true", help="save the trace as well")
    parser.add_argument("--hlo-only", action="store_true", help="compile, and run nothing")
    parser.add_argument("--command-buffers", action="store_true")
    args, rest = parser.parse_known_args()
    if not args.command_buffers:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_enable_command_buffer=".strip()
    is_jax = not args.mode.startswith("torch")
    script = importlib.import_module(args.script)
    options = script.arguments(None, []).parse_args(rest)
    if is_jax:
        import jax

        if jax.config.jax_compilation_cache_dir is None:
            # The step is compiled for its text and again to run: once is enough.
            jax.config.update("jax_compilation_cache_dir", tempfile.mkdtemp())
    for workload in script.build(args.mode, options):
        print(look_at(workload, args, is_jax), flush=True)


if __name__ == "__main__":
    sys.exit(main())
