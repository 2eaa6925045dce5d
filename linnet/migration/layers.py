"""The table of layers: what each Linen layer is called in NNX, and which sizes it wants.

Names and defaults of arguments are not written down here: they are read from the two classes.
"""

from __future__ import annotations

import dataclasses
import inspect

from linnet import linen, nnx

# What Linen's layers take and NNX's do not, where leaving it out changes nothing.
DROPPED = {"name", "parent", "force_float32_reductions"}


@dataclasses.dataclass(frozen=True)
class Layer:
    """How a Linen layer is written in NNX.

    Args:
      linen: its name in Linen.
      nnx: its name in NNX.
      sizes: what the constructor wants to know of the input: "features" (the last axis), "axes"
        (those that are contracted), or nothing.
      size_name: the name of that argument.
      fed: which argument of the call has that size.
      first: the arguments of Linen that follow it, by position.
      renamed: names of arguments that differ.
      output: the sizes of the last axes of the output: "same", "features" (the argument of that
        name), "appended" (features after the input's axes), "axes", "attention", "cell" (a carry
        and an output), "inner" (that of the layers it is given), or nothing.
      late: arguments of the constructor that a call takes too.
      keyword_only: arguments of the call that Linen also takes by position, in Linen's order.
      rngs: whether the constructor takes ``rngs``.
      inner: arguments that are layers.
    """

    linen: str
    nnx: str
    sizes: str = ""
    size_name: str = "in_features"
    fed: int = 0
    first: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    output: str = "same"
    late: tuple[str, ...] = ()
    keyword_only: tuple[str, ...] = ()
    rngs: bool = True
    inner: tuple[str, ...] = ()

    @property
    def fields(self) -> list[str]:
        """The names of the arguments in Linen, in their order."""
        cls = getattr(linen, self.linen)
        skipped = ("parent", "name")
        return [f.name for f in dataclasses.fields(cls) if f.init and f.name not in skipped]

    @property
    def accepted(self) -> set[str]:
        """The names of the arguments in NNX."""
        return set(inspect.signature(getattr(nnx, self.nnx).__init__).parameters)

    def nnx_name(self, argument: str) -> str:
        return dict(self.renamed).get(argument, argument)


_OUT = (("features", "out_features"),)
_HIDDEN = (("features", "hidden_features"),)


def _norm(name: str, late: tuple[str, ...] = ()) -> Layer:
    return Layer(name, name, "features", "num_features", late=late)


def _attention(name: str, *keyword_only: str) -> Layer:
    return Layer(
        name,
        "MultiHeadAttention",
        "features",
        first=("num_heads",),
        output="attention",
        late=("deterministic", "decode"),
        keyword_only=keyword_only,
    )


def _cell(name: str, twin: str) -> Layer:
    return Layer(name, twin, "features", fed=1, first=("features",), renamed=_HIDDEN, output="cell")


def _weighted(name: str, twin: str, first: tuple[str, ...], sizes: str = "features") -> Layer:
    return Layer(name, twin, sizes, first=first, renamed=_OUT, output=sizes)


_FLAGS = ("deterministic", "rngs")
_RNNS = ("forward_rnn", "backward_rnn")

LAYERS = {
    layer.linen: layer
    for layer in (
        _weighted("Dense", "Linear", ("features",)),
        _weighted("DenseGeneral", "LinearGeneral", ("features",), "axes"),
        _weighted("Conv", "Conv", ("features", "kernel_size")),
        _weighted("ConvTranspose", "ConvTranspose", ("features", "kernel_size")),
        Layer("Embed", "Embed", first=("num_embeddings", "features"), output="appended"),
        _norm("BatchNorm", late=("use_running_average",)),
        _norm("LayerNorm"),
        _norm("RMSNorm"),
        _norm("GroupNorm"),
        _norm("InstanceNorm"),
        Layer("Dropout", "Dropout", first=("rate",), late=_FLAGS[:1], keyword_only=_FLAGS),
        _attention("MultiHeadDotProductAttention"),
        _attention("MultiHeadAttention"),
        _attention("SelfAttention", "mask", "deterministic"),
        # The optimised cell of Linen has the parameters of the plain one; that of NNX has not.
        # GRUCell is not here: that of NNX lacks a bias that Linen's has.
        _cell("LSTMCell", "LSTMCell"),
        _cell("OptimizedLSTMCell", "LSTMCell"),
        _cell("SimpleCell", "SimpleCell"),
        Layer("RNN", "RNN", first=("cell",), output="inner", inner=("cell",)),
        Layer("Bidirectional", "Bidirectional", first=_RNNS, output="inner", inner=_RNNS),
        Layer("Sequential", "Sequential", output="inner", rngs=False, inner=("layers",)),
        Layer("PReLU", "PReLU", rngs=False),
        Layer("Einsum", "Einsum", renamed=(("shape", "kernel_shape"),), output=""),
    )
}

# Functions of Linen that NNX has under another name.
RENAMED_FUNCTIONS = {"with_logical_partitioning": "with_partitioning"}

# Names of Linen that work on NNX modules and arrays as they are, and that NNX does not have.
KEPT_FUNCTIONS = {
    "with_logical_constraint",
    "logical_to_mesh",
    "logical_to_mesh_axes",
    "logical_to_mesh_sharding",
    "get_logical_axis_rules",
    "set_logical_axis_rules",
    "dot_product_attention_weights",
    "broadcast",
}

# Functions whose output has the sizes of their first argument.
SAME_SHAPE = set(
    """relu relu6 gelu silu swish sigmoid softplus softmax log_softmax tanh elu selu celu leaky_relu
    hard_sigmoid hard_silu hard_swish hard_tanh log_sigmoid soft_sign standardize normalize exp log
    sin cos sqrt square abs clip where nan_to_num zeros_like ones_like full_like asarray array
    stop_gradient with_logical_constraint with_sharding_constraint checkpoint_name sign maximum
    minimum add subtract multiply divide power astype round floor ceil log1p expm1 erf
    dot_product_attention roll flip cumsum l2_normalize rsqrt bernoulli""".split()
)
