"""What surrounds the call of a module: the name of its scope in a trace, and its precision policy.

Both cost a look at a flag where there is nothing to do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from linnet import errors
from linnet.errors import name_some
from linnet.functional.precision import Policy, cast_floating, context, scope_of_call
from linnet.nnx import kinds, locate, statics
from linnet.nnx.graphlib.abstract import refuse_abstract, refuse_donated
from linnet.nnx.tracing_state import running, scope_name
from linnet.nnx.variablelib import Variable, type_text

if TYPE_CHECKING:
    from linnet.nnx.module import Module

POLICY = "precision_policy"  # the attribute that holds a module's policy

statics.add_self_keyed(Policy)


def surrounded(call: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a module that is called in the module's scope and under its policy.

    Args:
      call: the method.

    Returns:
      The method. While a transform traces it runs in a scope named after the module's attribute;
      as the outermost call under a precision policy it brings its output to the policy's dtype.
    """

    @functools.wraps(call)
    def wrapper(self: Module, *args: Any, **kwargs: Any) -> Any:
        if Policy.any_made:
            outer = context.value
            inner = scope_of_call(outer, self.__dict__.get(POLICY))
            if inner is not outer:
                return _under_policy(outer, inner, call, self, args, kwargs)
        try:
            if running.names:
                return _in_named_scope(call, self, args, kwargs)
            return call(self, *args, **kwargs)
        except (TypeError, ValueError, RuntimeError) as error:
            _explain(self, error)
            raise

    return wrapper


def _explain(module: Module, error: TypeError | ValueError | RuntimeError) -> None:
    """Adds to an error in the call of a module where that module is, and what it holds."""
    if isinstance(error, TypeError):
        refuse_abstract(module, error)
    refuse_donated(module, error)
    if isinstance(error, RuntimeError):
        return
    known = any(note.startswith(_PLACE) for note in getattr(error, "__notes__", ()))
    if known or type(error).__module__ == errors.__name__:
        return
    items = module._pytree_items()
    values = [(name, items[name]) for name in kinds.sort_keys(items)]
    own = [(name, value.raw_value) for name, value in values if isinstance(value, Variable)]
    held = name_some(f"{name} {type_text(x)}" for name, x in own if hasattr(x, "dtype"))
    error.add_note(
        f"{_PLACE}{locate.describe(module) or 'a module'} ({type(module).__name__})"
        + (f", which holds {held}." if held else ".")
    )


_PLACE = "This was in the call of "


def _under_policy(outer: Any, inner: Any, call: Any, module: Any, args: Any, kwargs: Any) -> Any:
    try:
        with context(inner):
            out = _in_named_scope(call, module, args, kwargs)
    except (TypeError, ValueError, RuntimeError) as error:
        _explain(module, error)
        raise
    is_outermost = outer is None or not outer.is_inside
    return cast_floating(out, inner.policy.output) if is_outermost else out


def _in_named_scope(call: Any, module: Any, args: Any, kwargs: Any) -> Any:
    name = scope_name(module)
    if name is None:
        return call(module, *args, **kwargs)
    with jax.named_scope(name):
        return call(module, *args, **kwargs)
