"""Objects that hold themselves, found before JAX follows them without end.

JAX flattens a cycle until the interpreter's stack is spent, and on some versions of Python does not
give the stack back, so that nothing runs any more. It does not say how deep it is; so every so
often an object is looked at that is about to be flattened.
"""

from __future__ import annotations

import itertools
from typing import Any

from linnet.errors import CyclicReferenceError, path_string
from linnet.nnx import kinds, locate
from linnet.nnx.attributes import sort_attributes
from linnet.nnx.kinds import ARRAY, METHOD, OBJECT, STATIC, VARIABLE, kind_of

LOOK_EVERY = 101
flattened = itertools.count(1)  # how many objects were flattened


def refuse_cycle(obj: Any) -> None:
    """Raises if an object can be reached from itself.

    Raises:
      CyclicReferenceError: it can; the way is named.
    """
    pending: list[Any] = [(obj, ())]
    entered: set[int] = set()
    while pending:
        value, path = pending.pop()
        if value is obj and path:
            raise CyclicReferenceError(
                f"{locate.describe(obj) or type(obj).__name__} holds itself, at "
                f"{path_string(path)}, and JAX takes only trees.\n"
                "Fix: use the nnx transforms (nnx.jit, nnx.grad, nnx.vmap ...), which carry cycles "
                "with graph=True; or split it first, graphdef, state = nnx.split(model), and "
                "nnx.merge(graphdef, state) inside."
            )
        kind = kind_of(value)
        if kind in (STATIC, VARIABLE, ARRAY, METHOD) or id(value) in entered:
            continue
        entered.add(id(value))
        if kind != OBJECT:
            children = kinds.container_items(value, kind)
        elif value._pytree_registered:
            children = zip(*sort_attributes(value)[:2], strict=True)
        else:
            continue
        pending += [(child, (*path, key)) for key, child in children]
