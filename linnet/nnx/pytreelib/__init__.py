"""Objects that are JAX pytrees: what an attribute is, what is static, and who is told of changes.

From the ground up: ``kinds`` decides by type what a value is to the object model, ``statics`` makes
cache keys of static values, ``attributes`` sorts the attributes of an object into data and static
ones, ``locate`` finds the path of something for an error, ``tracing`` tells in which trace code
runs, ``watch`` announces structural changes, ``printing`` renders objects as text and in notebooks,
and ``objects`` has ``Pytree``, the base of all modules.
"""

from linnet.nnx.pytreelib.attributes import Data, Static
from linnet.nnx.pytreelib.kinds import register_data_type
from linnet.nnx.pytreelib.objects import (
    Object,
    Pytree,
    check_pytree,
    data,
    dataclass,
    has_data,
    is_data,
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
