"""Conv and ConvTranspose: Flax's numbers, every argument, and bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from linnet import nnx
from linnet.errors import FeatureError, LayerArgumentError
from linnet.nnx.nn.linear import default_kernel_init
from tests.models import InList
from tests.nnx.nn.flax_cases import Case, check, doubled

HALF = jnp.bfloat16
NORMAL = jax.nn.initializers.normal(1.0)
ONES = jax.nn.initializers.ones
X1 = jax.random.normal(jax.random.key(1), (2, 5, 4))
X2 = jax.random.normal(jax.random.key(2), (2, 4, 5, 2))
X3 = jax.random.normal(jax.random.key(3), (2, 3, 2, 3, 2))
MASK = (jnp.arange(3 * 2 * 2 * 3) % 3 > 0).reshape(3, 2, 2, 3).astype(jnp.float32)
B = {"bias_init": NORMAL}


def tripled(*args, **kwargs):
    return 3 * lax.conv_general_dilated(*args, **kwargs)


C, T = nnx.Conv, nnx.ConvTranspose
LINE, IMAGE = (4, 3, 3), (2, 3, (3, 2))
CASES = [
    Case(C, "plain", IMAGE, {}, X2, -1.05351, 6.87719),
    Case(C, "bias", IMAGE, B, X2, -4.68138, 6.03247),
    Case(C, "no bias", IMAGE, {"use_bias": False}, X2, 1.03975, 6.87719),
    Case(C, "line", LINE, B, X1, -4.68138, 4.01441),
    Case(C, "no batch", LINE, B, X1[0], -4.68138, -2.7765),
    Case(C, "two batch axes", (2, 3, 2), B, X2, -6.22997, -8.98188),
    Case(C, "volume", (2, 3, (2, 1, 3)), B, X3, -4.68138, -0.83274),
    Case(C, "strides", IMAGE, {"strides": 2, **B}, X2, -4.68138, -4.76626),
    Case(C, "strides by axis", IMAGE, {"strides": [1, 2], **B}, X2, -4.68138, -1.07733),
    Case(C, "strides None", IMAGE, {"strides": None, **B}, X2, -4.68138, 6.03247),
    Case(C, "VALID", IMAGE, {"padding": "VALID", **B}, X2, -4.68138, -4.01626),
    Case(C, "SAME_LOWER", IMAGE, {"padding": "SAME_LOWER", **B}, X2, -4.68138, -6.5873),
    Case(C, "CIRCULAR", IMAGE, {"padding": "CIRCULAR", **B}, X2, -4.68138, 2.14162),
    Case(
        C,
        "CIRCULAR strides",
        IMAGE,
        {"padding": "CIRCULAR", "strides": 2, **B},
        X2,
        -4.68138,
        -6.93712,
    ),
    Case(C, "REFLECT", IMAGE, {"padding": "REFLECT", **B}, X2, -4.68138, 6.15454),
    Case(
        C,
        "REFLECT dilation",
        IMAGE,
        {"padding": "REFLECT", "kernel_dilation": 2},
        X2,
        -1.05351,
        -3.8935,
    ),
    Case(C, "CAUSAL", LINE, {"padding": "CAUSAL", **B}, X1, -4.68138, -5.90971),
    Case(
        C,
        "CAUSAL dilation",
        LINE,
        {"padding": "CAUSAL", "kernel_dilation": 2, **B},
        X1,
        -4.68138,
        -6.56719,
    ),
    Case(C, "padding number", IMAGE, {"padding": 2, **B}, X2, -4.68138, 18.13307),
    Case(C, "padding numbers", IMAGE, {"padding": (1, 2), **B}, X2, -4.68138, -2.33982),
    Case(C, "padding pairs", IMAGE, {"padding": [(1, 0), 2], **B}, X2, -4.68138, -2.05199),
    Case(
        C,
        "input_dilation",
        IMAGE,
        {"input_dilation": (2, 3), "padding": 1, **B},
        X2,
        -4.68138,
        -13.11176,
    ),
    Case(C, "kernel_dilation", IMAGE, {"kernel_dilation": (2, 1), **B}, X2, -4.68138, 9.02668),
    Case(C, "groups", (2, 4, (3, 2)), {"feature_group_count": 2, **B}, X2, -4.58854, -26.11754),
    Case(C, "mask", IMAGE, {"mask": MASK, **B}, X2, -4.68138, -0.12743),
    Case(C, "dtype", IMAGE, {"dtype": HALF, **B}, X2, -4.68138, 6.06323),
    Case(C, "param_dtype", IMAGE, {"param_dtype": HALF, **B}, X2, 0.83151, 3.21894),
    Case(C, "precision", IMAGE, {"precision": "highest", **B}, X2, -4.68138, 6.03247),
    Case(C, "kernel_init", IMAGE, {"kernel_init": ONES, **B}, X2, -3.50324, 3.46472),
    Case(
        C,
        "conv_general_dilated",
        IMAGE,
        {"conv_general_dilated": tripled, **B},
        X2,
        -4.68138,
        19.78686,
    ),
    Case(C, "promote_dtype", IMAGE, {"promote_dtype": doubled, **B}, X2, -4.68138, 25.81933),
    Case(
        C,
        "wider",
        IMAGE,
        {"dtype": HALF, "preferred_element_type": jnp.float32},
        X2,
        -1.05351,
        6.88324,
    ),
    Case(T, "plain", IMAGE, {}, X2, -1.05351, -5.74258),
    Case(T, "bias", IMAGE, B, X2, -4.68138, -6.5873),
    Case(T, "no bias", IMAGE, {"use_bias": False}, X2, 1.03975, -5.74258),
    Case(T, "line", LINE, B, X1, -4.68138, 4.01441),
    Case(T, "no batch", LINE, B, X1[0], -4.68138, -2.7765),
    Case(T, "two batch axes", (2, 3, 2), B, X2, -6.22997, 1.20591),
    Case(T, "volume", (2, 3, (2, 1, 3)), {"strides": 2, **B}, X3, -4.68138, -15.46951),
    Case(T, "strides", IMAGE, {"strides": 2, **B}, X2, -4.68138, -2.36202),
    Case(T, "strides by axis", IMAGE, {"strides": [3, 2], **B}, X2, -4.68138, -1.89315),
    Case(T, "VALID", IMAGE, {"padding": "VALID", "strides": 2, **B}, X2, -4.68138, -7.4096),
    Case(T, "SAME_LOWER", IMAGE, {"padding": "SAME_LOWER", **B}, X2, -4.68138, -6.5873),
    Case(
        T,
        "SAME_LOWER dilated",
        IMAGE,
        {"padding": "same_lower", "kernel_dilation": (1, 3), **B},
        X2,
        -4.68138,
        -0.19032,
    ),
    Case(T, "CIRCULAR", IMAGE, {"padding": "CIRCULAR", **B}, X2, -4.68138, -6.27824),
    Case(
        T,
        "CIRCULAR strides",
        IMAGE,
        {"padding": "CIRCULAR", "strides": (2, 3), **B},
        X2,
        -4.68138,
        -3.80803,
    ),
    Case(
        T,
        "CIRCULAR large",
        (4, 3, 9),
        {"padding": "CIRCULAR", "strides": 2, **B},
        X1,
        -1.61989,
        0.1791,
    ),
    Case(T, "padding number", IMAGE, {"padding": 2, **B}, X2, -4.68138, 18.13307),
    Case(
        T,
        "padding pairs",
        IMAGE,
        {"padding": ((1, 0), 2), "strides": 2, **B},
        X2,
        -4.68138,
        4.35078,
    ),
    Case(T, "kernel_dilation", IMAGE, {"kernel_dilation": (2, 1), **B}, X2, -4.68138, -14.52083),
    Case(
        T,
        "transpose_kernel",
        IMAGE,
        {"transpose_kernel": True, "strides": 2, **B},
        X2,
        -4.48806,
        -3.10942,
    ),
    Case(
        T,
        "transposed CIRCULAR",
        IMAGE,
        {"transpose_kernel": True, "padding": "CIRCULAR", "strides": 2},
        X2,
        -0.86019,
        2.05884,
    ),
    Case(T, "mask", IMAGE, {"mask": MASK, **B}, X2, -4.68138, 0.88207),
    Case(T, "dtype", IMAGE, {"dtype": HALF, **B}, X2, -4.68138, -6.61087),
    Case(T, "param_dtype", IMAGE, {"param_dtype": HALF, **B}, X2, 0.83151, -6.90637),
    Case(T, "precision", IMAGE, {"precision": "highest", **B}, X2, -4.68138, -6.5873),
    Case(T, "kernel_init", IMAGE, {"kernel_init": ONES, **B}, X2, -3.50324, -2.88075),
    Case(T, "promote_dtype", IMAGE, {"promote_dtype": doubled, **B}, X2, -4.68138, -24.65975),
    Case(
        T,
        "wider",
        IMAGE,
        {"dtype": HALF, "preferred_element_type": jnp.float32},
        X2,
        -1.05351,
        -5.74264,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers_of_flax(case):
    check(case)


@pytest.mark.parametrize(
    ("cls", "kwargs", "shape"),
    [
        (C, {}, (3, 2, 4, 6)),
        (C, {"feature_group_count": 2}, (3, 2, 2, 6)),
        (T, {}, (3, 2, 4, 6)),
        (T, {"transpose_kernel": True}, (3, 2, 6, 4)),
    ],
)
def test_parameters_bit_for_bit(cls, kwargs, shape):
    rngs = nnx.Rngs(0)
    layer = cls(4, 6, [3, 2], **kwargs, **B, rngs=rngs)
    keys = [jax.random.fold_in(jax.random.key(0), count) for count in range(2)]
    assert layer.kernel_shape == shape
    assert (layer.kernel[...] == default_kernel_init(keys[0], shape)).all()
    assert (layer.bias[...] == NORMAL(keys[1], (6,))).all()
    assert rngs.default.count[...] == 2


@pytest.mark.parametrize("cls", [C, T])
def test_names_and_attributes(cls):
    layer = cls(2, 3, 3, strides=[2], padding=[(0, 1)], use_bias=False, rngs=nnx.Rngs(0))
    assert list(nnx.state(layer)) == ["kernel"]
    assert layer.bias is None
    assert (layer.kernel_size, layer.strides, layer.padding) == ((3,), (2,), ((0, 1),))
    assert cls(2, 3, np.int64(3), rngs=nnx.Rngs(0)).kernel_size == (3,)


@pytest.mark.parametrize("cls", [C, T])
def test_metadata(cls):
    metadata = {"kernel_metadata": {"note": "k"}, "bias_metadata": {"note": "b"}}
    layer = cls(2, 3, 3, **metadata, rngs=nnx.Rngs(0))
    assert (layer.kernel.note, layer.bias.note) == ("k", "b")


def test_sharding_of_the_output():
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    with jax.set_mesh(jax.make_mesh((1, 1), ("a", "b"), axis_types=kinds)):
        out = C(4, 6, 3, rngs=nnx.Rngs(0))(X1, out_sharding=jax.P("a", None, "b"))
    assert str(jax.typeof(out)) == "float32[2@a,5,6@b]"


@pytest.mark.parametrize("cls", [C, T])
@pytest.mark.parametrize("padding", ["Same", "valid", "Circular", "causal", "reflect"])
def test_padding_in_any_letter_case(cls, padding):
    if cls is T and padding in ("causal", "reflect"):
        return
    written = cls(4, 6, 3, padding=padding, rngs=nnx.Rngs(0))(X1)
    assert (written == cls(4, 6, 3, padding=padding.upper(), rngs=nnx.Rngs(0))(X1)).all()


def test_a_transposed_kernel_is_the_gradient_of_a_convolution():
    down = C(2, 3, (3, 3), strides=2, padding="VALID", use_bias=False, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (1, 7, 9, 2))
    y = down(x)
    up = T(
        3, 2, (3, 3), 2, padding="VALID", use_bias=False, transpose_kernel=True, rngs=nnx.Rngs(0)
    )
    (want,) = jax.vjp(down, x)[1](y)
    np.testing.assert_allclose(up(y), want, atol=1e-5)


def test_the_mask_is_data_and_its_entries_get_no_gradient():
    layer = C(*IMAGE, mask=MASK, rngs=nnx.Rngs(0))
    assert set(nnx.state(layer)) == {"kernel", "bias", "mask"}
    grads = nnx.grad(lambda layer: layer(X2).sum())(layer)
    assert ((grads["kernel"][...] == 0) == (MASK == 0)).all()


@pytest.mark.parametrize("cls", [C, T])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("x", "text"),
    [
        (
            X1,
            "expected inputs whose last axis has size 2, but got float32[2,5,4].\n"
            "Fix: build it with in_features=4, or move the feature axis last.",
        ),
        (
            X1[0],
            "expected at least 3 axes, the last of size 2, but got float32[5,4].\n"
            "Fix: keep the feature axis, also where it has size 1; kernel_size says how many axes "
            "(2 here) the kernel moves over.",
        ),
    ],
)
def test_bad_input_names_the_layer(cls, jit, x, text):
    model = InList(cls(2, 3, (3, 3), rngs=nnx.Rngs(0)))
    call = nnx.jit(lambda model, x: model(x)) if jit else lambda model, x: model(x)
    with pytest.raises(FeatureError) as error:
        call(model, x)
    assert str(error.value) == f"model.blocks[0] ({cls.__name__}) {text}"


@pytest.mark.parametrize("cls", [C, T])
def test_a_mask_of_another_shape(cls):
    model = InList(cls(2, 3, 3, mask=jnp.ones((3, 1, 3)), rngs=nnx.Rngs(0)))
    with pytest.raises(LayerArgumentError) as error:
        model(X1[..., :2])
    assert str(error.value) == (
        f"model.blocks[0] ({cls.__name__}) expected a mask of the kernel's shape (3, 2, 3), but "
        "got float32[3,1,3].\nFix: jnp.broadcast_to(mask, (3, 2, 3))."
    )


@pytest.mark.parametrize(
    ("cls", "kwargs", "text"),
    [
        (
            C,
            {"padding": "nope"},
            "Conv: padding must be one of SAME, VALID, SAME_LOWER, CIRCULAR, REFLECT, CAUSAL, a "
            "number, or 2 of them that are numbers or pairs (before, after), but got 'nope'.\n"
            "Fix: for one pixel of zeros on all sides, padding=1.",
        ),
        (T, {"padding": "CAUSAL"}, "padding must be one of SAME, VALID, SAME_LOWER, CIRCULAR, a"),
        (
            T,
            {"padding": "same_lower", "strides": (1, 2)},
            "ConvTranspose: SAME_LOWER padding is not defined for a transposed convolution with "
            "strides of (1, 2).\nFix: give the padding as pairs (before, after), or SAME.",
        ),
        (C, {"padding": (1,)}, "but got (1,)."),
        (C, {"padding": ((1, 2, 3), 1)}, "but got ((1, 2, 3), 1)."),
        (C, {"padding": None}, "but got None."),
        (
            C,
            {"padding": "CAUSAL"},
            "Conv: CAUSAL padding is for one axis, but the kernel moves over 2.\nFix: give pairs",
        ),
        (
            C,
            {"strides": (1, 2, 3)},
            "Conv: strides must be a number or 2 of them, but got (1, 2, 3).\n"
            "Fix: give one entry for each axis that the window moves over.",
        ),
        (T, {"strides": (2,)}, "ConvTranspose: strides must be a number or 2 of them, but got"),
        (C, {"kernel_dilation": (2,)}, "Conv: kernel_dilation must be a number or 2 of them"),
        (C, {"input_dilation": (2,)}, "Conv: input_dilation must be a number or 2 of them"),
        (
            C,
            {"input_dilation": (1, 2)},
            "Conv: SAME padding is not defined beside input_dilation=(1, 2).\n"
            "Fix: give the padding in numbers, or use a transposed convolution.",
        ),
        (
            C,
            {"feature_group_count": 3},
            "Conv divides its features into feature_group_count=3 groups, but got in_features=4 "
            "and out_features=6.\nFix: choose a number that divides both.",
        ),
        (C, {"feature_group_count": 0}, "feature_group_count=0 groups"),
        (C, {"feature_group_count": 4}, "feature_group_count=4 groups"),
    ],
)
def test_arguments_that_do_not_fit(cls, kwargs, text):
    with pytest.raises(LayerArgumentError) as error:
        cls(4, 6, (3, 3), **kwargs, rngs=nnx.Rngs(0))
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("padding", "canonical"),
    [
        ("SAME", "SAME"),
        ("valid", "valid"),
        (1, [(1, 1), (1, 1)]),
        ((1, 2), [(1, 1), (2, 2)]),
        ([(1, 2), 3], [(1, 2), (3, 3)]),
    ],
)
def test_the_form_that_lax_takes(padding, canonical):
    assert nnx.nn.linear.canonicalize_padding(padding, 2) == canonical


@pytest.mark.parametrize("padding", [[(1, 1)], None, (1, 2, 3), ((1, 2, 3), 1), 1.5])
def test_what_is_no_padding(padding):
    with pytest.raises(ValueError, match=r"padding must be one of SAME, VALID, .* a number, or"):
        nnx.nn.linear.canonicalize_padding(padding, 2)
