"""The GPU benchmarks run, with small shapes and on the CPU, and read traces and HLO rightly."""

import gzip
import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks" / "gpu"


@pytest.fixture
def load(monkeypatch):
    """Imports a file of the folder, as its scripts do."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in {path.stem for path in FOLDER.glob("*.py")} - before:
        sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "mode"),
    [
        ("training", "linnet/chunked=64/float32/stack/remat/donate"),
        ("training", "jax"),
        ("decoding", "linnet"),
        ("decoding", "jax/packed"),
        ("architectures", "linnet/resnet50"),
        ("architectures", "linnet/lstm"),
        ("last_layer", "jax"),
        ("last_layer", "linnet"),
        ("last_layer", "linnet/chunked=64/mean"),
        ("last_layer", "linnet/chunked=64/each"),
    ],
)
def test_modes_run(load, script, mode):
    harness, module = load("harness"), load(script)
    args = module.arguments(None, []).parse_args(["--quick"])
    with jax.numpy_rank_promotion("allow"):
        rows = [harness.measure(w, blocks=1, steps=1) for w in module.build(mode, args)]
    for row in rows:
        assert row["ms"] > 0
        assert row["value"] is None or math.isfinite(row["value"])
        assert min(row["flops"], row["moved"], row["items_per_s"]) > 0


@pytest.mark.slow
def test_a_script_prints_a_table(tmp_path):
    out = tmp_path / "rows.jsonl"
    modes = ["linnet/chunked=64", "linnet/chunked=many", "nosuchlibrary"]
    command = [sys.executable, str(FOLDER / "last_layer.py"), *modes]
    run = subprocess.run(
        [*command, "--quick", "--blocks", "1", "--steps", "1", "--out", str(out)],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(FOLDER.parents[1]), "JAX_PLATFORMS": "cpu", "PATH": ""},
    )
    assert run.returncode == 0, run.stderr
    assert "nosuchlibrary: left out, nosuchlibrary is not installed" in run.stdout
    table = run.stdout.split("\n\n")[-1].splitlines()
    assert [line.split(" | ")[0] for line in table[2:]] == [
        "| linnet/chunked=64",
        "| linnet/chunked=many",
    ]
    assert "ValueError: invalid literal for int() with base 10: 'many'" in table[3]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [("failed" in row, row["script"]) for row in rows] == [
        (False, "last_layer"),
        (True, "last_layer"),
    ]


@pytest.mark.slow
def test_kernels_of_a_step(load, capsys, monkeypatch, tmp_path):
    kernels = load("kernels")
    arguments = ["last_layer", "linnet/chunked=64", "--quick", "--save", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["kernels.py", *arguments])
    monkeypatch.setenv("XLA_FLAGS", "")
    kernels.main()
    shown = capsys.readouterr().out
    assert "GiB: argument" in shown
    assert "ms of kernels a step" in shown
    assert "forward cross_entropy" in shown
    assert {path.suffix for path in tmp_path.iterdir()} == {".md", ".gz"}


HLO = """\
HloModule jit_step, is_scheduled=true

%fused_add (p.0: f32[8]) -> f32[8] {
  %p.0 = f32[8]{0} parameter(0)
  ROOT %add.1 = f32[8]{0} add(%p.0, %p.0)
}

%sliced (p.1: bf16[2,8], p.2: s32[]) -> (bf16[8], s8[1024]) {
  %p.1 = bf16[2,8]{1,0} parameter(0)
  ROOT %inner = (bf16[8]{0}, s8[1024]{0}) custom-call(%p.1), custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(step)/jvp(words)/dot_general"}
}

%body (t.0: (s32[], f32[8])) -> (s32[], f32[8]) {
  %t.0 = (s32[], f32[8]{0}) parameter(0)
  %x.0 = f32[8]{0} get-tuple-element(%t.0), index=1
  %loop_add_fusion.7 = f32[8]{0} fusion(%x.0), kind=kLoop, calls=%fused_add, metadata={op_name="jit(step)/transpose(jvp(blocks_11))/norm1/add"}
  ROOT %t.1 = (s32[], f32[8]{0}) tuple(%x.0, %loop_add_fusion.7)
}

%yes (t.4: f32[8]) -> f32[8] {
  %t.4 = f32[8]{0} parameter(0)
  ROOT %copy.9 = f32[8]{0} copy(%t.4)
}

