"""`python -m linnet --check`: programs are read, and what Linnet lacks is listed with its place."""

import textwrap

import pytest

from linnet.__main__ import main
from linnet.as_flax.check import Use, check, linnet_has, uses_in


def names_in(program):
    return [use.name for use in uses_in(textwrap.dedent(program), "a.py")]


@pytest.mark.parametrize(
    ("program", "names"),
    [
        ("import flax", ["flax"]),
        ("import flax.linen, os\nflax.linen.Dense", ["flax.linen", "flax.linen.Dense"]),
        ("import flax.linen as nn\nnn.Dense(3)", ["flax.linen", "flax.linen.Dense"]),
        ("from flax import nnx as n\nn.a.b.c()", ["flax.nnx", "flax.nnx.a.b.c"]),
        ("from flax.nnx import *", ["flax.nnx"]),
        (
            "from flax.core import (freeze, unfreeze as u)",
            ["flax.core.freeze", "flax.core.unfreeze"],
        ),
        ("from . import flax\nfrom .flax import nnx\nnnx.X", []),
        ("import numpy as nn\nnn.Dense", []),
        ("from flax import nnx\nm = nnx.nn\nm.Z", ["flax.nnx", "flax.nnx.nn", "flax.nnx.nn.Z"]),
        ("from flax import nnx\nnnx.X = 1", ["flax.nnx"]),
        ("from flax import nnx\ngetattr(nnx, 'X')", ["flax.nnx", "flax.nnx.X"]),
        ("from flax import nnx\ngetattr(nnx, 'X', None)", ["flax.nnx"]),
        ("import importlib as i\nm = i.import_module('flax.nnx')\nm.X", ["flax.nnx", "flax.nnx.X"]),
    ],
)
def test_what_a_program_uses(program, names):
    assert names_in(program) == names


def test_names_mean_what_they_mean_in_their_scope():
    program = """
    from flax import linen as nn

    def shadowed(nn):
        return nn.A

    def default(x: nn.B = nn.C) -> nn.D:
        return [nn.E for nn in x], [nn.F for y in x], lambda nn: nn.G, lambda z: nn.H

    class Net(nn.I, kind=nn.J):
        nn = 1

        def __call__(self):
            from flax.core import meta
            return nn.K, meta.L, before.M

    from flax.linen import attention as before
    """
    found = {name.rpartition(".")[2] for name in names_in(program)}
    assert found == {"linen", *"BCDFHIJKLM", "meta", "attention"}


def test_what_a_program_can_do_without():
    program = """
    from typing import TYPE_CHECKING
    try:
        from flax import gone
    except ImportError:
        from flax import away
    if TYPE_CHECKING:
        from flax import typed
    try:
        from flax import needed
    except KeyError:
        pass
    """
    uses = uses_in(textwrap.dedent(program), "a.py")
    assert {use.name[5:]: use.optional for use in uses} == {
        "gone": True,
        "away": False,
        "typed": True,
        "needed": False,
    }
    assert uses[0] == Use("a.py", 4, "flax.gone", optional=True)


def test_what_linnet_has():
    has = "flax flax.__version__ flax.nnx.Param.value flax.linen.module.Module.apply flax.version"
    lacks = "flax.optim flax.functional flax.nnx.Nope flax.nnx.nope.Linear flax.linen.Module.nope"
    assert all(map(linnet_has, has.split()))
    assert not any(map(linnet_has, lacks.split()))


def test_the_report(tmp_path, capsys):
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "good.py").write_text("from flax import nnx\nnnx.Linear, nnx.Rngs\n")
    (inner / "bad.py").write_text("import flax.linen as nn\nnn.Gone\ntry: nn.Away\nexcept: pass\n")
    assert check([str(tmp_path / "good.py")]) == 0
    assert capsys.readouterr().out == (
        "1 file, 3 names of Flax: Linnet has all of them.\n  flax: nnx\n  flax.nnx: Linear, Rngs\n"
    )
    with pytest.raises(SystemExit) as left:
        main(["--check", str(tmp_path)])
    assert left.value.code == 1
    assert capsys.readouterr().out == (
        f"{inner / 'bad.py'}:2: Linnet has no flax.linen.Gone\n"
        f"{inner / 'bad.py'}:3: Linnet has no flax.linen.Away (the program can do without it)\n"
        "2 files, 6 names of Flax: Linnet lacks 2.\nIt has:\n"
        "  flax: linen, nnx\n  flax.nnx: Linear, Rngs\n"
    )


def test_what_cannot_be_read(tmp_path, capsys):
    (tmp_path / "broken.py").write_text("import flax\n1 +\n")
    assert check([str(tmp_path)]) == 2
    assert f"{tmp_path / 'broken.py'}:2: cannot be read: " in capsys.readouterr().err
    assert check([str(tmp_path / "nowhere.py")]) == 2
    assert "nowhere.py:1: cannot be read: " in capsys.readouterr().err
