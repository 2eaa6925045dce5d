"""Layers that normalise, drop or adapt, in every configuration that is compared with Flax.

A case builds a layer from ``nnx.Rngs(0)`` and calls it. ``norm_numbers.py`` holds what Flax 0.12.8
gave for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from linnet import nnx
from tests.digest import digest

X = 2 * jax.random.normal(jax.random.key(3), (2, 3, 4)) + 1
MASK = jnp.arange(24).reshape(2, 3, 4) % 5 > 0
ONES, ZEROS = jax.nn.initializers.ones, jax.nn.initializers.zeros
NORMAL = jax.nn.initializers.normal(1.0)
HALF = jnp.bfloat16


class Case(NamedTuple):
    """A layer, how it is built, and how it is called."""

    name: str
    build: Callable[[nnx.Rngs], Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


CASES: list[Case] = []


def add(name: str, build: Callable[[nnx.Rngs], Any], *args: Any, **kwargs: Any) -> None:
    """Adds a case."""
    CASES.append(Case(name, build, args or (X,), kwargs))


def figures(layer: Any, case: Case) -> list[Any]:
    """What a case comes to: parameters, output, and the state after the call.

    The first entry of every leaf before the call; then, of the output and of every leaf after the
    call, the inner product with cosines, and the dtype of the output.
    """
    before = [float(np.asarray(leaf).ravel()[0]) for leaf in _leaves(layer)]
    out = layer(*case.args, **case.kwargs)
    after = [digest(leaf, places=9) for leaf in (out, *_leaves(layer))]
    return [before, after, str(out.dtype)]


def _leaves(layer: Any) -> list[Any]:
    """The floating-point arrays of a layer, in the order of their paths."""
    pairs = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(nnx.state(layer)))[0]
    pairs = sorted(pairs, key=lambda pair: jax.tree_util.keystr(pair[0]))
    return [leaf for _, leaf in pairs if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def last_doubled(args: Any, dtype: Any = None, inexact: bool = True) -> Any:
    """A ``promote_dtype`` that leaves a trace."""
    return (*args[:-1], 2 * args[-1])


def norm(name: str, cls: Any, features: int = 4, *, call: Any = None, **options: Any) -> None:
    """Adds a layer that normalises, with random parameters unless told otherwise."""
    options = {"scale_init": NORMAL, "bias_init": NORMAL, **options}
    if cls is nnx.RMSNorm:
        options = {k: v for k, v in options.items() if "bias" not in k}
    name = f"{cls.__name__} {name}"
    add(name, lambda rngs: cls(features, rngs=rngs, **options), **(call or {}))


NORMS = {
    nnx.BatchNorm: {},
    nnx.LayerNorm: {},
    nnx.RMSNorm: {},
    nnx.GroupNorm: {"num_groups": 2},
    nnx.InstanceNorm: {},
}
for cls, needed in NORMS.items():
    norm("random", cls, **needed)
    norm("defaults", cls, **needed, scale_init=ONES, bias_init=ZEROS)
    norm("epsilon", cls, **needed, epsilon=0.5)
    norm("dtype", cls, **needed, dtype=HALF)
    norm("param_dtype", cls, **needed, param_dtype=HALF)
    norm("no scale", cls, **needed, use_scale=False)
    norm("slow variance", cls, **needed, use_fast_variance=False)
    norm("promote", cls, **needed, promote_dtype=last_doubled)
    norm("mask", cls, **needed, call={"mask": MASK})
    if cls is not nnx.RMSNorm:
        norm("no bias", cls, **needed, use_bias=False)
norm("axis", nnx.BatchNorm, 3, axis=1)
norm("momentum", nnx.BatchNorm, momentum=0.5)
norm("evaluates", nnx.BatchNorm, use_running_average=True)
norm("evaluates in bfloat16", nnx.BatchNorm, use_running_average=True, dtype=HALF)
norm("told to evaluate", nnx.BatchNorm, call={"use_running_average": True})
norm("told to train", nnx.BatchNorm, use_running_average=True, call={"use_running_average": False})
for cls in (nnx.LayerNorm, nnx.RMSNorm):
    norm("reduction axes", cls, reduction_axes=(0, -1))
    norm("feature axis", cls, 3, feature_axes=1)
    norm("feature axes", cls, 12, feature_axes=(1, 2), reduction_axes=(1, 2))
norm("group size", nnx.GroupNorm, num_groups=None, group_size=1)
norm("four groups", nnx.GroupNorm, num_groups=4)
norm("reduction axes", nnx.GroupNorm, num_groups=1, reduction_axes=(-1,))
norm("feature axis", nnx.InstanceNorm, 3, feature_axes=1)
norm("feature axes", nnx.InstanceNorm, 12, feature_axes=(1, -1))


class Pair(nnx.Module):
    """Two layers, the later one first by name."""

    def __init__(self, rngs: nnx.Rngs):
        self.second = nnx.Linear(4, 5, rngs=rngs)
        self.first = nnx.List([nnx.Linear(5, 3, rngs=rngs)])

    def __call__(self, x: Any) -> Any:
        return self.first[0](self.second(x))


def wrapped(name: str, cls: Any, *, call: Any = None, inner: Any = None, **options: Any) -> None:
    """Adds a layer that normalises the weights of another."""
    inner = inner or (lambda rngs: nnx.Linear(4, 3, bias_init=NORMAL, rngs=rngs))
    name = f"{cls.__name__} {name}"
    add(name, lambda rngs: cls(inner(rngs), rngs=rngs, **options), **(call or {}))


def half_linear(rngs: nnx.Rngs) -> nnx.Linear:
    """A layer with weights of 16 bits."""
    return nnx.Linear(4, 3, param_dtype=HALF, rngs=rngs)


class Tensor(nnx.Module):
    """A layer with a weight of three axes."""

    def __init__(self, rngs: nnx.Rngs):
        self.kernel = nnx.Param(NORMAL(rngs.params(), (4, 2, 3)))

    def __call__(self, x: Any) -> Any:
        return jnp.einsum("abc,cde->abde", x, self.kernel[...])


wrapped("defaults", nnx.SpectralNorm)
wrapped("steps", nnx.SpectralNorm, n_steps=3)
wrapped("no steps", nnx.SpectralNorm, n_steps=0)
wrapped("epsilon", nnx.SpectralNorm, n_steps=2, epsilon=0.1)
wrapped("dtype", nnx.SpectralNorm, dtype=HALF)
wrapped("param_dtype", nnx.SpectralNorm, param_dtype=HALF)
wrapped("half the bits", nnx.SpectralNorm, inner=half_linear)
wrapped("keeps", nnx.SpectralNorm, update_stats=False)
wrapped("told to keep", nnx.SpectralNorm, call={"update_stats": False})
wrapped("told to update", nnx.SpectralNorm, update_stats=False, call={"update_stats": True})
wrapped("two layers", nnx.SpectralNorm, inner=Pair)
wrapped("tensor", nnx.SpectralNorm, inner=Tensor)
wrapped("defaults", nnx.WeightNorm)
wrapped("epsilon", nnx.WeightNorm, epsilon=0.5)
wrapped("no scale", nnx.WeightNorm, use_scale=False)
wrapped(
    "scale_init", nnx.WeightNorm, scale_init=lambda key, shape, dtype=None: jnp.full(shape, 2.0)
)
wrapped("dtype", nnx.WeightNorm, dtype=HALF)
wrapped("param_dtype", nnx.WeightNorm, param_dtype=HALF)
wrapped("half the bits", nnx.WeightNorm, inner=half_linear)
wrapped("feature axis", nnx.WeightNorm, feature_axes=0)
wrapped("feature axes", nnx.WeightNorm, inner=Tensor, feature_axes=(0, 2))
wrapped("one length", nnx.WeightNorm, feature_axes=None)
wrapped("filter", nnx.WeightNorm, variable_filter=nnx.Param)
wrapped("two layers", nnx.WeightNorm, inner=Pair)

DROPOUT = {
    "defaults": {"rate": 0.5},
    "rate": {"rate": 0.2},
    "rows": {"rate": 0.5, "broadcast_dims": (-1,)},
    "columns": {"rate": 0.5, "broadcast_dims": (0, 1)},
    "none": {"rate": 0.0},
    "all": {"rate": 1.0},
    "deterministic": {"rate": 0.5, "deterministic": True},
}
for label, options in DROPOUT.items():
    add(f"Dropout {label}", lambda rngs, options=options: nnx.Dropout(**options, rngs=rngs))
add("Dropout bfloat16", lambda rngs: nnx.Dropout(0.3, rngs=rngs), X.astype(HALF))
add("Dropout stream", lambda rngs: nnx.Dropout(0.3, rngs=nnx.Rngs(0, dropout=7)))
add(
    "Dropout collection",
    lambda rngs: nnx.Dropout(0.3, rng_collection="noise", rngs=nnx.Rngs(0, noise=7)),
)
add("Dropout key at call", lambda rngs: nnx.Dropout(0.3), rngs=jax.random.key(5))
add("Dropout rngs at call", lambda rngs: nnx.Dropout(0.3, rngs=rngs), rngs=nnx.Rngs(5))
add("Dropout stream at call", lambda rngs: nnx.Dropout(0.3), rngs=nnx.RngStream(5, tag="a"))
add("Dropout told to let through", lambda rngs: nnx.Dropout(0.3, rngs=rngs), deterministic=True)
add(
    "Dropout told to drop",
    lambda rngs: nnx.Dropout(0.3, deterministic=True, rngs=rngs),
    deterministic=False,
)

LORA = {
    "zero": {},
    "random": {"b_initializer": NORMAL},
    "initializers": {"a_initializer": NORMAL, "b_initializer": ONES},
    "dtype": {"dtype": HALF, "b_initializer": NORMAL},
    "param_dtype": {"param_dtype": HALF, "b_initializer": NORMAL},
    "promote": {"promote_dtype": last_doubled, "b_initializer": NORMAL},
    "base": {"base_module": nnx.Linear(4, 3, rngs=nnx.Rngs(1)), "b_initializer": NORMAL},
    "function": {"base_module": lambda x: x[..., :3], "b_initializer": NORMAL},
}
for label, options in LORA.items():
    add(f"LoRA {label}", lambda rngs, options=options: nnx.LoRA(4, 2, 3, rngs=rngs, **options))
LORA_LINEAR = {
    "zero": {},
    "random": {"b_initializer": NORMAL, "bias_init": NORMAL},
    "initializers": {"a_initializer": NORMAL, "b_initializer": NORMAL, "use_bias": False},
    "lora_dtype": {"b_initializer": NORMAL, "lora_dtype": HALF},
    "lora_param_dtype": {"b_initializer": NORMAL, "lora_param_dtype": HALF},
    "lora_promote": {"b_initializer": NORMAL, "lora_promote_dtype": last_doubled},
    "linear options": {"dtype": HALF, "param_dtype": HALF, "b_initializer": NORMAL},
}
for label, options in LORA_LINEAR.items():
    add(
        f"LoRALinear {label}",
        lambda rngs, options=options: nnx.LoRALinear(4, 3, lora_rank=2, rngs=rngs, **options),
    )
