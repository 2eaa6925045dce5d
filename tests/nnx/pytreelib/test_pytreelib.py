"""Objects as JAX pytrees: key paths, transforms, copies, bound methods, mutation across traces."""

import abc
import copy
import functools
import pickle

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import TraceContextError
from tests.models import Bag, Config, Count, CountingLinear, counted, param, through_tree_map


def key_strings(tree):
    return [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]


# ---- structure ----------------------------------------------------------------------------------


def test_leaves_have_the_paths_and_values_that_the_basics_page_prints():
    model = CountingLinear(2, 5, rngs=nnx.Rngs(0))
    assert model(jnp.ones((3, 2))).shape == (3, 5)
    (count_path, count), (w_path, w) = jax.tree.leaves_with_path(model)
    assert jax.tree_util.keystr(count_path) == ".count.value"
    assert jax.tree_util.keystr(w_path) == ".w.value"
    assert (int(count), count.weak_type) == (1, True)
    np.testing.assert_allclose(w[0, :3], [0.8423141, 0.18237865, 0.2271781], rtol=1e-6)
    assert f"{model.w.sum():.4f}" == "4.1854"
    assert f"{jax.tree.map(lambda x: x * 2, model).w.sum():.4f}" == "8.3709"


def test_key_paths_name_attributes_positions_and_keys():
    model = Bag(
        blocks=[Bag(w=param()), {"deep": param()}],
        by_name=nnx.Dict(right=param(), left=param()),
        layers=nnx.List([param()]),
        pair=(jnp.ones(1), param()),
    )
    assert key_strings(model) == [
        ".blocks[0].w.value",
        ".blocks[1]['deep'].value",
        ".by_name.left.value",
        ".by_name.right.value",
        ".layers[0].value",
        ".pair[0]",
        ".pair[1].value",
    ]


def test_state_paths_are_keys():
    model = Bag(w=param(), rngs=nnx.Rngs(0), traced=nnx.Param(4))
    assert key_strings(nnx.state(model)) == [
        "['rngs']['default']['count'].value",
        "['rngs']['default']['key'].value",
        "['traced'].value",
        "['w'].value",
    ]


def test_flattening_and_unflattening_brings_everything_back():
    model = CountingLinear(2, 3, rngs=nnx.Rngs(0))
    arrays, structure = jax.tree.flatten(model)
    rebuilt = jax.tree.unflatten(structure, arrays)
    assert (type(rebuilt), rebuilt.din, rebuilt.dout) == (CountingLinear, 2, 3)
    assert rebuilt.w is not model.w
    assert rebuilt.w.value is model.w.value
    assert jax.tree.structure(rebuilt) == structure


def test_structures_tell_static_values_apart():
    base = jax.tree.structure(Bag(x=1, w=param()))
    assert jax.tree.structure(Bag(x=1, w=param(1.0, 3))) == base
    for other in (Bag(x=True, w=param()), Bag(x=1.0, w=param()), Bag(x=2, w=param())):
        assert jax.tree.structure(other) != base
    for other in (Bag(w=param()), Bag(x=1, w=Count(1.0)), Bag(x=1, w=nnx.Param(1.0, role="a"))):
        assert jax.tree.structure(other) != base


def test_a_class_may_stay_unknown_to_jax():
    class Opaque(nnx.Module, pytree=False):
        def __init__(self):
            self.w = param()

    opaque = Opaque()
    assert jax.tree.leaves(opaque) == [opaque]
    assert list(nnx.state(Bag(inner=opaque)).flat_state().paths) == [("inner", "w")]
    assert nnx.clone(opaque).w is not opaque.w

    class Known(Opaque):
        pass

    assert len(jax.tree.leaves(Known())) == 1


def test_pytree_object_and_module_are_bases():
    assert nnx.Object is nnx.Pytree
    assert issubclass(nnx.Module, nnx.Pytree)
    assert jax.tree.leaves(nnx.Pytree()) == []


@pytest.mark.parametrize("value", [3, [1], None])
def test_check_pytree_takes_pytrees(value):
    with pytest.raises(TypeError, match=f"takes a Pytree, but got {type(value).__name__}"):
        nnx.check_pytree(value)


def test_check_pytree_looks_through_everything_below():
    inner = Bag(x=nnx.static([]))
    outer = Bag(layers=[{"a": inner}], again=inner)
    nnx.check_pytree(outer)
    inner.x.append(param())
    with pytest.raises(ValueError, match=r"Bag\.x is static, but got data: list with Param"):
        nnx.check_pytree(outer)


