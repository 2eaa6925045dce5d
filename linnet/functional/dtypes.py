"""Dtypes of parameters, computations and outputs, and the precision policies that set them.

A policy is in force inside of a region: a ``with`` block, a decorated function, or the call of a
model that carries a policy. Regions nest, and the innermost counts. The policy in force is a JAX
user context and so part of the cache key of compiled functions: they are traced anew under another
policy and found again under the same one.
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
PromoteDtype = Callable[..., Any]  # such as the function promote_dtype

_SHORT = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
_MIXED = {"mixed_bfloat16": "bfloat16", "mixed_float16": "float16"}
_FIELDS = ("params", "compute", "output", "masters")


@dataclasses.dataclass(frozen=True)
class Policy:
    """The dtypes of a region; None leaves a dtype as it is outside of the region.

    Args:
      params: the dtype of parameters, for layers made without ``param_dtype``.
      compute: the dtype of computations, for layers made without ``dtype``. Statistics of
        normalisations and the softmax of attention stay in float32, complex numbers complex.
      output: the dtype of the floating-point arrays that the outermost module called in the region
        returns, or the function that is decorated with the region.
      masters: the dtype in which an ``nnx.Optimizer`` keeps copies of parameters that are narrower.
        It changes the copies, and rounds the parameters from them.

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
    masters: Any = None

    # Until the first policy is made, no layer has to look for one. Copies and pickles count too.
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
        """This policy, with the dtypes it leaves open taken from another."""
        pairs = ((getattr(self, name), getattr(outer, name)) for name in _FIELDS)
        return Policy(*(theirs if mine is None else mine for mine, theirs in pairs))


