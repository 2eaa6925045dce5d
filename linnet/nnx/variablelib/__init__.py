"""Variables: values that modules hold and change in place, each with a kind and metadata.

``variable`` has the class, its kinds and how values are written; ``storage`` says whether a value
is stored plainly or in a JAX ref; ``metadata`` is what a Variable carries beside its value;
``operators`` lets a Variable stand where its array could; ``names`` maps kinds to names of
collections and back.
"""

from linnet.nnx.variablelib.metadata import VariableMetadata, with_metadata
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
