"""nnx.capture: what a run sows and perturbs, without leaving it on the model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import StateMismatchError, TraceContextError


class Loss(nnx.Variable):
    pass


class Layer(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.array(2.0))
        self.calls = nnx.BatchStat(jnp.array(0))

    def __call__(self, x):
        self.calls[...] += 1
        return self.activate(x)

    def activate(self, x):
        h = self.perturb("eps", x * self.w)
        self.sow(nnx.Intermediate, "h", h)
        self.sow(Loss, "loss", h, reduce_fn=jnp.add, init_fn=lambda: jnp.zeros(()))
        return h


class Pure(Layer):
    """The same without a write to a Variable, so that it may come from outside a trace."""

    def __call__(self, x):
        return self.activate(x) ** 2


class FirstAndRest(nnx.Module):
    def __init__(self, layer=Layer):
        self.steps = 0
        self.first = layer()
        self.rest = nnx.List([layer()])

    def __call__(self, x):
        self.steps += 1
        return self.twice(x)

    def twice(self, x, *, scale=1):
        return self.rest[0](self.first(x)) * scale


X = jnp.array(3.0)
H = {"first": {"h": (6.0,)}, "rest": {0: {"h": (12.0,)}}}
EPS = {"first": {"eps": 0.0}, "rest": {0: {"eps": 0.0}}}
LOSS = {"first": {"loss": 6.0}, "rest": {0: {"loss": 12.0}}}


def pure(state):
    return nnx.to_pure_dict(state)


@pytest.fixture
def net():
    return FirstAndRest()


# ---- forms --------------------------------------------------------------------------------------

FORMS = {
    "module": lambda net, *kinds: nnx.capture(net, *kinds)(X),
    "bound method": lambda net, *kinds: nnx.capture(net.twice, *kinds)(X, scale=1),
    "function": lambda net, *kinds: nnx.capture(lambda m, x: m(x) + 0, *kinds)(net, X),
    "unbound method": lambda net, *kinds: nnx.capture(FirstAndRest.__call__, *kinds)(net, x=X),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form(net, form):
    out, sown = form(net, nnx.Intermediate)
    assert out == 12.0
    assert isinstance(sown, nnx.State)
    assert pure(sown) == H
    assert type(sown["first"]["h"]) is nnx.Intermediate
    assert net.first.calls.value == 1
    assert list(vars(net)) == ["steps", "first", "rest"]
    assert list(vars(net.first)) == ["w", "calls"]


@pytest.mark.parametrize(
    ("kinds", "want"),
    [
        ([nnx.Intermediate], [H]),
        ([nnx.Perturbation], [EPS]),
        ([Loss], [LOSS]),
        ([Loss, nnx.Perturbation, nnx.Intermediate], [LOSS, EPS, H]),
        (
            [nnx.Intermediate, nnx.Perturbation],
            [{"first": H["first"] | EPS["first"], "rest": {0: H["rest"][0] | EPS["rest"][0]}}, {}],
        ),
        ([nnx.Param], [{}]),
        ([nnx.Cache, Loss], [{}, LOSS]),
    ],
    ids=lambda kinds: "-".join(getattr(k, "__name__", "") for k in kinds),
)
@pytest.mark.parametrize("earlier", [False, True], ids=["fresh", "sown before"])
def test_one_state_for_each_kind_and_nothing_left(net, kinds, want, earlier):
    if earlier:
        net(X)
    kept = {path: v for path, v in nnx.iter_graph(net) if isinstance(v, nnx.Variable)}
    values = {path: v.value for path, v in kept.items() if path[-1] != "calls"}
    out, *states = nnx.capture(net, *kinds)(X)
    assert out == 12.0
    assert [pure(state) for state in states] == want
    after = {path: v for path, v in nnx.iter_graph(net) if isinstance(v, nnx.Variable)}
    assert after.keys() == kept.keys()
    assert all(after[path] is kept[path] for path in kept)
    assert all(after[path].value == value for path, value in values.items())


def test_modules_in_a_pytree(net):
    run = nnx.capture(lambda models, x: models["nets"][1](x), nnx.Intermediate)
    out, sown = run({"nets": ["label", net]}, X)
    assert out == 12.0
    assert pure(sown) == {"nets": {1: H}}
    assert net.steps == 1


def test_a_subclass_of_the_kind_is_collected():
    class Special(nnx.Intermediate):
        pass

    class Model(nnx.Module):
        def __call__(self, x):
            self.sow(Special, "a", x)
            return x

    _, sown = nnx.capture(Model(), nnx.Intermediate)(1)
    assert pure(sown) == {"a": (1,)}
    assert type(sown["a"]) is Special


def test_without_kinds_it_is_the_plain_call(net):
    assert nnx.capture(net)(X) == 12.0
    assert net.first.h.value == (6.0,)


def test_a_shared_module_is_found_under_its_first_path(net):
    net.rest[0] = net.first
    _, sown, eps = nnx.capture(net, Loss, nnx.Perturbation)(X)
    assert pure(sown) == {"first": {"loss": 18.0}}
    assert pure(eps) == {"first": {"eps": 0.0}}


def test_a_capture_inside_of_a_capture(net):
    def inner(model, x):
        out, losses = nnx.capture(model.first, Loss)(x)
        return out + losses["loss"].value

    out, sown = nnx.capture(inner, nnx.Intermediate)(net, X)
    assert (out, pure(sown)) == (12.0, {})
    assert not hasattr(net.first, "loss")


def test_modules_outside_of_the_captured_one_sow_as_always(net):
    outside = Layer()
    _, sown = nnx.capture(lambda m, x: outside(m(x)), nnx.Intermediate)(net, X)
    assert pure(sown) == H
    assert outside.h.value == (24.0,)


def test_the_result_carries_the_name_of_what_it_runs(net):
    def forward(model, x):
        return model(x)

    assert nnx.capture(forward, Loss).__name__ == "forward"
    assert nnx.capture(net.twice, Loss).__name__ == "twice"


# ---- what a run changes -------------------------------------------------------------------------


def test_changes_inside_are_kept():
    class Model(nnx.Module):
        def __init__(self):
            self.zeta, self.alpha, self.array = 0, nnx.Param(1.0), jnp.zeros(2)
            self.log = []

        def __call__(self):
            self.zeta += 1
            self.array = self.array + 1
            self.log.append(self.zeta)
            self.cache = nnx.Cache(jnp.ones(2))
            self.sow(nnx.Intermediate, "seen", 1)
            del self.alpha

    model = Model()
    nnx.capture(model, nnx.Intermediate)()
    assert list(vars(model)) == ["zeta", "array", "log", "cache"]
    assert (model.zeta, model.array.tolist(), model.log) == (1, [1, 1], [1])
    assert model.cache.value.tolist() == [1, 1]


def test_a_run_without_changes_leaves_the_module_untouched():
    layer = Layer()
    attributes = vars(layer)
    order = list(attributes)
    nnx.capture(layer.activate, nnx.Intermediate)(X)
    assert vars(layer) is attributes
    assert list(attributes) == order == ["w", "calls"]


def test_an_error_leaves_the_module_unchanged(net):
    def fail(model, x):
        model(x)
        model.extra = 1
        raise KeyError("inside")

    net(X)
    graphdef, state = nnx.split(nnx.clone(net))
    with pytest.raises(KeyError, match="inside"):
        nnx.capture(fail, nnx.Intermediate, method_outputs=Loss)(net, X)
    assert nnx.graphdef(net) == graphdef
    assert net.first.h.value == state["first"]["h"].value
    assert type(net.first) is Layer
    assert nnx.capture(net, nnx.Intermediate)(X)[0] == 12.0


# ---- init ---------------------------------------------------------------------------------------


def test_perturbations_are_fed_in(net):
    _, eps = nnx.capture(net, nnx.Perturbation)(X)
    moved = jax.tree.map(lambda x: x + 1, eps)
    out, sown = nnx.capture(net, nnx.Intermediate, init=moved)(X)
    assert out == 15.0  # (3 * 2 + 1) * 2 + 1
    assert pure(sown) == {"first": {"h": (7.0,)}, "rest": {0: {"h": (15.0,)}}}
    assert nnx.capture(net, init=moved)(X) == 15.0
    assert nnx.capture(net, init=nnx.to_pure_dict(moved))(X) == 15.0
    assert not hasattr(net.first, "eps")


def test_init_is_not_changed_by_the_run(net):
    init = nnx.State({"first": {"h": nnx.Intermediate((1.0,))}})
    _, sown = nnx.capture(net, nnx.Intermediate, init=init)(X)
    assert pure(sown)["first"] == {"h": (1.0, 6.0)}
    assert pure(init) == {"first": {"h": (1.0,)}}


def test_init_stands_in_for_what_was_there(net):
    net(X)
    net.first.eps.value = jnp.array(100.0)
    init = nnx.State({"first": {"eps": nnx.Perturbation(jnp.array(1.0))}})
    assert nnx.capture(net, Loss, init=init)(X)[0] == 14.0
    assert net.first.eps.value == 100.0


@pytest.mark.parametrize("kinds", [(), (nnx.Intermediate,), (nnx.Perturbation, Loss)])
def test_gradients_with_respect_to_perturbations(kinds):
    model = FirstAndRest(Pure)  # from outside the trace
    _, eps = nnx.capture(model.twice, nnx.Perturbation)(X)

    def loss(eps):
        out = nnx.capture(model.twice, *kinds, init=eps)(X)
        return out[0] if kinds else out

    grads = jax.grad(loss)(eps)
    # (2 * (3w + a)**2 + b)**2 with w = 2: by b 2 * 72, by a 2 * 72 * 4 * 6
    assert pure(grads) == {"first": {"eps": 3456.0}, "rest": {0: {"eps": 144.0}}}
    assert type(grads["first"]["eps"]) is nnx.Perturbation
    assert not hasattr(model.first, "eps")


def test_gradients_for_a_model_that_is_an_argument():
    model = Pure()
    _, eps = nnx.capture(model, nnx.Perturbation)(X)
    by_model, by_eps = jax.grad(
        lambda model, eps: nnx.capture(model, init=eps)(X), argnums=(0, 1), allow_int=True
    )(model, eps)
    assert by_model.w.value == 36.0
    assert by_eps["eps"].value == 12.0


@pytest.mark.parametrize("more", ["", ".inner.again"])
def test_init_for_a_module_that_is_not_there(net, more):
    holder = {"eps": nnx.Perturbation(0.0)}
    for name in reversed(more.split(".")[1:]):
        holder = {name: holder}
    init = nnx.State({"rest": {5: holder}})
    with pytest.raises(StateMismatchError) as error:
        nnx.capture(net, nnx.Intermediate, init=init)(X)
    assert str(error.value) == (
        f"init of nnx.capture has a value at .rest[5]{more}.eps, but there is no module at "
        f".rest[5]{more}.\n"
        "Fix: pass a state that nnx.capture returned for this model."
    )


# ---- method_outputs -----------------------------------------------------------------------------


def test_method_outputs(net):
    out, sown = nnx.capture(net, Loss, method_outputs=Loss)(X)
    assert out == 12.0
    assert pure(sown) == {
        "__call__": (12.0,),
        "twice": (12.0,),
        "first": {"__call__": (6.0,), "activate": (6.0,), "loss": 6.0},
        "rest": {0: {"__call__": (12.0,), "activate": (12.0,), "loss": 12.0}},
    }
    assert type(net) is FirstAndRest
    assert list(vars(net.first)) == ["w", "calls"]


def test_method_outputs_that_are_not_asked_for(net):
    out = nnx.capture(net, method_outputs=Loss)(X)
    assert out == 12.0
    assert list(vars(net)) == ["steps", "first", "rest"]


def test_method_outputs_of_inherited_methods_and_of_no_others():
    class Base(nnx.Module):
        def __call__(self, x):
            return self.step(x)

        def step(self, x):
            return x

        def _private(self, x):
            return x

        @staticmethod
        def static(x):
            return x

        @property
        def one(self):
            return 1

    class Child(Base):
        def step(self, x):
            return super().step(x) + self._private(x) + self.static(x) + self.one

    _, sown = nnx.capture(Child(), Loss, method_outputs=Loss)(1)
    assert pure(sown) == {"__call__": (4,), "step": (4,)}


def test_modules_made_inside_keep_their_class(net):
    def grow(model, x):
        model.extra = Layer()
        return model.extra(x)

    nnx.capture(grow, Loss, method_outputs=Loss)(net, X)
    assert type(net.extra) is Layer
    assert isinstance(net.extra.w, nnx.Param)


# ---- under transforms ---------------------------------------------------------------------------


def test_under_jit(net):
    traces = []

    @jax.jit
    def run(model, x):
        traces.append(x)
        return nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)(x)

    for _ in range(2):
        out, sown = run(net, X)
        assert out == 12.0
        assert sown["first"]["h"].value == (6.0,)
        assert sown["rest"][0]["__call__"].value == (12.0,)
    assert len(traces) == 1
    assert list(vars(net)) == ["steps", "first", "rest"]


def test_under_vmap(net):
    xs = jnp.arange(3.0)
    run = jax.vmap(lambda m, x: nnx.capture(m, nnx.Intermediate)(x), in_axes=(None, 0))
    out, sown = run(net, xs)
    np.testing.assert_array_equal(out, xs * 4)
    np.testing.assert_array_equal(sown["first"]["h"].value[0], xs * 2)


def test_under_grad(net):
    def loss(model, x):
        return nnx.capture(model, nnx.Intermediate)(x)

    grads, sown = jax.grad(loss, has_aux=True, allow_int=True)(net, X)
    assert grads.first.w.value == 6.0
    assert pure(sown) == H


@pytest.mark.parametrize("mode", [True, False], ids=["graph", "tree"])
def test_in_every_mode(net, mode):
    with nnx.set_graph_mode(mode), nnx.set_graph_updates(mode):
        assert pure(nnx.capture(net, nnx.Intermediate)(X)[1]) == H


def test_a_change_to_a_model_from_outside_the_trace_is_refused(net):
    with pytest.raises(
        TraceContextError, match=r"Cannot mutate 'FirstAndRest'.*steps was set or deleted"
    ):
        jax.jit(nnx.capture(net, nnx.Intermediate))(X)
    with pytest.raises(TraceContextError, match=r"Cannot mutate BatchStat at net\.first\.calls"):
        jax.jit(nnx.capture(net.twice, nnx.Intermediate))(X)


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nnx.capture(3, Loss), "takes a function, a module .* but got int.\nFix: "),
        (lambda: nnx.capture(nnx.List([]), Loss), "takes a function, .* but got List.\nFix: "),
        (
            lambda: nnx.capture(Layer(), "intermediates"),
            "collects types of Variables such as nnx.Intermediate, but got 'intermediates'.\nFix: ",
        ),
        (
            lambda: nnx.capture(Layer(), method_outputs=int),
            "collects types of Variables .* but got <class 'int'>.\nFix: ",
        ),
        (
            lambda: nnx.capture(lambda x, m: m(x), Loss)(1.0, Layer()),
            "the first argument of the function, which must be a module or hold some, but it got "
            "float.\nFix: put the module first",
        ),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(TypeError, match=message):
        make()


class Sower(nnx.Module):
    def __init__(self, w):
        self.w = nnx.Param(jnp.asarray(w))

    def __call__(self, x):
        self.sow(nnx.Intermediate, "y", self.w * x)
        return self.w * x


def test_capture_as_a_decorator():
    @nnx.capture(nnx.Intermediate, nnx.Perturbation, method_outputs=nnx.Intermediate)
    def run(model, x):
        return model(x)

    model = Sower(2.0)
    y, sown, perturbed = run(model, 3.0)
    assert float(y) == 6.0
    assert {name: float(sown[name].value[0]) for name in sown} == {"__call__": 6.0, "y": 6.0}
    assert not perturbed
    assert not hasattr(model, "y")


def test_a_model_used_by_closure_inside_of_its_own_capture():
    model = Sower(2.0)
    _, sown = nnx.capture(lambda _, x: model(x) + model(x), nnx.Intermediate)(model, 3.0)
    assert [float(v) for v in sown["y"].value] == [6.0, 6.0]
    assert not hasattr(model, "y")


MODES = [{}, {"graph": False}, {"graph_updates": False}]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_capture_around_transforms_with_and_without_graph_updates(mode):
    jitted = nnx.jit(lambda model, x: model(x), **mode)
    model = Sower(2.0)
    if mode:  # what was compiled without a capture sows all the same
        jitted(model, 3.0)
        assert not hasattr(model, "y")
    assert float(nnx.capture(jitted, nnx.Intermediate)(model, 3.0)[1]["y"].value[0]) == 6.0

    stack = Sower(jnp.arange(3.0))
    mapped = nnx.vmap(lambda model, x: model(x), in_axes=(0, None), **mode)
    _, sown = nnx.capture(mapped, nnx.Intermediate)(stack, 3.0)
    assert sown["y"].value[0].tolist() == [0, 3, 6]

    axes = {"in_axes": (0, nnx.Carry), "out_axes": nnx.Carry}
    scanned = nnx.scan(lambda model, x: model(x) + 1.0, **axes, **mode)
    _, sown = nnx.capture(scanned, nnx.Intermediate)(stack, jnp.array(3.0))
    assert sown["y"].value[0].tolist() == [0, 1, 4]
    assert not hasattr(stack, "y")


def around_a_vmap_that_broadcasts(**mode):
    mapped = nnx.vmap(lambda model, x: model(x), in_axes=(None, 0), **mode)
    return nnx.capture(mapped, nnx.Intermediate)(Sower(2.0), jnp.arange(3.0))


def around_a_scan_that_broadcasts(**mode):
    axes = {"in_axes": (None, 0), "out_axes": 0}
    mapped = nnx.scan(lambda model, x: model(x), **axes, **mode)
    return nnx.capture(mapped, nnx.Intermediate)(Sower(2.0), jnp.arange(3.0))


def around_a_scan_that_carries(**mode):
    mapped = nnx.scan(lambda model, x: (model, model(x)), **mode)
    return nnx.capture(mapped, nnx.Intermediate)(Sower(2.0), jnp.arange(3.0))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            around_a_vmap_that_broadcasts,
            r"nnx.vmap: model.y was sown on an object that is broadcast, and differs along the "
            r"mapped axis.\nFix: map the object too",
        ),
        (
            around_a_scan_that_broadcasts,
            r"nnx.scan: model.y was sown on an object that is broadcast, which has no place for a "
            r"value of each step.\nFix: scan over the object",
        ),
        (around_a_scan_that_carries, r"nnx.scan: model.y was sown on an object that is carried"),
    ],
)
@pytest.mark.parametrize("mode", MODES[1:], ids=str)
def test_one_place_for_many_values_without_graph_updates(run, message, mode):
    with pytest.raises(ValueError, match=message):
        run(**mode)
    assert run()[1]["y"].value[0].tolist() == [0, 2, 4]  # graph updates stack them


def test_gradients_in_tree_mode_inside_of_a_capture():
    run = lambda model, x: nnx.grad(lambda model: model(x), graph=False)(model)  # noqa: E731
    grads, sown = nnx.capture(run, nnx.Intermediate)(Sower(2.0), 3.0)
    assert type(grads) is Sower
    assert float(grads.w[...]) == 3.0
    assert float(sown["y"].value[0]) == 6.0


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_only_what_was_sown_comes_out_of_a_transform(mode):
    class Adds(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.array(1.0))

        def __call__(self, x):
            self.sow(nnx.Intermediate, "y", x)
            self.new, self.flag = nnx.Param(x), 3
            self.w[...] += 1.0
            return x

    for transformed in (nnx.jit(Adds.__call__, **mode), nnx.remat(Adds.__call__, **mode)):
        model = Adds()
        for n in (1, 2, 3):  # traced, compiled, and by a plan
            _, sown = nnx.capture(transformed, nnx.Intermediate)(model, jnp.array(2.0))
            assert [float(v) for v in sown["y"].value] == [2.0]
            assert set(sown) == {"y"}
            assert float(model.w) == 1.0 + n
        assert hasattr(model, "new") == hasattr(model, "flag") == (mode == {})


def test_a_returned_argument_is_refused_under_capture_too():
    run = nnx.jit(lambda model, x: (model(x), model)[1], graph_updates=False)
    with pytest.raises(ValueError, match=r"Param comes into nnx.jit at model\.w and goes out at"):
        nnx.capture(run, nnx.Intermediate)(Sower(2.0), 3.0)


class Watcher(nnx.Module):
    def __init__(self):
        self.inner = Sower(2.0)

    def __call__(self, x):
        self.sow(nnx.Intermediate, "x", x)
        self.sow(nnx.Intermediate, "x", x + 1)
        x = self.perturb("p", self.inner(x))
        inner, own = self.inner.__captures__, self.__captures__
        assert type(own[0]) is nnx.Intermediate
        assert type(own[1]) is nnx.Perturbation
        assert set(inner[0].value) == {"y"}
        assert not inner[1].value
        assert set(own[1].value) == {"p"}
        return x * own[0]["x"][1]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_what_was_collected_so_far(mode):
    model = Watcher()
    run = nnx.jit(lambda model, x: model(x), **mode)
    for call in (run, lambda model, x: model(x)):
        y, sown, _ = nnx.capture(call, nnx.Intermediate, nnx.Perturbation)(model, 3.0)
        assert float(y) == 6.0 * 4.0
        assert [float(x) for x in sown["x"].value] == [3.0, 4.0]


def test_captures_are_there_while_a_capture_runs_and_only_read():
    model = Sower(2.0)
    with pytest.raises(
        AttributeError, match=r"no attribute '__captures__': nnx.capture is not run"
    ):
        model.__captures__  # noqa: B018
    assert not hasattr(model, "__captures__")

    def write(model, x):
        model.__captures__[0]["z"] = x

    with pytest.raises(TraceContextError, match="is read-only"):
        nnx.capture(write, nnx.Intermediate)(model, 3.0)


class FirstKind(nnx.Variable):
    pass


class SecondKind(nnx.Variable):
    pass


class SowsTwoKinds(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))

    def __call__(self, x):
        self.sow(FirstKind, "first", 2 * x)
        self.sow(SecondKind, "second", 3 * x)
        return x * self.w


@pytest.mark.parametrize("updates", [True, False], ids=["graph updates", "without"])
def test_a_compiled_function_tells_every_run_what_it_sows(updates):
    model, x = SowsTwoKinds(), jnp.ones(2)
    run = nnx.jit(lambda model, x: model(x), graph_updates=updates)
    for kinds in [(FirstKind,), (SecondKind,), (FirstKind,), (FirstKind, SecondKind)]:
        _, *states = nnx.capture(run, *kinds)(model, x)
        want = {FirstKind: {"first": 2.0}, SecondKind: {"second": 3.0}}
        got = [{k: float(v[0][0]) for k, v in nnx.to_pure_dict(s).items()} for s in states]
        assert got == [want[kind] for kind in kinds]
        assert list(vars(model)) == ["w"]
    assert run.jitted_fn._cache_size() == 1
    run(model, x)  # and outside of a run it sows for good, or not at all
    assert list(vars(model)) == (["w", "first", "second"] if updates else ["w"])


def test_a_method_that_is_defined_again_is_the_one_that_runs(monkeypatch):
    model = Layer()
    run = nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)

    def outputs():
        out, sown = run(jnp.array(1.0))
        return float(out), float(sown["__call__"][0])

    monkeypatch.setattr(Layer, "__call__", lambda self, x: x * 3)
    assert outputs() == (3.0, 3.0)
    monkeypatch.setattr(Layer, "__call__", lambda self, x: x * 5)
    assert outputs() == (5.0, 5.0)
