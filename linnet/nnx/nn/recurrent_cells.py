"""Recurrent cells: from a carry and an input to the next carry and an output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from linnet.errors import RngsError
from linnet.functional import fusing, initializers, linear, recurrent
from linnet.functional.dtypes import context, promote_dtype as default_promote
from linnet.functional.initializers import Initializer, modified_orthogonal as modified_orthogonal
from linnet.functional.shapes import refuse_inputs
from linnet.nnx.modules.module import POLICY, Module
from linnet.nnx.nn.linear import Linear
from linnet.nnx.nn.params import (
    FLOAT32_BY_DEFAULT,
    PromoteDtype,
    check_features,
    default_bias_init,
    default_kernel_init,
    draw_key,
    given_dtype,
    layer_name,
    own_stream,
    store_arguments,
)
from linnet.nnx.variablelib.operators import value_of


class RNNCellBase(Module):
    """The interface of a cell for ``nnx.RNN``: two methods and a property.

    Raises:
      NotImplementedError: a class does not define the method or property that is used.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> class Sum(nnx.RNNCellBase):
      ...     num_feature_axes = 1
      ...     def initialize_carry(self, input_shape, rngs=None, carry_init=None):
      ...         return jnp.zeros(input_shape)
      ...     def __call__(self, carry, inputs):
      ...         return carry + inputs, carry + inputs
      >>> nnx.RNN(Sum())(jnp.ones((1, 3, 1))).ravel()
      Array([1., 2., 3.], dtype=float32)
    """

    def initialize_carry(
        self, input_shape: tuple[int, ...], rngs: Any = None, carry_init: Initializer | None = None
    ) -> Any:
        """The carry before the first step.

        Args:
          input_shape: the shape of one step's input, batch included.
          rngs: where keys come from.
          carry_init: the initializer.

        Returns:
          The carry.
        """
        raise NotImplementedError(_missing(self, "initialize_carry"))

    def __call__(self, carry: Any, inputs: Any) -> tuple[Any, Any]:
        """One step.

        Args:
          carry: the carry of the step before.
          inputs: the step's input.

        Returns:
          ``(carry, output)``.
        """
        raise NotImplementedError(_missing(self, "__call__"))

    @property
    def num_feature_axes(self) -> int:
        """How many axes of one step's input are not batch."""
        raise NotImplementedError(_missing(self, "num_feature_axes"))


def _missing(cell: Any, name: str) -> str:
    return f"{type(cell).__name__} does not define {name}.\nFix: define it, as nnx.RNN needs it."


