"""Programs over the less known names: spmd, traverse_util, tracers, ids, config, types."""

import copy
import inspect

import jax
import jax.numpy as jnp
import optax

from tests.against_flax.compare import program, same_on_both

PROGRAMS = {}


@program(PROGRAMS)
def classes_with_parameters(f):
    nnx = f.nnx
    kinds = [nnx.GraphDef, nnx.TrainState, nnx.Optimizer, nnx.ModelAndOptimizer, nnx.List, nnx.Dict]
    subscripted = [kind[nnx.Linear] is not None for kind in kinds]
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer[nnx.Linear](model, optax.sgd(0.1), wrt=nnx.Param)
    items = nnx.List[nnx.Linear]([model])
    return (
        subscripted,
        nnx.state(optimizer),
        nnx.state(items),
        nnx.PureState[nnx.Linear].__origin__ is tuple,
        nnx.State[str, int] is not None,
        nnx.Initializer is not None,
    )


@program(PROGRAMS)
def partition_specs_of_variables(f):
    nnx = f.nnx
    value = jnp.ones((2, 3))
    rules = (("x", "data"),)
    variables = [
        nnx.Param(value, out_sharding=("a", None), eager_sharding=False),
        nnx.Param(value, out_sharding=("x", None), sharding_rules=rules, eager_sharding=False),
        nnx.Param(value),
        nnx.Param(3),
    ]
    return [str(nnx.spmd.get_var_pspec(v)) for v in variables]


def named_state(nnx):
    return nnx.State(
        {
            "w": nnx.Param(jnp.ones((2, 3)), out_sharding=("a", "b"), eager_sharding=False),
            "plain": nnx.Param(jnp.ones(2)),
            "array": jnp.ones(2),
        }
    )


@program(PROGRAMS)
def axis_names_added_and_removed(f):
    nnx = f.nnx
    seen = []
    for index in range(3):
        state = named_state(nnx)
        added = nnx.spmd.add_axis(state, index, {nnx.PARTITION_NAME: "layers"})
        seen.append(added["w"].out_sharding)
        seen.append(state["w"] is added["w"])
        removed = nnx.spmd.remove_axis(added, index, {nnx.PARTITION_NAME: "layers"})
        seen.append(removed["w"].out_sharding)
    unnamed = nnx.spmd.add_axis(named_state(nnx), 0, {nnx.PARTITION_NAME: None})
    return seen, unnamed["w"].out_sharding


@program(PROGRAMS, raises=ValueError)
def removing_an_axis_of_another_name(f):
    f.nnx.spmd.remove_axis(named_state(f.nnx), 0, {f.nnx.PARTITION_NAME: "layers"})


@program(PROGRAMS, raises=ValueError)
def adding_an_axis_without_a_name(f):
    f.nnx.spmd.add_axis(named_state(f.nnx), 0, {})


@program(PROGRAMS)
def path_filters_of_a_state(f):
    nnx = f.nnx
    axes = nnx.State({"a": {"b": 0}, "c": None, "d": 0})
    filters = nnx.statelib.create_path_filters(axes)
    selected = {
        str(value): sorted(
            ".".join(path) for path in [("a", "b"), ("c",), ("d",)] if selects(path, None)
        )
        for selects, value in filters.items()
    }
    of_variables = nnx.statelib.create_path_filters(nnx.State({"p": nnx.Param(1)}))
    return selected, list(of_variables.values())


@program(PROGRAMS)
def keyword_arguments_of_functions(f):
    has = f.nnx.helpers.has_keyword_arg

    def by_keyword(a, *, b=1): ...
    def others(a, **kwargs): ...
    def by_position(a, b, /): ...
    def both(a, b): ...

    return [has(function, "b") for function in (by_keyword, others, by_position, both)]


@program(PROGRAMS)
def paddings(f):
    canonical = f.nnx.nn.linear.canonicalize_padding
    return [canonical(p, 2) for p in ("SAME", "VALID", 1, (1, 2), [(1, 2), 3], [(0, 0), (1, 1)])]


for number, padding in enumerate([[(1, 1)], None, (1, 2, 3), ((1, 2, 3), 1), 1.5]):

    def refused(f, padding=padding):
        return f.nnx.nn.linear.canonicalize_padding(padding, 2)

    refused.__name__ = f"padding_refused_{number}"
    program(PROGRAMS, raises=ValueError)(refused)


@program(PROGRAMS)
def the_running_trace(f):
    tracers = f.nnx.tracers
    outside = tracers.TraceState()
    inside = []

    def traced(x):
        inside.append([outside.is_valid(), outside == tracers.TraceState()])
        return x

    jax.jit(traced)(0)
    jax.vmap(traced)(jnp.ones(2))
    return outside.is_valid(), outside == tracers.TraceState(), inside


