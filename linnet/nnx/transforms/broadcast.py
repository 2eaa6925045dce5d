"""What is the same in every step of a scan: it stays as it was, whatever a step writes to it.

A step of ``nnx.scan`` sees its own writes to what has axis ``None``; the next step begins with the
values from before the scan again, and so does the program after it. Each step therefore ends by
putting back the Variables and arrays that it changed or replaced. Static attributes and what a step
adds to an object are no values: they stay.
"""

from __future__ import annotations

import warnings

from linnet.errors import DroppedWriteWarning, name_some
from linnet.nnx import locate
from linnet.nnx.kinds import ARRAY, VARIABLE, kind_of
from linnet.nnx.rnglib import RngState
from linnet.nnx.transforms.lift import Inside
from linnet.nnx.transforms.places import Places
from linnet.nnx.transforms.slots import Slots


class Broadcast:
    """The slots of one scan that are the same in every step.

    Args:
      slots: all slots of the call.
      numbers: which of them.
    """

    def __init__(self, slots: Slots, numbers: list[int]):
        self._slots = slots
        self._numbers = numbers
        self._dropped: set[int] = set()

    def put_back(self, inside: Inside) -> None:
        """Undoes what a step did to them."""
        places = Places(self._slots, inside)
        leaves = [*inside.variables, *inside.arrays]
        for number in self._numbers:
            found, leaf = places.found(number), leaves[number]
            replaced = found is not leaf and kind_of(found) in (VARIABLE, ARRAY)
            if replaced:
                places.put(number, leaf)
            written = number < self._slots.variables and _restore_variable(inside, number)
            if replaced or written:
                self._dropped.add(number)

    def warn(self, told: set[str]) -> None:
        """Names what the steps wrote to, except what the user was ``told`` before."""
        slots = self._slots
        new = [number for number in sorted(self._dropped) if slots.where(number) not in told]
        if not new:
            return
        names = [slots.where(number) for number in new]
        variables = slots.call.opened.variables
        streams = any(isinstance(variables[n], RngState) for n in new if n < slots.variables)
        keys = ", so that random streams give each step the same keys" if streams else ""
        warnings.warn(
            f"nnx.scan drops what its function writes to {name_some(names)}: with axis None every "
            f"step begins with the values from before the scan{keys}, and these are left after "
            "it. To hand writes from step to step give nnx.Carry instead, for an object "
            "nnx.StateAxes({nnx.Param: None, ...: nnx.Carry}).",
            DroppedWriteWarning,
            stacklevel=locate.outer_level(),
        )
        told.update(names)


def _restore_variable(inside: Inside, number: int) -> bool:
    """Gives a Variable the value and metadata that it came in with; tells if it had others."""
    variable, value = inside.variables[number], inside.values[number]
    metadata = inside.structure.variable_kinds[number].own
    if variable._raw is value and variable._metadata == metadata:
        return False
    object.__setattr__(variable, "_raw", value)
    object.__setattr__(variable, "_metadata", metadata)
    return True
