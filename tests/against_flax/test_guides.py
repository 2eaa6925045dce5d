"""One program or more for the idea of each guide in Flax's public documentation, in own words."""

import functools
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.against_flax.compare import program, same_on_both

PROGRAMS = {}
X = jnp.linspace(-1, 1, 12).reshape(4, 3)
Y = jnp.array([0, 1, 1, 0])


def mlp(nnx, seed=0, **options):
    class Mlp(nnx.Module):
        def __init__(self, rngs, hidden=4):
            self.up = nnx.Linear(3, hidden, rngs=rngs)
            self.norm = nnx.BatchNorm(hidden, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.down = nnx.Linear(hidden, 2, rngs=rngs)

        def __call__(self, x):
            return self.down(self.drop(nnx.relu(self.norm(self.up(x)))))

    return Mlp(nnx.Rngs(seed), **options)


def cross_entropy(model, x=X, y=Y):
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


# ---- basics -------------------------------------------------------------------------------------


@program(PROGRAMS)
def basics_own_layer_and_state(f):
    nnx = f.nnx

    class Count(nnx.Variable):
        pass

    class Dense(nnx.Module):
        def __init__(self, ins, outs, *, rngs):
            self.w = nnx.Param(jax.random.uniform(rngs.params(), (ins, outs)))
            self.b = nnx.Param(jnp.zeros((outs,)))
            self.count = Count(jnp.array(0))

        def __call__(self, x):
            self.count[...] += 1
            return x @ self.w[...] + self.b[...]

    model = Dense(3, 2, rngs=nnx.Rngs(0))
    model(X)
    return model(X), nnx.state(model, Count), nnx.state(model, nnx.Param), nnx.state(model)


@program(PROGRAMS)
def basics_nested_modules_and_surgery(f):
    nnx = f.nnx
    model = mlp(nnx)

    class Adapter(nnx.Module):
        def __init__(self, linear, rank, rngs):
            self.linear, self.a = linear, nnx.Param(jnp.zeros((3, rank)))
            self.b = nnx.Param(jax.random.normal(rngs.params(), (rank, 4)))

        def __call__(self, x):
            return self.linear(x) + x @ self.a @ self.b

    model.up = Adapter(model.up, 2, nnx.Rngs(1))
    return model(X), nnx.state(model)


@program(PROGRAMS)
def basics_split_and_merge(f):
    nnx = f.nnx
    graphdef, params, others = nnx.split(mlp(nnx), nnx.Param, ...)
    merged = nnx.merge(graphdef, jax.tree.map(lambda x: x * 2, params), others)
    return merged(X), params, others


@program(PROGRAMS)
def basics_scan_over_layers(f):
    nnx = f.nnx

    class Deep(nnx.Module):
        def __init__(self, size, depth, rngs):
            @nnx.split_rngs(splits=depth)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def make(rngs):
                return nnx.Linear(size, size, rngs=rngs)

            self.layers = make(rngs)

        def __call__(self, x):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def forward(x, layer):
                return nnx.gelu(layer(x))

            return forward(x, self.layers)

    return Deep(3, 4, nnx.Rngs(0))(X)


@program(PROGRAMS)
def basics_key_concepts_mutable_arrays_in_closures(f):
    model = f.nnx.BatchNorm(3, rngs=f.nnx.Rngs(0))
    for _ in range(2):
        model(X)
    return model.mean, model.var


# ---- MNIST --------------------------------------------------------------------------------------


@program(PROGRAMS)
def mnist_convolutions_trained_and_evaluated(f):
    nnx = f.nnx

    class Cnn(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(1, 3, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(3, rngs=rngs)
            self.drop = nnx.Dropout(0.25, rngs=rngs)
            self.out = nnx.Linear(12, 2, rngs=rngs)
            self.pool = functools.partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))

        def __call__(self, x):
            x = self.pool(nnx.relu(self.norm(self.conv(x))))
            return self.out(self.drop(x.reshape(x.shape[0], -1)))

    images = jnp.linspace(0, 1, 64).reshape(4, 4, 4, 1)
    model = Cnn(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(5e-3, 0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))

    def loss_fn(model, batch):
        logits = model(batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), logits

    @nnx.jit
    def train_step(model, optimizer, metrics, batch):
        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])
        optimizer.update(model, grads)

    @nnx.jit
    def eval_step(model, metrics, batch):
        loss, logits = loss_fn(model, batch)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])

    batch = {"image": images, "label": Y}
    history = []
    for _ in range(2):
        model.train()
        train_step(model, optimizer, metrics, batch)
        history.append(metrics.compute())
        metrics.reset()
    model.eval()
    eval_step(model, metrics, batch)
    predictions = nnx.jit(lambda model, x: model(x).argmax(1))(model, images)
    return history, metrics.compute(), predictions