# ---- transforms of JAX over models --------------------------------------------------------------


def test_jit_does_not_carry_writes_out_but_state_and_update_do():
    model, x = CountingLinear(2, 5, rngs=nnx.Rngs(0)), jnp.ones((3, 2))
    jax.jit(lambda m, x: m(x))(model, x)
    assert model.count[...] == 0
    y, updates = jax.jit(lambda m, x: (m(x), nnx.state(m, Count)))(model, x)
    nnx.update(model, updates)
    assert model.count[...] == 1
    np.testing.assert_allclose(y, x @ model.w.value, rtol=1e-6)


def test_a_model_can_be_jitted_itself():
    model = Bag(w=param(3.0, 2))
    assert jax.jit(model.add)(1.0).tolist() == [4, 4]


def test_jit_traces_once_for_equal_structures_and_again_for_others():
    f, traces = counted(lambda m: m.w * m.scale, jax.jit)
    for value in (1.0, 2.0):
        assert f(Bag(w=param(value), scale=2)) == 2 * value
    assert len(traces) == 1
    assert f(Bag(w=param(), scale=3)) == 3
    assert len(traces) == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: (lambda n: lambda x: x + n)(1),  # noqa: PLC3002
        lambda: functools.partial(jnp.add, 1),
        lambda: lambda x, n=1: x + n,
    ],
    ids=["closure", "partial", "default"],
)
def test_fresh_but_equal_functions_do_not_retrace(make):
    f, traces = counted(lambda m: m.act(m.w[...]), jax.jit)
    assert [float(f(Bag(w=param(), act=make()))) for _ in range(3)] == [2, 2, 2]
    assert len(traces) == 1


@pytest.mark.parametrize("value", [Config(2), [2], {"width": 2}, {2}, {"a": [Config(2)]}])
def test_static_attributes_without_a_hash_work_and_are_watched(value):
    bag = Bag(w=param(), config=value)
    f, traces = counted(lambda m: m.w * 2, jax.jit)
    f(bag), f(nnx.clone(bag)), f(Bag(w=param(), config=copy.deepcopy(value)))
    assert len(traces) == 1
    assert nnx.graphdef(bag) == nnx.graphdef(copy.deepcopy(bag))
    assert nnx.clone(bag).config == value
    f(Bag(w=param(), config=Config(3)))
    assert len(traces) == 2


def test_a_static_list_that_grew_retraces():
    bag = Bag(w=param(), dims=[1])
    f, traces = counted(lambda m: m.w * sum(m.dims), jax.jit)
    assert f(bag) == 1
    bag.dims.append(2)
    assert (f(bag), len(traces)) == (3, 2)
    bag.dims.pop()
    assert (f(bag), len(traces)) == (1, 2)


def test_a_copy_does_not_share_static_containers():
    bag = Bag(dims=[1], table={"a": [2]})
    for copied in (nnx.clone(bag), through_tree_map(bag)):
        copied.dims.append(3)
        copied.table["a"].append(4)
    assert (bag.dims, bag.table) == ([1], {"a": [2]})


def test_eval_shape_of_a_constructor_gives_an_abstract_model():
    abstract = jax.eval_shape(lambda: Bag(w=param(1.0, 2, 3), raw=jnp.ones(4), n=3))
    assert abstract.w.value == jax.ShapeDtypeStruct((2, 3), jnp.float32)
    assert abstract.raw == jax.ShapeDtypeStruct((4,), jnp.float32)
    assert abstract.n == 3
    assert jax.tree.structure(abstract) == jax.tree.structure(
        Bag(w=param(1.0, 2, 3), raw=jnp.ones(4), n=3)
    )


def test_vmap_over_a_stacked_model():
    stacked = jax.vmap(lambda i: Bag(w=nnx.Param(i * jnp.ones(2)), name="a"))(jnp.arange(3.0))
    assert stacked.w.value.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert stacked.name == "a"
    sums = jax.vmap(lambda m, x: (m.w[...] * x).sum(), in_axes=(0, None))(stacked, jnp.ones(2))
    assert sums.tolist() == [0, 2, 4]


def test_grad_with_respect_to_a_model_has_its_type():
    grads = jax.grad(lambda m: (m.w[...] ** 2).sum())(Bag(w=param(3.0, 2), n=1))
    assert isinstance(grads, Bag)
    assert (grads.w.value.tolist(), grads.n) == ([6, 6], 1)


