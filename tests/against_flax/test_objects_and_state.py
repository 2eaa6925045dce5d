"""Programs over objects and their state: what is in it, merging, updating, going through it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from tests.against_flax.compare import program, same_on_both

PROGRAMS = {}


def net(nnx):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.b = nnx.Linear(2, 3, rngs=rngs)
            self.a = nnx.BatchNorm(3, rngs=rngs)

        def __call__(self, x):
            return self.a(self.b(x))

    return Net(nnx.Rngs(0))


def holding(nnx, value):
    class Holder(nnx.Module):
        def __init__(self):
            self.w, self.d = nnx.Param(jnp.ones(2)), nnx.data(value)

    return Holder()


def optional(nnx):
    class Optional(nnx.Module):
        b: nnx.Data[jax.Array | None]

        def __init__(self):
            self.w, self.b = nnx.Param(jnp.ones(2)), None

    return Optional()


def a_pytree():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Box:
        array: object
        other: object = None

    return Box


def kinds_of(pairs):
    return [(key, type(child).__name__) for key, child in pairs]


# ---- var_defaults -------------------------------------------------------------------------------


@program(PROGRAMS)
def var_defaults_as_a_mapping(f):
    defaults = f.nnx.var_defaults()
    names = (sorted(defaults.keys()), dict(defaults.items()), len(defaults))
    return "hijax" in defaults, {**defaults}, defaults["ref"], names, repr(defaults)


@program(PROGRAMS)
def var_defaults_as_a_decorator(f):
    nnx = f.nnx

    @nnx.var_defaults(hijax=True)
    def make():
        return nnx.Param(jnp.ones(2))

    made = [nnx.Param(jnp.ones(2)), make(), nnx.Param(jnp.ones(2))]
    return [v.hijax for v in made], make.__name__


@program(PROGRAMS)
def var_defaults_on_a_constructor(f):
    nnx = f.nnx

    class Net(nnx.Module):
        @nnx.var_defaults(hijax=True)
        def __init__(self, size):
            self.w = nnx.Param(jnp.ones(size))

    return Net(3).w.hijax, nnx.var_defaults()["hijax"]


@program(PROGRAMS)
def var_defaults_for_good_then_as_a_block(f):
    nnx = f.nnx
    setting = nnx.var_defaults(hijax=True)
    found = [nnx.var_defaults()["hijax"]]
    with setting:
        found.append(nnx.var_defaults()["hijax"])
    return [*found, nnx.var_defaults()["hijax"]]


@program(PROGRAMS)
def var_defaults_after_an_error(f):
    @f.nnx.var_defaults(hijax=True)
    def fail():
        raise KeyError("x")

    try:
        fail()
    except KeyError:
        return f.nnx.var_defaults()["hijax"]


@program(PROGRAMS, raises=TypeError)
def var_defaults_with_an_unknown_name(f):
    with f.nnx.var_defaults(nope=True):
        pass


# ---- None in the state --------------------------------------------------------------------------


@program(PROGRAMS)
def none_in_an_annotated_attribute(f):
    graphdef, state = f.nnx.split(optional(f.nnx))
    return state, f.nnx.merge(graphdef, state).b is None, f.nnx.to_pure_dict(state)


@program(PROGRAMS)
def none_and_a_pure_dict(f):
    nnx = f.nnx
    model = optional(nnx)
    state = nnx.state(model)
    nnx.replace_by_pure_dict(state, {"w": jnp.zeros(2)})
    nnx.update(model, state)
    return nnx.state(model)


@program(PROGRAMS)
def none_becomes_an_array_in_jit_and_goes(f):
    nnx = f.nnx
    model = optional(nnx)

    @nnx.jit
    def toggle(model):
        model.b = jnp.ones(3) if model.b is None else None

    states = []
    for _ in range(3):
        toggle(model)
        states.append(nnx.to_pure_dict(nnx.state(model)))
    return states


@program(PROGRAMS)
def none_in_marked_containers(f):
    model = holding(f.nnx, {"a": None, "b": jnp.ones(1), "c": [None]})
    merged = f.nnx.merge(*f.nnx.split(model))
    return f.nnx.state(model), merged.d["a"] is None, str(merged.d["c"])


@program(PROGRAMS, raises=ValueError)
def an_array_for_none_by_update(f):
    f.nnx.update(optional(f.nnx), {"b": jnp.ones(3)})


# ---- merging ------------------------------------------------------------------------------------


@program(PROGRAMS)
def merge_a_list_of_leaves(f):
    graphdef, state = f.nnx.split(net(f.nnx))
    model = f.nnx.merge(graphdef, jax.tree.leaves(state))
    return model(jnp.arange(8.0).reshape(4, 2)), f.nnx.state(model)


@program(PROGRAMS)
def merge_a_list_of_variables(f):
    nnx = f.nnx
    model = net(nnx)
    graphdef, state = nnx.split(model)
    variables = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    merged = nnx.merge(graphdef, variables)
    return nnx.state(merged), merged.b.kernel is model.b.kernel


@program(PROGRAMS)
def merge_a_list_of_leaves_in_jax_jit(f):
    nnx = f.nnx
    graphdef, state = nnx.split(net(nnx))

    @jax.jit
    def step(leaves, x):
        model = nnx.merge(graphdef, leaves)
        return model(x), jax.tree.leaves(nnx.state(model))

    leaves = jax.tree.leaves(state)
    for _ in range(2):
        out, leaves = step(leaves, jnp.arange(8.0).reshape(4, 2))
    return out, leaves


@program(PROGRAMS)
def merge_twelve_leaves_of_a_list(f):
    nnx = f.nnx
    graphdef, state = nnx.split([nnx.Param(jnp.full(1, float(n))) for n in range(12)])
    return nnx.merge(graphdef, jax.tree.leaves(state))


@program(PROGRAMS, raises=ValueError)
def merge_too_short_a_list(f):
    graphdef, state = f.nnx.split(net(f.nnx))
    f.nnx.merge(graphdef, jax.tree.leaves(state)[1:])


@program(PROGRAMS, raises=ValueError)
def merge_two_lists(f):
    graphdef, state = f.nnx.split(net(f.nnx))
    leaves = jax.tree.leaves(state)
    f.nnx.merge(graphdef, leaves[:2], leaves[2:])


@program(PROGRAMS, raises=TypeError)
def merge_without_a_state(f):
    f.nnx.merge(f.nnx.graphdef(net(f.nnx)))


@program(PROGRAMS)
def paths_of_an_unpacked_model(f):
    packed = f.nnx.unpack(net(f.nnx))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(packed)]
    return paths, f.nnx.state(f.nnx.merge(jax.tree.map(lambda x: 2 * x, packed)))


# ---- types of data ------------------------------------------------------------------------------


@program(PROGRAMS)
def a_registered_data_type_in_a_dict(f):
    box = f.nnx.register_data_type(a_pytree())
    return f.nnx.state({"k": box(jnp.ones(2))}), f.nnx.is_data(box(1))


@program(PROGRAMS)
def a_pytree_that_is_no_data_type(f):
    box = a_pytree()
    return f.nnx.state({"k": box(jnp.ones(2)), "n": box(None)}), f.nnx.is_data(box(1))


@program(PROGRAMS)
def a_registered_data_type_in_a_module(f):
    nnx = f.nnx
    box = nnx.register_data_type(a_pytree())

    class Net(nnx.Module):
        def __init__(self):
            self.b, self.c = box(jnp.ones(2), nnx.Param(jnp.zeros(1))), box(None)

    model = Net()
    graphdef, state = nnx.split(model)
    return state, nnx.merge(graphdef, state).b.array, len(jax.tree.leaves(model))


@program(PROGRAMS)
def a_registered_data_type_is_updated(f):
    nnx = f.nnx
    box = nnx.register_data_type(a_pytree())
    tree = {"k": box(nnx.Param(jnp.ones(2)))}
    variable = tree["k"].array
    nnx.update(tree, {"k": {"array": jnp.zeros(2)}})
    return variable, tree["k"].array is variable


@program(PROGRAMS)
def a_registered_data_type_in_jit_and_grad(f):
    nnx = f.nnx
    box = nnx.register_data_type(a_pytree())
    model = holding(nnx, box(jnp.ones(2), nnx.Param(jnp.zeros(2))))

    @nnx.jit
    def step(model):
        model.d.other[...] += 1
        return model.d.array * 2

    outs = [step(model), step(model)]
    grads = nnx.grad(lambda m: (m.d.array * m.d.other**2).sum())(model)
    return outs, nnx.state(model), grads


@program(PROGRAMS)
def static_fields_of_a_pytree(f):
    nnx = f.nnx
    box = a_pytree()
    model = holding(nnx, {"b": box(jnp.ones(2), "text"), "c": box(3, 2.5)})
    doubled = nnx.jit(lambda m: m.d["b"].array * m.d["c"].array)(model)
    return nnx.state(model), nnx.state(model, graph=False), doubled


@program(PROGRAMS)
def an_unregistered_class_as_data(f):
    @f.nnx.register_data_type
    class Handle:
        pass

    return sorted(f.nnx.state(holding(f.nnx, Handle())))


# ---- data that is no array ----------------------------------------------------------------------


@program(PROGRAMS)
def text_and_numbers_marked_as_data(f):
    return [f.nnx.state(holding(f.nnx, value)) for value in ("abc", 3, 2.5)]


@program(PROGRAMS, raises=TypeError)
def text_marked_as_data_in_jit(f):
    f.nnx.jit(lambda m: m.w * 2)(holding(f.nnx, "abc"))


def with_a_dtype(nnx):
    return holding(nnx, {"t": np.dtype("float16"), "s": "x", "i": 3})


@program(PROGRAMS)
def dtypes_and_text_in_jit(f):
    nnx = f.nnx
    model = with_a_dtype(nnx)
    step = nnx.jit(lambda m: m.w.astype(m.d["t"]) * m.d["i"])
    return step(model), step(model), model.d["s"], nnx.state(model)


@program(PROGRAMS)
def dtypes_and_text_in_cond_and_remat(f):
    nnx = f.nnx
    model = with_a_dtype(nnx)
    read = lambda m: m.w.astype(m.d["t"]) * m.d["i"]  # noqa: E731
    return nnx.cond(True, read, read, model), nnx.remat(read)(model), model.d["s"]


@program(PROGRAMS)
def dtypes_and_text_in_loops(f):
    nnx = f.nnx

    def body(_, model):
        model.w[...] += model.d["i"]
        return model

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def layers(model, x):
        model.w[...] += x
        return model, model.w.astype(model.d["t"])

    looped = nnx.fori_loop(0, 3, body, with_a_dtype(nnx))
    carried, out = layers(with_a_dtype(nnx), jnp.arange(3.0))
    return looped.w, looped.d["s"], carried.w, carried.d["s"], out


@program(PROGRAMS)
def dtypes_and_text_mapped(f):
    nnx = f.nnx
    model = with_a_dtype(nnx)
    return nnx.vmap(lambda m, x: m.w.astype(m.d["t"]) * x)(model, jnp.arange(2.0))


@program(PROGRAMS)
def dtypes_and_text_made_inside(f):
    nnx = f.nnx
    made = nnx.jit(lambda: with_a_dtype(nnx))()
    shapes = nnx.eval_shape(lambda: with_a_dtype(nnx))
    return made.d["s"], made.w, shapes.d["s"], shapes.w.shape


@program(PROGRAMS, raises=TypeError)
def dtypes_and_text_in_tree_mode(f):
    f.nnx.jit(lambda m: m.w.astype(m.d["t"]), graph=False)(with_a_dtype(f.nnx))


@program(PROGRAMS)
def traces_of_numbers_inside_data(f):
    nnx = f.nnx
    model, traced = holding(nnx, {"i": 3}), []

    @nnx.jit
    def step(model):
        traced.append(isinstance(model.d["i"], jax.core.Tracer))
        return model.w * model.d["i"]

    first = step(model)
    model.d["i"] = 4
    return first, step(model), step(model), traced


@program(PROGRAMS)
def traces_of_an_empty_dict_as_data(f):
    nnx = f.nnx
    counts = []
    for empty in ({}, [], None):
        model, traces = holding(nnx, empty), []

        @nnx.jit
        def step(model, traces=traces):
            traces.append(1)
            model.w[...] += 1

        for _ in range(3):
            step(model)
        counts.append((len(traces), str(model.d), model.w[...]))
    return counts


@program(PROGRAMS)
def an_empty_dict_filled_in_jit(f):
    nnx = f.nnx
    model = holding(nnx, {})
    nnx.jit(lambda m: m.d.update(a=jnp.ones(2)))(model)
    return nnx.state(model)


@program(PROGRAMS)
def text_set_in_jit(f):
    nnx = f.nnx
    model = holding(nnx, {"s": "x"})

    @nnx.jit
    def change(model):
        model.d["s"] = "y"
        model.w[...] += 1

    change(model)
    return model.d["s"], model.w


# ---- going through objects ----------------------------------------------------------------------


@program(PROGRAMS)
def children_of_a_module(f):
    nnx = f.nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            linear = lambda: nnx.Linear(1, 1, rngs=rngs)  # noqa: E731
            self.w, self.a, self.n = nnx.Param(jnp.ones(2)), jnp.ones(3), 3
            self.l, self.d, self.e = nnx.List([linear()]), nnx.Dict(x=linear()), nnx.List([])
            self.p, self.q = nnx.data([linear()]), nnx.data({"z": linear()})
            self.one = self.two = linear()
            self.rngs = rngs

    model = Net(nnx.Rngs(0))
    walks = [nnx.iter_children(model), nnx.iter_children(model, graph=False)]
    walks += [model.iter_children(), nnx.iter_module_children(model)]
    return [kinds_of(walk) for walk in walks]


@program(PROGRAMS)
def children_of_plain_containers(f):
    nnx = f.nnx
    linear = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    trees = [[linear, nnx.Param(jnp.ones(1)), [linear], 3], {"b": linear, "a": {"c": linear}}]
    return [kinds_of(nnx.iter_children(tree)) for tree in trees]


@program(PROGRAMS)
def pop_arrays_from_a_dict(f):
    tree = {"a": f.nnx.Param(jnp.ones(1)), "c": jnp.ones(3), "n": 3}
    return f.nnx.pop(tree, lambda path, x: isinstance(x, jax.Array)), sorted(tree)


@program(PROGRAMS)
def pop_by_path_from_nested_dicts(f):
    tree = {"a": {"x": jnp.ones(1), "y": jnp.zeros(2)}, "c": jnp.ones(3)}
    return f.nnx.pop(tree, f.nnx.PathContains("a")), tree


@program(PROGRAMS)
def pop_everything_from_a_module(f):
    nnx = f.nnx

    class Net(nnx.Module):
        def __init__(self):
            self.w, self.a, self.n = nnx.Param(jnp.ones(2)), jnp.ones(3), 3

    model = Net()
    params, rest = nnx.pop(model, nnx.Param, ...)
    return params, rest, nnx.state(model), model.n


@program(PROGRAMS, raises=ValueError)
def pop_from_a_tuple(f):
    f.nnx.pop((f.nnx.Param(jnp.ones(1)), jnp.ones(3)), f.nnx.Param)


@program(PROGRAMS)
def split_a_dict_with_arrays(f):
    nnx = f.nnx
    tree = {"a": nnx.Param(jnp.ones(1)), "c": jnp.ones(3), "l": [jnp.zeros(1), 2]}
    graphdef, arrays, rest = nnx.split(tree, lambda path, x: isinstance(x, jax.Array), ...)
    return arrays, rest, nnx.merge(graphdef, arrays, rest)


@program(PROGRAMS, raises=ValueError)
def split_with_filters_that_leave_an_array(f):
    f.nnx.split({"a": f.nnx.Param(jnp.ones(1)), "c": jnp.ones(3)}, f.nnx.Param)


@program(PROGRAMS)
def split_bare_leaves(f):
    nnx = f.nnx
    found = []
    for graph in (True, False):
        for leaf in (1, 2.5, "x", None, jnp.ones(2), np.ones(2), nnx.Param(jnp.ones(1))):
            graphdef, state = nnx.split(leaf, graph=graph)
            found.append((state, nnx.merge(graphdef, state)))
    return found


@program(PROGRAMS)
def flatten_a_tree_with_numbers(f):
    nnx = f.nnx
    linear = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    tree = {"a": 1, "b": {"c": 2.5, "d": jnp.ones(2)}, "e": [linear, "x", None]}
    flat = [nnx.graphlib.flatten(tree, graph=graph)[1] for graph in (False, True)]
    return [list(x.paths) for x in flat], [list(x.leaves) for x in flat]


@program(PROGRAMS)
def split_a_tree_with_numbers_in_tree_mode(f):
    graphdef, state = f.nnx.split({"a": 1, "b": jnp.ones(2)}, graph=False)
    return state, f.nnx.merge(graphdef, state)


@program(PROGRAMS)
def marked_containers_in_tree_mode(f):
    model = holding(f.nnx, {"s": "abc", "i": 3, "n": None, "a": np.ones(1)})
    return f.nnx.state(model, graph=False), f.nnx.state(model)


@program(PROGRAMS)
def the_difference_of_two_states(f):
    nnx = f.nnx
    one = {"a": nnx.Param(jnp.ones(1)), "b": {"c": nnx.Param(jnp.ones(1)), "d": nnx.Param(2.0)}}
    other = {"a": nnx.Param(jnp.zeros(1)), "b": {"c": nnx.Param(jnp.ones(2))}, "z": nnx.Param(1.0)}
    found = nnx.statelib.diff(nnx.State(one), nnx.State(other))
    return type(found).__name__, found, nnx.statelib.diff(found, found)


# ---- update -------------------------------------------------------------------------------------


@program(PROGRAMS)
def update_with_a_stacked_state(f):
    nnx = f.nnx
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    nnx.update(layer, jax.tree.map(lambda x: jnp.stack([x, x + 1]), nnx.state(layer)))
    run = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))
    return nnx.state(layer), run(layer, jnp.ones((1, 2)))


@program(PROGRAMS)
def update_with_another_dtype(f):
    layer = f.nnx.Linear(2, 3, rngs=f.nnx.Rngs(0))
    f.nnx.update(layer, jax.tree.map(lambda x: x.astype(jnp.float16), f.nnx.state(layer)))
    return f.nnx.state(layer), layer.kernel.dtype == jnp.float16


@program(PROGRAMS)
def update_with_plain_values(f):
    nnx = f.nnx
    tree = {"v": nnx.Param(jnp.ones(1)), "n": nnx.Param(None), "a": jnp.ones(2)}
    nnx.update(tree, {"v": 3, "n": jnp.zeros(3), "a": jnp.zeros(3, jnp.int32)})
    variable = nnx.Param(jnp.ones(2))
    nnx.update(variable, jnp.zeros(3))
    return tree, variable


@program(PROGRAMS)
def update_takes_metadata_over(f):
    nnx = f.nnx
    tree = {"v": nnx.Param(jnp.ones(1), tag="x")}
    nnx.update(tree, {"v": nnx.Param(jnp.ones(2), tag="y")})
    return tree, tree["v"].tag


@program(PROGRAMS)
def update_in_jit_with_another_shape(f):
    nnx = f.nnx
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    stack = lambda m: jax.tree.map(lambda x: jnp.stack([x, x]), nnx.state(m))  # noqa: E731
    nnx.jit(lambda m: nnx.update(m, stack(m)))(layer)
    return nnx.state(layer)


@program(PROGRAMS)
def update_streams_with_stacked_keys(f):
    nnx = f.nnx
    rngs = nnx.Rngs(0)
    nnx.update(rngs, jax.tree.map(lambda x: jnp.stack([x, x]), nnx.state(rngs)))
    return nnx.state(rngs)


@program(PROGRAMS, raises=ValueError)
def update_a_module_with_an_array(f):
    f.nnx.update({"m": f.nnx.Linear(2, 3, rngs=f.nnx.Rngs(0))}, {"m": jnp.zeros(1)})


@program(PROGRAMS, raises=ValueError)
def update_a_ref_with_another_shape(f):
    f.nnx.update({"v": f.nnx.Param(jnp.ones(1), ref=True)}, {"v": jnp.ones(2)})


# ---- models as trees ----------------------------------------------------------------------------


@program(PROGRAMS)
def a_model_and_its_gradients_in_tree_map(f):
    nnx = f.nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.a, self.b = nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)

        def __call__(self, x):
            return self.b(nnx.tanh(self.a(x)))

    @nnx.jit(graph=False)
    def step(model, x):
        grads = nnx.grad(lambda m: (m(x) ** 2).mean(), graph=False)(model)
        return jax.tree.map(lambda w, g: w - 0.1 * g, model, grads)

    model = Net(nnx.Rngs(0))
    for _ in range(3):
        model = step(model, jnp.ones((4, 2)))
    return nnx.state(model)


@program(PROGRAMS)
def gradients_in_tree_mode_by_the_switch(f):
    nnx = f.nnx
    with nnx.set_graph_mode(False):
        layer = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        grads = nnx.grad(lambda m: (m(jnp.ones((4, 2))) ** 2).mean())(layer)
        new = jax.tree.map(lambda w, g: w - 0.1 * g, layer, grads)
    return type(grads).__name__, nnx.state(new)


@program(PROGRAMS)
def gradients_in_tree_mode_of_all_leaves(f):
    nnx = f.nnx

    class Net(nnx.Module):
        def __init__(self):
            self.w, self.b = nnx.Param(jnp.ones(2)), nnx.BatchStat(jnp.full(2, 3.0))
            self.a, self.d, self.s = jnp.ones(2), nnx.data({"x": jnp.ones(2), "n": None}), 3

    grads = nnx.grad(lambda m: (m.w * m.b * m.a * m.d["x"]).sum(), graph=False)(Net())
    return nnx.state(grads), grads.s


@program(PROGRAMS)
def gradients_in_tree_mode_with_aux_and_two_arguments(f):
    nnx = f.nnx
    layer = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    lift = nnx.value_and_grad(
        lambda m, x: (m(x).sum(), 3), has_aux=True, graph=False, argnums=(0, 1)
    )
    (loss, aux), (of_layer, of_x) = lift(layer, jnp.ones((1, 1)))
    return loss, aux, nnx.state(of_layer), of_x


@program(PROGRAMS, raises=TypeError)
def gradients_with_argnums_by_position(f):
    f.nnx.grad(lambda m: m(jnp.ones(1)).sum(), f.nnx.DiffState(0, f.nnx.Param))


@program(PROGRAMS, raises=TypeError)
def integers_in_tree_mode(f):
    nnx = f.nnx
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    nnx.grad(lambda m: m(jnp.ones((1, 1))).sum(), graph=False)(dropout)


@program(PROGRAMS)
def an_empty_sequential(f):
    empty = f.nnx.Sequential()
    return empty(), empty(jnp.ones(2)), empty(jnp.ones(2), 3), empty(x=jnp.ones(2))


test_programs = same_on_both(PROGRAMS)
