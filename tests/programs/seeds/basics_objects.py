"""A page on NNX's basics, of the time of graphs: its cells in order, with checks."""

from flax import nnx
import jax
import jax.numpy as jnp


# %%
class Linear(nnx.Module):
    def __init__(self, din: int, dout: int, *, rngs: nnx.Rngs):
        key = rngs.params()
        self.w = nnx.Param(jax.random.uniform(key, (din, dout)))
        self.b = nnx.Param(jnp.zeros((dout,)))
        self.din, self.dout = (din, dout)

    def __call__(self, x: jax.Array):
        return x @ self.w + self.b


# %%
model = Linear(2, 5, rngs=nnx.Rngs(params=0))
y = model(x=jnp.ones((1, 2)))
print(y)
nnx.display(model)

assert y.shape == (1, 5) and isinstance(model.w, nnx.Param)


# %%
class Count(nnx.Variable):
    pass


class Counter(nnx.Module):
    def __init__(self):
        self.count = Count(jnp.array(0))

    def __call__(self):
        self.count += 1


counter = Counter()
print(f"counter.count.value = {counter.count.value!r}")
counter()
print(f"counter.count.value = {counter.count.value!r}")

assert type(counter.count) is Count and int(counter.count.value) == 1


# %%
class MLP(nnx.Module):
    def __init__(self, din: int, dmid: int, dout: int, *, rngs: nnx.Rngs):
        self.linear1 = Linear(din, dmid, rngs=rngs)
        self.dropout = nnx.Dropout(rate=0.1, rngs=rngs)
        self.bn = nnx.BatchNorm(dmid, rngs=rngs)
        self.linear2 = Linear(dmid, dout, rngs=rngs)

    def __call__(self, x: jax.Array):
        x = nnx.gelu(self.dropout(self.bn(self.linear1(x))))
        return self.linear2(x)


model = MLP(2, 16, 5, rngs=nnx.Rngs(0))
y = model(x=jnp.ones((3, 2)))
nnx.display(model)


# %%
class LoraParam(nnx.Param):
    pass


class LoraLinear(nnx.Module):
    def __init__(self, linear: Linear, rank: int, rngs: nnx.Rngs):
        self.linear = linear
        self.A = LoraParam(jax.random.normal(rngs(), (linear.din, rank)))
        self.B = LoraParam(jax.random.normal(rngs(), (rank, linear.dout)))

    def __call__(self, x: jax.Array):
        return self.linear(x) + x @ self.A @ self.B


rngs = nnx.Rngs(0)
model = MLP(2, 32, 5, rngs=rngs)
model.linear1 = LoraLinear(model.linear1, 4, rngs=rngs)
model.linear2 = LoraLinear(model.linear2, 4, rngs=rngs)
y = model(x=jnp.ones((3, 2)))
nnx.display(model)

assert isinstance(model.linear1.A, LoraParam) and isinstance(model.linear1.linear.w, nnx.Param)
# %%
import optax

model = MLP(2, 16, 10, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(0.001))


@nnx.jit
def train_step(model, optimizer, x, y):

    def loss_fn(model: MLP):
        y_pred = model(x)
        return jnp.mean((y_pred - y) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(grads)
    return loss


x, y = (jnp.ones((5, 2)), jnp.ones((5, 10)))
loss = train_step(model, optimizer, x, y)
print(f"loss = {loss!r}")
print(f"optimizer.step.value = {optimizer.step.value!r}")

assert int(optimizer.step.value) == 1 and float(loss) > 0
l0 = float(loss)
for _ in range(20):
    l1 = float(train_step(model, optimizer, x, y))
assert l1 < l0 and int(optimizer.step.value) == 21


# %%
@nnx.vmap(in_axes=0, out_axes=0)
def create_model(key: jax.Array):
    return MLP(10, 32, 10, rngs=nnx.Rngs(key))


keys = jax.random.split(jax.random.key(0), 5)
model = create_model(keys)


@nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
def forward(model: MLP, x):
    x = model(x)
    return x


x = jnp.ones((3, 10))
y = forward(model, x)
print(f"y.shape = {y.shape!r}")
nnx.display(model)

assert y.shape == (3, 10) and model.linear1.w.value.shape == (5, 10, 32)


# %%
class Count(nnx.Variable):
    pass


class StatefulLinear(nnx.Module):
    def __init__(self, din: int, dout: int, *, rngs: nnx.Rngs):
        self.w = nnx.Param(jax.random.uniform(rngs(), (din, dout)))
        self.b = nnx.Param(jnp.zeros((dout,)))
        self.count = Count(jnp.array(0, dtype=jnp.uint32))

    def __call__(self, x: jax.Array):
        self.count += 1
        return x @ self.w + self.b


model = StatefulLinear(din=3, dout=5, rngs=nnx.Rngs(0))
y = model(jnp.ones((1, 3)))
nnx.display(model)

assert int(model.count.value) == 1 and model.count.value.dtype == jnp.uint32
# %%
graphdef, state = nnx.split(model)
nnx.display(graphdef, state)
# %%
print(f"model.count.value = {model.count.value!r}")
graphdef, state = nnx.split(model)


@jax.jit
def forward(graphdef: nnx.GraphDef, state: nnx.State, x: jax.Array) -> tuple[jax.Array, nnx.State]:
    model = nnx.merge(graphdef, state)
    y = model(x)
    _, state = nnx.split(model)
    return (y, state)


y, state = forward(graphdef, state, x=jnp.ones((1, 3)))
nnx.update(model, state)
print(f"model.count.value = {model.count.value!r}")

assert int(model.count.value) == 2
# %%
graphdef, params, counts = nnx.split(model, nnx.Param, Count)
nnx.display(params, counts)

assert set(params) == {"w", "b"} and set(counts) == {"count"}
# %%
model = nnx.merge(graphdef, params, counts)
nnx.update(model, params, counts)

assert int(model.count.value) == 2
