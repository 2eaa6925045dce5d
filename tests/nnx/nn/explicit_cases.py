"""Every layer on eight devices with explicit axes. Run as a program; prints what went wrong."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from linnet import nnx
from tests.compare import assert_close
from tests.models import numpy_normal
from tests.subprocesses import Cases

CASES = case = Cases()
LAYERS = {
    *(nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Embed, nnx.Conv, nnx.ConvTranspose),
    *(nnx.LoRA, nnx.LoRALinear, nnx.PReLU, nnx.Dropout, nnx.RoPE, nnx.MultiHeadAttention),
    *(nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm, nnx.InstanceNorm, nnx.BatchNorm),
    *(nnx.WeightNorm, nnx.SpectralNorm, nnx.Stack, nnx.RNN, nnx.Bidirectional),
    *(nnx.GRUCell, nnx.SimpleCell, nnx.LSTMCell, nnx.OptimizedLSTMCell),
}
WIDTH = 8


def make_mesh():
    return jax.make_mesh((4, 2), ("batch", "features"), axis_types=(AxisType.Explicit,) * 2)


def whole(x):
    return jax.device_put(x, NamedSharding(make_mesh(), P()))


def shardings(x):
    """An array as it is fed: along the batch, and along batch and features."""
    specs = [P("batch")]
    if x.ndim > 1 and x.shape[-1] == WIDTH:
        specs.append(P("batch", *[None] * (x.ndim - 2), "features"))
    return [jax.device_put(x, NamedSharding(make_mesh(), spec)) for spec in specs]


def compare(build, *inputs, **kwargs):
    """One layer with its inputs sharded in each way, against the same on one device."""

    def run(layer, *inputs):
        return layer(*inputs, **kwargs)

    layer = build()
    want = nnx.jit(run)(layer, *map(jnp.asarray, inputs))
    state = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(layer, nnx.Not(nnx.RngState))))
    first, *rest = inputs
    for x in shardings(first):
        graphdef, values = nnx.split(build())
        with jax.set_mesh(make_mesh()):
            copy = nnx.merge(graphdef, jax.tree.map(whole, values))
            others = [jax.device_put(y, NamedSharding(make_mesh(), P("batch"))) for y in rest]
            got = nnx.jit(run)(copy, x, *others)
            after = nnx.to_pure_dict(nnx.state(copy, nnx.Not(nnx.RngState)))
        text = f"{type(layer).__name__} of {x.sharding.spec}"
        assert_close(got, want, 2e-5, 2e-6, text)
        assert_close(after, state, 2e-5, 2e-6, text)


# Numbers of NumPy: JAX may not run before the number of devices is set.
X = numpy_normal(8, WIDTH)
SEQUENCE = numpy_normal(8, 4, WIDTH)
IMAGE = numpy_normal(8, 4, 4, WIDTH)
CARRY = numpy_normal(8, WIDTH, seed=1)
IDS = np.arange(16).reshape(8, 2) % 6


def rngs():
    return nnx.Rngs(0)


def add(name, build, *inputs, **kwargs):
    CASES[name] = functools.partial(compare, build, *inputs, **kwargs)


add("linear", lambda: nnx.Linear(WIDTH, 6, rngs=rngs()), X)
add("linear_general", lambda: nnx.LinearGeneral(WIDTH, (2, 6), rngs=rngs()), SEQUENCE)
add("einsum", lambda: nnx.Einsum("...b,bc->...c", (WIDTH, 6), (6,), rngs=rngs()), SEQUENCE)
add("embed", lambda: nnx.Embed(6, WIDTH, rngs=rngs()), IDS)
add("conv", lambda: nnx.Conv(WIDTH, 6, (3, 3), rngs=rngs()), IMAGE)
add("conv_transpose", lambda: nnx.ConvTranspose(WIDTH, 6, (3, 3), rngs=rngs()), IMAGE)
add("lora", lambda: nnx.LoRA(WIDTH, 2, 6, rngs=rngs()), X)
add("lora_linear", lambda: nnx.LoRALinear(WIDTH, 6, lora_rank=2, rngs=rngs()), X)
add("prelu", nnx.PReLU, X)
add("layer_norm", lambda: nnx.LayerNorm(WIDTH, rngs=rngs()), SEQUENCE)
add("rms_norm", lambda: nnx.RMSNorm(WIDTH, rngs=rngs()), SEQUENCE)
add("group_norm", lambda: nnx.GroupNorm(WIDTH, 2, rngs=rngs()), IMAGE)
add("instance_norm", lambda: nnx.InstanceNorm(WIDTH, rngs=rngs()), IMAGE)
add("batch_norm", lambda: nnx.BatchNorm(WIDTH, rngs=rngs()), SEQUENCE)
add("weight_norm", lambda: nnx.WeightNorm(nnx.Linear(WIDTH, 6, rngs=rngs()), rngs=rngs()), X)
add("spectral_norm", lambda: nnx.SpectralNorm(nnx.Linear(WIDTH, 6, rngs=rngs()), rngs=rngs()), X)
add("dropout", lambda: nnx.Dropout(0.5, rngs=rngs()), SEQUENCE)
add("rope", nnx.RoPE, SEQUENCE)
add(
    "attention",
    lambda: nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs()),
    SEQUENCE,
)
add(
    "attention_with_dropout",
    lambda: nnx.MultiHeadAttention(
        2, WIDTH, dropout_rate=0.5, deterministic=False, normalize_qk=True, rngs=rngs()
    ),
    SEQUENCE,
    is_causal=True,
)
for cell in (nnx.GRUCell, nnx.SimpleCell):
    add(
        cell.__name__,
        lambda cell=cell: Flipped(cell(WIDTH, WIDTH, rngs=rngs())),
        X,
        CARRY,
    )
for cell in (nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.GRUCell):
    add(
        f"recurrent_{cell.__name__}",
        lambda cell=cell: nnx.RNN(cell(WIDTH, 6, rngs=rngs())),
        SEQUENCE,
    )
add(
    "bidirectional",
    lambda: nnx.Bidirectional(
        nnx.RNN(nnx.GRUCell(WIDTH, 6, rngs=rngs())), nnx.RNN(nnx.GRUCell(WIDTH, 6, rngs=rngs()))
    ),
    SEQUENCE,
)
add("stack", lambda: nnx.Stack(Residual, 2, rngs=rngs()), X)


class Residual(nnx.Module):
    """A layer whose output lies where its input does."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        sharding = jax.typeof(x).sharding
        return self.inner(x, out_sharding=None if sharding.mesh.empty else sharding.spec)


class Flipped(nnx.Module):
    """A cell whose input comes first."""

    def __init__(self, cell):
        self.cell = cell

    def __call__(self, x, carry):
        return self.cell(carry, x)


if __name__ == "__main__":
    case.run_on_devices(8)
