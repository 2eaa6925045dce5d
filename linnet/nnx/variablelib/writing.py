"""Writing many Variables at once, after it was checked that all of them may be written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from linnet.nnx.pytreelib.tracing import constants, current_trace, note_write, note_writes
from linnet.nnx.variablelib.storage import set_cells
from linnet.nnx.variablelib.variable import Variable, in_own_containers


def refuse_unwritable(variables: Iterable[Variable[Any]], *, allow_read_only: bool = False) -> None:
    """Raises unless all of these Variables may be written now, each where it was made.

    With ``allow_read_only`` one with ``mutable=False`` may be written too.
    """
    trace = current_trace()
    for variable in variables:
        metadata = variable._metadata
        if not allow_read_only and "mutable" in metadata:
            variable._check_mutable()
        elsewhere = variable._trace is not trace and variable._trace != trace
        if elsewhere and not metadata.stored_as_ref:
            variable._refuse_write()


def take_over(variable: Variable[Any], value: Any) -> None:
    """Writes a value, or another Variable's value and metadata; the caller checked that it may."""
    metadata = variable._metadata
    has_metadata = isinstance(value, Variable)
    same = not has_metadata or value._metadata is metadata or value._metadata == metadata
    if same and not metadata.stored_as_ref and metadata.get("mutable", True):
        if constants:
            note_write(variable)
        variable._cell.value = in_own_containers(value._raw if has_metadata else value)
    elif has_metadata:
        variable.update_from_state(value)
    else:
        variable.set_raw_value(in_own_containers(value))


def write_values(variables: list[Variable[Any]], values: list[Any]) -> None:
    """Writes results into Variables; whether they may be written is checked before the first one.

    A ref refuses a value of another shape or dtype, which may leave earlier ones written.
    """
    # The function that ran may have made its copy of a read-only one mutable.
    refuse_unwritable(variables, allow_read_only=True)
    if any(variable._metadata.stored_as_ref for variable in variables):
        for variable, value in zip(variables, values, strict=True):
            variable.set_raw_value(value)
        return
    if constants:
        note_writes(variables)
    set_cells([variable._cell for variable in variables], values)
