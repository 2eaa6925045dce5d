"""Several processes that save one model together: the first one does what only one may do."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from linnet.errors import CheckpointWriteError


def by_first(action: Callable[[], object], what: str) -> None:
    """Runs an action in the first process, while the others wait; it fails in all or in none.

    Args:
      action: what to do; its result is dropped.
      what: the folder it is about, for the error of those that waited.

    Raises:
      CheckpointWriteError: it failed in the first process, and this is another one.
    """
    if jax.process_count() == 1:
        action()
        return
    from jax.experimental import multihost_utils

    failed: Exception | None = None
    if jax.process_index() == 0:
        try:
            action()
        except Exception as error:
            failed = error
    outcomes = multihost_utils.process_allgather(np.array(failed is None))
    if failed is not None:
        raise failed
    if not np.all(outcomes):
        raise CheckpointWriteError(
            None,
            f"The first of {jax.process_count()} processes could not save to {what}.\n"
            "Fix: see its error.",
        )
