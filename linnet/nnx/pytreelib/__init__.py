"""Objects that are JAX pytrees: what an attribute is, what is static, and who is told of changes.

From the ground up:

- ``kinds``: what a value is to the object model, by type; its children; ``places``, which goes
  through everything that can be reached from a root.
- ``statics``: hashable keys of static values. ``copying``: deep copies that share arrays.
- ``attributes``: sorts the attributes of an object into data and static, and wraps mixed containers
  for JAX.
- ``tracing``: the running trace. ``locate``: the path of a Variable or module, for an error.
  ``watch``: who is told when the structure of an object changes. ``printing``: objects as text.
- ``objects``: ``Pytree``, the base of all modules, with ``data``, ``static`` and ``dataclass``.

A write ``obj.x = value`` goes through ``Pytree.__setattr__``: the trace is checked,
``nnx.data(...)`` or ``nnx.static(...)`` around the value is removed and remembered, and ``watch``
announces a change of structure to those that watch the object. Flattening calls
``sort_attributes``: data become children, the rest a ``StaticPart`` in the aux data; unflattening
puts both back without running the constructor.
"""

from linnet.nnx.pytreelib.attributes import Data, Static
from linnet.nnx.pytreelib.kinds import is_data, register_data_type
from linnet.nnx.pytreelib.objects import (
    Object,
    Pytree,
    check_pytree,
    data,
    dataclass,
    has_data,
    static,
)

__all__ = [
    "Data",
    "Object",
    "Pytree",
    "Static",
    "check_pytree",
    "data",
    "dataclass",
    "has_data",
    "is_data",
    "register_data_type",
    "static",
]
