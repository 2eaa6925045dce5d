"""What is compiled outside of traces, and what is never: contractions, unless somebody looks on."""

import ast
import functools
import importlib
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

import linnet
from linnet.functional import attention, fusing
from tests.compare import assert_alike
from tests.functional.interceptors import contractions_in, under_their_names

PACKAGE = Path(linnet.__file__).parent
FUNCTIONAL = sorted((PACKAGE / "functional").glob("*.py"))
LAYERS = sorted((PACKAGE / "nnx" / "nn").glob("*.py"))

CONTRACTIONS = {
    *("dot", "dot_general", "conv", "conv_general_dilated", "conv_transpose", "ragged_dot"),
    *("einsum", "inner", "matmul", "tensordot", "vdot", "vecdot", "dot_product_attention"),
}
ROOTS = ("jax.lax", "lax", "jnp", "jax.numpy", "jax.nn")


def parsed(path):
    return ast.parse(path.read_text(), str(path))


def functions_in(path):
    return [node for node in ast.walk(parsed(path)) if isinstance(node, ast.FunctionDef)]


def with_decorator(path, decorator):
    """The functions of a file with a decorator."""
    return [
        function
        for function in functions_in(path)
        if any(
            ast.unparse(found).partition("(")[0] == decorator for found in function.decorator_list
        )
    ]


def decorated(decorator):
    """The names of all functions with a decorator, such as ``linear.dense``."""
    return {
        f"{path.stem}.{function.name}"
        for path in FUNCTIONAL
        for function in with_decorator(path, decorator)
    }


def contraction_in_jax(node):
    """Whether a node is one of JAX's contractions, such as ``jax.lax.dot_general``."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr in CONTRACTIONS
        and ast.unparse(node.value) in ROOTS
    )


def contracts_itself(function):
    return any(
        contraction_in_jax(node)
        or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult))
        or (isinstance(node, ast.Attribute) and ast.unparse(node.value) == "fusing")
        for node in ast.walk(function)
    )


def test_nothing_fused_contracts():
    """What it calls does not either: the traces of all are looked at below."""
    fused = [function for path in FUNCTIONAL for function in with_decorator(path, "fused")]
    assert len(fused) > 20
    assert [function.name for function in fused if contracts_itself(function)] == []
    contracting = [f.name for path in FUNCTIONAL for f in functions_in(path) if contracts_itself(f)]
    assert {"attend", "conv_transpose", "attention_weights", "spectral_norm"} <= {*contracting}


def test_contractions_are_looked_up_where_they_are_called():
    """They are neither imported by name nor kept, as a default or under another name."""
    for path in (*FUNCTIONAL, *LAYERS):
        tree = parsed(path)
        imported = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("jax")
            for alias in node.names
        }
        called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        compared = [
            part
            for node in ast.walk(tree)
            if isinstance(node, ast.Compare)
            for part in node.comparators
        ]
        kept = [
            f"{path.name}:{node.lineno}: {ast.unparse(node)}"
            for node in ast.walk(tree)
            if contraction_in_jax(node) and node not in called and node not in compared
        ]
        assert (imported & CONTRACTIONS, kept) == (set(), []), path


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def arrays(*shapes):
    return lambda seed: [normal(seed + n, *shape) for n, shape in enumerate(shapes)]


def norm_arrays(seed):
    return [normal(seed, 2, 5, 4), normal(seed + 1, 4), normal(seed + 2, 4)]


def steps(gates):
    """The states, and the gates' parts."""
    states = 2 if gates == 4 else 1
    return arrays(*[(3, 2)] * states, (3, 2 * gates), (3, 2 * gates))


def integers(seed, *shape, size):
    return jnp.asarray(np.random.default_rng(seed).integers(0, size, shape))


