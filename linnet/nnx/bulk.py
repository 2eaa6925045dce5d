"""Many Variables at once: copied, and written so that either all are or none."""

from __future__ import annotations

import collections
from typing import Any, TypeVar

from linnet.nnx.tracing import current_trace
from linnet.nnx.tracing_state import constants, note_write
from linnet.nnx.var_storage import to_refs
from linnet.nnx.variablelib import Variable, build_variable

V = TypeVar("V", bound=Variable[Any])

_set_raw = Variable.__dict__["_raw"].__set__


def copy_of(variable: V) -> V:
    """``variable.copy()``, without the choices it offers."""
    metadata = variable._metadata
    raw = to_refs(variable._raw) if metadata.stored_as_ref else variable._raw
    return build_variable(type(variable), raw, metadata)


def take_over(variable: Variable[Any], value: Any) -> None:
    """Writes a value, or another Variable's value and metadata, where the trace was checked."""
    metadata = variable._metadata
    is_variable = isinstance(value, Variable)
    same = not is_variable or value._metadata is metadata or value._metadata == metadata
    if same and not metadata.stored_as_ref and metadata.get("mutable", True):
        _set_raw(variable, value._raw if is_variable else value)
    elif is_variable:
        variable.update_from_state(value)
    else:
        variable.set_raw_value(value)


def set_raw_values(variables: list[Variable[Any]], values: list[Any]) -> None:
    """Stores values in plain Variables, unchecked, in one pass that no signal can tear."""
    if constants:
        collections.deque(map(note_write, variables), 0)
    collections.deque(map(_set_raw, variables, values), 0)


def write_values(variables: list[Variable[Any]], values: list[Any]) -> None:
    """Writes results into Variables; what can fail is checked before the first write."""
    trace = current_trace()
    for variable in variables:
        elsewhere = variable._trace is not trace and variable._trace != trace
        if elsewhere and not variable._metadata.stored_as_ref:
            variable._refuse_write()
    if any(variable._metadata.stored_as_ref for variable in variables):
        for variable, value in zip(variables, values, strict=True):
            variable.set_raw_value(value)
        return
    set_raw_values(variables, values)
