"""Variables of a Linen model, carried into the NNX model that its converted source makes.

Names are kept by the conversion, so that a path in Linen says where a value goes: ``Dense_0`` is
the attribute ``Dense_0``, ``layers_3`` the item ``layers[3]`` of a list, ``heads_left`` the item
``heads["left"]`` of a dict, and what Linen scanned over layers lies in the ``stacked`` layer of an
``nnx.Stack``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from linnet import linen, nnx
from linnet.errors import StateMismatchError, list_lines
from linnet.traverse_util import flatten_dict

# Gates of a cell that NNX keeps side by side in one kernel, in their order.
FUSED = {
    nnx.SimpleCell: {"dense_i": ("i",), "dense_h": ("h",)},
    nnx.OptimizedLSTMCell: {
        "dense_i": ("ii", "if", "ig", "io"),
        "dense_h": ("hi", "hf", "hg", "ho"),
    },
}


def load_variables(model: nnx.Module, variables: Mapping[str, Any]) -> None:
    """Writes the variables of a Linen model into a converted model, by path.

    Args:
      model: made by a class that was converted from Linen.
      variables: the collections that ``init`` returned, or a checkpoint holds.

    Raises:
      StateMismatchError: a variable has no place in the model or another shape, or a parameter of
        the model got no value.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from linnet import linen, nnx
      >>> from linnet.migration import load_variables
      >>> variables = linen.Dense(3).init(jax.random.key(0), jnp.ones((1, 2)))
      >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(1))
      >>> load_variables(layer, variables)
      >>> bool((layer.kernel[...] == variables["params"]["kernel"]).all())
      True
    """
    problems: list[str] = []
    written: dict[int, tuple[nnx.Variable, Any]] = {}
    for collection, tree in linen.meta.unbox(dict(variables)).items():
        if collection == "intermediates":
            continue
        for path, value in flatten_dict(tree).items():
            variable = _find(model, path)
            if variable is None and _fused(model, path, value, written):
                continue
            text = "/".join((collection, *path))
            if not isinstance(variable, nnx.Variable):
                problems.append(f"{text}: no such variable in the model")
            elif variable.shape != jnp.shape(value):
                problems.append(f"{text}: {jnp.shape(value)}, but the model has {variable.shape}")
            else:
                written[id(variable)] = variable, jnp.asarray(value)
    for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if id(_at(model, path)) not in written:
            problems.append(f"{'/'.join(map(str, path))}: got no value")
    if problems:
        raise StateMismatchError(
            f"The variables do not fit the model:\n{list_lines(problems)}\n"
            "Fix: use variables of the Linen model whose source was converted."
        )
    for variable, value in written.values():
        variable[...] = value


def _at(model: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        model = _child(model, key)
    return model


def _child(node: Any, key: Any) -> Any:
    """An attribute or item, or None."""
    if isinstance(node, list | tuple | nnx.List):
        return node[int(key)] if str(key).isdigit() and int(key) < len(node) else None
    if isinstance(node, dict):
        return node.get(key)
    if isinstance(node, nnx.Dict):
        return node.get(key, None)
    return getattr(node, key, None)


def _find(node: Any, path: tuple[str, ...]) -> Any:
    """What a path of Linen leads to."""
    if isinstance(node, nnx.Stack):
        node = node.stacked
    if not path:
        return node
    for child in _named(node, path[0]):
        found = _find(child, path[1:])
        if found is not None:
            return found
    return None


def _named(node: Any, name: str) -> list[Any]:
    """The parts that a name of Linen can mean: an attribute, or an item of a container."""
    attributes = [name, f"{name}_"] if isinstance(node, nnx.LSTMCell) else [name]
    found = [_child(node, attribute) for attribute in attributes]
    words = name.split("_")
    for end in range(1, len(words)):
        start, rest = "_".join(words[:end]), "_".join(words[end:])
        container = _child(node, start)
        if isinstance(container, list | tuple | dict | nnx.List | nnx.Dict):
            found += _named(container, rest)
    return [item for item in found if item is not None]


def _fused(model: Any, path: tuple[str, ...], value: Any, written: dict[int, Any]) -> bool:
    """Notes a gate's part of a fused kernel or bias, and says whether it is one."""
    *start, gate, leaf = ("", *path)
    cell = _find(model, tuple(start[1:])) if start else None
    for name, gates in FUSED.get(type(cell), {}).items():
        if gate in gates:
            variable = getattr(getattr(cell, name), leaf)
            _, whole = written.get(id(variable), (variable, jnp.asarray(variable[...])))
            size = value.shape[-1]
            at = gates.index(gate) * size
            written[id(variable)] = variable, whole.at[..., at : at + size].set(value)
            return True
    return False