def test_scan_carries_a_model():
    def body(m, x):
        m.w[...] += x
        return m, m.w[...]

    model, ys = jax.lax.scan(body, Bag(w=param(), tag="t"), jnp.arange(3.0))
    assert (float(model.w[...]), ys.tolist(), model.tag) == (4, [1, 2, 4], "t")


# ---- copying ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "duplicate",
    [
        nnx.clone,
        copy.deepcopy,
        lambda m: nnx.merge(*nnx.split(m)),
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: cloudpickle.loads(cloudpickle.dumps(m)),
    ],
    ids="clone deepcopy merge pickle cloudpickle".split(),
)
def test_copies_keep_sharing_and_cycles(duplicate):
    shared = Bag(w=param())
    bag = Bag(a=shared, b=[shared, shared.w], plain=[param()])
    bag.again, bag.me = bag.plain, bag
    copied = duplicate(bag)
    assert copied.a is copied.b[0] is not shared
    assert copied.b[1] is copied.a.w
    assert copied.again is copied.plain is not bag.plain
    assert copied.me is copied


def test_copy_is_shallow():
    bag = Bag(w=param(), layers=[1])
    copied = copy.copy(bag)
    assert copied.w is bag.w
    assert copied.layers is bag.layers
    copied.w = param()
    assert copied.w is not bag.w


def test_deepcopy_has_arrays_and_static_values_of_its_own_but_keeps_functions():
    bag = Bag(w=param(), raw=np.ones(2), dims=[1], act=jax.nn.relu, layers=[Bag(), jnp.tanh])
    copied = copy.deepcopy(bag)
    copied.raw += 1
    copied.dims.append(2)
    assert (bag.raw.tolist(), bag.dims) == ([1, 1], [1])
    assert copied.act is jax.nn.relu
    assert copied.layers[1] is jnp.tanh
    copied.dims.pop()
    assert nnx.graphdef(copied) == nnx.graphdef(bag)


def test_copies_belong_to_the_trace_they_are_made_in():
    bag = Bag(w=param(), n=nnx.data(0))

    @jax.jit
    def f():
        for duplicate in (nnx.clone, copy.deepcopy, through_tree_map):
            copied = duplicate(bag)
            copied.n, copied.w[...] = 1, jnp.zeros(())
        return copied.w[...]

    assert f() == 0
    assert bag.w[...] == 1


# ---- mutation from another trace ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda m: setattr(m, "x", 1), "model.x"),
        (lambda m: setattr(m.part, "w", 1), "model.part.w"),
        (lambda m: delattr(m.part, "w"), "model.part.w"),
        (lambda m: m.layers.append(1), "model.layers[1]"),
        (lambda m: m.layers.__setitem__(0, 1), "model.layers[0]"),
        (lambda m: m.layers.pop(), "model.layers[-1]"),
        (lambda m: m.table.update(a=1), "model.table.a"),
        (lambda m: m.table.__delitem__("b c"), "model.table['b c']"),
    ],
)
@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad])
def test_changing_an_object_from_another_trace_is_refused_with_its_path(change, where, transform):
    model = Bag(part=Bag(w=param()), layers=nnx.List([param()]), table=nnx.Dict({"a": 0, "b c": 1}))
    before = nnx.graphdef(model)

    def f(x):
        change(model)
        return x

    with pytest.raises(TraceContextError) as error:
        transform(f)(jnp.ones(3) if transform is jax.vmap else 1.0)
    assert "Cannot mutate '" in str(error.value)
    assert f"from different trace level: {where} was set or deleted" in str(error.value)
    assert "Fix: pass the object as an argument" in str(error.value)
    assert nnx.graphdef(model) == before


def test_a_model_captured_by_a_jitted_function_is_told_to_be_an_argument():
    model = Bag(part=Bag(w=param()))

    @nnx.jit
    def step(x):
        model.part.calls = 1
        return x

    with pytest.raises(TraceContextError) as error:
        step(1.0)
    assert str(error.value) == (
        "Cannot mutate 'Bag' from different trace level: model.part.calls was set or deleted "
        "inside a function that JAX is tracing, but the object was made outside.\n"
        "Fix: pass the object as an argument to the function, and use an nnx transform, such as "
        "nnx.jit, which carries out the changes of its arguments, not of what it captures."
    )


def test_an_argument_of_the_transform_can_be_changed_inside():
    @jax.jit
    def f(model):
        model.extra = 3
        model.layers.append(param(5.0))
        return model

    model = Bag(layers=nnx.List([]))
    out = f(model)
    assert (out.extra, float(out.layers[0].value)) == (3, 5)
    assert (vars(model).get("extra"), len(model.layers)) == (None, 0)