POOLED = {"window_shape": [2], "strides": None, "padding": "SAME"}
CASES = {
    "activations.prelu": (arrays((3, 4), ()), {}),
    "attention._softmax": (
        arrays((2, 3, 5), (2, 1, 5), (2, 3, 5)),
        {"shape": (2, 3, 5), "factor": 0.5, "is_causal": True, "dtype": jnp.float32},
    ),
    "attention.drop_weights": (
        lambda seed: [normal(seed, 2, 3, 5), jax.random.key(seed)],
        {"rate": 0.5},
    ),
    "attention.extend_cache": (
        lambda seed: [
            *arrays((2, 1, 4, 3), (2, 1, 2, 3), (2, 1, 2, 3), (2, 6, 2, 3), (2, 6, 2, 3))(seed),
            integers(seed, size=6),
        ],
        {},
    ),
    "conv._arranged": (arrays((2, 3, 5, 4)), {"axes": 1, "continued": ((1, 2),), "mode": "wrap"}),
    "conv._flipped": (arrays((3, 2, 4, 5)), {}),
    "dropout.dropout": (
        lambda seed: [normal(seed, 3, 4), jax.random.key(seed)],
        {"rate": 0.3, "broadcast_dims": [0]},
    ),
    "linear.add_bias": (arrays((3, 2, 4), (4,)), {"shape": (1, 1, 4)}),
    "rotary.rotate": (arrays((3, 2, 4), (1, 2, 2), (1, 2, 2)), {}),
    "losses.softmax_cross_entropy": (
        lambda seed: [normal(seed, 3, 4), integers(seed, 3, size=5)],
        {},
    ),
    "norm._as_matrix": (arrays((2, 3, 4), (1, 4)), {}),
    "norm._divided": (arrays((6, 4), (1, 1)), {"shape": (2, 3, 4)}),
    "norm._unit": (arrays((1, 4)), {"epsilon": 1e-12}),
    "norm.batch_norm": (
        lambda seed: [*norm_arrays(seed)[:2], norm_arrays(seed)[2] ** 2, *norm_arrays(seed)[1:]],
        {},
    ),
    "norm.batch_norm_of_batch": (norm_arrays, {"use_fast_variance": False}),
    "norm.group_norm": (norm_arrays, {"groups": 2}),
    "norm.layer_norm": (norm_arrays, {}),
    "norm.rms_norm": (lambda seed: norm_arrays(seed)[:2], {}),
    "norm.running_average": (
        lambda seed: [tuple(norm_arrays(seed)[1:]), tuple(norm_arrays(seed + 1)[1:])],
        {"momentum": 0.9},
    ),
    "norm.weight_norm": (arrays((3, 4), (4,)), {}),
    "pooling._extreme": (arrays((2, 5, 3)), {"reduce_fn": jax.lax.max, **POOLED}),
    "pooling._mean": (arrays((2, 5, 3)), {"count_include_pad": False, **POOLED}),
    "recurrent.conv_lstm_step": (steps(4), {}),
    "recurrent.gru_step": (steps(3), {}),
    "recurrent.lstm_step": (steps(4), {"gate_fn": jax.nn.hard_sigmoid}),
    "recurrent.mgu_step": (steps(2), {"reset_gate": False}),
    "recurrent.simple_step": (steps(1), {"residual": True}),
}
cases = pytest.mark.parametrize(("name", "case"), CASES.items(), ids=CASES)


def find(name):
    module, function = name.split(".")
    return getattr(importlib.import_module(f"linnet.functional.{module}"), function)


def test_every_fused_function_is_here():
    assert decorated("fused") == set(CASES)


@cases
@given(seed=st.integers(0, 10**6))
def test_it_is_the_function_itself(name, case, seed):
    make, options = case
    function = find(name)
    want = function.__wrapped__(*make(seed), **options)
    # The loss of a label that is no class is not a number.
    assert_alike(function(*make(seed), **options), want, equal_nan=True)


def traced(function, args, options):
    return jax.make_jaxpr(functools.partial(function, **options))(*args)


