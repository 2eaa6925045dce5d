"""Layers, one file for each family. A layer owns its parameters and calls one function of
``linnet.functional``.

A constructor stores its arguments and draws its parameters from ``rngs`` (``params``). A call
checks the shapes of its inputs against the arguments, brings inputs and parameters to one dtype,
and calls the function.

- ``linear``, ``conv``, ``attention`` (with ``rotary``), ``normalization``,
  ``weight_normalization``, ``recurrent`` and ``recurrent_cells``, ``stochastic`` (dropout),
  ``pooling``, ``lora``: the layers. ``params`` is how they make their parameters.
- ``activations``, ``initializers``, ``dtypes``: functions, under the names of Flax.
- ``stack`` (with ``stack_states``): many layers of one structure as one; ``pipeline`` runs it over
  several devices. ``generation``: ``nnx.generate``.

Arguments that many layers share mean the same in all of them:

- ``rngs``: an ``nnx.Rngs``. A constructor draws one key from its ``params`` stream for each
  parameter, in the order kernel, bias (or scale, bias). Layers that draw random numbers in a call
  keep a fork of their own stream (``dropout``, ``carry``).
- ``dtype``: the dtype to compute in. By default it is that of the precision policy in force
  (``nnx.precision``, ``nnx.set_precision``), or else the one that inputs and parameters promote to.
- ``param_dtype``: the dtype of the parameters. By default it is that of the precision policy, or
  float32.
- ``promote_dtype``: a function with the signature of ``nnx.nn.dtypes.promote_dtype``. It gets the
  inputs and parameters as a tuple, and ``dtype``, and returns them in one dtype.
- ``kernel_init``, ``bias_init``, ``scale_init``, ...: functions of a key, a shape and a dtype, such
  as those of ``nnx.initializers``.
- ``kernel_metadata``, ``bias_metadata``, ``scale_metadata``, ...: keyword arguments of the
  parameter's ``nnx.Param``, for example ``{"out_sharding": ("data", None)}``.
- ``use_bias``, ``use_scale``: whether the layer has the parameter; without it, the attribute is
  None.
- ``precision``, ``preferred_element_type``: passed on to the contraction or convolution, as
  ``jax.lax.dot_general`` takes them.
- ``dot_general``, ``einsum_op``, ``conv_general_dilated``: a function to use in place of JAX's, for
  example to quantise a layer.
- ``out_sharding`` (of a call): the sharding of the output, as ``jax.lax.dot_general`` takes it.
- ``axis_name``, ``axis_index_groups``: a mapped axis, and groups of its devices, over which a
  normalisation takes its statistics too, as ``jax.lax.pmean`` takes them.
- ``use_fast_variance``: compute the variance in one pass, as ``E[x^2] - E[x]^2``, instead of two.

As a rule, arguments other than ``rngs``, initializers and metadata are kept as attributes of the
same name.
"""

from linnet.nnx.nn import dtypes as dtypes
