"""Branches over objects: cond and switch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linnet import nnx
from linnet.errors import BranchError, SharedReferenceError, TraceContextError
from tests.models import call
from tests.nnx.transforms.stateful import Count, Noise, Norm, Pair, Scale, counted, values


def skip(model, x):
    return x


def branch(api, number, branches, *operands, **options):
    """Runs the branch of that number, of two by cond, of any by switch."""
    if api == "cond":
        return nnx.cond(number == 0, *branches, *operands, **options)
    return nnx.switch(number, branches, *operands, **options)


@pytest.fixture(params=["cond", "switch"])
def api(request):
    return request.param


@pytest.mark.parametrize("updates", [True, False])
@pytest.mark.parametrize("traced", [False, True])
def test_only_the_branch_that_runs_writes(api, updates, traced):
    model = Scale(2.0)
    weight = model.w

    def run(number, model, x):
        return branch(api, number, [call, skip], model, x, graph_updates=updates)

    if traced:
        run = nnx.jit(run)
    assert run(jnp.int32(0), model, jnp.float32(3)) == 6.0
    assert run(jnp.int32(1), model, jnp.float32(3)) == 3.0
    assert values(model) == {("w",): 2.0, ("count",): 1}
    assert model.w is weight


def test_branches_that_write_different_variables(api):
    pair = Pair(Scale(2.0), Scale(3.0))
    branches = [lambda p, x: p.a(x), lambda p, x: p.b(x)]
    outs = [float(branch(api, n, branches, pair, jnp.float32(1))) for n in (0, 1, 1)]
    assert outs == [2.0, 3.0, 3.0]
    assert (int(pair.a.count.value), int(pair.b.count.value)) == (1, 2)


def test_switch_brings_the_index_into_range():
    branches = [lambda x, k=k: x + k for k in (10, 20, 30)]
    assert [float(nnx.switch(n, branches, 1.0)) for n in (-5, 1, 99)] == [11.0, 21.0, 31.0]
    model = Scale(2.0)
    assert nnx.switch(0, [call], model, 3.0) == 6.0
    assert model.count.value == 1


def test_values_are_those_of_plain_jax(api):
    x = jnp.arange(3.0)
    for number in (0, 1):
        want = branch(api, number, [jnp.sin, jnp.cos], x)
        plain = jax.lax.switch(number, [jnp.sin, jnp.cos], x)
        np.testing.assert_allclose(want, plain, rtol=1e-6)


def test_new_objects_and_containers_of_them_come_out(api):
    branches = [lambda x, k=k: {"pair": Pair(nnx.Param(k * x), "s"), "k": k} for k in (1.0, -1.0)]
    out = branch(api, 1, branches, jnp.float32(3))
    assert (float(out["pair"].a.value), out["pair"].b, float(out["k"])) == (-3.0, "s", -1.0)


def test_operands_that_are_returned_keep_their_identity(api):
    model = Scale(2.0)
    same, weight = branch(api, 1, [lambda m: (m, m.w)] * 2, model)
    assert same is model
    assert weight is model.w


def test_structure_changes_that_all_branches_make_come_out(api):
    def change(k):
        def f(model):
            model.extra = nnx.Param(jnp.float32(k))
            model.mode = "both"
            del model.count

        return f

    model = Scale()
    branch(api, 1, [change(1), change(2)], model)
    assert (float(model.extra.value), model.mode, hasattr(model, "count")) == (2.0, "both", False)


def test_without_graph_updates_structure_stays(api):
    model = Scale()

    def f(model):
        model.extra = nnx.Param(jnp.float32(1))

    branch(api, 0, [f, lambda model: None], model, graph_updates=False)
    assert not hasattr(model, "extra")


def test_arrays_in_attributes_may_change_in_one_branch_only(api):
    class WithArray(nnx.Module):
        def __init__(self):
            self.x = jnp.float32(1)
            self.y = jnp.float32(1)

    def f(m):
        m.x = m.x + 5

    model = WithArray()
    for number, want in ((1, 1.0), (0, 6.0), (0, 11.0)):
        branch(api, number, [f, lambda m: None], model)
        assert (float(model.x), float(model.y)) == (want, 1.0)


def test_shared_variables_stay_shared(api):
    w = nnx.Param(jnp.float32(1))

    def f(a, b):
        a[...] += 1
        return b * 1

    assert branch(api, 0, [f, lambda a, b: b * 1], w, w) == 2.0
    assert w.value == 2.0
    with pytest.raises(SharedReferenceError, match=rf"was already seen at .* tree-mode {api}"):
        branch(api, 0, [f, f], w, w, graph=False)
    with pytest.raises(SharedReferenceError, match="which needs graph updates"):
        branch(api, 0, [lambda a: a] * 2, w, graph_updates=False)


def test_each_branch_is_traced_twice_at_most(api):
    f, runs = counted(call)
    g, others = counted(skip)
    branch(api, 1, [f, g], Scale(), jnp.float32(1))
    assert len(runs) <= 2
    assert len(others) <= 2
    f, runs = counted(lambda m, x: x * m.w)
    branch(api, 0, [f, skip], Scale(), jnp.float32(1))
    assert len(runs) == 1


def test_keys_and_running_means(api):
    pair = Pair(Norm(), Noise(nnx.Rngs(0)))
    eager = nnx.clone(pair)
    x = jnp.arange(3.0)
    branches = [lambda p, x: p.b(p.a(x)), lambda p, x: p.a(x)]
    for number in (0, 1, 0):
        got = branch(api, number, branches, pair, x)
        np.testing.assert_allclose(got, branches[number](eager, x), rtol=1e-6)
    assert values(pair) == values(eager)


@pytest.mark.parametrize("storage", [{"ref": True}, {"hijax": True}])
def test_refs_are_read_and_written(api, storage):
    model = nnx.with_vars(Scale(2.0), **storage)
    assert branch(api, 0, [call, skip], model, jnp.float32(3)) == 6.0
    assert branch(api, 1, [call, skip], model, jnp.float32(3)) == 3.0
    assert model.count.value == 1
    assert isinstance(model.count.raw_value, jax.Ref)


def test_under_grad_vmap_and_scan(api):
    def f(model, x):
        return branch(api, jnp.int32(x < 2), [call, skip], model, x)

    model = Scale(3.0)
    assert nnx.grad(f)(model, jnp.float32(5)).w.value == 5.0
    assert nnx.grad(f)(model, jnp.float32(1)).w.value == 0.0
    assert model.count.value == 1
    stack = nnx.vmap(Scale)(jnp.arange(3.0) + 2)
    assert nnx.vmap(f)(stack, jnp.arange(3.0) + 1).tolist() == [1.0, 6.0, 12.0]
    assert stack.count.value.tolist() == [0, 1, 1]
    axes = nnx.StateAxes({...: nnx.Carry})
    out = nnx.scan(f, in_axes=(axes, 0), out_axes=0)(model, jnp.arange(4.0))
    assert (out.tolist(), int(model.count.value)) == ([0.0, 1.0, 6.0, 9.0], 3)


def test_sow_in_every_branch(api):
    class Sower(Scale):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "y", x)
            return x * self.w

    model = Sower(2.0)
    branches = [lambda m, x: m(x), lambda m, x: m(-x)]
    assert branch(api, 1, branches, model, jnp.float32(3)) == -6.0
    assert model.y.value == (-3.0,)


# ---- bad input ----------------------------------------------------------------------------------


def set_to(name, value):
    return lambda model, x: setattr(model, name, value)


def wrong_type(model, x):
    model.count.value = jnp.float32(1.5)
    return x


BAD = {
    "new": (
        set_to("extra", Count(jnp.int32(0))),
        lambda model, x: None,
        r"branch 1 changes the structure .*\n  - branch 0: model\.extra: new \(Count\)\n  - branch "
        r"1: nothing\nFix: make the same changes in every branch",
    ),
    "static": (
        set_to("mode", 1),
        set_to("mode", 2),
        r"\n  - branch 0: model\.mode: 0 -> 1\n  - branch 1: model\.mode: 0 -> 2\n",
    ),
    "structure": (
        lambda model, x: (x, x),
        skip,
        r"branch 1 returns PyTreeDef\(\*\), but branch 0 returns PyTreeDef\(\(\*, \*\)\)\.\nFix",
    ),
    "dtype": (
        lambda model, x: {"y": x},
        lambda model, x: {"y": 1},
        r"branch 1 gives int32\[\] for the output\.y, but branch 0 gives float32\[\]\.\nFix: give",
    ),
    "shape of a new variable": (
        lambda model, x: Pair(nnx.Param(x), None),
        lambda model, x: Pair(nnx.Param(jnp.stack([x, x])), None),
        r"branch 1 gives float32\[2\] for the output\.a, but branch 0 gives float32\[\]",
    ),
    "variable": (
        call,
        wrong_type,
        r"branch 1 gives float32\[\] for model\.count, but branch 0 gives int32\[\]",
    ),
    "kinds": (
        lambda model, x: [nnx.Param(x)],
        lambda model, x: [Count(x)],
        r"branch 1 returns another object at the output\[0\] than branch 0\.\nFix: return new",
    ),
    "operands": (
        lambda model, x: model.w,
        lambda model, x: model.count,
        "branch 1 returns another object at the output than branch 0",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_branches_that_do_not_match(api, name):
    *branches, message = BAD[name]
    model = Scale()
    model.mode = 0
    with pytest.raises(BranchError, match=f"nnx.{api}: (branch|.*){message}"):
        branch(api, 0, branches, model, jnp.float32(1))
    assert (model.mode, values(model)) == (0, values(Scale()))


def test_errors_of_the_program_stay_what_they_are(api):
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        branch(api, 0, [call, skip], Scale())
    with pytest.raises(TypeError, match=r"Pred must be a scalar|Branch index must be scalar"):
        branch(api, jnp.arange(2), [lambda x: x] * 2, 1.0)


def test_no_branches():
    with pytest.raises(
        ValueError, match=r"nnx.switch got no branches\.\nFix: give it at least one"
    ):
        nnx.switch(0, [], 1.0)


def test_a_captured_model_cannot_be_written(api):
    model = Scale()
    with pytest.raises(TraceContextError, match=r"Cannot mutate Count at model\.count"):
        branch(api, 0, [model.__call__, lambda x: x], jnp.float32(1))
    assert model.count.value == 0
    assert branch(api, 0, [lambda x: x * model.w, lambda x: x], 3.0) == 6.0


def test_after_an_error_objects_are_as_before(api):
    def fails(model, x):
        model(x)
        raise RuntimeError("stop")

    model = Scale()
    with pytest.raises(RuntimeError, match="stop"):
        branch(api, 0, [call, fails], model, 1.0)
    assert values(model) == values(Scale())
