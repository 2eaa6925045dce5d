"""Variables on eight devices. Run as a program; prints what went wrong, by case."""

import contextlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, SingleDeviceSharding

import linnet
from linnet import nnx
from linnet.errors import AxisError, ShardingError, ShardingWarning
from tests.compare import is_key
from tests.subprocesses import Cases

CASES = case = Cases()
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
VALUE = np.arange(32, dtype=np.float32).reshape(4, 8)


def make_mesh(*types):
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=types or (AUTO, AUTO))


@contextlib.contextmanager
def old_block(mesh):
    """``with mesh:``, which JAX deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with mesh:
            yield


def spec(variable):
    sharding = variable.value.sharding
    return sharding.spec if isinstance(sharding, NamedSharding) else None


def refused(make, error=ShardingError):
    try:
        made = make()
    except error as caught:
        return str(caught)
    raise AssertionError(f"this was not refused: {made}")


def linear(*names, mesh=None, **more):
    own = {} if mesh is None else {"mesh": mesh}
    metadata = {"out_sharding": names, **own, **more}
    return nnx.Linear(4, 8, kernel_metadata=metadata, rngs=nnx.Rngs(0))


@case
def every_spelling_places_the_value():
    spellings = [
        {"out_sharding": ("data", "model")},
        {"sharding_names": ("data", "model")},
        {"sharding": ("data", "model")},
        {"out_sharding": P("data", "model")},
        {"out_sharding": ["data", "model"]},
        {"out_sharding": NamedSharding(make_mesh(), P("data", "model"))},
        {
            "out_sharding": ("rows", "columns"),
            "sharding_rules": [("rows", "data"), ("columns", "model")],
        },
    ]
    for metadata in spellings:
        for enter in (jax.set_mesh, old_block):
            with enter(make_mesh()):
                eager = nnx.Param(VALUE, **metadata)
                inside = nnx.jit(lambda m=metadata: nnx.Param(VALUE * 1, **m))()
            for made in (eager, inside):
                assert spec(made) == P("data", "model"), (metadata, enter, spec(made))
                np.testing.assert_array_equal(made.value, VALUE)
                shards = made.value.addressable_shards
                assert len(shards) == 8 and shards[0].data.shape == (2, 2)
        if "sharding_rules" not in metadata:
            own = {"mesh": make_mesh()} | metadata
            assert spec(nnx.Param(VALUE, **own)) == P("data", "model")
            assert spec(nnx.jit(lambda m=own: nnx.Param(VALUE * 1, **m))()) == P("data", "model")


@case
def parts_of_a_spec():
    with jax.set_mesh(make_mesh()):
        for names, want in [
            (("data",), P("data")),
            ((None, "model"), P(None, "model")),
            ((None, ("data", "model")), P(None, ("data", "model"))),
            ((P.UNCONSTRAINED, "model"), P(None, "model")),
            ("data", P("data")),
        ]:
            assert spec(nnx.Param(VALUE, out_sharding=names)) == want
        tree = nnx.Variable(
            {"a": VALUE, "b": jnp.ones((2, 2)), "c": "text"}, out_sharding=("data",)
        )
        assert [tree.value[name].sharding.spec for name in "ab"] == [P("data")] * 2
        assert tree.value["c"] == "text"
        for names in (None, (), P()):
            bare = nnx.Param(jnp.asarray(VALUE), out_sharding=names)
            assert bare.value.sharding.is_fully_replicated
        keys = nnx.Variable(jax.random.split(jax.random.key(0), 4), out_sharding=("data",))
        assert spec(keys) == P("data")
        refs = [
            nnx.Param(VALUE, out_sharding=("data",), **{kind: True}) for kind in ("ref", "hijax")
        ]
        assert [spec(ref) for ref in refs] == [P("data")] * 2


@case
def the_mesh_of_the_metadata_comes_first():
    other = jax.make_mesh((8,), ("data",), axis_types=(AUTO,))
    with jax.set_mesh(make_mesh()):
        own = nnx.Param(jnp.ones((8, 2)), out_sharding=("data",), mesh=other)
        assert own.value.sharding == NamedSharding(other, P("data"))
        none = nnx.Param(VALUE, out_sharding=("data",), mesh=None)
        assert spec(none) == P("data")
        alone = SingleDeviceSharding(jax.devices()[3])
        assert nnx.Param(VALUE, out_sharding=alone).value.sharding == alone
    placed = jax.device_put(VALUE, NamedSharding(make_mesh(), P(None, "model")))
    assert spec(nnx.Param(placed, out_sharding=("data",))) == P("data")


@case
def every_type_of_axis():
    for types in ((AUTO, AUTO), (EXPLICIT, EXPLICIT), (AUTO, EXPLICIT), (EXPLICIT, AUTO)):
        mesh = make_mesh(*types)
        with jax.set_mesh(mesh):
            make = lambda: nnx.Param(jnp.asarray(VALUE) * 1, out_sharding=("data", "model"))  # noqa: E731
            for made in (make(), nnx.jit(make)(), linear("data", "model").kernel):
                assert made.value.sharding == NamedSharding(mesh, P("data", "model")), types
            mapped = nnx.vmap(lambda x: nnx.Param(x, out_sharding=(None, "model")))
            assert spec(mapped(jnp.ones((3, 4, 8)))) == P(None, None, "model")
            if types == (EXPLICIT, EXPLICIT):
                assert nnx.jit(placed_type)() == 1.0


def placed_type():
    """One if the type of a value that is made here has the sharding of its metadata."""
    made = nnx.Param(jnp.asarray(VALUE) * 1, out_sharding=("data", "model"))
    return jnp.float32(jax.typeof(made.value).sharding.spec == P("data", "model"))


@case
def manual_axes_are_the_programs_own():
    def local(x):
        made = nnx.Param(x, out_sharding=("data", "model"))
        assert made.out_sharding == ("data", "model")
        return made.value

    mesh = make_mesh()
    both = jax.shard_map(
        local, mesh=mesh, in_specs=P("data", "model"), out_specs=P("data", "model")
    )
    np.testing.assert_array_equal(both(VALUE), VALUE)
    one = jax.shard_map(
        local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    got = jax.jit(one)(VALUE)
    np.testing.assert_array_equal(got, VALUE)
    assert got.sharding.spec == P("data", "model")


@case
def rules_translate_names():
    rules = [("embed", "data"), ("mlp", "model"), ("heads", None)]
    with jax.set_mesh(make_mesh()), nnx.logical_axis_rules(rules):
        assert spec(nnx.Param(VALUE, out_sharding=("embed", "mlp"))) == P("data", "model")
        assert spec(nnx.Param(VALUE, out_sharding=("heads", "mlp"))) == P(None, "model")
        assert spec(linear("embed", "mlp").kernel) == P("data", "model")
        inside = nnx.jit(lambda: linear("embed", "mlp"))()
        assert (
            spec(inside.kernel) == P("data", "model") and inside.kernel.out_sharding[0] == "embed"
        )
        text = refused(lambda: linear("embed", "mlp", sharding_rules=[("mlp", "data")]), AxisError)
    assert text == (
        "A Param of Linear, at .kernel, float32[4,8]: Inconsistent logical axis annotations for "
        "'mlp': 'model' by nnx.logical_axis_rules, but 'data' by the Variable's own "
        "sharding_rules.\n"
        "Fix: leave the rule out in one of the two places."
    )


@case
def the_switch_has_three_forms():
    def is_placed():
        return spec(nnx.Param(jnp.asarray(VALUE), out_sharding=("data",))) == P("data")

    with jax.set_mesh(make_mesh()):
        assert is_placed()
        with nnx.use_eager_sharding(False):
            assert not is_placed()
            assert spec(nnx.Param(VALUE, out_sharding=("data",), eager_sharding=True)) == P("data")
            assert not spec(linear("data").kernel)
        nnx.use_eager_sharding(False)
        assert not is_placed()
        nnx.use_eager_sharding(True)
        linnet.config.update("flax_always_shard_variable", False)
        assert not is_placed() and not nnx.using_eager_sharding()
        linnet.config.update("flax_always_shard_variable", True)
        assert is_placed()
        made = []
        f = nnx.jit(lambda: made.append(None) or nnx.Param(VALUE * 1, out_sharding=("data",)))
        first = f()
        with nnx.use_eager_sharding(False):
            second = f()
        assert (len(made), spec(first), spec(second)) == (2, P("data"), P())
    with nnx.use_eager_sharding(False):
        assert nnx.Param(VALUE, out_sharding=("data",)).out_sharding == ("data",)


@case
def errors_say_what_where_and_how():
    class Tower(nnx.Module):
        def __init__(self, *names):
            self.layers = nnx.List([linear(*names)])

    with jax.set_mesh(make_mesh()):
        assert refused(lambda: Tower("data", "modle")) == (
            "A Param of Linear, in Tower, at .layers.kernel, float32[4,8], has "
            "out_sharding=('data', 'modle') on the mesh (data=2, model=4), but the mesh has no "
            "axis 'modle'.\n"
            "Fix: write 'model', or, if 'modle' is a name of your own, say what it stands for with "
            "nnx.logical_axis_rules([('modle', mesh axis or None)])."
        )
        assert refused(lambda: Tower("data", None, "model")) == (
            "A Param of Linear, in Tower, at .layers.kernel, float32[4,8], has "
            "out_sharding=('data', None, 'model') on the mesh (data=2, model=4), but these are 3 "
            "entries for 2 axes.\n"
            "Fix: one entry for each axis of the array; those at the end may be left out."
        )
        assert refused(lambda: nnx.Param(jnp.ones((3, 8)), out_sharding=("data",))) == (
            "A Param, float32[3,8], has out_sharding=('data',) on the mesh (data=2, model=4), but "
            "axis 0 of size 3 does not divide into 2 parts.\n"
            "Fix: make the size a multiple of 2, or shard another axis (None in its place)."
        )
        assert "two axes of the array are sharded along 'data'" in refused(
            nnx.jit(lambda: linear("data", "data"))
        )
        assert "out_sharding=3 is neither axis names nor a sharding" in refused(
            lambda: nnx.Param(VALUE, out_sharding=3)
        )
        rules = [("embed", "model"), ("mlp", "model")]
        with nnx.logical_axis_rules(rules):
            assert "('embed', 'mlp'), by the rules ('model', 'model'), on the mesh" in refused(
                lambda: linear("embed", "mlp")
            )
        state = nnx.State(
            {"a": {"w": nnx.Param(VALUE, out_sharding=("nope",), eager_sharding=False)}}
        )
        assert "no axis 'nope'" in refused(lambda: nnx.get_named_sharding(state, make_mesh()))
        assert refused(lambda: nnx.as_abstract(nnx.eval_shape(lambda: state))).startswith(
            "The Param at .a.w, float32[4,8], has out_sharding=('nope',) on the mesh"
        )
    for make in (lambda: linear("data"), nnx.jit(lambda: linear("data"))):
        assert refused(make) == (
            "A Param of Linear, at .kernel, float32[4,8], has out_sharding=('data',), but there is "
            "no mesh to place it on.\nFix: make it under `with jax.set_mesh(mesh):`, give it "
            "mesh=mesh in its metadata, or leave it where it is with nnx.use_eager_sharding(False)."
        )
    assert "which has no devices" in refused(
        lambda: nnx.Param(VALUE, out_sharding=("data",), mesh=make_mesh().abstract_mesh)
    )


class Table(nnx.Module):
    def __init__(self):
        self.size = 4
        self.table = nnx.Param(VALUE, out_sharding=("nope",))


class LocalTable(Table):
    def __init__(self):
        table = nnx.Param(VALUE, out_sharding=("nope",))
        self.table = table


class Places(nnx.Module):
    """Makes a table in one of several ways, which errors name as far as they can."""

    def __init__(self, how):
        self.how = how
        if how == "attribute":
            self.inner = Table()
        elif how == "list":
            self.inner = [Table() for _ in range(2)]
        elif how == "dict":
            self.inner = nnx.Dict({name: Table() for name in "ab"})
        elif how == "choice":
            self.inner = Table() if how else None
        elif how == "pair":
            self.inner, self.other = LocalTable, Table()
        elif how == "inner local":
            self.inner = LocalTable()
        else:
            inner = Table()
            self.inner = inner
        self.outer = None


@case
def errors_name_the_attribute_that_is_being_made():
    found = {}
    with jax.set_mesh(make_mesh()):
        for how in ("attribute", "list", "dict", "choice", "pair", "inner local", "local"):
            text = refused(lambda how=how: Places(how))
            found[how] = text[: text.index(", float32[4,8], has")]
        assert refused(Table).startswith("A Param of Table, at .table, float32")
    assert found == {
        "attribute": "A Param of Table, in Places, at .inner.table",
        "list": "A Param of Table, in Places, at .inner.table",
        "dict": "A Param of Table, in Places, at .inner.table",
        "choice": "A Param of Table, in Places, at .inner.table",
        "pair": "A Param of Table, in Places, at .?.table",
        "inner local": "A Param of LocalTable, in Places, at .inner",
        "local": "A Param of Table, in Places, at .?.table",
    }


@case
def inside_jit_an_uneven_axis_is_a_warning():
    make = lambda: nnx.Param(jnp.ones((3, 8)), out_sharding=("data",))  # noqa: E731
    with jax.set_mesh(make_mesh()), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        nnx.jit(make)()
        abstract = nnx.eval_shape(make)
    assert {w.category for w in caught} == {ShardingWarning} and spec(abstract) == P("data")
    assert "axis 0 of size 3 does not divide into 2 parts. Inside jit" in str(caught[0].message)
    with jax.set_mesh(make_mesh(EXPLICIT, EXPLICIT)):
        assert "does not divide" in refused(nnx.jit(make))


@case
def writes_stay_where_the_program_puts_them():
    with jax.set_mesh(make_mesh()):
        kernel = nnx.Param(VALUE, out_sharding=("data", "model"))
        kernel[...] = jnp.ones((4, 8))
        assert spec(kernel) == P("data", "model")
        kernel[0] = 5.0
        assert spec(kernel) == P("data", "model") and kernel.value[0, 0] == 5
        kernel.value = jnp.ones((4, 8))
        assert kernel.value.sharding.is_fully_replicated
        hooked = nnx.Param(
            VALUE, out_sharding=("data",), on_create_value=lambda v, x: x[:2, :4] * 2
        )
        assert spec(hooked) == P("data") and hooked.value.shape == (2, 4)


@case
def shapes_get_shardings():
    mesh = make_mesh()
    make = lambda: linear("data", "model")  # noqa: E731
    with jax.set_mesh(mesh):
        abstract = nnx.eval_shape(make)
        again = nnx.as_abstract(abstract)
        optimizer = nnx.eval_shape(lambda: nnx.Optimizer(make(), optax.adam(1e-3), wrt=nnx.Param))
    for model in (abstract, again):
        assert model.kernel.value.sharding == NamedSharding(mesh, P("data", "model"))
        assert model.bias.value.sharding == NamedSharding(mesh, P())
    assert spec(optimizer.opt_state[0].mu["kernel"]) == P("data", "model")
    _, state = nnx.get_abstract_model(make, mesh)
    assert state["kernel"].value.sharding == NamedSharding(mesh, P("data", "model"))
    own = nnx.eval_shape(lambda: linear("data", mesh=mesh))
    assert (
        own.kernel.value.sharding == NamedSharding(mesh, P("data"))
        and own.bias.value.sharding is None
    )
    with jax.set_mesh(mesh):
        model = make()
        assert nnx.spmd.get_var_pspec(model.kernel) == P("data", "model")
        shardings = nnx.get_named_sharding(nnx.state(model), mesh)
    assert shardings["kernel"].value == NamedSharding(mesh, P("data", "model"))
    assert nnx.spmd.get_var_pspec(nnx.Param(VALUE, out_sharding=shardings["kernel"].value)) == P(
        "data", "model"
    )


@nnx.jit(static_argnums=3)
def step(model, optimizer, x, out):
    loss = lambda m: (m(x, out_sharding=out) ** 2).mean()  # noqa: E731
    optimizer.update(model, nnx.grad(loss)(model))


@case
def optimizers_follow_their_parameters():
    for types in ((AUTO, AUTO), (EXPLICIT, EXPLICIT)):
        mesh = make_mesh(*types)
        with jax.set_mesh(mesh):
            model = linear("data", "model")
            inside = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        outside = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        for optimizer in (inside, outside):
            moment = optimizer.opt_state[0].mu["kernel"]
            assert moment.value.sharding == NamedSharding(mesh, P("data", "model"))
        with jax.set_mesh(mesh):
            factored = nnx.Optimizer(
                model, optax.adafactor(1e-3, min_dim_size_to_factor=2), wrt=nnx.Param
            )
            assert factored.opt_state[0].v_row["kernel"].value.shape == (4,)
            away = linear("data", "model", opt_sharding=(None, "model"))
            other = nnx.Optimizer(away, optax.adam(1e-3), wrt=nnx.Param)
            assert spec(other.opt_state[0].mu["kernel"]) == P(None, "model")
            x = jax.device_put(np.ones((4, 4), np.float32), NamedSharding(mesh, P("data")))

            step(away, other, x, P("data") if EXPLICIT in types else None)
            assert spec(away.kernel) == P("data", "model")
            assert spec(other.opt_state[0].mu["kernel"]) == P(None, "model")
    with nnx.use_eager_sharding(False):
        unplaced = linear("data", "model")
    state = nnx.Optimizer(unplaced, optax.adam(1e-3), wrt=nnx.Param).opt_state[0]
    assert not state.mu["kernel"].eager_sharding and spec(state.mu["kernel"]) is None


@case
def mapped_axes_come_and_go():
    def make(rngs):
        return nnx.Linear(
            8, 8, kernel_metadata={"out_sharding": (None, "model")}, use_bias=False, rngs=rngs
        )

    lift = lambda f, **axes: nnx.transform_metadata(f, partition="layers", **axes)  # noqa: E731
    want = nnx.vmap(make)
    with nnx.use_eager_sharding(False):
        want = want(nnx.Rngs(0).fork(split=4)).kernel.value
    for types in ((AUTO, AUTO), (EXPLICIT, EXPLICIT)):
        with jax.set_mesh(make_mesh(*types)):
            stacked = nnx.vmap(lift(make), in_axes=0, out_axes=0)(nnx.Rngs(0).fork(split=4))
            assert stacked.kernel.out_sharding == ("layers", None, "model")
            assert spec(stacked.kernel) == P(None, None, "model")
            np.testing.assert_array_equal(stacked.kernel.value, want)
            inside = []

            out = P("data") if EXPLICIT in types else None

            def layer(x, layer, inside=inside, out=out):
                inside.append(layer.kernel.out_sharding)
                return layer(x, out_sharding=out)

            axes = {"in_axes": (nnx.Carry, 0), "out_axes": nnx.Carry}
            x = jax.device_put(
                np.ones((4, 8), np.float32), NamedSharding(make_mesh(*types), P("data"))
            )
            nnx.jit(nnx.scan(lift(layer, **axes), **axes))(x, stacked)
            assert set(inside) == {(None, "model")}
            assert stacked.kernel.out_sharding == ("layers", None, "model")


# ---- building sharded ---------------------------------------------------------------------------


class Block(nnx.Module):
    def __init__(self, width, rngs):
        column = {"out_sharding": (None, "model")}
        normal = nnx.initializers.normal(0.02)  # made anew for each block
        self.norm = nnx.LayerNorm(width, scale_metadata={"out_sharding": ("model",)}, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            4,
            width,
            kernel_metadata={"out_sharding": ("data", "model", None)},
            out_kernel_metadata={"out_sharding": ("model", None, "data")},
            rngs=rngs,
        )
        self.up = nnx.Linear(
            width, 4 * width, kernel_init=normal, kernel_metadata=column, rngs=rngs
        )
        self.down = nnx.Linear(
            4 * width,
            width,
            kernel_init=nnx.with_partitioning(nnx.initializers.he_normal(), ("model", "data")),
            bias_metadata={"out_sharding": ("model",)},
            rngs=rngs,
        )


class Model(nnx.Module):
    def __init__(self, depth, width, rngs):
        self.embed = nnx.Embed(
            64, width, embedding_metadata={"out_sharding": ("data", "model")}, rngs=rngs
        )
        self.blocks = nnx.List([Block(width, rngs) for _ in range(depth)])


def per_device():
    """The most bytes that a device holds."""
    held = dict.fromkeys(jax.devices(), 0)
    for array in jax.live_arrays():
        if not is_key(array):
            size = int(np.prod(array.sharding.shard_shape(array.shape))) * array.dtype.itemsize
            for device in array.sharding.device_set:
                held[device] += size
    return max(held.values())


@contextlib.contextmanager
def watched(seen):
    """Notes what devices hold each time a Variable is made, before and after."""
    plain = nnx.Param.__init__

    def watching(self, *args, **kwargs):
        seen.append(per_device())
        plain(self, *args, **kwargs)
        seen.append(per_device())

    nnx.Param.__init__ = watching
    try:
        yield
    finally:
        del nnx.Param.__init__


@contextlib.contextmanager
def compilations(count):
    def heard(event, duration, **_):
        del duration
        if event.endswith("backend_compile_duration"):
            count.append(event)

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)


@case
def a_model_is_built_in_its_shards():
    with nnx.use_eager_sharding(False):
        want = Model(2, 64, nnx.Rngs(0))
        wanted = {path: np.asarray(v.value) for path, v in nnx.to_flat_state(nnx.state(want))}
    del want
    whole = sum(x.nbytes for x in wanted.values())
    largest = max(x.nbytes for x in wanted.values())
    for types in ((AUTO, AUTO), (EXPLICIT, EXPLICIT)):
        before, seen = per_device(), []
        with jax.set_mesh(make_mesh(*types)), watched(seen):
            model = Model(2, 64, nnx.Rngs(0))
        share = per_device() - before
        assert share < whole / 3, (share, whole)
        assert max(seen) - before <= share + largest / 4, (max(seen) - before, share, largest)
        for path, variable in nnx.to_flat_state(nnx.state(model)):
            np.testing.assert_array_equal(variable.value, wanted[path], err_msg=str(path))
            if variable.get_metadata("out_sharding", None):
                names = (*variable.out_sharding, *[None] * variable.value.ndim)
                assert variable.value.sharding.is_equivalent_to(
                    NamedSharding(make_mesh(*types), P(*names[: variable.value.ndim])),
                    variable.value.ndim,
                )
        del model, variable


@case
def equal_draws_are_compiled_once():
    with jax.set_mesh(make_mesh()):
        Model(1, 32, nnx.Rngs(0))
        count = []
        with compilations(count):
            Model(3, 32, nnx.Rngs(1))
        assert not count, count


@case
def a_draw_needs_its_share():
    from linnet.nnx.variablelib import drawing

    mesh = make_mesh()
    there = NamedSharding(mesh, P("data", "model"))
    draw = drawing.step_by_step(lambda key: nnx.initializers.normal()(key, (256, 256), jnp.float32))
    with jax.set_mesh(mesh):
        used = jax.jit(draw, out_shardings=there).lower(jax.random.key(0)).compile()
    one = 256 * 256 * 4
    assert used.memory_analysis().temp_size_in_bytes < one


@case
def other_functions_are_called_as_they_stand():
    numbers = iter(range(10))

    def counted(key, shape, dtype):
        return jnp.full(shape, next(numbers), dtype)

    with jax.set_mesh(make_mesh()):
        made = [
            nnx.Linear(
                4, 8, kernel_init=nnx.with_partitioning(counted, ("data",)), rngs=nnx.Rngs(0)
            ).kernel
            for _ in range(2)
        ]
    assert [float(kernel.value[0, 0]) for kernel in made] == [0, 1]
    assert [spec(kernel) for kernel in made] == [P("data")] * 2
    key = jax.device_put(jax.random.key(0), jax.devices()[5])
    elsewhere = nnx.Linear(
        4,
        8,
        kernel_metadata={"out_sharding": ("data",), "mesh": make_mesh()},
        rngs=nnx.Rngs(key),
    )
    assert spec(elsewhere.kernel) == P("data")


# ---- the example of the first seed --------------------------------------------------------------


class Perceptron(nnx.Module):
    def __init__(self, width, depth, rngs):
        self.blocks = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(depth)])

    def __call__(self, x):
        for layer in self.blocks:
            x = layer(x)
        return x


@case
def a_model_is_made_sharded_by_a_constraint():
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AUTO,))

    def make():
        return Perceptron(1024, 2, nnx.Rngs(0))

    def sharding(x):
        return NamedSharding(mesh, P(*[None] * (x.ndim - 1), "model"))

    shardings = jax.tree.map(sharding, jax.eval_shape(make))
    assert shardings.blocks[0].kernel.value.spec == P(None, "model")

    model = jax.jit(lambda: jax.lax.with_sharding_constraint(make(), shardings))()
    kernel = model.blocks[0].kernel.value
    assert kernel.sharding == NamedSharding(mesh, P(None, "model"))
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(1024, 128)}
    jax.debug.visualize_array_sharding(kernel)
    np.testing.assert_allclose(kernel, make().blocks[0].kernel.value, rtol=1e-6)


if __name__ == "__main__":
    case.run_on_devices(8)
