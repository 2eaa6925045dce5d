"""``FrozenDict`` and its functions under the path that programs import them from."""

from linnet.frozen_dict import (
    FrozenDict as FrozenDict,
    copy as copy,
    freeze as freeze,
    pop as pop,
    pretty_repr as pretty_repr,
    unfreeze as unfreeze,
)