# ---- objects as pytrees, views ------------------------------------------------------------------


@program(PROGRAMS)
def pytree_objects_in_jax_functions(f):
    nnx = f.nnx

    class Data(nnx.Pytree):
        def __init__(self, x):
            self.x, self.names = jnp.asarray(x), ("a", "b")

    one = jax.jit(lambda d: jax.tree.map(lambda x: x + 1, d))(Data([1.0, 2.0]))
    gradients = jax.grad(lambda d: (d.x**2).sum())(Data([1.0, 2.0]))
    mapped = jax.vmap(lambda d: d.x * 2)(Data([1.0, 2.0]))
    return one.x, one.names, gradients.x, mapped


@program(PROGRAMS)
def pytree_module_in_plain_jax_jit(f):
    nnx = f.nnx
    graphdef, state = nnx.split(mlp(nnx))

    @jax.jit
    def forward(graphdef_and_state, x):
        model = nnx.merge(*graphdef_and_state)
        return model(x), nnx.split(model)[1]

    out, state = forward((graphdef, state), X)
    return out, state


@program(PROGRAMS)
def views_share_arrays_with_other_flags(f):
    nnx = f.nnx
    model = mlp(nnx)
    evaluating = nnx.view(model, deterministic=True, use_running_average=True)
    training = nnx.view(model, deterministic=False, use_running_average=False)
    first = evaluating(X)
    training(X)
    return first, evaluating(X), evaluating.up.kernel is model.up.kernel, nnx.state(model)


