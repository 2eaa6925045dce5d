"""Mixed precision: which dtypes parameters, computations and outputs have.

A policy is in force inside of a region: a ``with`` block, a decorated function, or the call of a
model that carries a policy. Regions nest, and the innermost counts. What is in force is a JAX user
context, so that a compiled function is traced anew under another policy and found again under the
same one.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import threading
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from linnet.errors import PrecisionError

F = TypeVar("F", bound=Callable[..., Any])

_SHORT = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
_MIXED = {"mixed_bfloat16": "bfloat16", "mixed_float16": "float16"}
_FIELDS = ("params", "compute", "output")


@dataclasses.dataclass(frozen=True)
class Policy:
    """Which dtypes are used for what; None leaves a thing as it is outside of the region.

    Args:
      params: of parameters, where a layer that is made is not given ``param_dtype``.
      compute: that layers compute in, where they are not given ``dtype``. Statistics of
        normalisations and the softmax of attention stay in float32, complex numbers complex.
      output: of the floating-point arrays that the outermost module called in a region returns,
        or a function that is decorated with the region.

    Raises:
      PrecisionError: a dtype is unknown, or not floating point.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> nnx.Policy(params=jnp.float32, compute="bf16", output=jnp.float32)
      Policy(params=float32, compute=bfloat16, output=float32)
    """

    params: Any = None
    compute: Any = None
    output: Any = None

    # Until the first one is made, nobody has to look for policies. Copies and pickles count.
    any_made: ClassVar[bool] = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Policy:
        Policy.any_made = True
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name in _FIELDS:
            object.__setattr__(self, name, _floating(getattr(self, name), name))

    def __repr__(self) -> str:
        fields = {name: getattr(self, name) for name in _FIELDS}
        given = [f"{name}={dtype}" for name, dtype in fields.items() if dtype is not None]
        return f"Policy({', '.join(given)})"

    def over(self, outer: Policy) -> Policy:
        """This policy, with what it leaves open taken from another."""
        pairs = ((getattr(self, name), getattr(outer, name)) for name in _FIELDS)
        return Policy(*(theirs if mine is None else mine for mine, theirs in pairs))


def as_policy(policy: Any) -> Policy:
    """A policy from its short forms.

    Args:
      policy: a ``Policy``; a text such as ``"params=float32,compute=bfloat16,output=float32"``,
        of which parts may be left out; ``"mixed_bfloat16"`` or ``"mixed_float16"``, which compute
        in the half and hold all else in float32; or a dtype, for all three.

    Returns:
      The policy.

    Raises:
      PrecisionError: it is none of these.

    Example:
      >>> as_policy("compute=bf16,output=f32")
      Policy(compute=bfloat16, output=float32)
      >>> as_policy("mixed_bfloat16")
      Policy(params=float32, compute=bfloat16, output=float32)
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        return _parsed(policy)
    return Policy(policy, policy, policy)


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> Policy:
    if text in _MIXED:
        return Policy("float32", _MIXED[text], "float32")
    if "=" not in text:
        return Policy(text, text, text)
    fields: dict[str, str] = {}
    for part in text.replace(" ", "").split(","):
        name, _, value = part.partition("=")
        if name not in _FIELDS or name in fields or not value:
            raise PrecisionError(
                f"A precision policy was expected, but got {text!r}: {part!r} is not one of "
                f"params=, compute= and output= with a dtype, each at most once.\n"
                "Fix: write it like 'params=float32,compute=bfloat16,output=float32'."
            )
        fields[name] = value
    return Policy(**fields)


