"""A page on JAX and Flax: its cells in order, with checks after some of them."""

import jax
import jax.numpy as jnp
import flax
from flax import nnx
from functools import partial

jax.config.update("jax_num_cpu_devices", 8)


# %%
def jax_linear(x, kernel, bias):
    return jnp.dot(x, kernel) + bias


params = {"kernel": jax.random.normal(jax.random.key(42), (4, 2)), "bias": jnp.zeros((2,))}
x = jax.random.normal(jax.random.key(0), (2, 4))
y = jax_linear(x, params["kernel"], params["bias"])
# %%
linear = nnx.Linear(in_features=4, out_features=2, rngs=nnx.Rngs(42))
print(type(linear.kernel))
print(type(linear.kernel.value))
x = jax.random.normal(jax.random.key(0), (2, 4))
flax_y = linear(x)
jax_y = jax_linear(x, linear.kernel.value, linear.bias.value)
assert jnp.array_equal(flax_y, jax_y)
# %%
arrays, treedef = jax.tree.flatten_with_path(linear)
assert len(arrays) > 1
for kp, value in arrays:
    print(f"linear{jax.tree_util.keystr(kp)}: {value}")
print(f"treedef = {treedef!r}")
linear = jax.tree.unflatten(treedef, [value for _, value in arrays])
# %%
y = jax.jit(linear)(x)


# %%
class Foo(nnx.Module):
    def __init__(self, dim, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.param(), (dim, dim)))
        self.dim = dim
        self.traced_dim = nnx.Param(dim)
        self.rng = rngs


foo = Foo(4, nnx.Rngs(0))
for kp, x in jax.tree.flatten_with_path(nnx.state(foo))[0]:
    print(f"{jax.tree_util.keystr(kp)}: {x}")


# %%
@jax.jit
def jitted(model):
    print(f"model.dim = {model.dim!r}")
    print(f"model.traced_dim.value = {model.traced_dim.value!r}")
    if model.dim == 4:
        print("Code path based on static data value works fine.")
    try:
        if model.traced_dim.value == 4:
            print("This will never run :(")
    except jax.errors.TracerBoolConversionError as e:
        print(f"Code path based on JAX data value throws error: {e}")


jitted(foo)
# %%
print(x)
abs_x = jax.eval_shape(lambda x: x, x)
print(abs_x)

assert abs_x.shape == (4, 4) and isinstance(abs_x, jax.ShapeDtypeStruct)


# %%
class MLP(nnx.Module):
    def __init__(self, dim, nlayers, rngs):
        self.blocks = [nnx.Linear(dim, dim, rngs=rngs) for _ in range(nlayers)]
        self.activation = jax.nn.relu
        self.nlayers = nlayers

    def __call__(self, x):
        for block in self.blocks:
            x = self.activation(block(x))
        return x


dim, nlayers = (8190, 64)


@partial(jax.jit, static_argnums=(0, 1))
def init_state(dim, nlayers):
    return MLP(dim, nlayers, nnx.Rngs(0))


abstract_model = jax.eval_shape(partial(init_state, dim, nlayers))
print(abstract_model.blocks[0])
# %%
dim, nlayers = (1024, 2)
abstract_model = jax.eval_shape(partial(init_state, dim, nlayers))
mesh = jax.make_mesh((jax.device_count(),), "model", axis_types=(jax.sharding.AxisType.Auto,))


def make_sharding(abs_x):
    if len(abs_x.shape) > 1:
        pspec = jax.sharding.PartitionSpec(None, "model")
    else:
        pspec = jax.sharding.PartitionSpec("model")
    return jax.sharding.NamedSharding(mesh, pspec)


model_shardings = jax.tree.map(make_sharding, abstract_model)
print(model_shardings.blocks[0].kernel)


@partial(jax.jit, static_argnums=(0, 1))
def sharded_init(dim, nlayers):
    model = MLP(dim, nlayers, nnx.Rngs(0))
    return jax.lax.with_sharding_constraint(model, model_shardings)


model = sharded_init(dim, nlayers)
jax.debug.visualize_array_sharding(model.blocks[0].kernel.value)

k = model.blocks[0].kernel
k = getattr(k, "value", k)
assert len(k.sharding.device_set) == 8 and k.addressable_shards[0].data.shape == (1024, 128)
