"""The same Variables behind other flags."""

import jax
import jax.numpy as jnp
import pytest

from linnet import nnx


class Noise(nnx.Module):
    def __init__(self, rngs):
        self.deterministic = False
        self.rate = 0.5
        self.rngs = rngs.fork()

    def set_view(self, deterministic: bool | None = None, *, rate: float = 0.5):
        """Sets the flags of the noise.

        Args:
          deterministic: whether no noise is added,
            in any call.
          rate (float, optional): how much of it.

        Returns:
          Nothing: this is no argument.
        """
        self.deterministic = self.deterministic if deterministic is None else deterministic
        self.rate = rate

    def __call__(self, x):
        return x if self.deterministic else x + self.rngs.normal(x.shape)


class Norm(nnx.Module):
    def __init__(self):
        self.use_running_average = False
        self.mean = nnx.BatchStat(jnp.zeros(2))

    def set_view(self, use_running_average: "bool | None" = None, momentum=0.9, **rest):
        if use_running_average is not None:
            self.use_running_average = use_running_average
        return rest


class SharedNoise(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.w = nnx.Param(jnp.ones(2))
        self.noise = Noise(rngs)
        self.blocks = [Norm(), Noise(rngs)]
        self.shared = self.noise

    def __call__(self, x):
        self.blocks[0].mean[...] += 1
        return self.noise(x * self.w)


@pytest.fixture
def net():
    return SharedNoise()


# ---- view ---------------------------------------------------------------------------------------


def test_a_view_has_other_flags_and_the_same_variables(net):
    view = nnx.view(net, deterministic=True, use_running_average=True)
    assert type(view) is SharedNoise
    assert view is not net
    assert (view.noise.deterministic, view.blocks[1].deterministic) == (True, True)
    assert view.blocks[0].use_running_average is True
    assert (net.noise.deterministic, net.blocks[0].use_running_average) == (False, False)
    assert view.w is net.w
    assert view.noise.rngs.default.count is net.noise.rngs.default.count
    assert view.shared is view.noise


def test_what_a_view_writes_is_written_to_the_original(net):
    x = jnp.zeros(2)
    assert nnx.view(net, deterministic=True)(x).tolist() == [0, 0]
    assert net.blocks[0].mean.value.tolist() == [1, 1]
    nnx.view(net, deterministic=False).w.value = jnp.array([3.0, 4.0])
    assert net.w.value.tolist() == [3, 4]


@pytest.mark.parametrize(
    ("only", "want"),
    [
        (..., (True, True)),
        (nnx.PathContains("blocks"), (False, True)),
        (Noise, (True, True)),
        (lambda path, module: path == ("noise",), (True, False)),
    ],
)
def test_only_chooses_the_modules(net, only, want):
    view = nnx.view(net, only=only, deterministic=True)
    assert (view.noise.deterministic, view.blocks[1].deterministic) == want


def test_a_view_of_a_pytree_of_modules(net):
    first, second = nnx.view([net, Norm()], use_running_average=True)
    assert first.blocks[0].use_running_average
    assert second.use_running_average


def test_flags_that_nobody_takes(net):
    with pytest.raises(ValueError) as error:
        nnx.view(net, deterministic=True, nope=1, also=2)
    assert str(error.value) == (
        "Unused keys found in nnx.view: ['also', 'nope']; no module of SharedNoise takes them.\n"
        "Fix: see nnx.view_info(model) for those it takes."
    )
    with pytest.raises(ValueError, match=r"\['deterministic'\]"):
        nnx.view(net, only=Norm, deterministic=True)
    assert nnx.view(net, raise_if_not_found=False, nope=1).noise.rate == 0.5


def test_a_view_under_jit_and_in_tree_mode(net):
    x = jnp.zeros(2)
    assert jax.jit(lambda m: nnx.view(m, deterministic=True)(x))(net).tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"Noise at \.shared was already seen at \.noise"):
        nnx.view(net, deterministic=True, graph=False)


def test_view_info_lists_the_flags_of_each_class(net):
    noise = (
        "Noise:\n"
        "  deterministic: bool | None = None\n"
        "    whether no noise is added,\n"
        "    in any call.\n"
        "  rate: float = 0.5\n"
        "    how much of it."
    )
    norm = "Norm:\n  use_running_average: bool | None = None\n  momentum = 0.9"
    assert nnx.view_info(net) == f"{noise}\n{norm}"
    assert nnx.view_info([net], only=Norm) == norm
    assert nnx.view_info(nnx.List([])) == ""


def test_view_info_has_qualified_names_and_every_line():
    class Scaled(nnx.Module):
        def set_view(self, scale: float = 1.0, more=None):
            """Sets the scale.

            Args:
              scale: the factor, one of
                half: for small things

                  two.
              more: the rest.

            Returns:
              scale: nothing.
            """

    name = "test_view_info_has_qualified_names_and_every_line.<locals>.Scaled"
    assert nnx.view_info(Scaled()) == (
        f"{name}:\n"
        "  scale: float = 1.0\n    the factor, one of\n    half: for small things\n\n      two.\n"
        "  more = None\n    the rest."
    )


# ---- with_attributes ----------------------------------------------------------------------------


def test_with_attributes_shares_the_variables(net):
    changed = nnx.with_attributes(net, rate=0.1, deterministic=True)
    assert (changed.noise.rate, changed.blocks[1].rate) == (0.1, 0.1)
    assert (net.noise.rate, net.noise.deterministic) == (0.5, False)
    assert changed.w is net.w
    assert changed.shared is changed.noise


def test_with_attributes_only_where_the_filter_says(net):
    changed = nnx.with_attributes(net, only=nnx.PathContains("blocks"), rate=0.1)
    assert (changed.noise.rate, changed.blocks[1].rate) == (0.5, 0.1)


@pytest.mark.parametrize("options", [{"nope": 1}, {"only": Norm, "rate": 0.1}])
def test_attributes_that_no_module_has(net, options):
    name = next(key for key in options if key != "only")
    with pytest.raises(ValueError) as error:
        nnx.with_attributes(net, **options)
    assert str(error.value) == (
        f"Could not find at least one instance of the following attributes: ['{name}'] in "
        "SharedNoise.\nFix: check the spelling, or pass raise_if_not_found=False."
    )
    same = nnx.with_attributes(net, raise_if_not_found=False, **options)
    assert nnx.graphdef(same) == nnx.graphdef(net)
