"""A page on NNX's basics, of the time of pytrees: its cells in order, with checks."""

from flax import nnx
import jax
import jax.numpy as jnp

nnx.graphlib.set_graph_mode(False)
nnx.graphlib.set_graph_updates(False)


# %%
class Count(nnx.Variable):
    pass


class Linear(nnx.Pytree):
    def __init__(self, din: int, dout: int, *, rngs: nnx.Rngs):
        self.din, self.dout = (din, dout)
        self.w = nnx.Param(rngs.uniform((din, dout)))
        self.count = Count(jnp.array(0))

    def __call__(self, x: jax.Array):
        self.count[...] += 1
        return x @ self.w


model = Linear(2, 5, rngs=nnx.Rngs(0))
nnx.display(model)
# %%
x = jnp.ones((3, 2))
y = model(x)
print(f"y.shape = {y.shape!r}, model.count[...] = {model.count[...]!r}")
doubled_model = jax.tree.map(lambda x: x * 2, model)
print(f"\nmodel.w sum: {model.w.sum():.4f}")
print(f"doubled.w sum: {doubled_model.w.sum():.4f}")
print("\nPytree leaves:")
for path, value in jax.tree.leaves_with_path(model):
    print(f"{jax.tree_util.keystr(path)}: {value!r}")
# %%
rngs = nnx.Rngs(0)
key1 = rngs()
key2 = rngs()
arr = rngs.normal((2, 3))
print(f"key1 = {key1!r}")
print(f"key2 = {key2!r}")
print(f"arr = {arr!r}")
print(rngs)


# %%
class MLP(nnx.Pytree):
    def __init__(self, din: int, dmid: int, dout: int, *, rngs: nnx.Rngs):
        self.din, self.dmid, self.dout = (din, dmid, dout)
        self.linear1 = Linear(din, dmid, rngs=rngs)
        self.linear2 = Linear(dmid, dout, rngs=rngs)

    def __call__(self, x: jax.Array):
        x = nnx.relu(self.linear1(x))
        return self.linear2(x)


mlp = MLP(2, 16, 5, rngs=nnx.Rngs(0))
y = mlp(jnp.ones((3, 2)))
print(f"y.shape = {y.shape!r}")
nnx.display(mlp)
# %%
model = Linear(2, 5, rngs=nnx.Rngs(0))


@jax.jit
def forward(model, x):
    y = model(x)
    return y


y = forward(model, x)
print(model.count[...])

assert int(model.count[...]) == 0
# %%
model = Linear(2, 5, rngs=nnx.Rngs(0))


@jax.jit
def forward(model, x):
    y = model(x)
    return (y, nnx.state(model, Count))


y, updates = forward(model, x)
nnx.update(model, updates)
print(model.count[...])

assert int(model.count[...]) == 1
# %%
import optax

x, y = (jnp.ones((3, 2)), jnp.ones((3, 5)))
model = Linear(2, 5, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(0.001), wrt=nnx.Param)


@jax.jit
def train_step(model, optimizer, x, y):
    graphdef, params, nondiff = nnx.split(model, nnx.Param, ...)

    def loss_fn(params, nondiff):
        nondiff = nnx.clone(nondiff)
        model = nnx.merge(graphdef, params, nondiff)
        loss = jnp.mean((model(x) - y) ** 2)
        return (loss, nnx.state(model, Count))

    grads, updates = jax.grad(loss_fn, has_aux=True)(params, nondiff)
    nnx.update(model, updates)
    optimizer.update(model, grads)
    return nnx.state((model, optimizer))


updates = train_step(model, optimizer, x, y)
nnx.update((model, optimizer), updates)
print(f"model.count[...] = {model.count[...]!r}")
print(f"optimizer.step[...] = {optimizer.step[...]!r}")

assert int(model.count[...]) == 1 and int(optimizer.step[...]) == 1
# %%
x, y = (jnp.ones((3, 2)), jnp.ones((3, 5)))
model = Linear(2, 5, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(0.001), wrt=nnx.Param)


@nnx.jit
def train_step(model, optimizer, x, y):
    graphdef, params, nondiff = nnx.split(model, nnx.Param, ...)

    def loss_fn(params, nondiff):
        model = nnx.merge(graphdef, params, nondiff)
        loss = jnp.mean((model(x) - y) ** 2)
        return loss

    grads = nnx.grad(loss_fn)(params, nondiff)
    optimizer.update(model, grads)


train_step(model, optimizer, x, y)
print(f"model.count[...] = {model.count[...]!r}")
print(f"optimizer.step[...] = {optimizer.step[...]!r}")

assert int(model.count[...]) == 1 and int(optimizer.step[...]) == 1


# %%
@nnx.dataclass
class Foo(nnx.Module):
    a: nnx.Param
    b: nnx.Param


p = nnx.Param(jnp.array(1.0))
model = Foo(p, p)


@nnx.jit
def forward(model, x):
    model.a[...] += 1.0
    return model.a * x + model.b


try:
    forward(model, jnp.array(1.0))
except ValueError as e:
    print(f"Error: {e}")


# %%
@nnx.jit(graph=True)
def forward(model, x):
    model.a[...] += 1.0
    return model.a * x + model.b


y = forward(model, jnp.array(1.0))
print(f"y = {y!s}, model.a[...] = {model.a[...]!s}, model.b[...] = {model.b[...]!s}")

assert model.a is model.b and float(y) == 4.0
# %%
with nnx.var_defaults(hijax=True):
    x, y = (jnp.ones((3, 2)), jnp.ones((3, 5)))
    model = Linear(2, 5, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.001), wrt=nnx.Param)
print(model)


@jax.jit
def train_step(model, optimizer, x, y):
    graphdef, params, nondiff = nnx.split(model, nnx.Param, ...)

    def loss_fn(params):
        model = nnx.merge(graphdef, params, nondiff)
        loss = jnp.mean((model(x) - y) ** 2)
        return loss

    grads = jax.grad(loss_fn)(nnx.vars_as(params, hijax=False))
    optimizer.update(model, grads)


train_step(model, optimizer, x, y)
print(f"model.count[...] = {model.count[...]!r}")
print(f"optimizer.step[...] = {optimizer.step[...]!r}")

assert int(model.count[...]) == 1 and int(optimizer.step[...]) == 1
# %%
v = nnx.Variable(jnp.array(1), hijax=True)


@jax.jit
def inc(v):
    v[...] += 1


print(f"v[...] = {v[...]!s}")
inc(v)
print(f"v[...] = {v[...]!s}")

assert int(v[...]) == 2
