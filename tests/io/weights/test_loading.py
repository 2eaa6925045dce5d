import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from models import bits

from linnet import io, nnx
from linnet.errors import (
    CheckpointMismatchError,
    FilterError,
    NameMapError,
    RenameError,
    StateMismatchError,
    TraceContextError,
)
from linnet.io import names
from linnet.io.weights.files import TensorFile
from tests.models import OneOfEverything


class Two(nnx.Module):
    """Two layers, and a parameter of its own."""

    def __init__(self, rngs, dtype=jnp.float32):
        self.first = nnx.Linear(2, 3, rngs=rngs, param_dtype=dtype)
        self.second = nnx.Linear(3, 2, use_bias=False, rngs=rngs, param_dtype=dtype)
        self.scale = nnx.Param(jnp.ones((), dtype))


TENSORS = {
    "first.kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
    "first.bias": np.float32([7, 8, 9]),
    "second.kernel": np.arange(6, dtype=np.float32).reshape(3, 2) + 10,
    "scale": np.array(5, np.float32),
}
TORCH = names.NameMap(
    [
        names.Rule("~a.weight", "first/kernel", "out in -> in out"),
        names.Rule("~a.bias", "first/bias"),
        names.Rule("~b.weight", "second/kernel", "out in -> in out"),
        names.Rule("~s", "scale"),
    ],
    prefixes=("", "net."),
)
TORCH_TENSORS = {
    "a.weight": TENSORS["first.kernel"].T.copy(),
    "a.bias": TENSORS["first.bias"],
    "b.weight": TENSORS["second.kernel"].T.copy(),
    "s": TENSORS["scale"],
}


def values_of(model):
    state = nnx.to_flat_state(nnx.state(model))
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in state}


def assert_holds(model, tensors=TENSORS):
    found = values_of(model)
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize("is_abstract", [False, True], ids=["live", "abstract"])
@pytest.mark.parametrize(
    ("tensors", "name_map"),
    [
        (TENSORS, None),
        (TORCH_TENSORS, TORCH),
        ({f"net.{name}": tensor for name, tensor in TORCH_TENSORS.items()}, TORCH),
    ],
    ids=["paths", "map", "prefix"],
)
def test_tensors_are_written_into_the_model_that_was_passed(tensors, name_map, is_abstract, saved):
    model = nnx.eval_shape(lambda: Two(nnx.Rngs(0))) if is_abstract else Two(nnx.Rngs(0))
    kernel = model.first.kernel
    restored = io.load_safetensors(saved(tensors), model, name_map)
    assert restored.model is model
    assert model.first.kernel is kernel
    assert restored.problems == []
    assert isinstance(kernel[...], jax.Array)
    assert_holds(model)


def test_a_state_and_a_nest_of_arrays_are_loaded_too(saved):
    path = saved(TENSORS)
    state = nnx.eval_shape(lambda: nnx.state(Two(nnx.Rngs(0))))
    loaded = io.load_safetensors(path, state).model
    np.testing.assert_array_equal(loaded["first"]["bias"][...], TENSORS["first.bias"])
    nest = {"first": {"kernel": np.zeros((2, 3), np.float32), "bias": jnp.zeros(3)},
            "second": {"kernel": jnp.zeros((3, 2))}, "scale": jnp.zeros(())}  # fmt: skip
    loaded = io.load_safetensors(path, nest).model
    assert type(loaded["first"]["kernel"]) is np.ndarray
    np.testing.assert_array_equal(loaded["first"]["kernel"], TENSORS["first.kernel"])
    assert isinstance(loaded["scale"], jax.Array)


def changed(tensors, **changes):
    """Tensors with some replaced, or left out where None; ``__`` stands for a dot."""
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return {n: t for n, t in {**tensors, **changes}.items() if t is not None}


