"""The table of a model: its facts beside those of Flax 0.12.8, and how it is drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import SummaryError
from linnet.nnx.summary import CallInfo

X = jnp.ones((4, 8))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.bn = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.drop(self.bn(self.linear(x))))


class Tower(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.b1, self.b2 = Block(rngs), Block(rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x, *, flag=False):
        return self.head(self.b2(self.b1(x))), {"a": x}


def table(model, *args, width=160, **options):
    """The rows of a table as lists of cells, without lines and header."""
    text = nnx.tabulate(model, *args, console_kwargs={"width": width}, **options)
    rows = [line for line in text.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row.strip("│").split("│")] for row in rows[1:]]


def columns(*names, model=None, **options):
    return table(model or Tower(), X, columns=names, **options)


# ---- facts --------------------------------------------------------------------------------------


def test_parts_classes_and_shapes_in_the_order_of_calls():
    assert columns("path", "type", "inputs", "outputs", flag=True) == [
        ["", "Tower", "f32[4,8]", "f32[4,3]"],
        ["", "", "flag: True", "a: f32[4,8]"],
        ["b1", "Block", "f32[4,8]", "f32[4,8]"],
        ["linear", "Linear", "f32[4,8]", "f32[4,8]"],
        ["bn", "BatchNorm", "f32[4,8]", "f32[4,8]"],
        ["drop", "Dropout", "f32[4,8]", "f32[4,8]"],
        ["b2", "Block", "f32[4,8]", "f32[4,8]"],
        ["linear", "Linear", "f32[4,8]", "f32[4,8]"],
        ["bn", "BatchNorm", "f32[4,8]", "f32[4,8]"],
        ["drop", "Dropout", "f32[4,8]", "f32[4,8]"],
        ["head", "Linear", "f32[4,8]", "f32[4,3]"],
        ["total", "", "", ""],
    ]


def test_none_and_empty_containers_are_shown():
    class Part(nnx.Module):
        def __call__(self, x, mask, options, *, names=None):
            return None

    class Model(nnx.Module):
        def __init__(self):
            self.part = Part()

        def __call__(self, x, config):
            self.part(x, None, {}, names=[])
            return x, {"aux": ()}, None

    assert table(Model(), X, {}, columns=("path", "inputs", "outputs")) == [
        ["", "f32[4,8]", "f32[4,8]"],
        ["", "{}", "aux: ()"],
        ["", "", "None"],
        ["part", "f32[4,8]", "None"],
        ["", "None", ""],
        ["", "{}", ""],
        ["", "names: []", ""],
        ["total", "", ""],
    ]
    assert nnx.tabulate(Model(), X, {}).splitlines()[0].strip() == "Model Summary"


def test_variables_by_kind_with_bytes():
    assert columns("path", "kinds", depth=1) == [
        ["", "203 (812 B)", "32 (128 B)", "4 (24 B)"],
        ["b1", "88 (352 B)", "16 (64 B)", "2 (12 B)"],
        ["b2", "88 (352 B)", "16 (64 B)", "2 (12 B)"],
        ["head", "27 (108 B)", "", ""],
        ["total", "203 (812 B)", "32 (128 B)", "4 (24 B)"],
    ]
    assert columns("variables", depth=1)[3:5] == [["bias: f32[3]"], ["kernel: f32[8,3]"]]


def test_operations_forward_and_backward():
    rows = columns("path", "flops", "vjp_flops", depth=1)[:-1]
    flops = [row[:2] for row in rows]
    assert flops == [["", "4,540"], ["b1", "2,168"], ["b2", "2,168"], ["head", "204"]]
    # JAX 0.12 needs a few less to go back through a BatchNorm.
    assert [row[2] for row in rows] in (
        ["8,181", "3,776", "3,776", "597"],
        ["8,165", "3,768", "3,768", "597"],
    )
    linear = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))
    options = {"compute_flops": True, "compute_vjp_flops": True}
    assert table(linear, X, **options)[0][4:6] == ["512", "1,536"]


def deep(calls, depth):
    """A model of parts inside of each other, that note their calls; the innermost is a layer."""

    class Deep(nnx.Module):
        def __init__(self, inner):
            self.inner = inner

        def __call__(self, x):
            calls.append(x.shape)
            return self.inner(x)

    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    for _ in range(depth):
        model = Deep(model)
    return model


def test_operations_are_counted_without_another_call():
    calls = []
    assert columns("type", "flops", model=deep(calls, 10))[-2:] == [
        ["Linear", "544"],
        ["total", ""],
    ]
    assert len(calls) == 10
    calls.clear()
    rows = columns("flops", "vjp_flops", model=deep(calls, 10))
    assert rows[:-1] == [["544", "1,592"]] * 11
    assert len(calls) == 10


def test_an_error_inside_is_raised_as_it_is():
    calls = []
    with pytest.raises(ValueError, match=r"inner.*expected inputs whose last axis has size 8"):
        nnx.tabulate(deep(calls, 8), jnp.ones((4, 7)), compute_flops=True)
    assert len(calls) == 8


def test_what_writes_elsewhere_has_no_operation_counts():
    class Elsewhere(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))
            self.spy = Spy()

        def __call__(self, x):
            note = nnx.Variable(jnp.zeros(8))
            return self.spy(self.linear(x), lambda y: note.set_value(y[0])), "text", 3

    class Spy(nnx.Module):
        def __call__(self, x, write):
            write(x)
            return x + 1

    assert columns("path", "flops", "outputs", model=Elsewhere()) == [
        ["", "544", "f32[4,8]"],
        ["", "", "text"],
        ["", "", "3"],
        ["linear", "512", "f32[4,8]"],
        ["spy", "", "f32[4,8]"],
        ["total", "", ""],
    ]


def test_what_trains():
    model = Tower()
    nnx.freeze(model, "b1", "b2.linear.bias")
    assert columns("path", "trains", model=model) == [
        ["", "part"],
        ["b1", "frozen"],
        ["linear", "frozen"],
        ["bn", "frozen"],
        ["drop", ""],
        ["b2", "part"],
        ["linear", "part"],
        ["bn", "yes"],
        ["drop", ""],
        ["head", "yes"],
        ["total", "52.7 %"],
    ]


def test_what_is_frozen_costs_no_operations_backward():
    layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    cost = {}
    for frozen in ([], ["bias"], ["kernel", "bias"]):
        if frozen:
            nnx.freeze(layer, *frozen)
        cost[len(frozen)] = table(layer, X, columns=["vjp_flops"])[0][0]
    assert cost == {0: "1,592", 1: "1,568", 2: "1,056"}


def test_depth_and_rows_are_chosen():
    assert [row[0] for row in columns("path", depth=0)] == ["", "total"]
    seen = []

    def linears(row):
        seen.append(row)
        return row.type is nnx.Linear

    paths = [row[0] for row in columns("path", row_filter=linears)]
    assert paths == ["b1.linear", "b2.linear", "head", "total"]
    assert all(type(row) is CallInfo for row in seen)
    assert [row.call_order for row in seen] == list(range(12))  # random streams too
    assert (seen[1].path, seen[1].inputs_repr) == (("b1",), "f32[4,8]")
    assert seen[0].outputs[0].shape == (4, 3) and seen[0].flops is None
    model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.relu, Block(nnx.Rngs(0)))
    rows = [row[0] for row in table(model, X, depth=1, columns=["path"])]
    assert rows == ["", "layers[0]", "layers[2]", "total"]


# ---- what may be summarised ---------------------------------------------------------------------


def test_the_model_is_not_changed():
    model = Tower()
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey))))
    graphdef = nnx.graphdef(model)
    nnx.tabulate(model, X, compute_flops=True, compute_vjp_flops=True)
    after = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey)))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert nnx.graphdef(model) == graphdef and type(model.b1) is Block


def test_abstract_models_and_inputs():
    abstract = nnx.eval_shape(Tower)
    options = {"compute_flops": True, "compute_vjp_flops": True}
    given = jax.ShapeDtypeStruct(X.shape, X.dtype)
    assert table(abstract, given, **options) == table(Tower(), X, **options)


def test_methods_and_inputs_of_every_kind():
    class Coder(nnx.Module):
        def __init__(self):
            self.down = nnx.Linear(8, 2, rngs=nnx.Rngs(0))

        def encode(self, x, times, rngs, *, name):
            return {"code": self.down(x) * times, "noise": rngs.normal((2,))}

        def again(self, x):
            return self.encode(x, 2, nnx.Rngs(0), name="inner")["code"]

    class Outer(nnx.Module):
        def __init__(self):
            self.coder = Coder()

        def __call__(self, x):
            return self.coder.again(x)

    rows = table(Coder(), X, 3, nnx.Rngs(0), name="a name that is long", method="encode")
    assert [row[:4] for row in rows[:4]] == [
        ["encode()", "Coder", "f32[4,8]", "code: f32[4,2]"],
        ["", "", "3", "noise: f32[2]"],
        ["", "", "Rngs", ""],
        ["", "", "name: a name that is …", ""],
    ]
    rows = table(Outer(), X, columns=["path", "type"])
    assert rows == [["", "Outer"], ["coder.again()", "Coder"], ["down", "Linear"], ["total", ""]]


@pytest.mark.parametrize("lift", [nnx.jit, nnx.remat], ids=["jit", "remat"])
def test_parts_inside_transforms(lift):
    class Lifted(nnx.Module):
        def __init__(self):
            self.block = Block(nnx.Rngs(0))

        @lift
        def __call__(self, x):
            return self.block(x)

    model = Lifted()
    for _ in range(2):  # a second time, when functions are compiled
        paths = [row[0] for row in table(model, X, columns=["path"], compute_flops=True)]
        assert paths == ["", "block", "linear", "bn", "drop", "total"]


def test_layers_inside_scan():
    class Deep(nnx.Module):
        def __init__(self):
            make = nnx.vmap(lambda key: nnx.Linear(8, 8, rngs=nnx.Rngs(key)))
            self.layers = make(jax.random.split(jax.random.key(0), 5))

        def __call__(self, x):
            run = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return run(x, self.layers)

    assert table(Deep(), X, columns=["path", "inputs", "Param"])[1] == [
        "layers",
        "f32[4,8]",
        "360 (1.4 KB)",
    ]


def test_shared_parts_are_counted_once():
    shared = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    model = nnx.Sequential(shared, shared)
    assert table(model, X, columns=["path", "flops", "Param"]) == [
        ["", "1,088", "72 (288 B)"],
        ["layers[0]", "544", "72 (288 B)"],
        ["total", "", "72 (288 B)"],
    ]


def test_pytrees_and_refs():
    class Scale(nnx.Pytree):
        def __init__(self):
            self.factor = nnx.Param(jnp.ones(8))
            self.calls = nnx.Variable(jnp.array(0))

        def __call__(self, x):
            self.calls[...] += 1
            return x * self.factor[None]

    for options in ({}, {"ref": True}, {"hijax": True}):
        with nnx.var_defaults(**options) if options else nnx.var_defaults(ref=False):
            model = Scale()
        rows = table(model, X, columns=["type", "outputs", "flops", "Param"])
        assert rows[0] == ["Scale", "f32[4,8]", "32", "8 (32 B)"]
        assert int(model.calls[...]) == 0


# ---- drawing ------------------------------------------------------------------------------------


def test_it_is_drawn_in_full_where_there_is_room():
    text = nnx.tabulate(Block(nnx.Rngs(0)), X, console_kwargs={"width": 110})
    lines = text.splitlines()
    assert [[cell.strip() for cell in lines[n].strip("│").split("│")] for n in (2, 4, 5, 6)] == [
        "path type inputs outputs Param BatchStat RngState variables trains".split(),
        ["", "Block", "f32[4,8]", "f32[4,8]", "88 (352 B)", "16 (64 B)", "2 (12 B)", "", "yes"],
        ["linear", "Linear", *["f32[4,8]"] * 2, "72 (288 B)", "", "", "bias: f32[8]", "yes"],
        ["", "", "", "", "", "", "", "kernel: f32[8,8]", ""],
    ]
    assert lines[-1].strip() == "Total Parameters: 106 (428 B)"
    assert text.splitlines()[0].strip() == "Block Summary"


NARROW = {
    110: (
        ["path", "type", "inputs", "outputs", "Param", "BatchStat", "RngState", "trains"],
        "names of Variables are left out",
    ),
    90: (
        ["path", "type", "inputs", "outputs", "Param", "other", "trains"],
        "other kinds are joined",
    ),
    75: (["path", "type", "inputs", "outputs", "Param", "other", "trains"], "bytes are left out"),
    65: (["path", "type", "outputs", "Param", "other", "trains"], "inputs and bytes are left out"),
    55: (["path", "type", "outputs", "Param", "trains"], "inputs, bytes and other kinds"),
}


@pytest.mark.parametrize("width", NARROW)
def test_where_there_is_less_room_it_says_what_is_left_out(width):
    names, remark = NARROW[width]
    text = nnx.tabulate(Tower(), X, console_kwargs={"width": width})
    lines = text.splitlines()
    header = next(line for line in lines if line.startswith("│"))
    assert [cell.strip() for cell in header.strip("│").split("│")] == names
    assert max(map(len, lines)) <= width
    assert remark in text and f"to fit {width} columns" in " ".join(text.split())
    assert "BatchNorm" in text  # nothing is folded


def test_parts_that_are_not_called_are_named():
    model = Tower()
    model.spare = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    assert nnx.tabulate(model, X).splitlines()[-1].strip() == "not called: spare"


def test_large_counts_are_short_and_colour_is_for_terminals():
    model = nnx.eval_shape(lambda: nnx.Linear(4096, 4096, rngs=nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((1024, 4096), jnp.bfloat16)
    text = nnx.tabulate(model, x, compute_flops=True, console_kwargs={"width": 120})
    assert "34.4 G" in text and "16,781,312 (67.1 MB)" in text and "bf16[1024,4096]" in text
    assert "\x1b[" not in text
    coloured = nnx.tabulate(
        Tower(), X, console_kwargs={"force_terminal": True, "color_system": "standard"}
    )
    assert "\x1b[" in coloured


def test_options_reach_rich():
    text = nnx.tabulate(
        Tower(), X, table_kwargs={"title": "My model"}, column_kwargs={"header_style": "bold"}
    )
    assert text.splitlines()[0].strip() == "My model"


def test_bad_input():
    with pytest.raises(SummaryError) as caught:
        nnx.tabulate(Tower(), X, method="forward")
    assert str(caught.value) == (
        "nnx.tabulate: Tower has no method 'forward'; it has __call__.\n"
        "Fix: nnx.tabulate(model, x, method=...)."
    )
    with pytest.raises(
        SummaryError, match="takes a model and what to call it with, but got ArrayI"
    ):
        nnx.tabulate(X)
    with pytest.raises(SummaryError, match=r"has no column 'colour'.\nFix: choose from path, type"):
        nnx.tabulate(Tower(), X, columns=["path", "colour"])
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        nnx.tabulate(Tower())


def test_a_method_that_is_defined_again_is_the_one_that_runs(monkeypatch):
    model = Tower()
    before = nnx.tabulate(model, X)
    monkeypatch.setattr(Tower, "__call__", lambda self, x: self.head(x[:1]))
    after = nnx.tabulate(model, X)
    assert "not called: b1, b2" in after and "not called" not in before
