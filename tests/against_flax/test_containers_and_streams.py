"""Programs over Sequential, List, Dict, dataclasses, Variables, and over random streams."""

import jax
import jax.numpy as jnp

from tests.against_flax.compare import program, same_on_both

PROGRAMS = {}
X = jnp.arange(6.0).reshape(2, 3)


def linear(nnx, seed=0, size=3, **options):
    return nnx.Linear(size, size, rngs=nnx.Rngs(seed), **options)


# ---- Sequential ---------------------------------------------------------------------------------


@program(PROGRAMS)
def sequential_of_layers_and_functions(f):
    model = f.nnx.Sequential(linear(f.nnx), f.nnx.relu, linear(f.nnx, 1), jnp.sin)
    return model(X), f.nnx.state(model), len(model.layers)


@program(PROGRAMS)
def sequential_that_passes_tuples_on(f):
    model = f.nnx.Sequential(lambda x: (x, 2 * x), lambda a, b: {"c": a + b}, lambda c: c + 1)
    return model(X)


@program(PROGRAMS)
def sequential_with_keywords(f):
    return f.nnx.Sequential(lambda x, scale: x * scale, jnp.cos)(X, scale=3.0)


@program(PROGRAMS, raises=TypeError)
def sequential_with_something_that_cannot_be_called(f):
    return f.nnx.Sequential(linear(f.nnx), 3)(X)


@program(PROGRAMS)
def sequential_inside_sequential(f):
    inner = f.nnx.Sequential(linear(f.nnx), jnp.tanh)
    model = f.nnx.Sequential(inner, linear(f.nnx, 1), inner)
    return model(X), f.nnx.state(model)


@program(PROGRAMS)
def sequential_from_a_list_comprehension(f):
    model = f.nnx.Sequential(*[linear(f.nnx, seed) for seed in range(3)])
    del model.layers[1]
    return model(X), sorted(f.nnx.state(model)["layers"])