class HiddenCell(RNNCellBase):
    """What the cells here share: their constructor, their call, and a carry of equal arrays.

    A cell consists of projections of the input, projections of the hidden state, which is the last
    array of the carry, and a step without parameters that takes both.
    """

    _carries = 1
    _of_input: tuple[str, ...] = ("dense_i",)
    _of_hidden: tuple[str, ...] = ("dense_h",)
    _adds_projections = True  # the step needs the sum of both projections only
    in_features: int
    hidden_features: int
    gate_fn: Callable[..., Any]
    activation_fn: Callable[..., Any]
    dtype: Any
    param_dtype: Any
    promote_dtype: PromoteDtype
    carry_init: Initializer | None
    rngs: Any

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        gate_fn: Callable[..., Any] = jax.nn.sigmoid,
        activation_fn: Callable[..., Any] = jnp.tanh,
        kernel_init: Initializer = default_kernel_init,
        recurrent_kernel_init: Initializer = modified_orthogonal,
        bias_init: Initializer = default_bias_init,
        dtype: Any = None,
        param_dtype: Any = None,
        carry_init: Initializer | None = None,
        promote_dtype: PromoteDtype = default_promote,
        keep_rngs: bool = False,
        rngs: Any,
        kernel_metadata: Mapping[str, Any] = {},
        recurrent_kernel_metadata: Mapping[str, Any] = {},
        bias_metadata: Mapping[str, Any] = {},
    ):
        self._build(locals())

    def _build(self, given: Mapping[str, Any]) -> None:
        """Stores the arguments of a constructor and makes the projections."""
        store_arguments(self, given, "keep_rngs")
        keeps, name = given["keep_rngs"], type(self).__name__
        self.rngs = own_stream(name, given["rngs"], "carry") if keeps else None
        self._make_projections(given)
        self.carry_init = given["carry_init"]

    def _make_projections(self, given: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def _step(self, carry: tuple[Array, ...], inputs: Any, hidden: Any) -> tuple[Any, Array]:
        """From the arrays of the carry and the projections to ``(carry, output)``."""
        raise NotImplementedError

    def __call__(self, carry: Any, inputs: Array) -> tuple[Any, Array]:
        """One step.

        Args:
          carry: an array ``(..., hidden_features)``; a pair of them ``(c, h)`` for an LSTM.
          inputs: ``(..., in_features)``.

        Returns:
          ``(carry, output)``.

        Raises:
          FeatureError: the carry or the input does not fit.
        """
        arrays = self.check(carry, inputs)
        of_input = [getattr(self, name)(inputs) for name in self._of_input]
        of_hidden = [getattr(self, name)(arrays[-1]) for name in self._of_hidden]
        if len(of_input) == 1:
            return self._step(arrays, of_input[0], of_hidden[0])
        return self._step(arrays, tuple(of_input), tuple(of_hidden))

    def _project(
        self, given: Mapping[str, Any], of: str, gates: int = 1, *, use_bias: bool
    ) -> Linear:
        """Makes a projection of the ``"input"`` or of the ``"hidden"`` state to some gates."""
        kernel = "kernel" if of == "input" else "recurrent_kernel"
        return Linear(
            self.in_features if of == "input" else self.hidden_features,
            self.hidden_features * gates,
            use_bias=use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=given[f"{kernel}_init"],
            bias_init=given["bias_init"],
            promote_dtype=self.promote_dtype,
            rngs=given["rngs"],
            kernel_metadata=given[f"{kernel}_metadata"],
            bias_metadata=given["bias_metadata"],
        )

    @property
    def num_feature_axes(self) -> int:
        """How many axes of one step's input are not batch."""
        return 1

    def initialize_carry(
        self, input_shape: tuple[int, ...], rngs: Any = None, carry_init: Initializer | None = None
    ) -> Any:
        """The carry before the first step.

        Args:
          input_shape: ``(..., in_features)``.
          rngs: where keys come from, stream ``carry``; by default the cell's own.
          carry_init: the initializer; by default the cell's own, or zeros.

        Returns:
          An array ``(..., hidden_features)``, or a pair of them ``(c, h)`` for an LSTM.

        Raises:
          RngsError: the initializer needs a key and there is none.
        """
        init = carry_init or self.carry_init or initializers.zeros
        rngs = self.rngs if rngs is None else rngs
        if rngs is None and init is not initializers.zeros:
            raise RngsError(
                f"{layer_name(self)}: RNGs must be provided to initialize the cell carry, as "
                "carry_init draws.\nFix: pass rngs=nnx.Rngs(0), or build it with keep_rngs=True."
            )
        shape = (*input_shape[:-1], self.hidden_features)
        arrays = []
        for _ in range(self._carries):
            key: Any = None if rngs is None else draw_key(self, rngs, "carry")
            arrays.append(init(key, shape, self.param_dtype))
        return tuple(arrays) if self._carries > 1 else arrays[0]

    def check(self, carry: Any, inputs: Any) -> tuple[Any, ...]:
        """Returns the arrays of the carry, and refuses a carry or an input that does not fit."""
        check_features(self, inputs, self.in_features, "in_features")
        arrays = tuple(carry) if isinstance(carry, (tuple, list)) else (carry,)
        problem = recurrent.why_no_carry(
            arrays,
            inputs,
            features=self.hidden_features,
            carries=self._carries,
            made_by="initialize_carry(inputs.shape)",
        )
        refuse_inputs(self, problem, layer_name)
        return arrays


class LongShortTerm(HiddenCell):
    """What the cells of a long short-term memory share."""

    _carries = 2

    def _step(self, carry: tuple[Array, ...], inputs: Any, hidden: Any) -> tuple[Any, Array]:
        c, h = carry
        functions = {"gate_fn": self.gate_fn, "activation_fn": self.activation_fn}
        c, h, output = recurrent.lstm_step(c, h, inputs, hidden, **functions)
        return (c, h), output


class LSTMCell(LongShortTerm):
    """Long short-term memory, with a projection for each gate.

    ``i, f, o = sigmoid(W x + U h + b)``, ``g = tanh(W x + U h + b)``, ``c' = f c + i g``,
    ``h' = o tanh(c')``. The carry is ``(c, h)``, the output ``h'``.

    Args:
      in_features: the size of the last axis of the input.
      hidden_features: the size of the last axis of ``c``, ``h`` and the output.
      gate_fn: the activation of the gates.
      activation_fn: the activation of ``g`` and of the cell state.
      kernel_init, recurrent_kernel_init, bias_init: the initializers of the kernels of the input,
        of those of the hidden state, and of the biases.
      dtype, promote_dtype, rngs: as for ``Linear``.
      param_dtype: the dtype of the parameters and of the first carry; by default that of the
        precision policy, or float32.
      carry_init: the initializer of the carry; by default zeros.
      keep_rngs: keep a stream of keys for ``carry_init``.
      kernel_metadata, recurrent_kernel_metadata, bias_metadata: metadata of the parameters.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> cell = nnx.LSTMCell(3, 4, rngs=nnx.Rngs(0))
      >>> carry = cell.initialize_carry((2, 3))
      >>> carry, y = cell(carry, jnp.ones((2, 3)))
      >>> y.shape
      (2, 4)
    """

    _of_input = ("ii", "if_", "ig", "io")
    _of_hidden = ("hi", "hf", "hg", "ho")

    def _make_projections(self, given: Mapping[str, Any]) -> None:
        of_input = (self._project(given, "input", use_bias=False) for _ in range(4))
        self.ii, self.if_, self.ig, self.io = of_input
        of_hidden = (self._project(given, "hidden", use_bias=True) for _ in range(4))
        self.hi, self.hf, self.hg, self.ho = of_hidden


class OptimizedLSTMCell(LongShortTerm):
    """Long short-term memory, with one projection for all gates: fewer, larger contractions.

    The gates have the order i, f, g, o. Arguments and equations are those of ``LSTMCell``.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> cell = nnx.OptimizedLSTMCell(3, 4, rngs=nnx.Rngs(0))
      >>> cell.dense_i.kernel.shape
      (3, 16)
    """

    def _make_projections(self, given: Mapping[str, Any]) -> None:
        self.dense_i = self._project(given, "input", 4, use_bias=False)
        self.dense_h = self._project(given, "hidden", 4, use_bias=True)


class GRUCell(HiddenCell):
    """Gated recurrent unit.

    ``r, z = sigmoid(W x + U h + b)``, ``n = tanh(W x + b + r U h)``, ``h' = (1 - z) n + z h``. The
    carry is ``h``, the output ``h'``; the gates have the order r, z, n. Arguments are those of
    ``LSTMCell``.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> cell = nnx.GRUCell(3, 4, rngs=nnx.Rngs(0))
      >>> carry, y = cell(cell.initialize_carry((2, 3)), jnp.ones((2, 3)))
      >>> y.shape
      (2, 4)
    """

    _adds_projections = False

    def _make_projections(self, given: Mapping[str, Any]) -> None:
        self.dense_i = self._project(given, "input", 3, use_bias=True)
        self.dense_h = self._project(given, "hidden", 3, use_bias=False)

    def _step(self, carry: tuple[Array, ...], inputs: Any, hidden: Any) -> tuple[Any, Array]:
        functions = {"gate_fn": self.gate_fn, "activation_fn": self.activation_fn}
        (h,) = carry
        return recurrent.gru_step(h, inputs, hidden, **functions)


class SimpleCell(HiddenCell):
    """A simple recurrent cell: ``h' = tanh(W x + U h + b)``.

    Args:
      dtype: compute in this dtype, by default float32, or that of the precision policy; None for
        that of the promoted operands.
      residual: add the carry before the activation.
      activation_fn: the activation.
      in_features, hidden_features, param_dtype, carry_init, kernel_init, recurrent_kernel_init,
        bias_init, promote_dtype, keep_rngs, rngs, kernel_metadata, recurrent_kernel_metadata,
        bias_metadata: as for ``LSTMCell``.

    Example:
      >>> import jax.numpy as jnp
      >>> from linnet import nnx
      >>> cell = nnx.SimpleCell(3, 4, rngs=nnx.Rngs(0))
      >>> carry, y = cell(cell.initialize_carry((2, 3)), jnp.ones((2, 3)))
      >>> bool((carry == y).all())
      True
    """

    residual: bool

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        dtype: Any = FLOAT32_BY_DEFAULT,
        param_dtype: Any = None,
        carry_init: Initializer | None = None,
        residual: bool = False,
        activation_fn: Callable[..., Any] = jnp.tanh,
        kernel_init: Initializer = default_kernel_init,
        recurrent_kernel_init: Initializer = modified_orthogonal,
        bias_init: Initializer = default_bias_init,
        promote_dtype: PromoteDtype = default_promote,
        keep_rngs: bool = False,
        rngs: Any,
        kernel_metadata: Mapping[str, Any] = {},
        recurrent_kernel_metadata: Mapping[str, Any] = {},
        bias_metadata: Mapping[str, Any] = {},
    ):
        given = dict(locals())
        is_default = dtype is FLOAT32_BY_DEFAULT
        self._build({**given, "dtype": jnp.float32 if is_default else dtype})
        if is_default:
            self.dense_i.dtype_is_default = self.dense_h.dtype_is_default = True

    def _make_projections(self, given: Mapping[str, Any]) -> None:
        self.dense_h = self._project(given, "hidden", use_bias=False)
        self.dense_i = self._project(given, "input", use_bias=True)

    def _step(self, carry: tuple[Array, ...], inputs: Any, hidden: Any) -> tuple[Any, Array]:
        (h,) = carry
        options = {"activation_fn": self.activation_fn, "residual": self.residual}
        return recurrent.simple_step(h, inputs, hidden, **options)