@cases
def test_its_operations_stand_in_the_callers_trace(name, case):
    make, options = case
    function = find(name)
    jaxpr = traced(function, make(0), options)
    assert str(jaxpr) == str(traced(function.__wrapped__, make(0), options))
    assert function.__name__ not in [equation.params.get("name") for equation in jaxpr.eqns]
    assert contractions_in(jaxpr.jaxpr) == 0


CONTRACTING = {
    "linear.dense": (arrays((3, 4), (4, 5), (5,)), {}),
    "linear.low_rank": (arrays((3, 4), (4, 2), (2, 5)), {}),
    "linear.dense_general": (arrays((3, 4), (4, 2, 5), (2, 5)), {}),
    "linear.attend": (arrays((5, 4), (3, 4)), {}),
    "linear.einsum": (arrays((3, 4), (4, 5), (5,)), {"equation": "ab,bc->ac"}),
    "conv.conv": (arrays((2, 6, 4), (3, 4, 5), (5,)), {"padding": "circular"}),
    "conv.conv_transpose": (arrays((6, 4), (3, 4, 5)), {"strides": [2]}),
    "recurrent.dense_gates": (
        lambda seed: [normal(seed, 3, 4), tuple(arrays((4, 5), (4, 5))(seed))],
        {"dtype": jnp.float32},
    ),
    "losses._chunked": (
        lambda seed: [
            *arrays((7, 4), (4, 5))(seed),
            integers(seed, 7, size=5),
            normal(seed, 5),
            None,
        ],
        {
            "reduction": None,
            "chunk_size": 3,
            "transposed": False,
            "logits_dtype": None,
            "precision": None,
        },
    ),
    "attention._fused_where_it_runs": (
        lambda seed: [*arrays((2, 4, 2, 3), (2, 6, 2, 3), (2, 6, 2, 3))(seed), None, None, None],
        {"is_causal": True, "precision": None},
    ),
}
contracting = pytest.mark.parametrize(("name", "case"), CONTRACTING.items(), ids=CONTRACTING)


def test_every_function_that_is_compiled_unless_intercepted_is_here():
    assert decorated("compiled_unless_intercepted") == set(CONTRACTING)


@contracting
def test_a_contraction_is_compiled_unless_somebody_looks_on(monkeypatch, name, case):
    monkeypatch.setattr(attention, "_cudnn", lambda query, *_, **__: jnp.zeros_like(query))
    make, options = case
    function = find(name)
    want = function.__wrapped__(*make(0), **options)
    seen = []
    for intercepts in (False, True, False, True):
        if intercepts:
            with under_their_names(seen.append):
                got = function(*make(0), **options)
            assert seen
            seen.clear()
            assert any(
                not np.allclose(a, b, atol=1e-3)
                for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
            )
        else:
            assert_alike(function(*make(0), **options), want)
    jaxpr = str(traced(function, make(0), options))
    assert jaxpr == str(traced(function.__wrapped__, make(0), options))


def test_functions_are_called_as_they_are_in_every_kind_of_trace():
    seen = []

    @fusing.fused
    def noted(x):
        seen.append(type(x))
        return 2 * x

    x = jnp.ones(2)
    noted(x)
    transforms = (jax.jit, jax.vmap, jax.checkpoint, lambda f: jax.grad(lambda x: f(x).sum()))
    for number, transform in enumerate((*transforms, jax.make_jaxpr), start=2):
        transform(lambda x: noted(x))(x)  # noqa: PLW0108 - JAX keeps the trace of a function
        assert len(seen) == number
    jax.jit(lambda y: noted(x) + y)(x)  # a trace is running, and the argument is not part of it
    assert inspect.isclass(seen[-1])
    assert issubclass(seen[-1], jax.Array)
    assert not issubclass(seen[-1], jax.core.Tracer)
    assert len(seen) == 7
