"""Linen."""

from linnet.core.frozen_dict import FrozenDict as FrozenDict
from linnet.linen.module import (
    DenyList as DenyList,
)
from linnet.linen.module import (
    Module as Module,
)
from linnet.linen.module import (
    Variable as Variable,
)
from linnet.linen.module import (
    apply as apply,
)
from linnet.linen.module import (
    compact as compact,
)
from linnet.linen.module import (
    compact_name_scope as compact_name_scope,
)
from linnet.linen.module import (
    disable_named_call as disable_named_call,
)
from linnet.linen.module import (
    enable_named_call as enable_named_call,
)
from linnet.linen.module import (
    init as init,
)
from linnet.linen.module import (
    init_with_output as init_with_output,
)
from linnet.linen.module import (
    intercept_methods as intercept_methods,
)
from linnet.linen.module import (
    merge_param as merge_param,
)
from linnet.linen.module import (
    nowrap as nowrap,
)
from linnet.linen.module import (
    override_named_call as override_named_call,
)
