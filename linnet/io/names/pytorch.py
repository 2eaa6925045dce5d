"""PyTorch's layers: a map for any model whose modules have the names of a PyTorch model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from linnet.io.names import rules as rules_lib
from linnet.io.names.rules import FUSED_HEADS, STAR, NameMap, Rule, dotted, slashed
from linnet.nnx.modules.containers import Sequential
from linnet.nnx.nn.activations import PReLU
from linnet.nnx.nn.attention import MultiHeadAttention
from linnet.nnx.nn.conv import Conv, ConvTranspose
from linnet.nnx.nn.linear import Embed, Linear, LinearGeneral
from linnet.nnx.nn.normalization import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from linnet.nnx.nn.recurrent import RNN, Bidirectional
from linnet.nnx.nn.recurrent_cells import GRUCell, LSTMCell, OptimizedLSTMCell, SimpleCell
from linnet.nnx.nn.stack import Stack
from linnet.nnx.pytreelib import kinds
from linnet.nnx.pytreelib.kinds import VARIABLE, children_of, kind_of
from linnet.nnx.variablelib.variable import stored_value

_SPATIAL = "abcdefgh"


def pytorch(model: Any) -> NameMap:
    """The map for the state dict of a PyTorch model that is built alike.

    Modules have the same names in both: ``encoder.fc1`` in PyTorch is ``model.encoder.fc1`` here; a
    ``ModuleList`` is an ``nnx.List``, a list or an ``nnx.Stack``, and the children of an
    ``nnx.Sequential`` have numbers as in PyTorch. Known layers: Linear, Conv, ConvTranspose,
    BatchNorm, LayerNorm, GroupNorm, InstanceNorm, RMSNorm, Embed, MultiHeadAttention, PReLU, and
    the cells of LSTM, GRU and RNN, alone or inside ``nnx.RNN`` and ``nnx.Bidirectional``.
    Parameters of your own modules keep name and layout.

    PyTorch's two biases of an LSTM or RNN are added up; written back, the first is the sum and the
    second is zero. An ``nnx.GRUCell`` lacks the second bias of the new state, which has to be zero.

    Args:
      model: the model; it may be abstract.

    Returns:
      The map. ``names=names.pytorch`` does the same, as a map may be a function of the model.

    Example:
      >>> from linnet import nnx
      >>> from linnet.io import names
      >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)
      >>> [(rule.stored, rule.paths, rule.axes) for rule in names.pytorch(model).rules]
      [(('0.weight',), ('layers/0/kernel',), 'out in -> in out'),
       (('0.bias',), ('layers/0/bias',), 'out -> out')]
    """
    collector = _RuleCollector()
    collector.visit(model, (), ())
    return NameMap(collector.rules, ignored=collector.ignored, tied=collector.tied)


class _RuleCollector:
    """Collects the rules of all modules."""

    def __init__(self) -> None:
        self.rules: list[Rule] = []
        self.ignored: list[str] = []
        self.tied: dict[str, str] = {}
        self._seen: dict[int, tuple[Any, list[Rule]]] = {}

    def visit(self, node: Any, name: tuple[str, ...], path: tuple[str, ...]) -> None:
        """Adds the rules of a module, and of what is in it."""
        node_kind = kind_of(node)
        if node_kind == VARIABLE or hasattr(node, "shape"):
            self._add(node, list(_as_it_is(node, name, path)))
        elif layer := next((rules for cls, rules in _LAYERS if isinstance(node, cls)), None):
            rules = list(layer(node, ".".join(name), "/".join(path)))
            self._add(node, rules)
            self._visit_others(node, name, path, rules)
            if isinstance(node, BatchNorm):
                self.ignored.append(dotted(".".join(name), "num_batches_tracked"))
        elif isinstance(node, Stack):
            self.visit(node.stacked, (*name, STAR), (*path, STAR))
        elif isinstance(node, Sequential):
            for number, child in enumerate(node.layers):
                self.visit(child, (*name, str(number)), (*path, "layers", str(number)))
        elif node_kind in (kinds.OBJECT, kinds.LIST, kinds.TUPLE, kinds.DICT):
            for key, child in children_of(node, node_kind):
                self.visit(child, (*name, str(key)), (*path, str(key)))

    def _visit_others(
        self, node: Any, name: tuple[str, ...], path: tuple[str, ...], rules: list[Rule]
    ) -> None:
        """Visits what a subclass adds to a known layer, such as the matrices of LoRA."""
        known = {part for rule in rules for part in rule.paths}
        for key, child in children_of(node, kind_of(node)):
            at = "/".join((*path, str(key)))
            if not any(part == at or part.startswith(f"{at}/") for part in known):
                self.visit(child, (*name, str(key)), (*path, str(key)))

    def _add(self, node: Any, rules: list[Rule]) -> None:
        """Adds rules; a module that is met again may be stored under either name."""
        _, first = self._seen.setdefault(id(node), (node, rules))
        if first is not rules:
            for rule, other in zip(rules, first, strict=True):
                self.tied |= dict(zip(rule.stored, other.stored, strict=True))
                self.tied |= dict(zip(other.stored, rule.stored, strict=True))
        self.rules += rules


def _as_it_is(node: Any, name: tuple[str, ...], path: tuple[str, ...]) -> Iterator[Rule]:
    """Rules for an array, or for the arrays of a Variable; names and axes stay as they are."""
    for steps, _ in jax.tree_util.tree_leaves_with_path(stored_value(node)):
        more = [str(kinds.key_name(step)) for step in steps]
        yield Rule(".".join((*name, *more)), "/".join((*path, *more)))


def _linear_general(layer: Any, name: str, path: str) -> Iterator[Rule]:
    outs = " ".join(f"out{n}" for n in range(len(layer.out_features)))
    ins = " ".join(f"in{n}" for n in range(len(layer.in_features)))
    axes = f"({outs}) ({ins}) -> {ins} {outs}"
    yield Rule(dotted(name, "weight"), slashed(path, "kernel"), axes)
    yield Rule(dotted(name, "bias"), slashed(path, "bias"), f"({outs}) -> {outs}")


def _conv(layer: Any, name: str, path: str) -> Iterator[Rule]:
    space = " ".join(_SPATIAL[: len(layer.kernel_size)])
    axes = f"out in {space} -> {space} in out"
    yield Rule(dotted(name, "weight"), slashed(path, "kernel"), axes)
    yield Rule(dotted(name, "bias"), slashed(path, "bias"))


def _conv_transpose(layer: Any, name: str, path: str) -> Iterator[Rule]:
    letters = tuple(_SPATIAL[: len(layer.kernel_size)])
    space = " ".join(letters)
    features, flip = ("out in", ()) if layer.transpose_kernel else ("in out", letters)
    axes = f"in out {space} -> {space} {features}"
    yield Rule(dotted(name, "weight"), slashed(path, "kernel"), axes, flip=flip)
    yield Rule(dotted(name, "bias"), slashed(path, "bias"))


def _batch_norm(name: str, path: str) -> Iterator[Rule]:
    yield from rules_lib.norm(name, path)
    yield Rule(dotted(name, "running_mean"), slashed(path, "mean"))
    yield Rule(dotted(name, "running_var"), slashed(path, "var"))


def _prelu(name: str, path: str) -> Iterator[Rule]:
    yield Rule(dotted(name, "weight"), slashed(path, "negative_slope"), "() ->")


def _attention(layer: Any, name: str, path: str) -> Iterator[Rule]:
    heads = [slashed(path, part) for part in ("query", "key", "value")]
    kernels, biases = ([f"{head}/{leaf}" for head in heads] for leaf in ("kernel", "bias"))
    if layer.in_kv_features == layer.in_features:
        yield Rule(dotted(name, "in_proj_weight"), kernels, FUSED_HEADS)
    else:
        for short, kernel in zip("qkv", kernels, strict=True):
            axes = "(head dim) width -> width head dim"
            yield Rule(dotted(name, f"{short}_proj_weight"), kernel, axes)
    yield Rule(dotted(name, "in_proj_bias"), biases, "(head dim)+ -> head dim")
    out, axes = slashed(path, "out"), "width (head dim) -> head dim width"
    yield Rule(dotted(name, "out_proj.weight"), f"{out}/kernel", axes)
    yield Rule(dotted(name, "out_proj.bias"), f"{out}/bias")


def _recurrent(cell: Any, name: str, path: str, suffix: str = "") -> Iterator[Rule]:
    """The rules of a cell; ``suffix`` ends its names in a layer of PyTorch, such as ``_l0``."""
    weights = [dotted(name, f"weight_{side}{suffix}") for side in ("ih", "hh")]
    biases = [dotted(name, f"bias_{side}{suffix}") for side in ("ih", "hh")]
    if isinstance(cell, LSTMCell):
        gates = [[slashed(path, f"{side}{gate}") for gate in "ifgo"] for side in "ih"]
        gates[0][1] += "_"  # `if` is no name in Python
        for weight, layers in zip(weights, gates, strict=True):
            yield Rule(weight, [f"{layer}/kernel" for layer in layers], "gate+ in -> in gate")
        yield Rule(biases, [f"{layer}/bias" for layer in gates[1]], "gate+ -> gate", add=True)
        return
    for weight, side in zip(weights, "ih", strict=True):
        yield Rule(weight, slashed(path, f"dense_{side}/kernel"), "gates in -> in gates")
    is_gru = isinstance(cell, GRUCell)
    for side in "ih":
        bias = slashed(path, f"dense_{side}/bias")
        yield Rule(biases, bias, add=True, check=_check_gru if is_gru else None)


def _check_gru(biases: Sequence[np.ndarray[Any, Any]]) -> str:
    hidden = biases[1]
    if not hidden[2 * len(hidden) // 3 :].any():
        return ""
    return (
        "nnx.GRUCell has no bias of the hidden state inside the new state, and the last third of "
        "the second bias is not zero; write a cell of your own with that bias"
    )


def _rnn(layer: Any, name: str, path: str) -> Iterator[Rule]:
    yield from _recurrent(layer.cell, name, slashed(path, "cell"), "_l0")


def _bidirectional(layer: Any, name: str, path: str) -> Iterator[Rule]:
    for side, suffix in (("forward_rnn", "_l0"), ("backward_rnn", "_l0_reverse")):
        cell = getattr(layer, side).cell
        yield from _recurrent(cell, name, slashed(path, f"{side}/cell"), suffix)


LayerRules = Callable[[Any, str, str], Iterator[Rule]]


def _same_for_all(rules: Callable[[str, str], Iterator[Rule]]) -> LayerRules:
    """Rules that do not depend on the layer, only on its class."""
    return lambda layer, name, path: rules(name, path)


_LAYERS: list[tuple[Any, LayerRules]] = [
    (LinearGeneral, _linear_general),
    (Linear, _same_for_all(rules_lib.linear)),
    (Embed, _same_for_all(rules_lib.embedding)),
    (Conv, _conv),
    (ConvTranspose, _conv_transpose),
    (BatchNorm, _same_for_all(_batch_norm)),
    ((LayerNorm, RMSNorm, GroupNorm, InstanceNorm), _same_for_all(rules_lib.norm)),
    (PReLU, _same_for_all(_prelu)),
    (MultiHeadAttention, _attention),
    (RNN, _rnn),
    (Bidirectional, _bidirectional),
    ((LSTMCell, OptimizedLSTMCell, GRUCell, SimpleCell), _recurrent),
]