@program(PROGRAMS)
def views_of_some_parts(f):
    nnx = f.nnx
    model = nnx.Sequential(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    view = nnx.view(model, only=nnx.Dropout, deterministic=True)
    return view(X), view.layers[0].deterministic, model.layers[0].deterministic


@program(PROGRAMS, raises=ValueError)
def views_with_unknown_flags(f):
    return f.nnx.view(mlp(f.nnx), unknown=True)


@program(PROGRAMS)
def views_of_attributes(f):
    nnx = f.nnx
    other = nnx.with_attributes(mlp(nnx), deterministic=True)
    return other.drop.deterministic, other(X)


# ---- filters ------------------------------------------------------------------------------------

FILTERS = {
    "type": lambda nnx: nnx.Param,
    "types": lambda nnx: (nnx.BatchStat, nnx.RngState),
    "name": lambda nnx: "params",
    "everything": lambda nnx: ...,
    "true": lambda nnx: True,
    "nothing": lambda nnx: None,
    "false": lambda nnx: False,
    "path": lambda nnx: nnx.PathContains("norm"),
    "all": lambda nnx: nnx.All(nnx.Param, nnx.PathContains("up")),
    "any": lambda nnx: nnx.Any(nnx.BatchStat, nnx.PathContains("bias")),
    "not": lambda nnx: nnx.Not(nnx.Param),
    "function": lambda nnx: lambda path, value: path[-1] == "kernel",
    "of_type": lambda nnx: nnx.OfType(nnx.RngKey),
    "with_tag": lambda nnx: nnx.WithTag("dropout"),
}


@program(PROGRAMS)
def filters_of_every_kind(f):
    nnx = f.nnx
    return {name: nnx.state(mlp(nnx), make(nnx)) for name, make in FILTERS.items()}


@program(PROGRAMS)
def filters_in_order(f):
    nnx = f.nnx
    model = mlp(nnx)
    return (
        nnx.split(model, nnx.PathContains("up"), nnx.Param, ...)[1:],
        nnx.state(model, nnx.Param).filter(nnx.PathContains("down")),
    )


@program(PROGRAMS, raises=ValueError)
def filters_that_leave_something(f):
    return f.nnx.split(mlp(f.nnx), f.nnx.Param)


@program(PROGRAMS, raises=ValueError)
def filters_after_everything(f):
    return f.nnx.split(mlp(f.nnx), ..., f.nnx.Param)


@program(PROGRAMS, raises=ValueError)
def filters_that_are_numbers(f):
    return f.nnx.state(mlp(f.nnx), 3)


# ---- randomness ---------------------------------------------------------------------------------


@program(PROGRAMS)
def randomness_weights_from_seeds(f):
    nnx = f.nnx
    return nnx.state(mlp(nnx, 1), nnx.Param), nnx.state(mlp(nnx, 2), nnx.Param)


@program(PROGRAMS)
def randomness_augmented_input(f):
    nnx = f.nnx
    rngs = nnx.Rngs(0, noise=1)

    @nnx.jit
    def noisy(x, rngs):
        return x + rngs.noise.normal(x.shape) * 0.1

    return noisy(X, rngs), noisy(X, rngs), nnx.state(rngs)


@program(PROGRAMS)
def randomness_ensemble_with_own_dropout(f):
    nnx = f.nnx

    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def make(rngs):
        return nnx.Sequential(nnx.Linear(3, 2, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))

    models = make(nnx.Rngs(0, dropout=1))
    outs = nnx.vmap(lambda m, x: m(x), in_axes=(0, None))(models, X)
    return outs, nnx.state(models, nnx.RngState)


@program(PROGRAMS)
def randomness_one_mask_for_all_steps(f):
    nnx = f.nnx
    rngs = nnx.Rngs(recurrent_dropout=1)
    drop = nnx.Dropout(0.5, rng_collection="recurrent_dropout", rngs=rngs)
    fixed = nnx.state(drop, nnx.RngState)

    def step(x):
        nnx.update(drop, fixed)
        return drop(x)

    return step(X), step(X)


@program(PROGRAMS)
def randomness_reset_between_epochs(f):
    nnx = f.nnx
    model = mlp(nnx)
    first = model(X)
    nnx.reseed(model, default=0)
    return first, model(X), nnx.state(model, nnx.RngState)


# ---- checkpoints --------------------------------------------------------------------------------


@program(PROGRAMS)
def checkpoint_saved_and_restored(f):
    import orbax.checkpoint as ocp

    nnx = f.nnx
    model = mlp(nnx)
    model(X)
    _, keys, state = nnx.split(model, nnx.RngKey, ...)
    path = tempfile.mkdtemp() + "/state"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, nnx.to_pure_dict(state))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(path)
    graphdef, fresh_keys, abstract = nnx.split(nnx.eval_shape(lambda: mlp(nnx, 5)), nnx.RngKey, ...)
    nnx.replace_by_pure_dict(abstract, nnx.restore_int_paths(restored))
    loaded = nnx.merge(graphdef, keys, abstract)
    return loaded(X), nnx.state(loaded, nnx.Not(nnx.RngKey)), len(jax.tree.leaves(fresh_keys))


@program(PROGRAMS)
def checkpoint_as_bytes(f):
    nnx = f.nnx
    pure = nnx.to_pure_dict(nnx.state(mlp(nnx), nnx.Param))
    data = f.flax.serialization.to_bytes(pure)
    other = nnx.to_pure_dict(nnx.state(mlp(nnx, 3), nnx.Param))
    return f.flax.serialization.from_bytes(other, data), len(data)


@program(PROGRAMS)
def checkpoint_pure_dicts(f):
    nnx = f.nnx
    model = nnx.Sequential(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.relu)
    graphdef, state = nnx.split(model)
    pure = jax.tree.map(lambda x: x + 1, nnx.to_pure_dict(state))
    nnx.replace_by_pure_dict(state, pure)
    return nnx.merge(graphdef, state)(X), sorted(map(str, pure["layers"]))


# ---- JAX transforms, performance ----------------------------------------------------------------


@program(PROGRAMS)
def jax_transforms_by_hand(f):
    nnx = f.nnx
    graphdef, params, rest = nnx.split(mlp(nnx), nnx.Param, ...)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params, rest):
        model = nnx.merge(graphdef, params, rest, copy=True)
        value = cross_entropy(model)
        return value, nnx.state(model, nnx.Not(nnx.Param))

    (value, rest), grads = loss(params, rest)
    return value, grads, rest


@program(PROGRAMS)
def jax_vmap_by_hand(f):
    nnx = f.nnx

    def make(key):
        return nnx.split(nnx.Linear(3, 2, rngs=nnx.Rngs(key)))

    graphdef, states = jax.vmap(make)(jax.random.split(jax.random.key(0), 3))
    return jax.vmap(lambda state: nnx.merge(graphdef, state)(X))(states)


