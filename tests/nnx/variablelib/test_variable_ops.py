"""A Variable stands wherever its array could: operators, conversions, JAX and NumPy functions."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import InPlaceError
from tests.compare import identical
from tests.models import Bag

ARITHMETIC = "add sub mul truediv floordiv mod pow lt le gt ge eq ne".split()
BITWISE = "and_ or_ xor lshift rshift".split()
IN_PLACE = "iadd isub imul itruediv ifloordiv imod ipow".split()
IN_PLACE_BITWISE = "iand ior ixor ilshift irshift".split()

FLOATS = jnp.array([3.0, -2.0]), jnp.array([2.0, 4.0])
INTS = jnp.array([6, 3]), jnp.array([1, 2])

PAIRS = {
    "variable and array": lambda a, b: (nnx.Param(a), b),
    "array and variable": lambda a, b: (a, nnx.Param(b)),
    "two variables": lambda a, b: (nnx.Param(a), nnx.Cache(b)),
    "variable and numpy": lambda a, b: (nnx.Param(a), np.asarray(b)),
    "numpy and variable": lambda a, b: (np.asarray(a), nnx.Param(b)),
    "variable of numpy": lambda a, b: (nnx.Param(np.asarray(a)), b),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", [*ARITHMETIC, *BITWISE])
def test_operators_work_both_ways(name, pair):
    op = getattr(operator, name)
    a, b = INTS if name in BITWISE else FLOATS
    assert identical(op(*PAIRS[pair](a, b)), op(a, b))


@pytest.mark.parametrize("name", ARITHMETIC)
def test_operators_with_numbers(name):
    op, x = getattr(operator, name), FLOATS[0]
    assert identical(op(nnx.Param(x), 2), op(x, 2))
    assert identical(op(2, nnx.Param(x)), op(2, x))
    assert identical(op(nnx.Param(3), 2), op(3, 2))


@pytest.mark.parametrize("pair", PAIRS)
def test_matmul_and_divmod(pair):
    a, b = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[0.0, 1.0], [1.0, 1.0]])
    left, right = PAIRS[pair](a, b)
    assert identical(left @ right, a @ b)
    assert identical(divmod(*PAIRS[pair](*FLOATS)), divmod(*FLOATS))


@pytest.mark.parametrize(
    "op",
    [operator.neg, operator.pos, abs, lambda x: round(x, 1), int, float, complex, str, bool],
)
def test_unary_operators_and_conversions(op):
    x = jnp.array(-1.26)
    got, want = op(nnx.Param(x)), op(x)
    if op is str:
        assert got == repr(nnx.Param(x))
    else:
        assert identical(got, want)


def test_invert_round_and_index():
    assert identical(round(nnx.Variable(jnp.array(3.7))), jnp.array(4.0))
    assert identical(~nnx.Variable(INTS[0]), ~INTS[0])
    assert ["a", "b", "c"][nnx.Variable(jnp.array(2))] == "c"
    assert list(range(nnx.Variable(jnp.array(3)))) == [0, 1, 2]


def test_len_iteration_and_membership():
    v = nnx.Param(jnp.array([1.0, 2.0]))
    assert len(v) == 2
    assert [float(x) for x in v] == [1.0, 2.0]
    assert 2.0 in v
    assert 3.0 not in v
    assert nnx.Param(jnp.array(1.0)) in v
    table = nnx.Variable({"a": 1, "b": 2})
    assert (len(table), list(table), "a" in table, dict(table.items())) == (
        2,
        ["a", "b"],
        True,
        {"a": 1, "b": 2},
    )


def test_truth_is_that_of_a_scalar_and_of_anything_else_that_it_is_there():
    assert nnx.Variable(jnp.array(True))
    assert not nnx.Variable(jnp.array(0.0))
    assert nnx.Variable(jnp.zeros(2))
    assert nnx.Variable(jnp.zeros((1, 3)))
    assert not nnx.Variable(jnp.zeros((0, 3)))
    assert jax.jit(lambda v: 1 if v else 0)(nnx.Param(jnp.zeros(2))) == 1


def test_variables_have_no_hash():
    with pytest.raises(TypeError, match="unhashable type: 'Param'"):
        hash(nnx.Param(1.0))


def test_formatting():
    loss = nnx.Variable(jnp.array(0.12345))
    assert f"{loss:.3f}" == "0.123"
    assert f"{loss}" == str(loss) == repr(loss)
    assert "%.2f" % loss == "0.12"  # noqa: UP031
    assert f"{nnx.Variable(7):03d}" == "007"


# ---- in place --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*IN_PLACE, *IN_PLACE_BITWISE])
@pytest.mark.parametrize("wrap", [lambda x: x, nnx.Variable], ids=["array", "variable"])
def test_in_place_operators_keep_the_variable(name, wrap):
    op = getattr(operator, name)
    a, b = INTS if name in IN_PLACE_BITWISE else FLOATS
    v = nnx.Variable(a)
    assert op(v, wrap(b)) is v
    assert identical(v.value, op(a, b))


def test_in_place_on_an_attribute_keeps_the_attribute():
    m = Bag(v=nnx.Variable(jnp.array(1)))
    v = m.v
    m.v += 1
    m.v *= 5
    assert m.v is v
    assert identical(v.value, jnp.array(10))


def test_in_place_matmul():
    v = nnx.Variable(jnp.array([[1.0, 2.0], [3.0, 4.0]]))
    v @= jnp.array([[0.0, 1.0], [1.0, 0.0]])
    np.testing.assert_array_equal(v.value, [[2.0, 1.0], [4.0, 3.0]])


@pytest.mark.parametrize(
    ("value", "other", "change"),
    [
        (jnp.zeros(()), jnp.ones(3), r"from float32\[\] to float32\[3\]"),
        (jnp.array([1, 2]), 0.5, r"from int32\[2\] to float32\[2\]"),
        (jnp.ones(2, jnp.bfloat16), np.ones(2, np.float32), r"bfloat16\[2\] to float32\[2\]"),
        (1, 0.5, "from the Python int 1 to the Python float 1.5"),
    ],
)
def test_in_place_refuses_another_type(value, other, change):
    m = Bag(v=nnx.Variable(value))
    with pytest.raises(
        InPlaceError, match=rf"`\+=` on Variable at m\.v would change it .*{change}"
    ):
        m.v += other
    assert m.v.value is value


def test_a_local_name_cannot_rewrite_a_bias_unseen():
    bias, x = nnx.Param(jnp.zeros(3)), jnp.ones((2, 3))
    with jax.numpy_rank_promotion("allow"), pytest.raises(InPlaceError) as error:
        y = bias
        y += x
    assert str(error.value) == (
        "`+=` on Param at bias would change it from float32[3] to float32[2,3], in place, for "
        "everyone who holds it.\n"
        "Fix: for a new value write `y = variable + x`; to change the Variable itself assign "
        "`variable.value = ...`."
    )
    assert isinstance(error.value, (ValueError, NotImplementedError))
    np.testing.assert_array_equal(bias.value, jnp.zeros(3))


def test_in_place_on_containers():
    table = nnx.Variable({"a": 1})
    table |= {"b": 2}
    items = nnx.Variable([1])
    items += [2]
    assert table.value == {"a": 1, "b": 2}
    assert items.value == [1, 2]


# ---- as an argument of JAX and NumPy ------------------------------------------------------------

X = jnp.array([[1.0, 2.0, 3.0], [0.5, 0.0, -1.0]])
P = jnp.array([1.0, -2.0, 3.0])

JAX_FUNCTIONS = {
    "matmul": lambda p: jnp.matmul(X, p),
    "concatenate": lambda p: jnp.concatenate([p, p]),
    "stack": lambda p: jnp.stack([p, P]),
    "where": lambda p: jnp.where(p > 0, p, 0.0),
    "sum": jnp.sum,
    "einsum": lambda p: jnp.einsum("ij,j->i", X, p),
    "zeros_like": jnp.zeros_like,
    "asarray": jnp.asarray,
    "array": jnp.array,
    "softmax": jax.nn.softmax,
    "set": X.at[0].set,
    "cond": lambda p: jax.lax.cond(p[0] > 0, lambda: 1.0, lambda: 2.0),
    "scan": lambda p: jax.lax.scan(lambda c, x: (c + x, c), 0.0, p)[0],
    "jit": jax.jit(lambda p: p * 2),
    "vmap": jax.vmap(lambda p: p * 2),
}


@pytest.mark.parametrize("name", JAX_FUNCTIONS)
def test_jax_functions_take_variables(name):
    f = JAX_FUNCTIONS[name]
    assert identical(f(nnx.Param(P)), f(P))


def test_jnp_queries_take_variables():
    p = nnx.Param(X)
    assert (jnp.shape(p), jnp.ndim(p), jnp.size(p)) == ((2, 3), 2, 6)
    assert jnp.result_type(p) == jnp.float32
    assert identical(jnp.arange(nnx.Variable(jnp.array(3))), jnp.arange(3))


NUMPY_FUNCTIONS = {
    "asarray": np.asarray,
    "as float16": lambda p: np.asarray(p, np.float16),
    "array": np.array,
    "add": lambda p: np.add(np.ones(3, np.float32), p),
    "exp": np.exp,
    "concatenate": lambda p: np.concatenate([p, np.zeros(1, np.float32)]),
    "allclose": lambda p: np.allclose(p, [1.0, -2.0, 3.0]),
}


@pytest.mark.parametrize("name", NUMPY_FUNCTIONS)
def test_numpy_functions_take_variables(name):
    f = NUMPY_FUNCTIONS[name]
    assert identical(f(nnx.Param(P)), f(np.asarray(P)))


def test_a_copy_for_numpy_is_its_own():
    v = nnx.Variable(np.zeros(2))
    copied = np.array(v, copy=True)
    copied[0] = 5.0
    assert v.value.tolist() == [0.0, 0.0]
    numbers = np.arange(4)
    assert numbers[nnx.Variable(jnp.array([1, 3]))].tolist() == [1, 3]


@pytest.mark.parametrize(
    "index",
    [0, -1, slice(None), slice(1, None), (0, 1), (slice(None), 0), None, (None, slice(None)), ...],
)
def test_indexing(index):
    assert identical(nnx.Param(X)[index], X[index])


def test_variables_as_indices():
    row, columns = nnx.Variable(jnp.array(1)), nnx.Variable(jnp.array([0, 2]))
    v = nnx.Param(X)
    assert identical(v[columns[:1]], X[jnp.array([0])])
    assert identical(v[row, columns], X[1, jnp.array([0, 2])])
    v[row, columns] = nnx.Variable(jnp.array(9.0))
    np.testing.assert_array_equal(v.value, [[1.0, 2.0, 3.0], [9.0, 0.0, 9.0]])


@pytest.mark.parametrize("name", "shape dtype ndim size T nbytes weak_type".split())
def test_array_attributes(name):
    got, want = getattr(nnx.Param(X), name), getattr(X, name)
    if name == "T":
        np.testing.assert_array_equal(got, want)
    else:
        assert identical(got, want)


def test_array_methods():
    v = nnx.Param(X)
    assert identical(v.sum(axis=0), X.sum(axis=0))
    assert identical(v.astype(jnp.int32), X.astype(jnp.int32))
    assert identical(v.at[0, 0].set(7.0), X.at[0, 0].set(7.0))
    assert identical(v.reshape(-1), X.reshape(-1))
    assert v[0, 0].item() == 1.0
    assert v.block_until_ready() is v.value
