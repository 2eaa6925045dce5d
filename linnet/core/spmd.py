"""Rules from the names of axes in a model to the axes of a mesh, as Linen offers them.

NNX has its own functions over the same ``functional.sharding.axis_rules``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from jax.sharding import PartitionSpec

from linnet import config
from linnet.errors import AxisError
from linnet.functional.sharding import AxisRules, as_rules, axis_rules
from linnet.typing import LogicalRules as LogicalRules, Sharding as Sharding


def set_logical_axis_rules(rules: LogicalRules) -> None:
    """Sets the rules from names of axes to mesh axes, from here on.

    Args:
      rules: pairs of a name and the mesh axis it stands for: a name, a tuple of names, or None for
        an axis that is not sharded.

    Example:
      >>> from linnet import linen as nn
      >>> nn.set_logical_axis_rules([("batch", "data")])
      >>> nn.get_logical_axis_rules()
      (('batch', 'data'),)
      >>> nn.set_logical_axis_rules(())
    """
    config.apply_value(axis_rules, as_rules(rules))


def get_logical_axis_rules() -> LogicalRules:
    """The rules in force.

    Returns:
      Pairs of a name and what it stands for, as for ``set_logical_axis_rules``.

    Example:
      >>> from linnet import linen as nn
      >>> with nn.logical_axis_rules([("batch", "data")]):
      ...     nn.get_logical_axis_rules()
      (('batch', 'data'),)
    """
    return axis_rules.value


@contextlib.contextmanager
def logical_axis_rules(rules: LogicalRules) -> Iterator[None]:
    """Sets the rules from names of axes to mesh axes for the length of a ``with`` block.

    Args:
      rules: as for ``set_logical_axis_rules``.

    Returns:
      A context manager.

    Example:
      >>> from linnet import linen as nn
      >>> with nn.logical_axis_rules([("batch", "data"), ("embed", None)]):
      ...     tuple(nn.logical_to_mesh_axes(("batch", "embed")))
      ('data', None)
    """
    with config.value_block(axis_rules, as_rules(rules)):
        yield


def composite_rules(rule1: Any, rule2: Any) -> AxisRules:
    """Two sets of rules as one.

    Args:
      rule1: rules, or None.
      rule2: rules, or None.

    Returns:
      The rules of both.

    Raises:
      AxisError: they contradict each other.

    Example:
      >>> from linnet.core import spmd
      >>> spmd.composite_rules([("batch", "data")], [("mlp", "model")])
      (('batch', 'data'), ('mlp', 'model'))
    """
    rules = dict(as_rules(rule1 or ()))
    for name, axis in as_rules(rule2 or ()):
        if rules.setdefault(name, axis) != axis:
            raise AxisError(
                f"Inconsistent logical axis annotations for {name!r}: {rules[name]!r} by the rules "
                f"in force, but {axis!r} by those of the variable.\n"
                "Fix: leave the rule out in one of the two places."
            )
    return tuple(rules.items())


def from_sharding_rules(sharding: Sharding, sharding_rules: Any) -> Sharding:
    """The names of axes with those replaced for which there is a rule.

    Args:
      sharding: one name, tuple of names or None for each axis.
      sharding_rules: the rules.

    Returns:
      The names of mesh axes.

    Example:
      >>> from linnet.core import spmd
      >>> spmd.from_sharding_rules(("batch", "model"), [("batch", "data")])
      ('data', 'model')
    """
    rules = dict(as_rules(sharding_rules))
    return tuple(rules.get(name, name) if isinstance(name, str) else name for name in sharding)


def get_pspec(sharding: Any, sharding_rules: Any = None) -> PartitionSpec | None:
    """The partition spec of names of axes, by the rules in force and further ones.

    Args:
      sharding: one name, tuple of names or None for each axis; or None.
      sharding_rules: further rules.

    Returns:
      The spec, or None.

    Raises:
      AxisError: the rules contradict each other.

    Example:
      >>> from linnet.core import spmd
      >>> tuple(spmd.get_pspec(("batch", None), [("batch", "data")]))
      ('data', None)
    """
    if sharding is None:
        return None
    rules = composite_rules(get_logical_axis_rules(), sharding_rules)
    return PartitionSpec(*from_sharding_rules(sharding, rules))
