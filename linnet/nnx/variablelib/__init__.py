"""Variables: values that modules hold and change in place, each with a type and metadata.

- ``variable``: the class ``Variable``, the types derived from it, making Variables without hooks.
- ``writing``: many Variables at once, where all or none may be written.
- ``storage``: whether a value is stored plainly or in JAX refs, and the defaults for that.
- ``metadata``: what a Variable carries beside its value, hooks included.
- ``drawing``: initializers with metadata, and values drawn in their shards.
- ``placement``: the mesh and the sharding that the axis names in the metadata stand for.
- ``ownership``: which arrays only their Variables hold, so that ``nnx.jit`` may donate them.
- ``operators``: arithmetic and indexing, so that a Variable can stand where its array could.
- ``comparing``: how the leaves of two states differ.
- ``names``: names for the types of Variables: those of Linen's collections.

The value is in the cell of the Variable: an array, a pytree or refs. A random stream that nobody
has read holds a seed and a plain count, which the first read replaces by arrays.

**Reads.** Everybody but ``nnx.jit`` reads the cell through the property ``_raw``, which notes that
somebody else may hold the array now. ``raw_value`` also makes the key of a seed, ``stored_value``
reads refs as well, and ``v.value`` reads refs and runs ``on_get_value``.

**Writes.** ``v.value = x`` checks that the Variable is mutable and, unless it is stored as refs,
that the Variable was made in the running trace. It runs ``on_set_value`` and comes to
``Variable._put``, which warns if a compiled function read the old value as a constant, and stores
into the cell or the refs. ``__init__`` and ``build_variable`` fill the cell of a new Variable.
Other writes run no hooks:

- ``set_raw_value`` checks as ``v.value = x`` does, and calls ``_put``; with
  ``_unsafe_bypass_check`` (the first read of a stream, ``eval_shape``) it writes the cell at once.
- A call of a compiled function that changed only values writes them with ``set_cells`` in one pass;
  where refs or other traces may be involved, ``write_values`` checks first.
- ``nnx.update`` writes each value with ``take_over``. ``copy_from`` and ``update_from_state`` take
  over the value and the metadata of another Variable, by ``_put``.
- Before a call donates an array that others may hold, ``copy_unowned`` puts a copy in its place.
- ``Variable._replace_metadata`` turns the value into refs, or back, where new metadata asks for it.
- Loops write the cells of their own Variables, inside a step, directly (``transforms.carry``).
"""

from linnet.nnx.variablelib.drawing import VariableMetadata, with_metadata
from linnet.nnx.variablelib.names import (
    VariableType,
    register_variable_name,
    variable_name_from_type,
    variable_type_from_name,
)
from linnet.nnx.variablelib.storage import (
    VarDefaults,
    VarDefaultsContext,
    use_eager_sharding,
    using_eager_sharding,
    var_defaults,
)
from linnet.nnx.variablelib.variable import (
    BatchStat,
    Cache,
    Intermediate,
    OptArray,
    OptState,
    OptVariable,
    Param,
    Perturbation,
    Variable,
    VariableState,
)

__all__ = [
    "BatchStat",
    "Cache",
    "Intermediate",
    "OptArray",
    "OptState",
    "OptVariable",
    "Param",
    "Perturbation",
    "VarDefaults",
    "VarDefaultsContext",
    "Variable",
    "VariableMetadata",
    "VariableState",
    "VariableType",
    "register_variable_name",
    "use_eager_sharding",
    "using_eager_sharding",
    "var_defaults",
    "variable_name_from_type",
    "variable_type_from_name",
    "with_metadata",
]