@program(PROGRAMS, raises=TypeError)
def a_trace_has_no_hash(f):
    hash(f.nnx.tracers.TraceState())


@program(PROGRAMS)
def own_transforms_by_split_and_merge_inputs(f):
    nnx, general = f.nnx, f.nnx.transforms.general

    class Counter(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.zeros(()))

    @general.split_inputs
    @jax.jit
    @general.merge_inputs
    def step(pair, by):
        first, second = pair
        first.count.value += by
        first.calls = 1
        return second.count.value * 2, first, nnx.Variable(by)

    counter = Counter()
    out, same, made = step((counter, counter), 3.0)
    return out, same is counter, counter.calls, counter.count, made


@program(PROGRAMS)
def split_inputs_with_a_tag(f):
    general = f.nnx.transforms.general
    variable = f.nnx.Variable(jnp.ones(3))

    @general.split_inputs(ctxtag="mine")
    @jax.jit
    @general.merge_inputs(ctxtag="mine")
    def double(variable):
        variable.value = variable.value * 2

    double(variable)
    return variable


@program(PROGRAMS, raises=ValueError)
def merge_inputs_alone(f):
    return f.nnx.transforms.general.merge_inputs(lambda x: x)(1.0)


@program(PROGRAMS)
def compilations_are_counted(f):
    nnx = f.nnx
    step = nnx.jit(lambda m, x: m(x))
    sizes = [step.jitted_fn._cache_size()]
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    for count in (1, 2, 2):
        step(model, jnp.ones((count, 2)))
        sizes.append(step.jitted_fn._cache_size())
    step(nnx.Linear(2, 3, rngs=nnx.Rngs(1)), jnp.ones((1, 2)))
    step(nnx.Linear(2, 3, use_bias=False, rngs=nnx.Rngs(1)), jnp.ones((1, 2)))
    sizes.append(step.jitted_fn._cache_size())
    partial = nnx.cached_partial(step, model)
    partial(jnp.ones((5, 2)))
    sizes.append(partial.jitted_fn._cache_size())
    step.jitted_fn.clear_cache()
    return sizes, step.jitted_fn._cache_size()


@program(PROGRAMS)
def compilations_with_static_arguments(f):
    step = f.nnx.jit(lambda m, k: m.kernel.value.sum() * k, static_argnums=1)
    model = f.nnx.Linear(2, 3, rngs=f.nnx.Rngs(0))
    for k in (1, 2, 1):
        step(model, k)
    return step.jitted_fn._cache_size()


# ---- traverse_util ------------------------------------------------------------------------------

NESTED = {"a": {"b": 1, "e": {}}, "d": 3}


@program(PROGRAMS)
def flat_dicts(f):
    util = f.flax.traverse_util
    flat = util.flatten_dict(NESTED, keep_empty_nodes=True)
    return (
        [(".".join(path), value) for path, value in util.flatten_dict(NESTED).items()],
        list(util.flatten_dict(NESTED, sep="/")),
        list(util.flatten_dict(NESTED, True, None, ".")),
        util.unflatten_dict(flat),
        util.unflatten_dict({"a/b": 1, "c": 2}, sep="/"),
        [str(path) for path in util.flatten_dict(NESTED, is_leaf=lambda path, _: len(path) == 1)],
        util.flatten_dict({}),
        len(jax.tree.leaves(util.empty_node)),
    )


@program(PROGRAMS, raises=AssertionError)
def a_list_is_not_flattened(f):
    return f.flax.traverse_util.flatten_dict([1])


@program(PROGRAMS)
def maps_that_know_the_path(f):
    return f.flax.traverse_util.path_aware_map(lambda path, x: ("/".join(path), x), NESTED)


def parts(traversal, data):
    return list(traversal.iterate(data)), traversal.update(lambda x: x * 10, data)


@program(PROGRAMS)
def traversals(f):
    util = f.flax.traverse_util
    t = util.t_identity
    data = {"a": {"b": 1, "c": 2}, "d": [3, 4], "e": (5, 6)}
    large = t.tree().filter(lambda x: x > 2)
    return [
        parts(t["a"]["b"], data),
        parts(t["d"].each(), data),
        parts(t["e"].each(), data),
        parts(t["a"].each(), data),
        parts(t["e"][1], data),
        parts(t.tree(), data),
        parts(large, data),
        large.set([9, 8, 7, 6], data),
        parts(t["a"].merge(t["b"], t["c"]), data),
        parts(t["a"].compose(t["c"]), data),
        t["d"][0:1].update(lambda xs: [x + 1 for x in xs], data),
        t["e"][0:1].update(lambda x: x + 1, data),
        t.merge(t["d"], t["d"]).set([1, 2], data),
        t.set([0], data),
    ]