def as_policy(policy: Any) -> Policy:
    """Makes a policy from one of its short forms.

    Args:
      policy: a ``Policy``; a text such as ``"params=float32,compute=bfloat16,output=float32"``,
        of which parts may be left out; ``"mixed_bfloat16"`` or ``"mixed_float16"``, which compute
        in the half and hold all else in float32; or a dtype, for all but ``masters``.

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
    if not isinstance(policy, (type, np.dtype)):
        raise PrecisionError(
            f"A precision policy was expected, but got {type(policy).__name__}.\n"
            "Fix: pass nnx.Policy(params=..., compute=..., output=...), a text such as "
            "'params=float32,compute=bfloat16', 'mixed_bfloat16' or 'mixed_float16', a dtype for "
            "everything, or None for no policy."
        )
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
                f"params=, compute=, output= and masters= with a dtype, each at most once.\n"
                "Fix: write it like 'params=float32,compute=bfloat16,output=float32'."
            )
        fields[name] = value
    return Policy(**fields)


def _floating(dtype: Any, name: str) -> np.dtype | None:
    """Reads a dtype, by any of its names, and refuses one that is not real floating point."""
    if dtype is None:
        return None
    known = _SHORT.get(dtype, dtype) if isinstance(dtype, str) else dtype
    try:
        found = jnp.dtype(known)
    except (TypeError, ValueError):
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


class PolicyScope(NamedTuple):
    """The policy in force at one place in a program.

    ``entered`` holds the policies of the models whose calls led here: a layer of such a model does
    not put its policy in force again, so that a region inside of the model's call counts.
    ``is_inside`` says whether an outer call will convert the output to the policy's dtype.
    """

    policy: Policy
    entered: frozenset[Policy] = frozenset()
    is_inside: bool = False


context = jax.make_user_context(None)


# Equal scopes are one object, which jax.jit compares fastest.
@functools.lru_cache(maxsize=1024)
def _scope(policy: Policy, entered: frozenset[Policy], is_inside: bool) -> PolicyScope:
    return PolicyScope(policy, entered, is_inside)


def scope_of_region(
    outer: PolicyScope | None, policy: Policy | None, is_inside: bool = False
) -> PolicyScope:
    """The scope inside of a region with a policy, or with None for no policy at all."""
    if outer is None:
        return _scope(policy or Policy(), frozenset(), is_inside)
    new = Policy() if policy is None else policy.over(outer.policy)
    return _scope(new, outer.entered, outer.is_inside or is_inside)


def scope_of_call(outer: PolicyScope | None, own: Policy | None) -> PolicyScope | None:
    """The scope inside of the call of a module, which may carry a policy of its own."""
    if own is not None and (outer is None or own not in outer.entered):
        entered = frozenset() if outer is None else outer.entered
        new = own if outer is None else own.over(outer.policy)
        return _scope(new, entered | {own}, True)
    return outer if outer is None or outer.is_inside else _scope(*outer[:2], True)


def compute_dtype() -> np.dtype | None:
    """The compute dtype of the policy in force, or None."""
    if not Policy.any_made:
        return None
    scope = context.value
    return None if scope is None else scope.policy.compute


def default_param_dtype(given: Any = None) -> Any:
    """The dtype of new parameters: the one given, that of the policy in force, or float32.

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
    """Converts the floating-point arrays of a pytree; everything else stays as it is.

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


def canonicalize_dtype(*args: Any, dtype: Any = None, inexact: bool = True) -> Any:
    """The dtype that a computation over ``args`` runs in.

    Args:
      *args: arrays; None is skipped.
      dtype: the dtype asked for; by default that of the precision policy in force, or that of the
        promoted arguments.
      inexact: promote integers to floating point, and refuse an integer ``dtype``.

    Returns:
      The dtype.

    Raises:
      ValueError: ``dtype`` is not floating point and ``inexact`` is set.

    Example:
      >>> canonicalize_dtype(jnp.ones(2, jnp.bfloat16), 1)
      dtype(bfloat16)
    """
    if dtype is None:
        dtype = jnp.result_type(*[_as_array(x) for x in args if x is not None])
        if inexact and not jnp.issubdtype(dtype, jnp.inexact):
            dtype = jnp.promote_types(jnp.float32, dtype)
        if Policy.any_made and jnp.issubdtype(dtype, jnp.floating):
            from_policy = compute_dtype()
            dtype = dtype if from_policy is None else from_policy
    if inexact and not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(f"Dtype must be inexact: {dtype}.\nFix: use a floating-point dtype.")
    return dtype


def promote_dtype(args: Any, /, *, dtype: Any = None, inexact: bool = True) -> Any:
    """Converts arrays to one dtype.

    Args:
      args: a tuple or list of arrays, or of nested lists of numbers; None stays None.
      dtype: the dtype; by default that of the precision policy in force (``nnx.precision``), or
        that of the promoted arrays.
      inexact: promote integers to floating point.

    Returns:
      The arrays, in the same kind of sequence.

    Example:
      >>> x, y = promote_dtype((jnp.ones(2, jnp.int32), jnp.ones(2, jnp.float16)))
      >>> x.dtype, y.dtype
      (dtype('float16'), dtype('float16'))
    """
    has_policy = dtype is None and Policy.any_made and compute_dtype() is not None
    if not has_policy and _is_settled(args, dtype, inexact):
        return args
    dtype = canonicalize_dtype(*args, dtype=dtype, inexact=inexact)
    return type(args)([None if x is None else jnp.asarray(_as_array(x), dtype) for x in args])


def _as_array(x: Any) -> Any:
    """Lists and tuples of numbers or arrays as arrays; JAX takes no dtype from them."""
    return jnp.asarray(x) if isinstance(x, (list, tuple)) else x


def _is_settled(args: Any, dtype: Any, inexact: bool) -> bool:
    """Whether the arrays have the dtype asked for, or one dtype if none was, already."""
    if dtype is not None:
        dtype = _as_dtype(dtype)
    for x in args:
        if x is None:
            continue
        if not (_is_array_type(type(x)) or isinstance(x, jax.Array)) or x.weak_type:
            return False
        found = x.dtype
        if dtype is None:
            dtype = found
        elif found is not dtype and found != dtype:
            return False
    return dtype is not None and (not inexact or _is_inexact(dtype))


@functools.cache
def _as_dtype(dtype: Any) -> Any:
    """A dtype given by a class or by name; arrays with it are found by identity, which is fast."""
    return jnp.dtype(dtype)


@functools.cache
def _is_array_type(cls: type) -> bool:
    """Whether values of a type are arrays outside of traces; faster than ``isinstance``."""
    return issubclass(cls, jax.Array)


@functools.cache
def _is_inexact(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


class _OpenBlocks(threading.local):
    def __init__(self) -> None:
        self.blocks: list[Any] = []


class precision:
    """A region with a precision policy: a ``with`` block or a decorator.

    Layers called in the region follow the policy, also inside of functions that were compiled
    outside of it: those are traced anew for each policy. A layer that was given ``dtype`` computes
    in that dtype, one that was given ``param_dtype`` makes its parameters in that one. Of nested
    regions the innermost counts, and dtypes that it leaves open are as outside; the policy of a
    model (``nnx.set_precision``) counts from its call on. A policy holds for the thread that
    entered the region.

    ``output`` is the dtype of what the outermost module called in the block returns; of a decorated
    function, of what the function returns. Your own computations follow the policy where they
    promote their operands with ``nnx.nn.dtypes.promote_dtype``.

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
        self._opened = _OpenBlocks()

    def __enter__(self) -> None:
        block = context(scope_of_region(context.value, self.policy))
        block.__enter__()
        self._opened.blocks.append(block)

    def __exit__(self, *error: Any) -> None:
        self._opened.blocks.pop().__exit__(*error)

    def __call__(self, f: F) -> F:
        policy = self.policy

        @functools.wraps(f)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return _in_region(policy, f, args, kwargs)

        return wrapper  # pyright: ignore[reportReturnType]


def _in_region(policy: Policy | None, f: Any, args: Any, kwargs: Any) -> Any:
    output = None if policy is None else policy.output
    with context(scope_of_region(context.value, policy, output is not None)):
        out = f(*args, **kwargs)
    return cast_floating(out, output)
