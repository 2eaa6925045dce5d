"""Sharded models: arrays go to where they belong, from whichever devices they were saved."""

from programs import run

PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding
from linnet import io, nnx
from linnet.errors import CheckpointArgumentError

path = sys.argv[1]
assert len(jax.devices()) == 4
mesh = jax.make_mesh((4,), ("model",))
rows, columns = NamedSharding(mesh, P("model", None)), NamedSharding(mesh, P(None, "model"))


class LayersAndKeys(nnx.Module):
    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List([nnx.Linear(8, 8, use_bias=False, rngs=rngs) for _ in range(2)])
        self.scale = nnx.Param(jnp.full((4,), float(seed)))
        self.keys = nnx.RngKey(jax.random.split(jax.random.key(seed), 4))


def values(model):
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state(model, nnx.Param))]


def is_restored(model):
    saved = LayersAndKeys(0)
    pairs = zip(values(model), values(saved), strict=True)
    return all((a == b).all() for a, b in pairs) and (model.keys[...] == saved.keys[...]).all()


def place(model, sharding):
    for layer in model.layers:
        layer.kernel.value = jax.device_put(layer.kernel.value, sharding)
    return model


# A sharded model is saved, and comes back into one with another sharding.
io.save(path + "/rows", model=place(LayersAndKeys(0), rows))
model = place(LayersAndKeys(1), columns)
io.restore(path + "/rows", model=model)
assert is_restored(model)
assert all(layer.kernel[...].sharding == columns for layer in model.layers)
assert model.layers[0].kernel[...].addressable_shards[2].data.shape == (8, 2)

# An abstract model: each array is made with its sharding, keys as well.
abstract = nnx.eval_shape(lambda: LayersAndKeys(1))
def shard(x):
    spec = {2: P(None, "model"), 1: P("model")}[len(x.shape)]
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
abstract = jax.tree.map(shard, abstract)
io.restore(path + "/rows", model=abstract)
assert is_restored(abstract)
assert abstract.layers[1].kernel[...].sharding == columns
assert abstract.scale[...].sharding == NamedSharding(mesh, P("model"))
assert abstract.keys[...].sharding == NamedSharding(mesh, P("model"))

# What JAX was free to move stays free, what was not is where it was.
model = LayersAndKeys(1)
io.restore(path + "/rows", model=model)
assert is_restored(model) and not model.scale[...].committed and not model.keys[...].committed
jax.jit(lambda x: x, in_shardings=columns)(model.layers[0].kernel[...])
third = SingleDeviceSharding(jax.devices()[2])
model.scale.value = jax.device_put(jnp.zeros(4), third)
io.restore(path + "/rows", model=model)
assert model.scale[...].sharding == third and float(model.scale[0]) == 0.0

# Stacked from listed layers, onto the mesh.
class Stacked(nnx.Module):
    def __init__(self, seed):
        make = lambda rngs: nnx.Linear(8, 8, use_bias=False, rngs=rngs)
        self.layers = nnx.Stack(make, 2, rngs=nnx.Rngs(seed))
stacked = nnx.eval_shape(lambda: Stacked(1))
deep = NamedSharding(mesh, P(None, "model", None))
stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=deep), stacked)
left_out = {"model/scale": None, "model/keys": None}
io.restore(path + "/rows", model=stacked, rename=left_out)
assert stacked.layers.stacked.kernel[...].sharding == deep
assert (stacked.layers.stacked.kernel[1] == LayersAndKeys(0).layers[1].kernel[...]).all()

# A sharding that does not divide its entry.
io.save(path + "/three", x=jnp.ones(3))
io.save_safetensors(path + "/three.safetensors", {"x": jnp.ones(3)})
wanted = jax.ShapeDtypeStruct((3,), "float32", sharding=NamedSharding(mesh, P("model")))
for restore in (
    lambda: io.restore(path + "/three", x=wanted),
    lambda: io.load_safetensors(path + "/three.safetensors", {"x": wanted}),
):
    try:
        restore()
    except CheckpointArgumentError as error:
        text = str(error)
        assert text.startswith("x is float32[3], which NamedSharding(mesh="), text
        assert "cannot divide evenly.\\nFix: replicate that axis, or choose" in text, text
    else:
        raise AssertionError("it was not refused")

# An optimizer's moments follow their parameters.
model = place(LayersAndKeys(0), rows)
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
with io.Manager(path + "/run") as manager:
    manager.save(1, model=model, optimizer=optimizer)
    manager.restore(model=model, optimizer=optimizer)
    mu = optimizer.opt_state[0].mu["layers"][0]["kernel"][...]
    assert mu.sharding.is_equivalent_to(rows, 2), mu.sharding
print("all well")
"""


def test_arrays_go_to_where_they_belong(tmp_path):
    assert run(PROGRAM, tmp_path, devices=4).stdout.endswith("all well\n")