ENTRY %main (a: f32[8], b: bf16[2,8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %b = bf16[2,8]{1,0} parameter(1)
  %start = (s32[], f32[8]{0}) tuple(%a, %a)
  %gemm.2 = (bf16[8]{0}, s8[1024]{0}) fusion(%b, %a), kind=kCustom, calls=%sliced, backend_config={"fusion_backend_config":{"kind":"__custom_fusion"}}
  %loop = (s32[], f32[8]{0}) while(%start), condition=%yes, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %either = f32[8]{0} conditional(%a, %a, %a), true_computation=%yes, false_computation=%yes
  ROOT %out = f32[8]{0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501


def test_instructions_of_hlo(load):
    hlo = load("hlo")
    found = [(i.name, i.what, i.moved, i.times, i.branch) for i in hlo.instructions(HLO)]
    assert found == [
        ("gemm.2", "__cublas$lt$matmul", 16 + 32 + 32, 1, False),
        ("loop_add_fusion.7", "kLoop", 64, 5, False),
        ("copy.9", "", 64, 1, True),
        ("copy.9", "", 64, 1, True),
    ]


SLICES = """\
%update (p.0: f32[4,8], p.1: s32[], p.2: f32[4,8]) -> f32[4,8] {
  %p.0 = f32[4,8]{1,0} parameter(0)
  %p.1 = s32[] parameter(1)
  %p.2 = f32[4,8]{1,0} parameter(2)
  %part = f32[1,8]{1,0} dynamic-slice(%p.2, %p.1), dynamic_slice_sizes={1,8}
  ROOT %all = f32[4,8]{1,0} dynamic-update-slice(%p.0, %part, %p.1)
}

ENTRY %main (a: f32[4,8], b: s32[], c: f32[4,8]) -> f32[4,8] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = s32[] parameter(1)
  %c = f32[4,8]{1,0} parameter(2)
  ROOT %out = f32[4,8]{1,0} fusion(%a, %b, %c), kind=kLoop, calls=%update
}
"""


def test_a_fusion_of_slices_moves_the_slices(load):
    (instruction,) = load("hlo").instructions(SLICES)
    assert instruction.moved == 32 + 4 + 32  # a row read, where it is, a row written


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("jit(step)/transpose(jvp(blocks_11))/norm1/add", "backward blocks_*/norm1"),
        ("jit(step)/jvp(blocks_3)/attention/query/dot_general", "forward blocks_*/attention/query"),
        ("jit(step)/jvp()/while/body/cross_entropy/exp", "forward cross_entropy"),
        ("jit(step)/mul", "update"),
        ("", ""),
    ],
)
def test_parts_of_a_model(load, source, part):
    assert load("hlo").part(source) == part


def trace(path, events):
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    return str(path)


def test_kernels_of_a_trace(load, tmp_path):
    """Streams of the GPU count; lines that sum them up, and the host, do not."""
    kernels, hlo = load("kernels"), load("hlo")
    lines = {1: "Stream #13(Compute)", 2: "XLA Ops"}
    events = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}},
        {"ph": "M", "pid": 9, "name": "process_name", "args": {"name": "/host:CPU"}},
        *(
            {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}}
            for tid, name in lines.items()
        ),
        *(
            {"ph": "X", "pid": pid, "tid": tid, "ts": 0, "dur": us, "name": name, "args": args}
            for pid, tid, us, name, args in [
                (1, 1, 2000, "loop_add_fusion_7", {"hlo_op": "loop_add_fusion.7"}),
                (1, 1, 4000, "loop_add_fusion_7", {}),  # in a CUDA graph: by its name
                (1, 1, 1000, "nvjet_tst_128", {"hlo_op": "gemm.2"}),
                (1, 2, 9000, "gemm.2", {"hlo_op": "gemm.2"}),
                (9, 1, 9000, "python", {}),
            ]
        ),
    ]
    path = trace(tmp_path / "a.trace.json.gz", events)
    rows = kernels.kernels_of(kernels.trace_events(path), hlo.instructions(HLO), steps=2)
    assert [(r.name, r.part, r.kind, r.calls, r.ms, r.moved) for r in rows] == [
        ("loop_add_fusion", "backward blocks_*/norm1", "fusions", 1, 3.0, 64),
        ("nvjet_tst", "forward words", "products", 0.5, 0.5, 40),
    ]
    assert "| 3.000 | 85.7% | 1 | 0 | 0 | fusions | backward blocks_*/norm1 |" in kernels.table(
        rows, 5
    )


def test_kernels_of_a_trace_of_pytorch(load, tmp_path):
    kernels = load("kernels")
    events = [
        {"ph": "X", "cat": "kernel", "name": "triton_poi_fused_add_0", "dur": 5, "pid": 0},
        {"ph": "X", "cat": "cpu_op", "name": "aten::add", "dur": 50, "pid": 0},
        {"ph": "X", "cat": "kernel", "name": "flash_fwd_kernel", "dur": 7, "pid": 0},
    ]
    found = kernels.kernels_of(kernels.trace_events(trace(tmp_path / "t.gz", events)), [], 1)
    assert [(r.name, r.kind, r.ms) for r in found] == [
        ("flash_fwd_kernel", "attention", 0.007),
        ("triton_poi_fused_add", "fusions", 0.005),
    ]