# A cell along a sequence, with its parameters in products over all steps.

_STEPS_AT_ONCE = 8  # in one iteration of the loop, so that what they keep is written at once
_CALLS = {cls: cls.__call__ for cls in (LSTMCell, OptimizedLSTMCell, GRUCell, SimpleCell, Linear)}


def can_run_as_recurrence(cell: Any, carry: Any) -> bool:
    """Whether ``run_as_recurrence`` computes what the calls of the cell would.

    That is so for the cells of this file, not for subclasses, if their projections are as the
    constructor made them and JAX wrote their activations.
    """
    if not isinstance(cell, HiddenCell) or not _is_unchanged(cell) or fusing.are_intercepted():
        return False
    functions = [getattr(cell, name, jnp.tanh) for name in ("gate_fn", "activation_fn")]
    if not all(map(fusing.is_written_by_jax, functions)):
        return False
    arrays = (carry,) if cell._carries == 1 else carry
    if type(arrays) is not tuple or not all(map(_is_floating, arrays)):
        return False
    sizes = ((cell._of_input, cell.in_features), (cell._of_hidden, cell.hidden_features))
    for names, size in sizes:
        layers = [getattr(cell, name) for name in names]
        if not all(_is_standard_linear(layer, size) for layer in layers):
            return False
        if any(_options(layer) != _options(layers[0]) for layer in layers):
            return False
    return True


