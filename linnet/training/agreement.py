"""Agreement: the loops of several processes go on, and stop, at the same step.

Each process tells the others, before each step, at which step it is, whether it has another batch
after this one, and whether it was asked to stop. That is a small collective computation in the
queue of the devices. Its result is read one step later, when it is done, so that the devices always
have a step to work on while the program waits for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from linnet.errors import DataError, ProcessMismatchError
from linnet.io.shared.processes import gather, mesh_of_all


class Sharing(NamedTuple):
    """How the processes share rows."""

    mesh: Mesh
    rows: NamedSharding  # of what each process gives
    share: Callable[[jax.Array], jax.Array]
    firsts: list[int]  # the first row of each process


@functools.cache
def _sharing() -> Sharing:
    # The sharding puts one row on each device, and the function copies all rows to all devices.
    # All devices take part: on CPUs, JAX keeps the order only of computations on all devices of a
    # process, and two that wait for each other in different orders never end.
    mesh = mesh_of_all()
    share = jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, PartitionSpec()))
    owners = [device.process_index for device in jax.devices()]
    firsts = [owners.index(number) for number in range(jax.process_count())]
    return Sharing(mesh, NamedSharding(mesh, PartitionSpec("device")), share, firsts)


class Agreement:
    """What the processes of a run tell each other about their loops."""

    def __init__(self) -> None:
        self._told: Any = None

    def tell(self, step: int, has_next: bool, is_asked: bool) -> None:
        """Starts to tell the others about a step, without waiting for them."""
        own = np.array([[step, has_next, is_asked]] * jax.local_device_count(), np.int32)
        sharing = _sharing()
        with jax.set_mesh(sharing.mesh):  # the mesh in force may have other devices
            rows = jax.make_array_from_process_local_data(sharing.rows, own)
            self._told = sharing.share(rows)

    def hear(self) -> bool:
        """Whether any process was asked to stop, by what all processes told about the last step.

        Raises:
          ProcessMismatchError: the processes are at different steps.
          DataError: some processes have another batch, and others do not.
        """
        if self._told is None:
            return False
        rows = np.asarray(self._told)[_sharing().firsts]
        self._told = None
        steps, has_next, is_asked = (rows[:, 0], rows[:, 1] != 0, rows[:, 2] != 0)
        if len(set(steps.tolist())) > 1:
            at = ", ".join(f"process {n} at step {step}" for n, step in enumerate(steps))
            raise ProcessMismatchError(
                f"The loops of this run are not at the same step: {at}.\n"
                "Fix: restore the same checkpoint in all processes (io.Manager does), and make one "
                "Loop in each."
            )
        if has_next.any() and not has_next.all():
            ended = ", ".join(str(n) for n in np.flatnonzero(~has_next))
            raise DataError(
                f"After step {steps[0]} the batches of process {ended} are used up, and other "
                "processes have more; their next step would wait forever.\n"
                "Fix: give every process the same number of batches, or pass steps= to the loop."
            )
        return bool(is_asked.any())


def first_reason(reason: str | None) -> str | None:
    """The reason of the first process that has one."""
    return next((given for given in gather(reason) if given is not None), None)
