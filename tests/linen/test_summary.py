"""tabulate and module_paths."""

import jax
import jax.numpy as jnp

from linnet import linen as nn

KEY = jax.random.key(0)
X = jnp.ones((2, 3))
PLAIN = {"console_kwargs": {"width": 150, "force_terminal": False}}


class Dense(nn.Module):
    features: int
    use_bias: bool = True

    @nn.compact
    def __call__(self, x):
        y = x @ self.param("kernel", jax.nn.initializers.ones, (x.shape[-1], self.features))
        if self.use_bias:
            y = y + self.param("bias", jax.nn.initializers.zeros, (1, self.features))
        return y


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        names = nn.with_partitioning(jax.nn.initializers.ones, ("data",))
        self.variable("stats", "mean", lambda: names(KEY, (2,)))
        return Dense(4)(x)


class Model(nn.Module):
    def setup(self):
        self.a = Block()
        self.b = Dense(2, use_bias=False)

    def encode(self, x):
        return {"h": self.a(x), "k": [1, None]}

    def __call__(self, x, *, train=True):
        return self.b(self.encode(x)["h"]), self.b(self.a(x))


def test_a_table_of_all_modules():
    table = Model().tabulate(KEY, X, train=False, **PLAIN)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines()]
    rows = [row for row in rows if row]
    assert rows[0] == ["path", "module", "inputs", "outputs", "params", "stats"]
    assert rows[1] == ["", "Model", "f32[2,3]", "f32[2,2]", "", ""]
    assert rows[2] == ["", "", "train: False", "f32[2,2]", "", ""]
    assert rows[3] == ["a", "Block", "f32[2,3]", "f32[2,4]", "", "mean: f32[2] ('data',)"]
    assert rows[5] == ["a/Dense_0", "Dense", "f32[2,3]", "f32[2,4]", "bias: f32[1,4]", ""]
    assert rows[6][4] == "kernel: f32[3,4]" and rows[7][4] == "16 (64 B)"
    assert rows[-1] == ["total", "", "", "", "24 (96 B)", "2 (8 B)"]


def test_depth_and_repeated_calls():
    shallow = Model().tabulate(KEY, X, depth=1, **PLAIN)
    assert "Dense_0" not in shallow and "16 (64 B)" in shallow and "24 (96 B)" in shallow
    repeated = Model().tabulate(KEY, X, show_repeated=True, **PLAIN)
    assert repeated.count("a/Dense_0") == 2 and "Model (encode)" in repeated
    assert "24 (96 B)" in repeated, "each parameter counts once"


def test_operations_are_those_that_flax_counts():
    table = nn.tabulate(Dense(4), KEY, compute_flops=True, compute_vjp_flops=True, **PLAIN)(X)
    row = next(line for line in table.splitlines() if "Dense" in line and "f32" in line)
    assert [cell.strip() for cell in row.split("│")][5:7] == ["56", "172"]


def test_paths_of_modules():
    paths = Model().module_paths(KEY, X)
    assert list(paths) == ["", "a", "a/Dense_0", "b"]
    assert paths["b"] == Dense(2, use_bias=False, name="b") and paths["b"].scope is None


def test_nothing_is_computed():
    class Loud(nn.Module):
        @nn.compact
        def __call__(self, x):
            assert isinstance(x, jax.core.Tracer)
            return self.param("w", lambda key: jnp.ones((10**6, 10**6)))

    assert "1,000,000,000,000 (4.0 TB)" in Loud().tabulate(KEY, X, **PLAIN)


class Twice(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return nn.Dense(4)(x), None


def test_operations_in_lifted_transforms():
    split = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
    counts = {"compute_flops": True, "compute_vjp_flops": True}
    table = nn.scan(Twice, length=2, **split)().tabulate(KEY, jnp.ones((3, 4)), **counts, **PLAIN)
    row = next(line for line in table.splitlines() if "Dense_0" in line)
    assert [cell.strip() for cell in row.split("│")[5:8]] == ["108", "328", "bias: f32[2,4]"]
    for lifted in (nn.vmap(Twice, **split)(), nn.remat(Twice)(), nn.RNN(nn.LSTMCell(3))):
        assert "vjp_flops" in lifted.tabulate(KEY, jnp.ones((1, 3, 4)), **counts, **PLAIN)