def test_dir_shows_what_the_class_and_the_program_added():
    class Net(nnx.Module):
        def __init__(self):
            self.w, self._cache = param(), 0

        def _help(self): ...

    private = {name for name in dir(Net()) if name.startswith("_") and not name.startswith("__")}
    assert private == {"_cache", "_help"}
    assert {"w", "sow", "train", "__init__"} <= set(dir(Net()))


def test_slots_are_refused_where_the_class_is_made():
    with pytest.raises(TypeError) as caught:

        class Slotted(nnx.Module):
            __slots__ = ("a",)

    assert str(caught.value) == (
        "A Pytree keeps its attributes in __dict__, but test_slots_are_refused_where_the_class_is_"
        "made.<locals>.Slotted has __slots__ = ('a',), which split, copies and transforms would "
        "lose.\nFix: leave out __slots__."
    )

    class Empty(nnx.Module):
        __slots__ = ()

    assert nnx.clone(Empty()) is not None


@pytest.mark.parametrize("is_first", [True, False])
def test_slots_of_a_mixin_are_refused(is_first):
    class Mixin:
        __slots__ = ("a",)

    bases = (Mixin, nnx.Module) if is_first else (nnx.Module, Mixin)
    with pytest.raises(TypeError) as caught:
        type(nnx.Module)("Slotted", bases, {"__module__": __name__})
    assert str(caught.value) == (
        "A Pytree keeps its attributes in __dict__, but Slotted has __slots__ = ('a',) by its base "
        "test_slots_of_a_mixin_are_refused.<locals>.Mixin, which split, copies and transforms "
        "would lose.\nFix: leave out __slots__."
    )


class WithRngs(nnx.Module):
    def __init__(self, size, rngs):
        self.linear = nnx.Linear(size, size, rngs=rngs)


class Forgets(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 2)


RNGS = "Fix: {0}(..., rngs=nnx.Rngs(0)); in the constructor of another module, pass on the rngs "
WITHOUT_RNGS = {
    "Linear": lambda: nnx.Linear(2, 3),
    "LSTMCell": lambda: nnx.LSTMCell(2, 3),
    "Embed": lambda: nnx.Embed(num_embeddings=2, features=3),
    "WithRngs": lambda: WithRngs(3),
}


@pytest.mark.parametrize("name", WITHOUT_RNGS)
def test_a_layer_without_rngs(name):
    with pytest.raises(TypeError) as caught:
        WITHOUT_RNGS[name]()
    kind = "positional" if name == "WithRngs" else "keyword-only"
    assert type(caught.value) is TypeError
    assert str(caught.value) == (
        f"{name}.__init__() missing 1 required {kind} argument: 'rngs'.\n{RNGS.format(name)}"
        "that it was given."
    )


def test_a_layer_inside_a_constructor_without_rngs():
    with pytest.raises(TypeError, match=r"^Linear\.__init__.*\nFix: Linear\(\.\.\., rngs="):
        Forgets(nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"missing 2 .*: 'size' and 'rngs'\.\nFix: WithRngs\("):
        WithRngs()
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'size'$"):
        WithRngs(rngs=nnx.Rngs(0))


def test_abstract_methods_count():
    class Base(nnx.Module):
        @abc.abstractmethod
        def run(self): ...

    class Whole(Base, abc.ABC):
        def run(self):
            return 3

    with pytest.raises(TypeError, match="abstract"):
        Base()
    whole = nnx.clone(Whole())
    assert isinstance(whole, Base) and whole.run() == 3


def test_arguments_without_a_constructor():
    class Misspelled(nnx.Module):
        def __innit__(self, size):
            self.size = size

    class Made(nnx.Module):
        def __new__(cls, size):
            return super().__new__(cls, size)

    for make in (lambda: Misspelled(3), lambda: Misspelled(size=3)):
        with pytest.raises(TypeError) as caught:
            make()
        assert str(caught.value) == (
            "test_arguments_without_a_constructor.<locals>.Misspelled() takes no arguments: the "
            "class has no __init__.\nFix: define __init__(self, ...) (is its name misspelled?), or "
            "decorate a class of annotated fields with @nnx.dataclass."
        )
    assert isinstance(Misspelled(), Misspelled) and isinstance(Made(3), Made)
    for cls in (nnx.Module, nnx.Pytree):
        with pytest.raises(TypeError, match=f"{cls.__name__}.. takes no arguments"):
            cls(3)