@program(PROGRAMS)
def performance_cached_partial(f):
    nnx = f.nnx
    model = mlp(nnx)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit(donate_argnums=0)
    def step(model, optimizer, x):
        value, grads = nnx.value_and_grad(cross_entropy)(model, x)
        optimizer.update(model, grads)
        return value

    cached = nnx.cached_partial(step, model, optimizer)
    return [cached(X) for _ in range(2)], nnx.state(model)


@program(PROGRAMS)
def performance_functional_loop(f):
    nnx = f.nnx
    model = mlp(nnx)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    graphdef, state = nnx.split((model, optimizer))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, x):
        model, optimizer = nnx.merge(graphdef, state)
        value, grads = nnx.value_and_grad(cross_entropy)(model, x)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), value

    values = []
    for _ in range(2):
        state, value = step(state, X)
        values.append(value)
    nnx.update((model, optimizer), state)
    return values, nnx.state(model)


# ---- surgery ------------------------------------------------------------------------------------


@program(PROGRAMS)
def surgery_of_every_linear_layer(f):
    nnx = f.nnx
    model = mlp(nnx)
    rngs = nnx.Rngs(7)
    for _, part in list(nnx.iter_graph(model)):
        if isinstance(part, nnx.Module):
            for name, child in list(vars(part).items()):
                if isinstance(child, nnx.Linear):
                    sizes = (child.in_features, 2, child.out_features)
                    setattr(part, name, nnx.LoRA(*sizes, base_module=child, rngs=rngs))
    return model(X), nnx.state(model)


@program(PROGRAMS)
def surgery_of_a_pretrained_part(f):
    nnx = f.nnx
    pretrained, model = mlp(nnx, 1), mlp(nnx, 2)
    nnx.update(model.up, nnx.state(pretrained.up))
    return nnx.state(model, nnx.Param)


@program(PROGRAMS)
def surgery_without_memory(f):
    nnx = f.nnx
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: nnx.Linear(3, 2, rngs=nnx.Rngs(0))))
    values = {"kernel": np.ones((3, 2), np.float32), "bias": np.zeros(2, np.float32)}
    filled = jax.tree.map(lambda x: jnp.zeros(x.shape), abstract)
    nnx.replace_by_pure_dict(filled, values)
    return nnx.merge(graphdef, filled)(X)


@program(PROGRAMS)
def surgery_weights_tied_by_reference(f):
    nnx = f.nnx

    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.one, self.two = nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 3, rngs=rngs)
            self.two.kernel = self.one.kernel

        def __call__(self, x):
            return self.two(self.one(x))

    model = Tied(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    optimizer.update(model, nnx.grad(lambda m: m(X).sum())(model))
    merged = nnx.merge(*nnx.split(model))
    return nnx.state(model), merged.one.kernel is merged.two.kernel, nnx.find_duplicates(model)


# ---- sharding -----------------------------------------------------------------------------------


def mesh():
    return jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def partitioned(nnx):
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("data", "model"))
    return nnx.Linear(3, 2, kernel_init=init, rngs=nnx.Rngs(0))


@program(PROGRAMS)
def sharding_of_a_model(f):
    nnx = f.nnx
    with jax.set_mesh(mesh()):
        model = nnx.jit(lambda: partitioned(nnx))()
        specs = nnx.get_partition_spec(nnx.state(model))
        out = nnx.jit(lambda m, x: m(x))(model, X)
    return str(specs["kernel"].get_value()), str(specs["bias"].get_value()), out


@program(PROGRAMS)
def sharding_by_constraint(f):
    nnx = f.nnx
    with jax.set_mesh(mesh()) as here:
        del here
        model = partitioned(nnx)
        state = nnx.state(model)
        shardings = nnx.get_named_sharding(state, mesh())
        placed = jax.device_put(state, shardings)
        nnx.update(model, placed)
    return nnx.state(model)


@program(PROGRAMS)
def sharding_with_logical_names(f):
    nnx = f.nnx
    rules = (("embed", "model"), ("batch", "data"))
    with jax.set_mesh(mesh()):
        kernel = nnx.Param(jnp.ones((2, 4)), out_sharding=("batch", "embed"), sharding_rules=rules)
    return kernel, str(nnx.spmd.get_var_pspec(kernel))