@program(PROGRAMS)
def traversals_of_attributes(f):
    @f.flax.struct.dataclass
    class Point:
        x: float
        y: float

    util = f.flax.traverse_util
    new = util.TraverseAttr("x").update(lambda x: x + 1, Point(1.0, 2.0))
    nested = util.t_identity["p"].x.update(lambda x: x + 1, {"p": Point(1.0, 2.0)})
    return new.x, new.y, nested["p"].x, list(util.t_identity.y.iterate(new))


@program(PROGRAMS)
def traversals_of_parameters(f):
    params = {"y": {"kernel": {"z": 3}, "none": {}}, "x": {"kernel": 1, "bias": 2}}
    kernels = f.flax.traverse_util.ModelParamTraversal(lambda path, _: path.endswith("kernel"))
    seen = []
    every = f.flax.traverse_util.ModelParamTraversal(lambda path, _: seen.append(path) or True)
    return parts(kernels, params), kernels.set([7], params), every.set([7, 8, 9], params), seen


@program(PROGRAMS, raises=ValueError)
def too_few_values_for_a_traversal(f):
    f.flax.traverse_util.t_identity.tree().set([1], [1, 2])


@program(PROGRAMS, raises=ValueError)
def too_many_values_for_a_traversal(f):
    f.flax.traverse_util.t_identity.tree().set([1, 2, 3], [1, 2])


@program(PROGRAMS, raises=ValueError)
def each_of_a_number(f):
    f.flax.traverse_util.t_identity.each().update(abs, 3)


@program(PROGRAMS, raises=KeyError)
def a_key_that_is_not_there(f):
    f.flax.traverse_util.t_identity["z"].update(abs, {"a": 1})


@program(PROGRAMS, raises=TypeError)
def a_traversal_is_abstract(f):
    f.flax.traverse_util.Traversal()


# ---- ids, config, typing ------------------------------------------------------------------------


@program(PROGRAMS)
def ids_are_given_out_once(f):
    import importlib

    ids = importlib.import_module(f"{f.flax.__name__}.ids")
    give = ids.UUIDManager()
    one = ids.uuid()
    copies = [copy.copy(one), copy.deepcopy(one)]
    return (
        [repr(give()), repr(give())],
        [other == one for other in copies],
        ids.FlaxId(3) == ids.FlaxId(3),
        hash(ids.FlaxId(3)) == hash(ids.FlaxId(3)),
    )


@program(PROGRAMS)
def switches_at_first(f):
    names = [name for name in dir(f.flax.config) if name.startswith(("flax_", "nnx_graph"))]
    return [(name, getattr(f.flax.config, name)) for name in sorted(names)]


@program(PROGRAMS)
def switches_take_effect(f):
    nnx, config = f.nnx, f.flax.config
    seen = []
    for name, read in {
        "nnx_graph_mode": nnx.set_graph_mode.current_value,
        "nnx_graph_updates": nnx.set_graph_updates.current_value,
        "flax_always_shard_variable": nnx.using_eager_sharding,
        "flax_hijax_variable": lambda: nnx.var_defaults().hijax,
        "flax_profile": lambda: None,
    }.items():
        before = getattr(config, name)
        config.update(name, not before)
        seen.append((name, getattr(config, name), read()))
        config.update(name, before)
        seen.append(read())
    with config.temp_flip_flag("profile", False):
        seen.append(config.flax_profile)
    return seen, config.flax_profile


@program(PROGRAMS)
def how_deep_objects_print(f):
    nnx, config = f.nnx, f.flax.config
    model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    texts = []
    for depth in range(3):
        config.update("flax_max_repr_depth", depth)
        texts += [repr(model), repr(nnx.state(model))]
    config.update("flax_max_repr_depth", None)
    return texts


@program(PROGRAMS, raises=LookupError)
def a_switch_that_is_not_there(f):
    f.flax.config.update("flax_nonsense", True)


@program(PROGRAMS, raises=AttributeError)
def a_switch_that_is_read_and_not_there(f):
    return f.flax.config.flax_nonsense


@program(PROGRAMS, raises=AttributeError)
def a_switch_that_is_assigned(f):
    f.flax.config.flax_profile = False


@program(PROGRAMS)
def names_of_types(f):
    import importlib

    typing = importlib.import_module(f"{f.flax.__name__}.typing")
    names = "Array Axes Axis AxisName Collection Dtype Initializer Key LogicalNames LogicalRules"
    names += " PRNGKey PaddingLike PathParts PrecisionLike Shape Sharding VariableDict In Out"
    return (
        [getattr(typing, name) is not None for name in names.split()],
        repr(typing.In(1)),
        typing.has_shape_dtype(jnp.ones(2)),
        typing.has_shape_dtype(2),
        inspect.isclass(f.nnx.graph.Key),
    )


test_programs = same_on_both(PROGRAMS)
