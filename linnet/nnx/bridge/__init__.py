"""The bridge: modules of Linen in models of NNX, and the other way round.

- ``variables``: Linen's collections as NNX Variables and back, with their metadata;
- ``module``: ``Module``, NNX objects written as Linen modules;
- ``linen_in_nnx``: ``ToNNX`` and ``lazy_init``;
- ``nnx_in_linen``: ``ToLinen`` and ``to_linen``;
- ``wrappers``: those of the two files before, under the module name of Flax, and ``functional``;
- ``interop``: modules of both kinds in a ``Module``.

A call of a ``ToNNX`` makes Linen's collections of its Variables (``variables``), runs ``apply`` of
the Linen module with a key from each of its streams, and writes the collections that came back into
the Variables. A call of a ``ToLinen`` constructs the NNX module, writes the collections of its
scope into the Variables of the module, runs a method, and puts what changed into the collections
that can be written.
"""

from linnet.nnx.bridge import (
    interop as interop,
    module as module,
    variables as variables,
    wrappers as wrappers,
)
from linnet.nnx.bridge.interop import (
    linen_in_bridge_mdl as linen_in_bridge_mdl,
    nnx_in_bridge_mdl as nnx_in_bridge_mdl,
)
from linnet.nnx.bridge.module import (
    AttrPriority as AttrPriority,
    Module as Module,
    Scope as Scope,
    compact as compact,
    current_context as current_context,
    current_module as current_module,
)
from linnet.nnx.bridge.variables import (
    NNXMeta as NNXMeta,
    with_partitioning as with_partitioning,
)
from linnet.nnx.bridge.wrappers import (
    Functional as Functional,
    ToLinen as ToLinen,
    ToNNX as ToNNX,
    functional as functional,
    lazy_init as lazy_init,
    to_linen as to_linen,
)
from linnet.nnx.nn import initializers as initializers
