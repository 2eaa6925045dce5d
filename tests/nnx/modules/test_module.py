"""Module: sow, perturb, flags, and walking over submodules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import SharedReferenceError, TraceContextError


class Noise(nnx.Module):
    def __init__(self, rate=0.5):
        self.deterministic = False
        self.rate = rate


class Norm(nnx.Module):
    def __init__(self):
        self.use_running_average = False
        self.mean = nnx.BatchStat(jnp.zeros(2))


class Block(nnx.Module):
    def __init__(self):
        self.noise, self.norm = Noise(), Norm()
        self.w = nnx.Param(jnp.ones(2))


class NestedModules(nnx.Module):
    def __init__(self):
        self.blocks = nnx.List([Block(), Block()])
        self.plain = [Noise(), {"deep": Norm()}]
        self.head = Block()
        self.width = 3


class Layer(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.array(2.0))
        self.width = 3

    def __call__(self, x):
        h = self.perturb("eps", x * self.w)
        self.sow(nnx.Intermediate, "h", h)
        return h**2


def noises(net):
    return [module for _, module in nnx.iter_modules(net) if isinstance(module, Noise)]


def norms(net):
    return [module for _, module in nnx.iter_modules(net) if isinstance(module, Norm)]


# ---- sow ----------------------------------------------------------------------------------------


def test_sow_grows_a_tuple():
    layer = Layer()
    assert layer.sow(nnx.Intermediate, "seen", 1) is True
    kept = layer.seen
    assert layer.sow(nnx.Intermediate, "seen", [2]) is True
    assert layer.seen is kept
    assert type(kept) is nnx.Intermediate
    assert kept.value == (1, [2])


def test_sow_with_a_reduction_of_ones_own():
    layer = Layer()
    for value in (1.0, 2.0):
        layer.sow(
            nnx.Cache, "total", jnp.array(value), reduce_fn=jnp.add, init_fn=lambda: jnp.zeros(())
        )
    assert type(layer.total) is nnx.Cache
    assert layer.total.value == 3.0


def test_sow_a_kind_by_its_name():
    layer = Layer()
    layer.sow("intermediates", "a", 1)
    layer.sow("kind_made_by_sow", "b", 2)
    layer.sow("kind_made_by_sow", "b", 3)
    assert type(layer.a) is nnx.Intermediate
    assert type(layer.b) is nnx.variable_type_from_name("kind_made_by_sow")
    assert layer.b.value == (2, 3)


def test_a_sown_kind_may_be_more_special_than_asked_for():
    layer = Layer()
    layer.sow(nnx.Perturbation, "a", 1)
    layer.sow(nnx.Intermediate, "a", 2)
    assert layer.a.value == (1, 2)


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        (
            nnx.Intermediate,
            "width",
            "Expected 'width' to be a Variable, got int: Layer.width cannot take a sown value.",
        ),
        (nnx.Intermediate, "w", "Expected 'w' to be of type 'Intermediate', got 'Param' in Layer."),
    ],
)
def test_sow_onto_something_else(kind, name, message):
    layer = Layer()
    before = getattr(layer, name)
    with pytest.raises(ValueError) as error:
        layer.sow(kind, name, 1)
    assert str(error.value) == f"{message}\nFix: sow another name."
    assert getattr(layer, name) is before


def test_what_was_sown_can_be_popped():
    net = nnx.List([Layer(), Layer()])
    for layer in net:
        layer.sow(nnx.Intermediate, "h", 1.0)
    sown = nnx.pop(net, nnx.Intermediate)
    assert nnx.to_pure_dict(sown) == {0: {"h": (1.0,)}, 1: {"h": (1.0,)}}
    assert not hasattr(net[0], "h")


def test_sow_inside_a_jit_comes_out_with_the_module():
    layer = Layer()
    out, sown = jax.jit(lambda m, x: (m(x), nnx.pop(m, nnx.Intermediate)))(layer, 3.0)
    assert (out, sown["h"].value) == (36.0, (6.0,))
    assert not hasattr(layer, "h")


def test_sow_from_another_trace():
    model = Layer()
    jitted = jax.jit(model)
    with pytest.raises(TraceContextError, match=r"Cannot mutate 'Layer'.*: model\.eps was set"):
        jitted(1.0)
    model(1.0)
    with pytest.raises(TraceContextError, match=r"Cannot mutate Intermediate at model\.h"):
        jitted(1.0)


# ---- perturb ------------------------------------------------------------------------------------


def test_perturb_adds_zeros_of_the_same_kind():
    layer = Layer()
    value = {"a": jnp.ones(2), "b": jnp.arange(3)}
    out = layer.perturb("eps", value)
    assert type(layer.eps) is nnx.Perturbation
    jax.tree.map(np.testing.assert_array_equal, out, value)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), layer.eps.value) == jax.tree.map(
        lambda x: (x.shape, x.dtype), value
    )
    layer.eps.value = jax.tree.map(lambda x: x + 5, layer.eps.value)
    assert layer.perturb("eps", value)["b"].tolist() == [5, 6, 7]


def test_the_gradient_of_a_perturbation_is_that_of_the_value():
    layer = Layer()
    layer(jnp.array(3.0))
    graphdef, perturbations, rest = nnx.split(layer, nnx.Perturbation, ...)

    def loss(perturbations, rest):
        return nnx.merge(graphdef, perturbations, nnx.clone(rest))(jnp.array(3.0))

    grads = jax.grad(loss)(perturbations, rest)
    assert grads["eps"].value == 12.0  # d(h**2)/dh at h = 6


def test_perturb_with_another_kind():
    layer = Layer()
    layer.perturb("a", 1.0, nnx.Cache)
    layer.perturb("b", 1.0, "kind_made_by_perturb")
    assert type(layer.a) is nnx.Cache
    assert type(layer.b) is nnx.variable_type_from_name("kind_made_by_perturb")


@pytest.mark.parametrize(
    ("name", "found"), [("width", "int"), ("w", "Param"), ("h", "Intermediate")]
)
def test_perturb_onto_something_else(name, found):
    layer = Layer()
    layer.sow(nnx.Intermediate, "h", 1.0)
    with pytest.raises(ValueError) as error:
        layer.perturb(name, 1.0)
    assert str(error.value) == (
        f"Expected '{name}' to be of type 'Perturbation', got '{found}' in Layer.\n"
        "Fix: perturb another name."
    )


# ---- flags --------------------------------------------------------------------------------------


def test_eval_and_train_reach_every_module():
    net = NestedModules()
    net.eval()
    assert [n.deterministic for n in noises(net)] == [True] * 4
    assert [n.use_running_average for n in norms(net)] == [True] * 4
    net.train()
    assert [n.deterministic for n in noises(net)] == [False] * 4
    assert [n.use_running_average for n in norms(net)] == [False] * 4
    assert not hasattr(net, "deterministic")


@pytest.mark.parametrize("switch", ["train", "eval"])
def test_train_and_eval_set_more_attributes(switch):
    net = NestedModules()
    getattr(net, switch)(rate=0.1, nobody_has_this=1)
    assert [n.rate for n in noises(net)] == [0.1] * 4
    assert not hasattr(net, "nobody_has_this")


@pytest.mark.parametrize("make", [lambda: nnx.List([Noise()]), lambda: nnx.Dict(a=Noise())])
def test_containers_have_the_switches_too(make):
    container = make()
    container.eval()
    assert [n.deterministic for n in noises(container)] == [True]


def test_an_entry_of_a_dict_hides_the_method_of_its_name():
    splits = nnx.Dict(train=Noise(), eval=2)
    splits.sow = 3
    assert (splits.train, splits.eval, splits.sow) == (splits["train"], 2, 3)
    splits.set_attributes(rate=0.1)
    assert splits["train"].rate == 0.1
    del splits.train
    splits.train()


@pytest.mark.parametrize(
    ("filters", "changed"),
    [
        ((), [True] * 4),
        ((Noise,), [True] * 4),
        ((nnx.PathContains("head"),), [False, False, True, False]),
        ((nnx.PathContains("head"), nnx.PathContains(0)), [True, False, True, True]),
        ((lambda path, module: path[:1] == ("plain",),), [False, False, False, True]),
    ],
)
def test_set_attributes_with_filters(filters, changed):
    net = NestedModules()
    net.set_attributes(*filters, deterministic=True, rate=0.9)
    assert [n.deterministic for n in noises(net)] == changed
    assert [n.rate == 0.9 for n in noises(net)] == changed


def test_set_attributes_that_no_module_has():
    net = NestedModules()
    with pytest.raises(ValueError) as error:
        net.set_attributes(rate=0.9, nope=1, neither=2)
    assert str(error.value) == (
        "Could not find at least one instance of the following attributes: ['nope', 'neither'] in "
        "NestedModules.\nFix: check the spelling, or pass raise_if_not_found=False."
    )
    with pytest.raises(ValueError, match=r"\['deterministic'\] in NestedModules"):
        net.set_attributes(Norm, deterministic=True)
    net.set_attributes(nope=1, raise_if_not_found=False)
    assert not hasattr(net, "nope")


def test_flags_of_a_module_from_another_trace():
    net = NestedModules()
    with pytest.raises(TraceContextError, match=r"net\.blocks\[0\]\.noise\.deterministic was set"):
        jax.jit(lambda x: net.eval() or x)(1.0)


# ---- walking ------------------------------------------------------------------------------------

PATHS = [
    ("blocks", 0, "noise"),
    ("blocks", 0, "norm"),
    ("blocks", 0),
    ("blocks", 1, "noise"),
    ("blocks", 1, "norm"),
    ("blocks", 1),
    ("blocks",),
    ("head", "noise"),
    ("head", "norm"),
    ("head",),
    ("plain", 0),
    ("plain", 1, "deep"),
    (),
]


@pytest.mark.parametrize(
    "walk", [nnx.iter_modules, NestedModules.iter_modules], ids=["function", "method"]
)
def test_iter_modules_from_the_inside_out(walk):
    net = NestedModules()
    found = dict(walk(net))
    assert list(found) == PATHS
    assert found["blocks", 1, "norm"] is net.blocks[1].norm
    assert found["plain", 1, "deep"] is net.plain[1]["deep"]
    assert found[()] is net


def test_iter_modules_meets_a_shared_module_once():
    net = NestedModules()
    net.twice = net.head
    net.cycle = net
    assert list(dict(nnx.iter_modules(net))) == PATHS
    with pytest.raises(ValueError, match=r"NestedModules at \.cycle was already seen at the root"):
        list(nnx.iter_modules(net, graph=False))


def test_children_that_are_objects():
    net = NestedModules()
    net.twice, net.plain = net.head, [net.head]
    want = [("blocks", net.blocks), ("head", net.head), ("twice", net.head)]
    assert list(nnx.iter_module_children(net)) == want
    net.w = nnx.Param(1.0)
    assert list(nnx.iter_module_children(net)) == want
    assert list(net.iter_children()) == [*want, ("w", net.w)] == list(nnx.iter_children(net))


def test_children_of_all_kinds():
    block = Block()
    block.array, block.label = jnp.ones(2), "label"
    assert list(nnx.iter_children(block)) == [
        ("noise", block.noise),
        ("norm", block.norm),
        ("w", block.w),
    ]
    assert list(nnx.iter_module_children([block, 3])) == [(0, block)]


def test_a_child_that_stands_twice_is_given_twice_in_either_mode():
    net = NestedModules()
    net.twice = net.head
    for walk in (nnx.iter_module_children, nnx.iter_children):
        assert list(walk(net, graph=False)) == list(walk(net, graph=True))
        assert [key for key, child in walk(net) if child is net.head] == ["head", "twice"]


CALLS_IN_TREE_MODE = {
    "iter_modules": lambda model: list(nnx.iter_modules(model)),
    "iter_graph": lambda model: list(nnx.iter_graph(model)),
    "recursive_map": lambda model: nnx.recursive_map(lambda path, x: x, model),
    "map": lambda model: nnx.map(lambda path, x: x, model),
    "Module.iter_modules": lambda model: list(model.iter_modules()),
    "Module.train, eval or set_attributes": lambda model: model.eval(),
    "view": lambda model: nnx.view(model, deterministic=True),
    "view_info": nnx.view_info,
    "with_attributes": lambda model: nnx.with_attributes(model, deterministic=True),
    "split_rngs": lambda model: nnx.split_rngs(model, splits=2),
    "fork_rngs": nnx.fork_rngs,
    "with_rngs": lambda model: nnx.with_rngs(model, fork=...),
    "reseed": lambda model: nnx.reseed(model, default=1),
}


@pytest.mark.parametrize("api", CALLS_IN_TREE_MODE)
def test_an_error_in_tree_mode_names_what_was_called(api):
    layer = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    model = nnx.Dict(a=layer, b=layer)
    with nnx.set_graph_mode(False), pytest.raises(SharedReferenceError) as caught:
        CALLS_IN_TREE_MODE[api](model)
    what, fix = str(caught.value).split("\n")
    assert what == (
        f"Dropout at .b was already seen at .a. tree-mode {api} (graph=False) does not support "
        "shared Dropout references."
    )
    by_argument = "" if api.startswith("Module.") else f"nnx.{api}(..., graph=True) or "
    assert fix == (
        "Fix: give each place its own Dropout, or allow sharing with "
        f"{by_argument}nnx.set_graph_mode(True)."
    )
    assert layer.deterministic is False