@program(PROGRAMS)
def sequential_with_dropout_and_norm(f):
    nnx = f.nnx
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(linear(nnx), nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
    trained = model(X)
    model.eval()
    return trained, model(X), nnx.state(model)


@program(PROGRAMS)
def sequential_split_and_merged(f):
    model = f.nnx.Sequential(linear(f.nnx), f.nnx.relu, linear(f.nnx, 1))
    graphdef, state = f.nnx.split(model)
    doubled = f.nnx.merge(graphdef, jax.tree.map(lambda x: 2 * x, state))
    return doubled(X), f.nnx.state(doubled)


@program(PROGRAMS)
def sequential_differentiated_under_jit(f):
    model = f.nnx.Sequential(linear(f.nnx), f.nnx.tanh, linear(f.nnx, 1))
    return f.nnx.jit(f.nnx.value_and_grad(lambda m: (m(X) ** 2).mean()))(model)


@program(PROGRAMS)
def sequential_with_a_layer_replaced(f):
    model = f.nnx.Sequential(linear(f.nnx), f.nnx.relu)
    model.layers[0] = f.nnx.Embed(7, 3, rngs=f.nnx.Rngs(2))
    return model(jnp.array([1, 4])), f.nnx.state(model)


# ---- Embed ------------------------------------------------------------------------------------


@program(PROGRAMS)
def embeddings_of_tokens_and_positions(f):
    nnx = f.nnx
    tokens, positions = (nnx.Embed(5, 3, rngs=nnx.Rngs(seed)) for seed in range(2))
    ids = jnp.array([[0, 4], [2, 2]])

    def loss(tokens, positions):
        return ((tokens(ids) + positions(jnp.arange(2))[None]) ** 2).sum()

    return nnx.value_and_grad(loss, argnums=(0, 1))(tokens, positions)


@program(PROGRAMS)
def embeddings_tied_to_the_output(f):
    nnx = f.nnx
    embed = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
    logits = lambda e: e.attend(e(jnp.array([1, 3])))  # noqa: E731
    return logits(embed), nnx.grad(lambda e: logits(e).sum())(embed)


@program(PROGRAMS)
def embeddings_out_of_range(f):
    return f.nnx.Embed(5, 3, rngs=f.nnx.Rngs(0))(jnp.array([-1, 7]))


@program(PROGRAMS)
def embeddings_under_vmap_and_jit(f):
    nnx = f.nnx
    embed = nnx.Embed(5, 3, param_dtype=jnp.float16, rngs=nnx.Rngs(0))
    mapped = nnx.jit(nnx.vmap(lambda e, i: e(i), in_axes=(None, 0)))
    return mapped(embed, jnp.array([0, 4])), embed(jnp.array(2)), nnx.state(embed)


# ---- List and Dict ------------------------------------------------------------------------------


@program(PROGRAMS)
def list_operations(f):
    nnx = f.nnx
    items = nnx.List([linear(nnx), linear(nnx, 1)])
    items.append(linear(nnx, 2))
    items.insert(0, linear(nnx, 3))
    popped = items.pop()
    items[1] = linear(nnx, 4)
    items += [linear(nnx, 5)]
    items.extend([linear(nnx, 6)])
    del items[0]
    return nnx.state(items), nnx.state(popped), len(items), items[-1](X), len(items[1:3])


@program(PROGRAMS)
def list_of_different_things(f):
    nnx = f.nnx
    items = nnx.List([1, "a", jnp.ones(2), nnx.Param(jnp.zeros(1)), None, linear(nnx)])
    return nnx.state(items), [type(x).__name__ for x in items][:2], len(items), items[0]


@program(PROGRAMS)
def list_in_a_model_under_jit(f):
    nnx = f.nnx

    class Net(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([linear(nnx, n) for n in range(2)])

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = Net()

    @nnx.jit
    def grow(model, x):
        model.layers.append(nnx.Linear(3, 3, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(9)))
        return model(x)

    return grow(model, X), len(model.layers), nnx.state(model)


@program(PROGRAMS, raises=IndexError)
def list_index_out_of_range(f):
    return f.nnx.List([1, 2])[5]


@program(PROGRAMS)
def list_in_a_list(f):
    nnx = f.nnx
    nested = nnx.List([nnx.List([linear(nnx)]), nnx.List([])])
    graphdef, state = nnx.split(nested)
    merged = nnx.merge(graphdef, state)
    return merged[0][0](X), len(merged[1]), state


@program(PROGRAMS)
def dict_operations(f):
    nnx = f.nnx
    items = nnx.Dict(a=linear(nnx), b=nnx.Param(jnp.ones(2)))
    items["c"] = linear(nnx, 1)
    items.d = jnp.zeros(2)
    del items["b"]
    return sorted(items), nnx.state(items), "a" in items, items["a"](X), len(items)


@program(PROGRAMS)
def dict_from_a_mapping(f):
    nnx = f.nnx
    items = nnx.Dict({"x": linear(nnx), "n": 3})
    return [(key, type(value).__name__) for key, value in items.items()], items.n, nnx.state(items)


@program(PROGRAMS, raises=KeyError)
def dict_without_the_key(f):
    return f.nnx.Dict(a=1)["b"]


@program(PROGRAMS, raises=AttributeError)
def dict_read_by_a_missing_attribute(f):
    return f.nnx.Dict(a=1).b


@program(PROGRAMS)
def a_plain_list_of_layers_by_data(f):
    nnx = f.nnx

    class Net(nnx.Module):
        def __init__(self):
            self.layers = nnx.data([linear(nnx, 0), linear(nnx, 1)])

    return nnx.state(Net())


# ---- dataclasses and attributes -----------------------------------------------------------------


@program(PROGRAMS)
def dataclass_with_fields(f):
    nnx = f.nnx

    @nnx.dataclass
    class Net(nnx.Module):
        size: int
        w: nnx.Param = nnx.data(default_factory=lambda: nnx.Param(jnp.ones(2)))
        names: list = nnx.static(default_factory=list)

    net = Net(3)
    return nnx.state(net), net.size, net.names, nnx.state(Net(1, nnx.Param(jnp.zeros(1))))


@program(PROGRAMS)
def dataclass_with_annotations(f):
    nnx = f.nnx

    @nnx.dataclass
    class Point(nnx.Pytree):
        x: nnx.Data[jax.Array]
        y: nnx.Data[float]
        name: nnx.Static[str] = "p"

    point = Point(jnp.ones(2), 2.0)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, point)
    return doubled.x, doubled.y, doubled.name, len(jax.tree.leaves(point))


@program(PROGRAMS, raises=ValueError)
def static_attribute_with_an_array(f):
    class Net(f.nnx.Module):
        def __init__(self):
            self.a = f.nnx.static(jnp.ones(2))

    return Net()


@program(PROGRAMS)
def pytrees_in_tree_map(f):
    nnx = f.nnx

    class Point(nnx.Pytree):
        def __init__(self):
            self.x, self.label = jnp.ones(2), "a"

    moved = jax.tree.map(lambda x: x + 1, Point())
    same = jax.tree.structure(moved) == jax.tree.structure(Point())
    return moved.x, moved.label, same


@program(PROGRAMS)
def setting_attributes_of_all_parts(f):
    nnx = f.nnx
    model = nnx.Sequential(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(1)))
    model.set_attributes(deterministic=True, use_running_average=True)
    first = model(X)
    model.set_attributes(nnx.Dropout, deterministic=False)
    return first, model(X), model.layers[0].deterministic, model.layers[1].use_running_average