@program(PROGRAMS)
def sharding_of_an_abstract_model(f):
    nnx = f.nnx
    with jax.set_mesh(mesh()):
        graphdef, abstract = nnx.get_abstract_model(lambda: partitioned(nnx), mesh())
        spec = abstract["kernel"].get_value().sharding.spec
    return str(spec), abstract["kernel"].get_value().shape, graphdef is not None


@program(PROGRAMS)
def sharding_of_stacked_layers(f):
    nnx = f.nnx

    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
    def make(key):
        init = nnx.with_partitioning(nnx.initializers.ones, ("a", "b"))
        return nnx.Linear(3, 2, kernel_init=init, rngs=nnx.Rngs(key))

    with nnx.use_eager_sharding(False):
        model = make(jax.random.split(jax.random.key(0), 2))
    return model.kernel.out_sharding, model.kernel


@program(PROGRAMS)
def sharding_data_parallel_step(f):
    nnx = f.nnx
    here = mesh()
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    x = jax.device_put(X, NamedSharding(here, PartitionSpec("data")))

    @nnx.jit
    def step(model, optimizer, x):
        value, grads = nnx.value_and_grad(cross_entropy)(model, x)
        optimizer.update(model, grads)
        return value

    return step(model, optimizer, x), nnx.state(model)


# ---- intermediates ------------------------------------------------------------------------------


def sowing(nnx):
    class Sowing(nnx.Module):
        def __init__(self, rngs):
            self.one, self.two = nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs)

        def __call__(self, x):
            h = self.one(x)
            self.sow(nnx.Intermediate, "hidden", h)
            self.sow(nnx.Intermediate, "norm", (h**2).sum(), init_fn=lambda: 0.0, reduce_fn=jnp.add)
            return self.two(nnx.relu(self.perturb("before", h)))

    return Sowing(nnx.Rngs(0))


@program(PROGRAMS)
def intermediates_popped(f):
    nnx = f.nnx
    model = sowing(nnx)
    model(X)
    model(2 * X)
    found = nnx.pop(model, nnx.Intermediate)
    return found, hasattr(model, "hidden")


@program(PROGRAMS)
def intermediates_captured(f):
    nnx = f.nnx
    return nnx.capture(sowing(nnx), nnx.Intermediate)(X)


@program(PROGRAMS)
def intermediates_of_every_method(f):
    nnx = f.nnx
    return nnx.capture(sowing(nnx), nnx.Intermediate, method_outputs=nnx.Intermediate)(X)


@program(PROGRAMS)
def intermediates_under_jit(f):
    nnx = f.nnx

    @nnx.jit
    def run(model, x):
        out = model(x)
        return out, nnx.pop(model, nnx.Intermediate)

    return run(sowing(nnx), X)


@program(PROGRAMS)
def gradients_of_intermediates(f):
    nnx = f.nnx
    model = sowing(nnx)
    forward = nnx.capture(model, nnx.Perturbation)
    _, perturbations = forward(X)

    def loss(model, perturbations):
        return (nnx.capture(model, init=perturbations)(X) ** 2).sum()

    return nnx.grad(loss, argnums=1)(model, perturbations)


# ---- migrating ----------------------------------------------------------------------------------


@program(PROGRAMS)
def from_haiku_lazy_shapes_become_arguments(f):
    nnx = f.nnx

    class Block(nnx.Module):
        def __init__(self, ins, outs, rngs):
            self.linear = nnx.Linear(ins, outs, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x, training=False):
            return self.drop(jax.nn.relu(self.linear(x)), deterministic=not training)

    model = Block(3, 4, nnx.Rngs(params=0, dropout=1))
    return model(X, training=True), model(X), nnx.state(model)


@program(PROGRAMS)
def from_linen_state_in_variables(f):
    nnx = f.nnx
    model = mlp(nnx)
    optimizer = nnx.ModelAndOptimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(optimizer, x):
        grads = nnx.grad(cross_entropy)(optimizer.model, x)
        optimizer.update(grads)

    step(optimizer, X)
    return nnx.state(optimizer.model), optimizer.step


@program(PROGRAMS)
def from_older_nnx_values(f):
    nnx = f.nnx
    v = nnx.Param(jnp.ones(2))
    v.value = v.value * 3
    v[...] += 1
    return v.value, v.get_value(), v[...], v.get_raw_value()


@program(PROGRAMS)
def from_pytorch_weights_transposed(f):
    nnx = f.nnx
    theirs = {
        "weight": np.arange(6.0, dtype=np.float32).reshape(2, 3),
        "bias": np.ones(2, np.float32),
    }
    layer = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    layer.kernel[...] = jnp.asarray(theirs["weight"].T)
    layer.bias[...] = jnp.asarray(theirs["bias"])
    return layer(X)


