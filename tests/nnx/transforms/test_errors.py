"""What JAX says of a failed call, in terms of the arguments that the user passed."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import AxisError, GradientTypeError, UntraceableError

X = jnp.ones((1, 2))


@pytest.fixture
def model():
    return nnx.Linear(2, 2, rngs=nnx.Rngs(0))


def notes(call, error=jax.errors.TracerBoolConversionError):
    with pytest.raises(error) as caught:
        call()
    return "\n".join(caught.value.__notes__)


BRANCH = "compute with jnp.where, or branch with nnx.cond"


@pytest.mark.parametrize("donated", [{}, {"donate_argnames": "model"}], ids=["kept", "donated"])
def test_a_flag_that_python_decides_by(model, donated):
    @nnx.jit(**donated)
    def step(model, x, train):
        return model(x) if train else x

    for _ in range(2):
        text = notes(lambda: step(model, X, True))
        assert text.endswith(
            "nnx.jit: train is traced, so Python cannot decide by its value.\n"
            f"Fix: {BRANCH}; or make it static, nnx.jit(..., static_argnames='train'), if it is a "
            "flag."
        )


@pytest.mark.parametrize("donated", [{}, {"donate_argnums": 0}], ids=["kept", "donated"])
def test_a_parameter_that_python_decides_by(model, donated):
    @nnx.jit(**donated)
    def step(model, x):
        return model(x) if model.kernel[0, 0] > 0 else x

    text = notes(lambda: step(model, X))
    assert text.endswith(
        f"nnx.jit: model.kernel is traced, so Python cannot decide by its value.\nFix: {BRANCH}."
    )


def test_a_number_that_python_counts_to(model):
    @nnx.jit
    def repeat(model, options):
        for _ in range(options["times"]):
            model(X)

    text = notes(lambda: repeat(model, {"times": 3}), error=jax.errors.TracerIntegerConversionError)
    assert "nnx.jit: options.times is traced" in text


def test_a_whole_model_that_python_decides_by():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(*(nnx.Linear(2, 2, rngs=rngs) for _ in range(8)))

    @nnx.jit
    def step(model, x):
        return x if model(x).sum() > 0 else -x

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        step(model, X)
    names = ", ".join(f"model.layers[{n}].{part}" for n in range(5) for part in ("bias", "kernel"))
    assert f"depends on the values of the arguments {names} and 7 more." in str(caught.value)
    assert "values[" not in str(caught.value)
    note = caught.value.__notes__[-1]
    assert note.startswith(f"nnx.jit: {names} and 7 more are traced, so Python cannot decide by th")


def test_a_shape_from_an_argument(model):
    with pytest.raises(TypeError, match=r"depends on the value of the argument n\.") as caught:
        nnx.jit(lambda model, n: jnp.zeros(n))(model, 3)
    assert "nnx.jit(..., static_argnames='n')" in caught.value.__notes__[-1]


AXES = (nnx.Carry, None, 0)
XS = jnp.arange(3.0)
MESH = jax.sharding.Mesh(jax.devices()[:1], ("x",))
ALL = jax.sharding.PartitionSpec()


def positive(x):
    return 1.0 if x.sum() > 0 else 2.0


BRANCHES = {
    "scan": (
        lambda m: nnx.scan(lambda c, m, y: (c, positive(m.kernel[...] * y)), in_axes=AXES)(
            0.0, m, XS
        ),
        "scan",
        "y",
    ),
    "scan's carry": (
        lambda m: nnx.scan(lambda c, y: (positive(c), y))(m.kernel[0], XS),
        "scan",
        "c",
    ),
    "while_loop": (
        lambda m: nnx.while_loop(lambda s: bool(s["n"] < 3), lambda s: s, {"n": 0, "m": m}),
        "while_cond",
        "init_val.n",
    ),
    "fori_loop": (
        lambda m: nnx.fori_loop(0, 3, lambda i, s: (s[0], positive(s[1])), (m, 0.0)),
        "fori_loop",
        "init_val[1]",
    ),
    "cond": (
        lambda m: nnx.cond(True, lambda m: 1.0, lambda net: positive(net.bias), m),
        "cond",
        "net.bias",
    ),
    "switch": (
        lambda m: nnx.switch(0, [lambda m: 1.0, lambda net: positive(net.bias)], m),
        "switch",
        "net.bias",
    ),
    "remat": (
        lambda m: nnx.remat(lambda net, y: positive(net.kernel * y))(m, 1.0),
        "checkpoint / remat",
        "net.kernel, y",
    ),
    "eval_shape": (lambda m: nnx.eval_shape(lambda net: positive(net.bias), m), "jit", "net.bias"),
    "make_jaxpr": (
        nnx.make_jaxpr(lambda net: positive(net.bias)),
        "jit",
        "net.bias",
    ),
    "shard_map": (
        nnx.shard_map(lambda net: positive(net.bias), mesh=MESH, in_specs=(ALL,), out_specs=ALL),
        "shard_map",
        "net.bias",
    ),
}


@pytest.mark.parametrize("inside_jit", [False, True])
@pytest.mark.parametrize("name", BRANCHES)
def test_other_transforms_name_function_and_paths(model, name, inside_jit):
    run, kind, paths = BRANCHES[name]
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        (nnx.jit(lambda net: [run(net)]) if inside_jit else run)(model)
    text = str(caught.value)
    assert re.search(rf"tracing the function <lambda> at {__file__}:\d+ for {kind}\.", text)
    argument = "values of the arguments" if ", " in paths else "value of the argument"
    assert f"depends on the {argument} {paths}." in text
    api = name.removesuffix("'s carry")
    assert f"nnx.{api}: {paths} " in "\n".join(caught.value.__notes__)


def test_what_an_inner_transform_met_of_an_outer_one(model):
    @nnx.jit
    def outer(net, x):
        return nnx.grad(lambda bias: positive(net.kernel[...]) * bias.sum())(net.bias)

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        outer(model, XS)
    assert "depends on the value of the argument net.kernel." in str(caught.value)


@pytest.mark.parametrize(
    ("out", "text"),
    [
        ("abc", "nnx.jit: the output is 'abc' (str), which is no array"),
        ({"a": [1.0, len]}, "nnx.jit: the output.a[1] is <built-in function len> (builtin_functi"),
    ],
)
def test_an_output_that_is_no_array(model, out, text):
    with pytest.raises(UntraceableError) as caught:
        nnx.jit(lambda model: {**out, "m": model} if isinstance(out, dict) else out)(model)
    assert str(caught.value).startswith(text)
    assert "\nFix: return arrays, modules and Variables" in str(caught.value)


def test_jax_names_the_function_of_the_user(model):
    def branch(model, x):
        return model(x) if x.sum() > 0 else x

    class Step:
        def __call__(self, model, x):
            return branch(model, x)

        def method(self, model, x):
            return branch(model, x)

    line = branch.__code__.co_firstlineno
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        nnx.jit(branch)(model, X)
    assert f"the function branch at {__file__}:{line} for jit" in str(caught.value)
    for other in (Step().method, Step(), functools.partial(branch, model)):
        with pytest.raises(jax.errors.TracerBoolConversionError, match=r"tracing the function "):
            nnx.jit(other)(*([X] if isinstance(other, functools.partial) else [model, X]))


def test_a_leaked_tracer_names_the_function_of_the_user(model):
    kept = []

    @nnx.jit
    def leak(model, x):
        kept.append(model(x))
        return x

    leak(model, X)
    with pytest.raises(jax.errors.UnexpectedTracerError) as caught:
        kept[0] + 1
    text = str(caught.value)
    assert re.search(rf"leak at {__file__}:\d+ traced", text)
    assert re.search(rf"created on line {__file__}:\d+:\d+ \(.*leak\)", text)


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("train", "mode is 'train' (str), which is no array"),
        ({"a": [1.0, "train"]}, "mode.a[1] is 'train' (str), which is no array"),
        (len, "mode is <built-in function len> (builtin_function_or_method), which is no array"),
    ],
    ids=["text", "inside", "function"],
)
def test_an_argument_that_is_no_array(model, mode, text):
    step = nnx.jit(lambda model, mode: model(X))
    with pytest.raises(UntraceableError) as caught:
        step(model, mode)
    assert str(caught.value) == (
        f"nnx.jit: {text} and cannot be traced.\n"
        "Fix: nnx.jit(..., static_argnames='mode') if it is part of the program, such as a mode or "
        "a function; or bind it with functools.partial."
    )


@pytest.mark.parametrize(
    ("value", "path", "text"),
    [
        ("abc", "model.extra", "'abc' (str)"),
        ({"k": "abc", "l": 1.0}, "model.extra", "'abc' (str)"),
    ],
)
def test_a_variable_without_an_array(model, value, path, text):
    model.extra = nnx.Variable(value)
    with pytest.raises(UntraceableError) as caught:
        nnx.jit(lambda model: model(X))(model)
    assert str(caught.value) == (
        f"nnx.jit: {path} holds {text}, which JAX does not take as an array.\n"
        "Fix: hold it in a plain attribute, which is static, and an array of text or objects there "
        "as a list, .tolist()."
    )


def test_an_array_that_jax_does_not_take(model):
    model.names = [np.array(["a", "b"])]
    with pytest.raises(UntraceableError, match=r"model.names\[0\] holds array\(\['a', 'b'\]"):
        nnx.jit(lambda model: model(X))(model)


def test_an_argument_without_a_name(model):
    step = nnx.jit(lambda *args: args[0](X))
    with pytest.raises(UntraceableError, match=r"static_argnums=1\) if it is part of the program"):
        step(model, "x" * 1000)


def test_errors_of_the_function_are_left_alone(model):
    @nnx.jit
    def step(model):
        raise TypeError("my own")

    with pytest.raises(TypeError, match="my own") as caught:
        step(model)
    assert type(caught.value) is TypeError
    assert str(caught.value) == "my own"


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (lambda c, x: c + x, "the function returned float32[]"),
        (lambda c, x: (c, x, [c]), "the function returned (float32[], float32[], [float32[]])"),
        (lambda c, x: {"a": None, "b": c}, "the function returned {'a': NoneType, 'b': float32[]}"),
    ],
    ids=["too little", "too much", "other"],
)
def test_outputs_that_out_axes_do_not_fit(step, text):
    with pytest.raises(AxisError) as caught:
        nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(jnp.zeros(()), jnp.ones(3))
    assert str(caught.value) == (
        "nnx.scan: out_axes=(nnx.Carry, 0) does not fit the structure of what it is for: "
        f"{text}.\nFix: give one value for each argument or output, or one for all."
    )


class Counting(nnx.Module):
    def __init__(self):
        self.layers = [nnx.Dict(w=nnx.Param(jnp.ones(3)), n=nnx.Param(jnp.arange(3)))]

    def __call__(self, x=1.0):
        return (self.layers[0].w * self.layers[0].n).sum() * x


CHOOSE = (
    "keep it in a Variable that is no nnx.Param, or choose what to differentiate with "
    "argnums=nnx.DiffState(0, filter); or pass allow_int=True."
)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (nnx.grad(lambda model: model()), f"model.layers[0].n is int32[3].\nFix: {CHOOSE}"),
        (
            nnx.grad(lambda model, x: model(x), argnums=1),
            "x is the Python int 3.\nFix: pass a floating-point number, such as 3.0.",
        ),
        (
            nnx.value_and_grad(lambda model: model(), graph_updates=False),
            f"model.layers[0].n is int32[3].\nFix: {CHOOSE}",
        ),
    ],
    ids=["parameter", "number", "no updates"],
)
def test_what_has_no_gradient(call, text):
    arguments = (Counting(), 3) if "Python" in text else (Counting(),)
    with pytest.raises(GradientTypeError) as caught:
        call(*arguments)
    what, _, rest = str(caught.value).partition(", but ")
    assert what.endswith("grad requires real- or complex-valued inputs")
    assert rest == text


@pytest.mark.parametrize("error", [ValueError, TypeError, RuntimeError, KeyError, OSError])
@pytest.mark.parametrize(
    "outer",
    [nnx.jit, lambda f: nnx.jit(nnx.remat(f)), lambda f: nnx.grad(lambda m, x: f(m, x).sum())],
    ids=["jit", "remat", "grad"],
)
def test_an_error_of_an_inner_compiled_function_passes_through_the_outer_trace(outer, error):
    @nnx.jit
    def apply(layer, x):
        if x.shape[-1] != 2:
            raise error("x must have 2 features")
        return layer(x)

    def step(layer, x):
        try:
            return apply(layer, x)
        except error:
            return apply(layer, x[:, :2])

    layer = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    outer(step)(layer, jnp.ones((1, 3)))
    with pytest.raises(error, match="x must have 2 features"):
        outer(apply)(layer, jnp.ones((1, 3)))