@program(PROGRAMS, raises=ValueError)
def setting_an_attribute_that_nobody_has(f):
    linear(f.nnx).set_attributes(unknown=True)


@program(PROGRAMS)
def setting_an_attribute_that_nobody_has_quietly(f):
    layer = linear(f.nnx)
    layer.set_attributes(unknown=True, raise_if_not_found=False)
    return hasattr(layer, "unknown")


@program(PROGRAMS)
def modules_and_children(f):
    nnx = f.nnx
    model = nnx.Sequential(linear(nnx), nnx.Sequential(linear(nnx, 1)))
    walked = [(".".join(map(str, path)), type(m).__name__) for path, m in nnx.iter_modules(model)]
    children = [(str(name), type(m).__name__) for name, m in nnx.iter_children(model.layers)]
    return sorted(walked), children


@program(PROGRAMS)
def modules_copied_and_pickled(f):
    import copy

    import cloudpickle

    layer = linear(f.nnx)
    copied = copy.deepcopy(layer)
    copied.kernel[...] *= 2
    loaded = cloudpickle.loads(cloudpickle.dumps(layer))
    return f.nnx.state(copied), f.nnx.state(loaded), f.nnx.state(layer)


@program(PROGRAMS)
def variables_as_arrays(f):
    v = f.nnx.Param(jnp.arange(1.0, 4))
    return (
        [v + 1, 1 - v, v * v, v / 2, v**2, -v, abs(v), v @ v, v[1:], v.sum(), v.mean()],
        [v.shape, str(v.dtype), v.ndim, v.size, len(v), float(v[0]), list(v)],
        [jnp.sin(v), jnp.concatenate([v, v]), jax.tree.map(lambda x: x + 1, v)],
    )


@program(PROGRAMS)
def variables_of_all_kinds(f):
    nnx = f.nnx
    kinds = "Variable Param BatchStat Cache Intermediate Perturbation LoRAParam OptState OptArray"
    made = [getattr(nnx, kind)(jnp.ones(1)) for kind in kinds.split()]
    return [[isinstance(v, getattr(nnx, kind)) for kind in kinds.split()] for v in made]


@program(PROGRAMS)
def variables_with_hooks(f):
    seen = []

    def note(name):
        def hook(variable, *values):
            seen.append(name)
            return values[-1]

        return hook

    v = f.nnx.Param(jnp.ones(2), on_get_value=note("get"), on_set_value=note("set"))
    v[...] = jnp.zeros(2)
    return v[...], "set" in seen, "get" in seen


@program(PROGRAMS)
def variables_replaced_and_copied(f):
    v = f.nnx.Param(jnp.ones(2), tag="a")
    other = v.replace(jnp.zeros(3), tag="b")
    copied = v.copy()
    copied[...] = jnp.full(2, 5.0)
    return other, other.tag, v, copied, sorted(k for k in v.get_metadata() if k == "tag")


@program(PROGRAMS)
def variables_by_name(f):
    nnx = f.nnx
    name = f"Own{nnx.__name__.partition('.')[0]}"
    kind = nnx.variable_type_from_name(name, allow_register=True)
    return issubclass(kind, nnx.Variable), nnx.variable_name_from_type(kind) == name


@program(PROGRAMS)
def a_write_of_another_shape(f):
    v = f.nnx.Param(jnp.ones(2))
    v.set_value(jnp.zeros((3, 3)))
    return v


# ---- random streams -----------------------------------------------------------------------------


@program(PROGRAMS)
def streams_by_name(f):
    rngs = f.nnx.Rngs(params=0, dropout=1)
    return rngs.params(), rngs.dropout(), rngs.params(), f.nnx.state(rngs)


