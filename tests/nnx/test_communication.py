"""Collectives read from the text of a program. Of real programs: tests/nnx/parallel_cases."""

import jax
import jax.numpy as jnp
import pytest

from linnet import nnx
from linnet.nnx.communication import Collective

PROGRAM = """
HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%wrapped (p: bf16[16,4]) -> bf16[2,4] {
  %p = bf16[16,4]{1,0} parameter(0)
  ROOT %rs = bf16[2,4]{1,0} reduce-scatter(%p), dimensions={0}, to_apply=%add
}

%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %state = (s32[], f32[8]{0}) parameter(0)
  %moved = f32[8]{0} collective-permute(%x), source_target_pairs={{0,1}}, metadata={op_name="go"}
  ROOT %out = (s32[], f32[8]{0}) tuple(%i, %moved)
}

%cond (state: (s32[], f32[8])) -> pred[] {
  ROOT %less = pred[] constant(true)
}

ENTRY %main (a: f32[16], b: pred[3,5]) -> f32[] {
  %loop = (s32[], f32[8]{0}) while(%i), body=%body, config={"known_trip_count":{"n":"5"}}
  %gathering = (f32[2]{0}, f32[16]{0}) all-gather-start(%a), dimensions={0}
  %gathered = f32[16]{0} all-gather-done(%gathering)
  %both = (f32[4]{0}, /*index=1*/s4[6]{0}) all-reduce(%c, %d), to_apply=%add
  %scattering = ((bf16[16,4]{1,0}), bf16[2,4]{1,0}) async-start(%e), calls=%wrapped
  %scattered = bf16[2,4]{1,0} async-done(%scattering), calls=%wrapped
  %swapped = pred[3,5]{1,0} all-to-all(%b), dimensions={0}
  ROOT %end = f32[] constant(0)
}
"""


class Text:
    """Stands for a compiled function."""

    def as_text(self):
        return PROGRAM


def test_rows_of_a_program():
    report = nnx.collectives(Text())
    assert report.rows == {
        "all-gather": (1, 1, 64),
        "all-reduce": (1, 2, 16 + 3),
        "all-to-all": (1, 1, 15),
        "collective-permute": (5, 5, 5 * 32),
        "reduce-scatter": (1, 1, 16),
    }
    assert report.types("all-reduce") == ["f32[4]", "s4[6]"]
    assert Collective("collective-permute", ("f32[8]",), 5, 160, "go") in report.entries
    assert report.bytes == 64 + 19 + 15 + 160 + 16
    assert str(report) == (
        "operation           count  arrays  bytes per device\n"
        "all-gather          1      1       64\n"
        "all-reduce          1      2       19\n"
        "all-to-all          1      1       15\n"
        "collective-permute  5      5       160\n"
        "reduce-scatter      1      1       16"
    )
    assert repr(report) == f"CollectivesReport(\n{report}\n)"


def double(layer, x, *, times=2):
    layer.kernel[...] += 1
    return times * layer(x)


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit])
def test_a_function_is_compiled_and_not_run(wrap):
    layer = nnx.Linear(2, 3, kernel_init=jax.nn.initializers.zeros, rngs=nnx.Rngs(0))
    assert nnx.collectives(wrap(double), layer, jnp.ones((1, 2)), times=3).entries == ()
    assert not layer.kernel.any()


def test_what_was_traced_lowered_or_compiled():
    layer, x = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((1, 2))
    traced = nnx.jit(double).trace(layer, x)
    lowered = traced.lower()
    for stage in (traced, lowered, lowered.compile(), jax.jit(jnp.sin).lower(x)):
        assert str(nnx.collectives(stage)) == "no collectives"
    assert nnx.collectives(jax.jit(jnp.sin), x).entries == ()


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["values[0]", "values[1]", "plain[0]"]),
        ({"donate_argnums": 0}, ["donated_values[0][0]", "donated_values[0][1]", "plain[0]"]),
    ],
)
def test_arguments_are_named_by_their_paths(monkeypatch, options, names):
    layer, x = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((1, 2))
    lowered = nnx.jit(double, **options).lower(layer, x)
    in_program = lowered.as_text(debug_info=True)
    assert all(f'"{name}"' in in_program for name in names)  # as JAX names them
    compiled = lowered.compile()
    lines = [
        f'  %g{n} = f32[{n}]{{0}} all-gather(%p), metadata={{op_name="{name}"}}'
        for n, name in enumerate([*names, "plain[7]", "jit(f)/dot"])
    ]
    text = "\n".join(["ENTRY %main () -> f32[] {", *lines, "}"])
    monkeypatch.setattr(compiled, "as_text", lambda: text, raising=False)
    found = [entry.where for entry in nnx.collectives(compiled).entries]
    assert found == ["layer.bias", "layer.kernel", "x", "plain[7]", "jit(f)/dot"]
