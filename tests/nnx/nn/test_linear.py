"""Linear, LinearGeneral, Einsum and Embed: Flax's numbers, every argument, and bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from linnet import nnx
from linnet.errors import FeatureError, LayerArgumentError, LostVariableWarning, RngsError
from linnet.nnx.nn.linear import default_embed_init, default_kernel_init
from tests.models import InList, drawn_key
from tests.nnx.nn.flax_cases import Case, check, doubled

HALF = jnp.bfloat16
NORMAL = jax.nn.initializers.normal(1.0)
ONES = jax.nn.initializers.ones
X = jax.random.normal(jax.random.key(1), (2, 3, 4))
IDS = jnp.array([[0, 4], [2, -1]])
B = {"bias_init": NORMAL}


def tripled(*args, **kwargs):
    return 3 * lax.dot_general(*args, **kwargs)


def doubled_einsum(*args, **kwargs):
    return 2 * jnp.einsum(*args, **kwargs)


LG, HEADS = nnx.LinearGeneral, {"axis": (-2, -1), **B}
EIN, EQUATION = nnx.Einsum, ("abc,cde->abde", (4, 5, 2), (5, 2))
CASES = [
    Case(nnx.Linear, "plain", (4, 5), {}, X, 1.3895, -0.39851),
    Case(nnx.Linear, "bias", (4, 5), B, X, -1.3903, -3.48435),
    Case(nnx.Linear, "vector", (4, 5), B, X[0, 0], -1.3903, -2.788),
    Case(nnx.Linear, "no bias", (4, 5), {"use_bias": False}, X, 2.49947, -0.39851),
    Case(nnx.Linear, "dtype", (4, 5), {"dtype": HALF, **B}, X, -1.3903, -3.48346),
    Case(nnx.Linear, "param_dtype", (4, 5), {"param_dtype": HALF, **B}, X, 2.46954, 2.99132),
    Case(nnx.Linear, "precision", (4, 5), {"precision": "highest", **B}, X, -1.3903, -3.48435),
    Case(nnx.Linear, "kernel_init", (4, 5), {"kernel_init": ONES}, X, 0.40275, 5.16112),
    Case(nnx.Linear, "dot_general", (4, 5), {"dot_general": tripled, **B}, X, -1.3903, -4.28138),
    Case(
        nnx.Linear, "promote_dtype", (4, 5), {"promote_dtype": doubled, **B}, X, -1.3903, -7.76573
    ),
    Case(
        nnx.Linear,
        "wider",
        (4, 5),
        {"dtype": HALF, "preferred_element_type": jnp.float32},
        X,
        1.3895,
        -0.40008,
    ),
    Case(LG, "plain", (4, 5), {}, X, 1.3895, -0.39851),
    Case(LG, "axes", ((3, 4), (5, 2)), HEADS, X, -3.35295, -4.6334),
    Case(LG, "first and last", ((2, 4), (5, 2)), {"axis": (0, -1), **B}, X, -3.21574, -8.09041),
    Case(LG, "axes in any order", ((3, 4), 5), {"axis": (-1, 1), **B}, X, -1.20918, -6.35408),
    Case(LG, "batch", (4, (5, 2)), {"batch_axis": {0: 2}, **B}, X, -10.3874, -8.69061),
    Case(LG, "two batch axes", (4, 5), {"batch_axis": {0: 2, 1: 3}, **B}, X, -13.49872, -15.02018),
    Case(
        LG,
        "no bias",
        ((3, 4), (5, 2)),
        {"axis": (-2, -1), "use_bias": False},
        X,
        -3.99411,
        -3.83338,
    ),
    Case(LG, "dtype", ((3, 4), (5, 2)), {"dtype": HALF, **HEADS}, X, -3.35295, -4.64474),
    Case(LG, "param_dtype", ((3, 4), (5, 2)), {"param_dtype": HALF, **HEADS}, X, 4.55522, 1.79376),
    Case(
        LG, "precision", ((3, 4), (5, 2)), {"precision": "highest", **HEADS}, X, -3.35295, -4.6334
    ),
    Case(LG, "kernel_init", ((3, 4), (5, 2)), {"kernel_init": ONES, **HEADS}, X, -6.33203, 0.31203),
    Case(
        LG,
        "dot_general",
        ((3, 4), (5, 2)),
        {"dot_general": tripled, **HEADS},
        X,
        -3.35295,
        -12.30016,
    ),
    Case(
        LG,
        "dot_general_cls",
        (4, 5),
        {"dot_general_cls": lambda: tripled, "dot_general": max, **B},
        X,
        -1.3903,
        -4.28138,
    ),
    Case(
        LG,
        "promote_dtype",
        ((3, 4), (5, 2)),
        {"promote_dtype": doubled, **HEADS},
        X,
        -3.35295,
        -16.93357,
    ),
    Case(
        LG,
        "wider",
        (4, 5),
        {"dtype": HALF, "preferred_element_type": jnp.float32},
        X,
        1.3895,
        -0.40008,
    ),
    Case(EIN, "plain", EQUATION, {}, X, 0.17106, -5.01282),
    Case(EIN, "bias", EQUATION, B, X, -5.57172, -10.84674),
    Case(EIN, "no bias", ("abc,cd->bad", (4, 5)), {}, X, 2.49947, -0.54877),
    Case(EIN, "spaces", (" abc, cd -> abd", (4, 5), (5,)), B, X, -1.3903, -3.48435),
    Case(EIN, "ellipsis", ("...c,cd->...d", (4, 5), (5,)), B, X, -1.3903, -3.48435),
    Case(EIN, "shared axis", ("abc,bcd->abd", (3, 4, 5), (3, 5)), B, X, -8.00659, -4.84761),
    Case(EIN, "swapped outputs", ("abc,cde->aebd", (4, 5, 2), (2, 5)), B, X, -5.57172, -2.26758),
    Case(EIN, "dtype", EQUATION, {"dtype": HALF, **B}, X, -5.57172, -10.81616),
    Case(EIN, "param_dtype", EQUATION, {"param_dtype": HALF, **B}, X, 2.87188, 2.95317),
    Case(EIN, "precision", EQUATION, {"precision": "highest", **B}, X, -5.57172, -10.84674),
    Case(EIN, "kernel_init", EQUATION, {"kernel_init": ONES, **B}, X, -6.38702, 5.88134),
    Case(EIN, "promote_dtype", EQUATION, {"promote_dtype": doubled, **B}, X, -5.57172, -31.71913),
    Case(EIN, "einsum_op", EQUATION, {"einsum_op": doubled_einsum, **B}, X, -5.57172, -15.85957),
    Case(
        EIN,
        "wider",
        EQUATION,
        {"dtype": HALF, "preferred_element_type": jnp.float32},
        X,
        0.17106,
        -5.01546,
    ),
    Case(nnx.Embed, "plain", (5, 3), {}, IDS, 2.70763, 1.64159),
    Case(nnx.Embed, "one row", (1, 3), {}, IDS, 0.4767, 0.25627),
    Case(nnx.Embed, "dtype", (5, 3), {"dtype": HALF}, IDS, 2.70763, 1.63607),
    Case(nnx.Embed, "param_dtype", (5, 3), {"param_dtype": HALF}, IDS, -0.51832, 3.69098),
    Case(nnx.Embed, "embedding_init", (5, 3), {"embedding_init": NORMAL}, IDS, 4.68975, 2.84332),
    Case(nnx.Embed, "promote_dtype", (5, 3), {"promote_dtype": doubled}, IDS, 2.70763, 3.28319),
]
ATTEND = [
    Case(nnx.Embed, "plain", (5, 4), {}, X, 2.41404, -1.58038),
    Case(nnx.Embed, "dtype", (5, 4), {"dtype": HALF}, X, 2.41404, -1.56994),
    Case(nnx.Embed, "promote_dtype", (5, 4), {"promote_dtype": doubled}, X, 2.41404, -6.32153),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers_of_flax(case):
    check(case)


@pytest.mark.parametrize("case", ATTEND, ids=str)
def test_numbers_of_flax_for_attend(case):
    check(case, "attend")


@pytest.mark.parametrize(
    ("build", "kernel", "bias"),
    [
        (lambda rngs: nnx.Linear(4, 5, **B, rngs=rngs), (4, 5), (5,)),
        (lambda rngs: LG((3, 4), (5, 2), **HEADS, rngs=rngs), (12, 10), (10,)),
        (lambda rngs: LG(4, (5, 2), batch_axis={0: 2}, **B, rngs=rngs), (8, 10), (20,)),
        (lambda rngs: EIN(*EQUATION, **B, rngs=rngs), (4, 5, 2), (5, 2)),
    ],
    ids=["Linear", "LinearGeneral", "LinearGeneral-batch", "Einsum"],
)
def test_parameters_bit_for_bit(build, kernel, bias):
    rngs = nnx.Rngs(0)
    layer = build(rngs)
    assert (layer.kernel[...].ravel() == default_kernel_init(drawn_key(0), kernel).ravel()).all()
    assert (layer.bias[...].ravel() == NORMAL(drawn_key(1), bias).ravel()).all()
    assert rngs.default.count[...] == 2


def test_embedding_bit_for_bit():
    rngs = nnx.Rngs(0)
    layer = nnx.Embed(5, 3, rngs=rngs)
    assert (layer.embedding[...] == default_embed_init(drawn_key(0), (5, 3))).all()
    assert rngs.default.count[...] == 1


@pytest.mark.parametrize(
    ("layer", "shapes"),
    [
        (nnx.Linear(4, 5, rngs=nnx.Rngs(0)), {"kernel": (4, 5), "bias": (5,)}),
        (nnx.Linear(4, 5, use_bias=False, rngs=nnx.Rngs(0)), {"kernel": (4, 5)}),
        (LG(4, 5, rngs=nnx.Rngs(0)), {"kernel": (4, 5), "bias": (5,)}),
        (
            LG((3, 4), (5, 2), axis=(-2, -1), batch_axis={0: 7}, rngs=nnx.Rngs(0)),
            {"kernel": (7, 3, 4, 5, 2), "bias": (7, 5, 2)},
        ),
        (LG(4, 5, use_bias=False, rngs=nnx.Rngs(0)), {"kernel": (4, 5)}),
        (EIN(*EQUATION, rngs=nnx.Rngs(0)), {"kernel": (4, 5, 2), "bias": (5, 2)}),
        (EIN(*EQUATION[:2], rngs=nnx.Rngs(0)), {"kernel": (4, 5, 2)}),
        (nnx.Embed(5, 3, rngs=nnx.Rngs(0)), {"embedding": (5, 3)}),
    ],
)
def test_names_and_shapes(layer, shapes):
    state = nnx.state(layer)
    assert {name: state[name].shape for name in state} == shapes
    if "kernel" in shapes and "bias" not in shapes:
        assert layer.bias is None


def test_attributes():
    layer = LG([2, 3], 4, axis=[-2, -1], batch_axis={0: 5}, rngs=nnx.Rngs(0))
    assert (layer.in_features, layer.out_features, layer.axis) == ((2, 3), (4,), (-2, -1))
    assert layer.batch_axis == {0: 5}
    assert EIN(" ab, bc -> ac", [2, 3], rngs=nnx.Rngs(0)).einsum_str == "ab,bc->ac"
    embed = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
    assert (embed.num_embeddings, embed.features, embed.dtype) == (5, 3, jnp.float32)
    assert nnx.Embed(5, 3, param_dtype=HALF, rngs=nnx.Rngs(0)).dtype == HALF


@pytest.mark.parametrize(
    ("cls", "args", "names"),
    [
        (nnx.Linear, (4, 5), ("kernel", "bias")),
        (LG, (4, 5), ("kernel", "bias")),
        (EIN, EQUATION, ("kernel", "bias")),
        (nnx.Embed, (4, 5), ("embedding",)),
    ],
)
def test_metadata(cls, args, names):
    metadata = {f"{name}_metadata": {"note": name, "out_sharding": None} for name in names}
    layer = cls(*args, **metadata, rngs=nnx.Rngs(0))
    assert {name: getattr(layer, name).note for name in names} == {name: name for name in names}


def test_metadata_from_an_initializer_survives_the_reshape():
    init = nnx.with_metadata(default_kernel_init, note="heads")
    layer = LG((3, 4), (5, 2), axis=(-2, -1), kernel_init=init, rngs=nnx.Rngs(0))
    assert (layer.kernel.note, layer.kernel.shape) == ("heads", (3, 4, 5, 2))


@pytest.mark.parametrize(
    ("call", "sharding", "want"),
    [
        (
            lambda s: nnx.Linear(4, 5, rngs=nnx.Rngs(0))(X, out_sharding=s),
            ("a", None, "b"),
            "2@a,3,5@b",
        ),
        (lambda s: LG(4, 5, rngs=nnx.Rngs(0))(X, out_sharding=s), ("a", None, "b"), "2@a,3,5@b"),
        (
            lambda s: EIN("abc,cd->abd", (4, 5), (5,), rngs=nnx.Rngs(0))(X, out_sharding=s),
            ("a", None, "b"),
            "2@a,3,5@b",
        ),
        (
            lambda s: nnx.Embed(5, 3, rngs=nnx.Rngs(0))(IDS, out_sharding=s),
            ("a", None, "b"),
            "2@a,2,3@b",
        ),
        (
            lambda s: nnx.Embed(1, 3, rngs=nnx.Rngs(0))(IDS, out_sharding=s),
            ("a", None, "b"),
            "2@a,2,3@b",
        ),
        (
            lambda s: nnx.Embed(5, 4, rngs=nnx.Rngs(0)).attend(X, out_sharding=s),
            ("a", None, "b"),
            "2@a,3,5@b",
        ),
    ],
    ids=["Linear", "LinearGeneral", "Einsum", "Embed", "Embed-1", "attend"],
)
def test_sharding_of_the_output(call, sharding, want):
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    with jax.set_mesh(jax.make_mesh((1, 1), ("a", "b"), axis_types=kinds)):
        assert str(jax.typeof(call(jax.P(*sharding)))) == f"float32[{want}]"


def test_sharding_of_embed_in_an_automatic_mesh():
    kinds = (jax.sharding.AxisType.Auto,) * 2
    layer = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
    want = layer(IDS)
    with jax.set_mesh(jax.make_mesh((1, 1), ("a", "b"), axis_types=kinds)):
        assert (layer(IDS, out_sharding=jax.P("a")) == want).all()


@pytest.mark.parametrize(
    "equation, kernel, bias, inputs, added_as",
    [
        ("d...ab,bc...->ad...c", (5, 7, 6), (6, 7), (4, 6, 2, 5), (1, 1, 6, 7)),
        ("d...ab,bc...->ad...c", (5, 7, 8), (8, 7), (4, 6, 8, 2, 5), (1, 1, 1, 8, 7)),
        ("d...ab,bc...->ad...c", (5, 7), 7, (4, 2, 5), (1, 1, 7)),
        ("ab,b...->a...", (5, 7, 8), (7, 8), (4, 5), (1, 7, 8)),
        ("...a,...ab->...b", (3, 5, 7), (3, 7), (4, 3, 5), (1, 3, 7)),
        ("ba,a->b", 5, None, (4, 5), None),
    ],
)
def test_einsum_with_an_ellipsis_or_an_int(equation, kernel, bias, inputs, added_as):
    noise = nnx.initializers.normal(1.0)
    layer = EIN(equation, kernel, bias, kernel_init=noise, bias_init=noise, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=inputs).astype(np.float32)
    want = np.einsum(equation, x, layer.kernel.value)
    if bias is not None:
        want = want + np.reshape(layer.bias.value, added_as)
    with jax.numpy_rank_promotion("allow"):
        np.testing.assert_allclose(layer(x), want, rtol=1e-4, atol=1e-4)


def test_einsum_with_the_equation_of_the_call():
    layer = EIN(None, (4, 5), (5,), **B, rngs=nnx.Rngs(0))
    want = nnx.Linear(4, 5, **B, rngs=nnx.Rngs(0))(X)
    np.testing.assert_allclose(layer(X, "abc,cd->abd"), want, atol=1e-6)
    np.testing.assert_allclose(layer(X, "abc, cd -> bad"), want.swapaxes(0, 1), atol=1e-6)


def test_embed_beyond_the_table_is_nan():
    rows = nnx.Embed(5, 3, rngs=nnx.Rngs(0))(jnp.array([5, -6, 4]))
    assert jnp.isnan(rows).all(1).tolist() == [True, True, False]


@pytest.mark.parametrize("indices", [2, [0, 2], np.array([0, 2]), jnp.array([2], jnp.uint8)])
def test_embed_takes_any_integers(indices):
    layer = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
    assert (layer(indices) == layer.embedding[...][np.asarray(indices)]).all()


def test_a_plain_array_may_take_the_place_of_a_parameter():
    layer, want = nnx.Linear(4, 5, rngs=nnx.Rngs(0)), nnx.Linear(4, 5, rngs=nnx.Rngs(0))(X)
    with pytest.warns(LostVariableWarning):
        layer.kernel = layer.kernel[...]
    assert (layer(X) == want).all()


def test_a_contraction_with_state_keeps_it():
    class Counting(nnx.Module):
        def __init__(self):
            self.calls = nnx.Variable(jnp.array(0))

        def __call__(self, *args, **kwargs):
            self.calls[...] += 1
            return lax.dot_general(*args, **kwargs)

    counting = Counting()
    layer = nnx.Linear(4, 5, dot_general=counting, rngs=nnx.Rngs(0))
    layer(X)
    layer(X)
    assert counting.calls[...] == 2


def linear(*args, **kwargs):
    return nnx.Linear(*args, **kwargs, rngs=nnx.Rngs(0))


def general(*args, **kwargs):
    return LG(*args, **kwargs, rngs=nnx.Rngs(0))


def einsum(*args, **kwargs):
    return EIN(*args, **kwargs, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("layer", "x", "text"),
    [
        (
            linear(3, 5),
            X,
            "model.blocks[0] (Linear) expected inputs whose last axis has size 3, but got "
            "float32[2,3,4].\nFix: build it with in_features=4, or move the feature axis last.",
        ),
        (
            linear(3, 5),
            jnp.array(1.0),
            "model.blocks[0] (Linear) expected at least 1 axis, the last of size 3, but got "
            "float32[].\nFix: keep the feature axis, also where it has size 1.",
        ),
        (
            general((3, 5), 2, axis=(-2, -1)),
            X,
            "model.blocks[0] (LinearGeneral) expected inputs of size (3, 5) on axes (-2, -1), but "
            "got float32[2,3,4].\n"
            "Fix: build it with in_features and axis as in the input, or move the axes.",
        ),
        (
            general(4, 2, batch_axis={0: 5}),
            X,
            "model.blocks[0] (LinearGeneral) expected inputs of size (4) on axes (-1,) and batch "
            "axes {0: 5}, but got float32[2,3,4].",
        ),
        (general((3, 4), 2, axis=(-2, -1)), X[0, 0], "on axes (-2, -1), but got float32[4]."),
        (general(2, 2, batch_axis={0: 2}, axis=0), X, "axes (0,) and batch axes {0: 2}, but got"),
        (
            einsum("abc,cd->abd", (5, 6)),
            X,
            "model.blocks[0] (Einsum) computes 'abc,cd->abd' with a kernel of (5, 6), so that "
            "c = 5, but got float32[2,3,4].\nFix: build it with another kernel_shape, or give the "
            "input the axes of the equation.",
        ),
        (einsum("ab,bc->ac", (4, 5)), X, "so that b = 4, but got float32[2,3,4]."),
        (einsum("a...b,bc->a...c", (4, 5)), X[0, 0], "so that b = 4, but got float32[4]."),
        (
            nnx.Embed(5, 3, rngs=nnx.Rngs(0)),
            X,
            "model.blocks[0] (Embed) expected integers as indices, but got float32[2,3,4].\n"
            "Fix: convert them with .astype(jnp.int32), or use attend() for vectors.",
        ),
        (nnx.Embed(5, 3, rngs=nnx.Rngs(0)), X > 0, "(Embed) expected integers as indices, but"),
    ],
)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_bad_input_names_the_layer(layer, x, text, jit):
    model = InList(layer)
    call = nnx.jit(lambda model, x: model(x)) if jit else lambda model, x: model(x)
    with pytest.raises(FeatureError) as error:
        call(model, x)
    assert text in str(error.value)


def test_attend_refuses_another_size():
    model = InList(nnx.Embed(5, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(FeatureError, match=r"model\.blocks\[0\] \(Embed\) .* size 3, but got"):
        model.blocks[0].attend(X)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda: general((2, 3), 4),
            "LinearGeneral wants one entry of in_features for each axis, but got in_features="
            "(2, 3) and axis=(-1,).\n"
            "Fix: list as many axes as there are input sizes, for example axis=(-2, -1).",
        ),
        (
            lambda: general(2, 3, batch_axis={1: 4}),
            "LinearGeneral takes leading axes as batch axes, but got batch_axis={1: 4}.\n"
            "Fix: move them to the front of the input and number them from 0.",
        ),
        (
            lambda: einsum("ab", (2,)),
            "Einsum: An einsum of inputs and kernel was expected, but got 'ab'.\n"
            "Fix: write two operands and the output, for example 'ab,bc->ac'.",
        ),
        (lambda: einsum("ab,bc,cd->ad", (2, 3)), "but got 'ab,bc,cd->ad'."),
        (
            lambda: einsum("ab,bc->ac", (2, 3, 4)),
            "Einsum: 'ab,bc->ac' has 2 axes for the kernel, but kernel_shape=(2, 3, 4).\n"
            "Fix: write one letter for each axis of the kernel, after the comma.",
        ),
        (
            lambda: einsum("ab,bc...d->a...cd", (2, 3)),
            "Einsum: 'ab,bc...d->a...cd' has 3 axes for the kernel, but kernel_shape=(2, 3).\n",
        ),
        (
            lambda: einsum("ab,bc...->a...c", (2, 3, 4), (3,)),
            "Einsum: the kernel gives 'ab,bc...->a...c' output axes of size (4, 3), but "
            "bias_shape=(3,).\nFix: bias_shape=(4, 3), or None for no bias.",
        ),
        (
            lambda: einsum("ab,bc->ac", (2, 3), (2,)),
            "Einsum: the kernel gives 'ab,bc->ac' output axes of size (3,), but bias_shape=(2,).\n"
            "Fix: bias_shape=(3,), or None for no bias.",
        ),
        (
            lambda: einsum(None, (2, 3))(X),
            "Einsum has no equation.\nFix: give einsum_str to the constructor or to the call.",
        ),
    ],
)
def test_arguments_that_do_not_fit(build, text):
    with pytest.raises(LayerArgumentError) as error:
        build()
    assert text in str(error.value)


def test_an_equation_of_the_call_that_does_not_fit_names_the_layer():
    model = InList(einsum("ab,bc->ac", (4, 5), (5,)))
    with pytest.raises(LayerArgumentError, match=r"^model\.blocks\[0\] \(Einsum\): the kernel"):
        model(X[0], einsum_str="ab,bc->b")


@pytest.mark.parametrize("rngs", [None, 0])
def test_no_keys(rngs):
    with pytest.raises(RngsError) as error:
        nnx.Linear(2, 3, rngs=rngs)
    assert str(error.value) == (
        f"Linear draws its parameters from rngs, but got {rngs}.\n"
        "Fix: pass rngs=nnx.Rngs(0), or the rngs your own constructor was given."
    )


def test_a_list_as_input():
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer([[1.0, 2.0]]), layer(jnp.array([[1.0, 2.0]])))
    np.testing.assert_array_equal(layer(((1, 2),)), layer(jnp.array([[1.0, 2.0]])))