@program(PROGRAMS)
def from_pytorch_channels_moved(f):
    nnx = f.nnx
    theirs = np.arange(54.0, dtype=np.float32).reshape(2, 3, 3, 3)
    conv = nnx.Conv(3, 2, (3, 3), padding=1, use_bias=False, rngs=nnx.Rngs(0))
    conv.kernel[...] = jnp.asarray(theirs.transpose(2, 3, 1, 0))
    return conv(jnp.ones((1, 4, 4, 3)))


# ---- Gemma: decoding with a cache ---------------------------------------------------------------


@program(PROGRAMS)
def gemma_decoding_with_a_cache(f):
    nnx = f.nnx

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.RMSNorm(4, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, 4, rngs=rngs)
            self.gate, self.up = (nnx.Linear(4, 6, use_bias=False, rngs=rngs) for _ in range(2))
            self.down = nnx.Linear(6, 4, use_bias=False, rngs=rngs)

        def __call__(self, x, mask=None, decode=False):
            x = x + self.attention(self.norm(x), mask=mask, decode=decode)
            return x + self.down(nnx.gelu(self.gate(x)) * self.up(x))

    class Decoder(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(11, 4, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(2)])

        def __call__(self, tokens, **options):
            x = self.embed(tokens) * jnp.sqrt(4.0)
            for block in self.blocks:
                x = block(x, **options)
            return self.embed.attend(x)

    tokens = jnp.array([[1, 5, 2]])
    model = Decoder(nnx.Rngs(0))
    whole = model(tokens, mask=nnx.make_causal_mask(tokens))
    for block in model.blocks:
        block.attention.init_cache((1, 3, 4))
    steps = [model(tokens[:, n : n + 1], decode=True) for n in range(3)]
    return whole, steps, nnx.state(model, nnx.Cache)


# ---- tree mode, hijax, refs ---------------------------------------------------------------------


@program(PROGRAMS)
def tree_mode_training(f):
    nnx = f.nnx

    @nnx.jit(graph=False)
    def step(model, x):
        graphdef, params, rest = nnx.split(model, nnx.Param, ..., graph=False)

        def loss(params):
            return (nnx.merge(graphdef, params, nnx.clone(rest))(x) ** 2).mean()

        grads = jax.grad(loss)(params)
        nnx.update(model, jax.tree.map(lambda w, g: w - 0.1 * g, params, grads))

    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    for _ in range(2):
        step(model, X)
    return nnx.state(model)


@program(PROGRAMS, raises=ValueError)
def tree_mode_refuses_what_is_shared(f):
    nnx = f.nnx
    layer = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    return nnx.jit(lambda a: a[0](X), graph=False)([layer, layer])


@program(PROGRAMS)
def tree_mode_by_the_switch(f):
    nnx = f.nnx
    with nnx.set_graph_mode(False), nnx.set_graph_updates(False):
        model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        grads = nnx.grad(lambda m: (m(X) ** 2).mean())(model)
    return nnx.state(grads), type(grads).__name__


@program(PROGRAMS)
def hijax_variables_in_jax_jit(f):
    nnx = f.nnx
    with nnx.var_defaults(hijax=True):
        v = nnx.Variable(jnp.array(1.0))

    @jax.jit
    def add(v):
        v[...] += 2.0

    add(v)
    add(v)
    return v[...]


@program(PROGRAMS)
def hijax_model_in_jax_jit(f):
    nnx = f.nnx
    with nnx.var_defaults(hijax=True):
        layer = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    return jax.jit(lambda m, x: m(x))(layer, X)


@program(PROGRAMS)
def refs_written_in_jax_jit(f):
    nnx = f.nnx
    v = nnx.Variable(jnp.array(1.0), ref=True)

    @jax.jit
    def add(v):
        v[...] += 2.0

    add(v)
    return v[...]


@program(PROGRAMS)
def refs_frozen_and_thawed(f):
    nnx = f.nnx
    layer = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    mutable = nnx.with_vars(layer, ref=True)
    mutable.bias[...] += 1.0
    frozen = nnx.with_vars(mutable, ref=False)
    return frozen(X), nnx.state(frozen), nnx.state(layer)


test_programs = same_on_both(PROGRAMS)