def _is_floating(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)


def _is_unchanged(module: Any) -> bool:
    """Whether a module is of one of these classes, not a subclass, under the policy in force."""
    call = _CALLS.get(type(module))
    if call is None or type(module).__call__ is not call:
        return False
    policy, scope = vars(module).get(POLICY), context.value
    return policy is None or (scope is not None and policy in scope.entered)


def _is_standard_linear(layer: Any, size: int) -> bool:
    return (
        isinstance(layer, Linear)
        and _is_unchanged(layer)
        and layer.in_features == size
        and layer.dot_general is fusing.dot_general
        and layer.promote_dtype is default_promote
        and _is_floating(value_of(layer.kernel))
        and (layer.bias is None or _is_floating(value_of(layer.bias)))
    )


def _options(layer: Linear) -> list[Any]:
    """What projections must have in common to be computed as one."""
    dtypes = [None if x is None else value_of(x).dtype for x in (layer.kernel, layer.bias)]
    return [*dtypes, given_dtype(layer), layer.precision, layer.preferred_element_type]


def run_as_recurrence(
    cell: HiddenCell, carry: Any, inputs: Array, *, reverse: bool, unroll: int
) -> tuple[Any, Array]:
    """Runs a cell along the first axis; returns the last carry and the outputs.

    ``can_run_as_recurrence`` says for which cells it may be used.
    """
    arrays = cell.check(carry, inputs[0])
    of_input, project_input = _side_by_side(cell, cell._of_input, inputs)
    of_hidden, project_hidden = _side_by_side(cell, cell._of_hidden, arrays[-1])
    is_one = cell._carries == 1
    return recurrent.recurrence(
        lambda params, carry: project_hidden(params, carry if is_one else carry[-1]),
        lambda carry, x, h: cell._step((carry,) if is_one else carry, x, h),
        of_hidden,
        project_input(of_input, inputs),
        carry,
        is_sum=cell._adds_projections,
        reverse=reverse,
        unroll=max(unroll, _STEPS_AT_ONCE),
    )


def _side_by_side(cell: HiddenCell, names: tuple[str, ...], x: Array) -> tuple[Any, Any]:
    """The concatenated parameters of projections of ``x``, and the function that applies them."""
    layers = [getattr(cell, name) for name in names]
    kernels, biases = zip(*(layer._promoted(x)[1:] for layer in layers), strict=True)

    def project(params: Any, x: Array) -> Array:
        kernel, bias = params
        return linear.dense(
            x.astype(kernel.dtype),
            kernel,
            bias,
            precision=layers[0].precision,
            preferred_element_type=layers[0].preferred_element_type,
        )

    bias = None if biases[0] is None else jnp.concatenate(biases)
    return (jnp.concatenate(kernels, axis=-1), bias), project
