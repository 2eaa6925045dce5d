"""The two switches of the object model."""

from __future__ import annotations

from linnet.nnx.settings import Setting


class set_graph_mode(Setting, env="NNX_GRAPH_MODE"):
    """Whether shared references and cycles are allowed (graph mode) or refused (tree mode)."""


class set_graph_updates(Setting, env="NNX_GRAPH_UPDATES"):
    """Whether transforms carry changed structure and static values out, beside values."""


def graph_mode(graph: bool | None) -> bool:
    """An explicit choice, or else the ambient one."""
    return set_graph_mode.current_value() if graph is None else graph


def graph_updates(updates: bool | None) -> bool:
    """An explicit choice, or else the ambient one."""
    return set_graph_updates.current_value() if updates is None else updates