@program(PROGRAMS)
def streams_by_default(f):
    rngs = f.nnx.Rngs(0)
    return rngs(), rngs.params(), rngs.anything(), rngs["other"](), f.nnx.state(rngs)


@program(PROGRAMS)
def streams_from_keys_and_dicts(f):
    made = [
        f.nnx.Rngs(jax.random.key(3)),
        f.nnx.Rngs(jax.random.key(3), dropout=jax.random.key(4)),
        f.nnx.Rngs({"params": 0, "dropout": jax.random.key(5)}),
        f.nnx.Rngs(jax.random.PRNGKey(3)),
    ]
    return [rngs.params() for rngs in made], [f.nnx.state(rngs) for rngs in made]


@program(PROGRAMS, raises=AttributeError)
def streams_that_are_missing(f):
    return f.nnx.Rngs(params=0).dropout()


@program(PROGRAMS)
def streams_that_draw(f):
    rngs = f.nnx.Rngs(0, params=1)
    return (
        rngs.normal((2,)),
        rngs.uniform((2,), minval=1.0, maxval=2.0),
        rngs.params.normal((2,)),
        rngs.randint((3,), 0, 10),
        rngs.bernoulli(0.3, (4,)),
        rngs.permutation(jnp.arange(4)),
        rngs.categorical(jnp.zeros(3)),
        rngs.truncated_normal(-1.0, 1.0, (2,)),
        rngs.choice(jnp.arange(5), (2,)),
        rngs.gumbel((2,)),
    )


@program(PROGRAMS)
def streams_forked(f):
    rngs = f.nnx.Rngs(params=0, dropout=1)
    forked = rngs.fork()
    return forked.params(), forked.dropout(), rngs.params(), f.nnx.state(rngs)


@program(PROGRAMS)
def streams_split(f):
    rngs = f.nnx.Rngs(params=0, dropout=1)
    split = [rngs.split(3), rngs.split((2, 2)), rngs.split({"dropout": 2, ...: None})]
    return [f.nnx.state(s) for s in split], f.nnx.state(rngs)


@program(PROGRAMS)
def streams_of_one_kind(f):
    rngs = f.nnx.Rngs(params=0, dropout=1)
    nnx = f.nnx
    return nnx.state(rngs, nnx.RngKey), nnx.state(rngs, nnx.RngCount), nnx.state(rngs, "params")


@program(PROGRAMS)
def streams_split_in_a_model(f):
    nnx = f.nnx
    model = nnx.Sequential(linear(nnx), nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=1)))
    backups = nnx.split_rngs(model, splits=2)
    shapes = jax.tree.map(jnp.shape, nnx.state(model, nnx.RngState))
    nnx.restore_rngs(backups)
    return nnx.to_pure_dict(shapes), nnx.state(model, nnx.RngState)


@program(PROGRAMS)
def streams_reseeded(f):
    nnx = f.nnx
    model = nnx.Sequential(linear(nnx), nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=1)))
    first = model(X)
    nnx.reseed(model, dropout=1)
    again = model(X)
    nnx.reseed(model, dropout=jax.random.key(5))
    return first, again, model(X), nnx.state(model, nnx.RngState)


@program(PROGRAMS)
def streams_under_jit(f):
    rngs = f.nnx.Rngs(0)
    draw = f.nnx.jit(lambda rngs: rngs.normal((2,)))
    return [draw(rngs) for _ in range(3)], f.nnx.state(rngs)


@program(PROGRAMS)
def streams_in_vmap(f):
    nnx = f.nnx
    draw = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: rngs.normal((2,))))
    rngs = nnx.Rngs(0)
    return draw(rngs), nnx.state(rngs)


@program(PROGRAMS)
def streams_of_an_ensemble(f):
    nnx = f.nnx

    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key):
        return nnx.Linear(2, 2, rngs=nnx.Rngs(key))

    return nnx.state(make(jax.random.split(jax.random.key(0), 3)))


@program(PROGRAMS)
def streams_with_another_implementation(f):
    return f.nnx.Rngs(jax.random.key(0, impl="rbg"))().shape


@program(PROGRAMS, raises=ValueError)
def streams_with_a_wrong_seed(f):
    return f.nnx.Rngs("zero")


test_programs = same_on_both(PROGRAMS)