BY_PATH = changed(
    TENSORS,
    first__bias=None,
    first__biass=np.zeros(3, np.float32),
    second__kernel=np.zeros((3, 5), np.float32),
    scale=np.array(5, np.int32),
    more=np.zeros(1),
)
BY_MAP = changed(
    TORCH_TENSORS,
    a__bias=None,
    a__biass=np.zeros(3, np.float32),
    b__weight=np.zeros((5, 3), np.float32),
    s=np.array(5, np.int32),
)
REPORTS = {
    "paths": (
        BY_PATH,
        None,
        [
            "first/bias: missing; did you mean first.biass?",
            "first.biass: not wanted; did you mean first/bias?",
            "more: not wanted",
            "second/kernel: expected float32[3, 2] in the file as second.kernel, found "
            "float32[3, 5]",
            "scale: expected float32[] in the file as scale, found int32[]",
        ],
        ["missing", "extra", "extra", "shape", "dtype"],
    ),
    "map": (
        BY_MAP,
        TORCH,
        [
            "first/bias: missing: there is no a.bias in the file; did you mean a.biass?",
            "a.biass: not wanted: the map has no such tensor",
            "second/kernel: expected float32[2, 3] in the file as b.weight, found float32[5, 3]",
            "scale: expected float32[] in the file as s, found int32[]",
        ],
        ["missing", "extra", "shape", "dtype"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REPORTS)
def test_everything_that_does_not_fit_is_listed_and_nothing_is_changed(case, saved, monkeypatch):
    tensors, name_map, lines, kinds = REPORTS[case]
    path = saved(tensors)
    model = Two(nnx.Rngs(0))
    before = bits(model)
    monkeypatch.setattr(TensorFile, "read", lambda *_: pytest.fail("read before all was compared"))
    with pytest.raises(CheckpointMismatchError) as error:
        io.load_safetensors(path, model, name_map)
    assert sorted(map(str, error.value.problems)) == sorted(lines)
    assert sorted(p.kind for p in error.value.problems) == sorted(kinds)
    text = str(error.value)
    assert text.startswith(f"{path} does not fit the model; nothing was changed:\n  - ")
    assert all(f"  - {line}\n" in text for line in lines)
    assert text.endswith(
        "Fix: rename={old: new} for tensors that have another name, or strict=False to load what "
        "fits and get this list back."
    )
    assert isinstance(error.value, StateMismatchError)
    assert bits(model) == before


@pytest.mark.parametrize("case", REPORTS)
def test_not_strict_loads_what_fits_and_returns_the_list(case, saved):
    tensors, name_map, lines, _ = REPORTS[case]
    model = Two(nnx.Rngs(0))
    before = values_of(model)
    restored = io.load_safetensors(saved(tensors), model, name_map, strict=False)
    assert sorted(map(str, restored.problems)) == sorted(lines)
    kept = {name: before[name] for name in ("first.bias", "second.kernel", "scale")}
    assert_holds(model, {**TENSORS, **kept})


def test_a_map_that_does_not_know_an_entry_says_so(saved):
    smaller = names.NameMap(TORCH.rules[:2])
    with pytest.raises(CheckpointMismatchError) as error:
        io.load_safetensors(saved(TORCH_TENSORS), Two(nnx.Rngs(0)), smaller)
    assert "second/kernel: missing: the map has no tensor for it" in str(error.value)
    assert "b.weight: not wanted: the map has no such tensor" in str(error.value)


def test_a_tensor_for_an_entry_that_the_model_lacks_names_the_path(saved):
    model = nnx.Dict(first=nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(CheckpointMismatchError) as error:
        io.load_safetensors(saved(TORCH_TENSORS), model, TORCH)
    assert "b.weight: not wanted: the model has no second/kernel" in str(error.value)


def test_tensors_are_renamed_before_the_map(saved):
    tensors = {f"old.{name}": t for name, t in TORCH_TENSORS.items()}
    path = saved({**tensors, "ema.a.bias": np.zeros(3), "ema.x": np.zeros(3)})
    model = Two(nnx.Rngs(0))
    rename = {"old.**": "**", "ema": None}
    io.load_safetensors(path, model, TORCH, rename=rename)
    assert_holds(model)
    io.load_safetensors(path, model, TORCH, rename={re.compile("^old/"): "net/", "ema": None})
    with pytest.raises(CheckpointMismatchError, match=r"em\.a: renames no tensor"):
        io.load_safetensors(path, model, TORCH, rename={**rename, "em.a": None})


@pytest.mark.parametrize(
    "rename", [{"module.": ""}, {"module": ""}, {"module.**": "**"}], ids=["dot", "step", "stars"]
)
def test_a_prefix_is_renamed_to_nothing(rename, saved):
    model = Two(nnx.Rngs(0))
    tensors = {f"module.{name}": value for name, value in TENSORS.items()}
    io.load_safetensors(saved(tensors), model, rename=rename)
    assert_holds(model)


def test_what_is_no_map_of_renamed_tensors_is_refused(saved):
    with pytest.raises(RenameError, match=r"but got \['module'\]"):
        io.load_safetensors(saved(TENSORS), Two(nnx.Rngs(0)), rename=["module"])


def test_cast_converts_floating_point_numbers_only(saved):
    half = {name: np.asarray(t, np.float16) for name, t in TENSORS.items()}
    model = Two(nnx.Rngs(0), jnp.bfloat16)
    with pytest.raises(CheckpointMismatchError, match=r"cast=True to convert dtypes") as error:
        io.load_safetensors(saved(half), model)
    assert "first/bias: expected bfloat16[3] in the file as first.bias" in str(error.value)
    io.load_safetensors(saved(half), model, cast=True)
    assert model.first.kernel.dtype == jnp.bfloat16
    assert_holds(model, {n: np.asarray(t, jnp.bfloat16) for n, t in TENSORS.items()})
    whole = {**half, "first.bias": np.int32([1, 2, 3])}
    with pytest.raises(CheckpointMismatchError, match=r"found int32\[3\]") as error:
        io.load_safetensors(saved(whole), model, cast=True)
    assert "cast=True" not in str(error.value)


@pytest.mark.parametrize("stacked", [False, True], ids=["listed", "stacked"])
def test_numbers_that_a_cast_would_lose_are_a_problem(stacked, saved):
    path = saved({"l.0": np.float32([1, np.inf]), "l.1": np.float32([7e4, 2])})
    model = {"l": np.zeros((2, 2), np.float16)}
    if not stacked:
        model = {"l": {n: np.zeros(2, np.float16) for n in "01"}}
    name_map = names.NameMap([names.Rule("l.*", "l/*")])
    with pytest.raises(CheckpointMismatchError) as error:
        io.load_safetensors(path, model, name_map, cast=True)
    assert list(map(str, error.value.problems)) == [
        f"{'l' if stacked else 'l/1'}: l.1 has numbers that are too large for float16"
    ]
    restored = io.load_safetensors(path, model, name_map, cast=True, strict=False)
    assert len(restored.problems) == 1
    expected = [[0, 0], [0, 0]] if stacked else {"0": [1, np.inf], "1": [0, 0]}
    assert jax.tree.map(np.ndarray.tolist, restored.model) == {"l": expected}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_narrow_floats_arrive_bit_for_bit(dtype, tmp_path):
    wanted = jnp.array([0.5, -1.5, 448.0, 0.0078125], dtype)
    io.save_safetensors(tmp_path / "x.safetensors", {"x": wanted})
    loaded = io.load_safetensors(tmp_path / "x.safetensors", {"x": jnp.zeros(4, dtype)}).model
    assert loaded["x"].dtype == dtype
    assert np.asarray(loaded["x"]).tobytes() == np.asarray(wanted).tobytes()


def test_a_traced_model_is_not_loaded_into(saved):
    path = saved(TENSORS)
    with pytest.raises(TraceContextError) as error:
        nnx.jit(lambda model: io.load_safetensors(path, model).problems)(Two(nnx.Rngs(0)))
    assert "first/bias is traced: nothing can be loaded inside a function" in str(error.value)


def test_random_state_is_left_alone_and_may_be_asked_for(tmp_path):
    model, other = OneOfEverything(0), OneOfEverything(1)
    io.save_safetensors(tmp_path / "x.safetensors", model)
    before = bits(other.dropout)
    io.load_safetensors(tmp_path / "x.safetensors", other)
    assert bits(other.dropout) == before
    assert bits(other.layers) == bits(model.layers)
    assert bits(other.norm) == bits(model.norm)
    np.testing.assert_array_equal(other.table, model.table)
    io.save_safetensors(tmp_path / "all.safetensors", model, only=...)
    io.load_safetensors(tmp_path / "all.safetensors", other, only=...)
    assert bits(other) == bits(model)


def test_only_narrows_what_is_loaded(tmp_path):
    model, other = OneOfEverything(0), OneOfEverything(1)
    io.save_safetensors(tmp_path / "x.safetensors", model, only=nnx.Param)
    stats = bits(nnx.state(other, nnx.BatchStat))
    io.load_safetensors(tmp_path / "x.safetensors", other, only=nnx.Param)
    assert bits(nnx.state(other, nnx.BatchStat)) == stats
    assert bits(nnx.state(other, nnx.Param)) == bits(nnx.state(model, nnx.Param))


@pytest.mark.parametrize("name_map", [None, names.pytorch], ids=["paths", "map"])
@pytest.mark.parametrize("only", [nnx.Param, nnx.BatchStat, nnx.PathContains("norm")])
def test_tensors_of_entries_that_were_not_chosen_are_passed_over(only, name_map, tmp_path):
    model, other, before = (
        nnx.Dict(fc=nnx.Linear(2, 3, rngs=nnx.Rngs(n)), norm=nnx.BatchNorm(3, rngs=nnx.Rngs(n)))
        for n in (0, 1, 1)
    )
    model.norm.scale[...] = model.norm.mean[...] = jnp.full(3, 5, "float32")
    io.save_safetensors(tmp_path / "x.safetensors", model, name_map)
    io.load_safetensors(tmp_path / "x.safetensors", other, name_map, only=only)
    assert bits(nnx.state(other, only)) == bits(nnx.state(model, only))
    rest = nnx.Not(only)
    assert bits(nnx.state(other, rest)) == bits(nnx.state(before, rest))


def test_only_is_for_arrays_of_a_nest_too(saved):
    path = saved({"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)})
    nest = {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)}
    loaded = io.load_safetensors(path, nest, only=nnx.PathContains("a")).model
    assert (loaded["a"].tolist(), loaded["b"].tolist()) == ([1, 1], [0, 0])


def test_a_filter_that_chooses_nothing_is_refused(saved, tmp_path):
    message = (
        r"only=PathContains\('frist'\) chooses none of the 4 entries: first/bias, first/kernel, "
        r"scale, second/kernel\nFix: a filter for some of them, or only=\.\.\. for all\."
    )
    with pytest.raises(FilterError, match=message):
        io.load_safetensors(saved(TENSORS), Two(nnx.Rngs(0)), only=nnx.PathContains("frist"))
    with pytest.raises(FilterError, match="chooses none"):
        io.save_safetensors(tmp_path / "y", Two(nnx.Rngs(0)), only=nnx.PathContains("frist"))


@pytest.mark.parametrize("wrong", ["gpt2", {"a": "b"}, names.gpt2], ids=["text", "dict", "maker"])
def test_what_is_no_map_of_names_is_refused(wrong, saved):
    with pytest.raises(NameMapError) as error:
        io.load_safetensors(saved(TENSORS), Two(nnx.Rngs(0)), wrong)
    assert str(error.value) == (
        "names is a map from linnet.io.names, or a function that makes one for a model, but got "
        f"{wrong!r}.\nFix: names.gpt2(), names.pytorch, or names.NameMap([...])."
    )


def test_an_abstract_key_that_no_file_fills_is_a_problem(tmp_path):
    io.save_safetensors(tmp_path / "x.safetensors", nnx.Dict(d=nnx.Param(jnp.ones(2))))

    def make():
        return nnx.Dict(d=nnx.Param(jnp.zeros(2)), drop=nnx.Dropout(0.5, rngs=nnx.Rngs(0)))

    with pytest.raises(CheckpointMismatchError) as error:
        io.load_safetensors(tmp_path / "x.safetensors", nnx.eval_shape(make))
    assert "drop/rngs/key: has no value yet, and weights files do not hold one" in str(error.value)
    hint = "a model with values (not nnx.eval_shape) for random state and caches"
    assert hint in str(error.value).splitlines()[-1]
    assert io.load_safetensors(tmp_path / "x.safetensors", make()).problems == []


class Layers(nnx.Module):
    def __init__(self, stacked, count=3):
        rngs = nnx.Rngs(0)

        def layer(rngs):
            return nnx.Linear(2, 2, rngs=rngs)

        if stacked:
            self.layers = nnx.Stack(layer, count, rngs=rngs)
        else:
            self.layers = nnx.List([layer(rngs) for _ in range(count)])


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "listed"])
def test_without_a_map_stacked_and_listed_layers_load_into_each_other(stacked, tmp_path):
    path = tmp_path / "x.safetensors"
    source, target = Layers(stacked), Layers(not stacked)
    for layer in source.layers:
        layer.kernel[...] += 1
        layer.bias[...] = layer.kernel[0]
    io.save_safetensors(path, source)
    io.load_safetensors(path, target)
    for mine, theirs in zip(target.layers, source.layers, strict=True):
        np.testing.assert_array_equal(mine.kernel[...], theirs.kernel[...])
        np.testing.assert_array_equal(mine.bias[...], theirs.bias[...])


@pytest.mark.parametrize("count", [2, 4])
def test_without_a_map_a_stack_wants_as_many_layers(count, tmp_path):
    io.save_safetensors(tmp_path / "x.safetensors", Layers(stacked=False))
    model = Layers(stacked=True, count=count)
    before = bits(model)
    with pytest.raises(CheckpointMismatchError) as error:
        io.load_safetensors(tmp_path / "x.safetensors", model)
    assert list(map(str, error.value.problems)) == [
        f"layers/stacked/bias: expected float32[{count}, 2], found float32[3, 2] in the file as "
        "layers.0.bias, layers.1.bias, layers.2.bias",
        f"layers/stacked/kernel: expected float32[{count}, 2, 2], found float32[3, 2, 2] in the "
        "file as layers.0.kernel, layers.1.kernel, layers.2.kernel",
    ]
    assert bits(model) == before
    assert len(io.load_safetensors(tmp_path / "x.safetensors", model, strict=False).problems) == 2
    assert bits(model) == before


def test_a_stack_with_a_layer_missing_stays_as_it_was(tmp_path, saved):
    layer_map = names.NameMap(
        [names.Rule("l.*.weight", "layers/*/kernel"), names.Rule("l.*.b", "layers/*/bias")]
    )
    tensors = {f"l.{n}.weight": np.full((2, 2), n, np.float32) for n in range(4)}
    tensors |= {f"l.{n}.b": np.full(2, n, np.float32) for n in range(2)}
    model = Layers(True)
    before = np.asarray(model.layers.stacked.bias[...])
    restored = io.load_safetensors(saved(tensors), model, layer_map, strict=False)
    assert list(map(str, restored.problems)) == [
        "layers/stacked/bias: missing: there is no l.2.b in the file",
        "l.3.weight: not wanted: the model has no layers/3/kernel; did you mean "
        "layers/stacked/kernel?",
    ]
    assert model.layers.stacked.kernel[:, 0, 0].tolist() == [0, 1, 2]
    np.testing.assert_array_equal(model.layers.stacked.bias[...], before)


class Shared(nnx.Module):
    def __init__(self):
        self.a = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
        self.b = self.c = self.a


def test_shared_variables_are_loaded_once(saved):
    model = Shared()
    io.load_safetensors(saved({"b.kernel": np.eye(2, dtype=np.float32)}), model)
    assert model.a is model.b
    assert model.a.kernel[...].tolist() == [[1, 0], [0, 1]]
    by_map = names.NameMap([names.Rule("w", "b/kernel")])
    io.load_safetensors(saved({"w": np.ones((2, 2), np.float32)}), model, by_map)
    assert model.a.kernel[...].tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("first", "second"), [("a", "c"), ("b", "c")], ids=["first-and-other", "others"]
)
def test_copies_of_a_shared_variable_are_the_same(first, second, saved):
    copies = {f"{name}.kernel": np.eye(2, dtype=np.float32) for name in (first, second)}
    assert io.load_safetensors(saved(copies), Shared()).problems == []
    path = saved({**copies, f"{second}.kernel": np.ones((2, 2), np.float32)})
    with pytest.raises(CheckpointMismatchError) as error:
        io.load_safetensors(path, Shared())
    assert list(map(str, error.value.problems)) == [
        f"{second}.kernel: differs from {first}.kernel, and the model has one entry for both"
    ]


def test_a_tensor_of_an_entry_that_is_made_of_another_is_extra(saved):
    two_ways = names.NameMap([names.Rule("w", "x"), names.Rule("v", "x")])
    with pytest.raises(CheckpointMismatchError) as error:
        io.load_safetensors(saved({"v": np.ones(2)}), {"x": np.zeros(2)}, two_ways)
    assert list(map(str, error.value.problems)) == [
        "x: missing: there is no w in the file",
        "v: not wanted: x is made of other tensors",
    ]


def test_summands_are_converted_before_they_are_added(saved):
    added = names.NameMap([names.Rule(["u", "v"], "x", add=True)])
    path = saved({"u": np.array([256], jnp.bfloat16), "v": np.array([1], jnp.bfloat16)})
    loaded = io.load_safetensors(path, {"x": np.zeros(1, np.float32)}, added, cast=True).model
    assert loaded["x"].tolist() == [257]


def test_values_arrive_with_the_sharding_of_an_abstract_entry(saved):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    model = {"x": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding)}
    loaded = io.load_safetensors(saved({"x": np.arange(4, dtype=np.float32)}), model).model
    assert loaded["x"].sharding == sharding
    assert loaded["x"].tolist() == [0, 1, 2, 3]
    stack = {"l": jax.ShapeDtypeStruct((2, 3), jnp.float32, sharding=sharding)}
    path = saved({f"l.{n}": np.full(3, n, np.float32) for n in range(2)})
    loaded = io.load_safetensors(path, stack, names.NameMap([names.Rule("l.*", "l/*")])).model
    assert loaded["l"].sharding == sharding
    assert loaded["l"].tolist() == [[0, 0, 0], [1, 1, 1]]