def _floating(dtype: Any, name: str) -> np.dtype | None:
    """A dtype by any of its names; refuses what is not a real floating-point one."""
    if dtype is None:
        return None
    known = _SHORT.get(dtype, dtype) if isinstance(dtype, str) else dtype
    try:
        found = jnp.dtype(known)
    except TypeError:
        names = [*_SHORT, *_SHORT.values(), *_MIXED]
        close = difflib.get_close_matches(str(dtype), names, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise PrecisionError(
            f"The precision policy has {name}={dtype!r}, which is no dtype.{hint}\n"
            "Fix: use a dtype such as jnp.bfloat16, or its name."
        ) from None
    if not jnp.issubdtype(found, jnp.floating):
        raise PrecisionError(
            f"The precision policy has {name}={found}, which is not floating point.\n"
            "Fix: use one of bfloat16, float16, float32 and float64."
        )
    return found


class Scope(NamedTuple):
    """What is in force at one place in a program.

    Args:
      policy: the policy.
      entered: the policies of models that led here. A layer of such a model does not put its
        policy in force again, so that a region inside of the model's call counts.
      is_inside: whether an outer call will bring the output to the dtype of the policy.
    """

    policy: Policy
    entered: frozenset[Policy] = frozenset()
    is_inside: bool = False


context = jax.make_user_context(None)


# Equal scopes are one object, which jax.jit compares fastest.
@functools.lru_cache(maxsize=1024)
def _scope(policy: Policy, entered: frozenset[Policy], is_inside: bool) -> Scope:
    return Scope(policy, entered, is_inside)


def scope_of_region(outer: Scope | None, policy: Policy | None, is_inside: bool = False) -> Scope:
    """What is in force in a region.

    Args:
      outer: what is in force around it.
      policy: its policy; None for none at all.
      is_inside: whether the region brings outputs to their dtype.

    Returns:
      The scope.
    """
    if outer is None:
        return _scope(policy or Policy(), frozenset(), is_inside)
    new = Policy() if policy is None else policy.over(outer.policy)
    return _scope(new, outer.entered, outer.is_inside or is_inside)


def scope_of_call(outer: Scope | None, own: Policy | None) -> Scope | None:
    """What is in force in the call of a module.

    Args:
      outer: what is in force around it.
      own: the policy that the module carries, if any.

    Returns:
      The scope.
    """
    if own is not None and (outer is None or own not in outer.entered):
        entered = frozenset() if outer is None else outer.entered
        new = own if outer is None else own.over(outer.policy)
        return _scope(new, entered | {own}, True)
    return outer if outer is None or outer.is_inside else _scope(*outer[:2], True)


def compute_dtype() -> np.dtype | None:
    """The dtype that the policy in force computes in, or None."""
    if not Policy.any_made:
        return None
    scope = context.value
    return None if scope is None else scope.policy.compute


def default_param_dtype(given: Any = None) -> Any:
    """The dtype of a parameter that is made here.

    Args:
      given: the dtype that was asked for; None for that of the policy in force, or float32.

    Returns:
      The dtype.

    Example:
      >>> from linnet import nnx
      >>> with nnx.precision("params=bfloat16"):
      ...     default_param_dtype()
      dtype(bfloat16)
    """
    if given is not None:
        return given
    scope = context.value if Policy.any_made else None
    return jnp.float32 if scope is None or scope.policy.params is None else scope.policy.params


def cast_floating(tree: Any, dtype: Any) -> Any:
    """The floating-point arrays of a pytree in another dtype; everything else as it is.

    Args:
      tree: the pytree. Modules and Variables in it stay themselves.
      dtype: the dtype; None for no change.

    Returns:
      The pytree.

    Example:
      >>> cast_floating({"x": jnp.ones(1), "n": jnp.ones(1, int)}, jnp.bfloat16)
      {'n': Array([1], dtype=int32), 'x': Array([1], dtype=bfloat16)}
    """
    if dtype is None:
        return tree

    def cast(leaf: Any) -> Any:
        if not isinstance(leaf, (jax.Array, np.ndarray)) or leaf.dtype == dtype:
            return leaf
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, tree, is_leaf=lambda x: hasattr(type(x), "_linnet_kind"))


class _Opened(threading.local):
    def __init__(self) -> None:
        self.blocks: list[Any] = []


class precision:
    """A region with a precision policy: a ``with`` block or a decorator.

    Layers called in it obey, also inside of functions that were compiled outside of it: those are
    traced anew for each policy. A layer that was given ``dtype`` keeps it, one that was given
    ``param_dtype`` makes its parameters in it. Of nested regions the innermost counts, and what it
    leaves open is as outside; the policy of a model (``nnx.set_precision``) counts from its call
    on. A policy holds for the thread that entered the region.

    ``output`` is the dtype of what the outermost module called in the block returns; of a decorated
    function, of what the function returns. Own computations obey where they ask for their dtype
    with ``nnx.nn.dtypes.promote_dtype``.

    Args:
      policy: an ``nnx.Policy`` or a short form of one: ``"params=float32,compute=bfloat16"``,
        ``"mixed_bfloat16"``, a dtype for everything; None for no policy, whatever is outside.

    Raises:
      PrecisionError: it is no policy.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> with nnx.precision("compute=bfloat16"):
      ...     model(jnp.ones((1, 2))).dtype
      dtype(bfloat16)
      >>> @nnx.precision("mixed_bfloat16")
      ... def run(model, x):
      ...     return model(x)
      >>> run(model, jnp.ones((1, 2))).dtype
      dtype('float32')
    """

    def __init__(self, policy: Any):
        self.policy = None if policy is None else as_policy(policy)
        self._opened = _Opened()

    def __enter__(self) -> None:
        block = context(scope_of_region(context.value, self.policy))
        block.__enter__()
        self._opened.blocks.append(block)

    def __exit__(self, *error: Any) -> None:
        self._opened.blocks.pop().__exit__(*error)

    def __call__(self, f: F) -> F:
        output = None if self.policy is None else self.policy.output

        @functools.wraps(f)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with context(scope_of_region(context.value, self.policy, output is not None)):
                out = f(*args, **kwargs)
            return cast_floating(out, output)

        return wrapper  # pyright: ignore[reportReturnType]
