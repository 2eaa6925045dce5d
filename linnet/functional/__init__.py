"""The maths of the layers: functions of arrays, each computation written once.

Each function takes arrays by position and options by keyword. Options that many of them share:

- ``precision``, ``preferred_element_type``, ``out_sharding``: of the contraction or convolution, as
  ``jax.lax.dot_general``, ``jnp.einsum`` and ``jax.lax.conv_general_dilated`` take them. They are
  passed on only where they are given: a replacement need not know them.
- ``dot_general``, ``einsum``, ``conv_general_dilated``: a function to use in place of JAX's.
- ``axis_name``, ``axis_index_groups``: take statistics over a mapped axis (of ``jax.pmap`` or
  ``jax.shard_map``) too, or over groups of its devices, as ``jax.lax.pmean`` does.
- ``epsilon``: a small number that keeps a divisor away from zero.
- ``mask``: True where values count.

The files:

- ``fusing``: how functions run as one compiled operation outside of traces; JAX's contractions.
- ``dtypes``: promotion, and precision policies. ``sharding``: placing arrays. ``shapes``: axes.
- ``linear``, ``conv``, ``norm``, ``attention``, ``rotary``, ``recurrent``, ``pooling``,
  ``dropout``, ``activations``, ``losses``, ``sampling``, ``initializers``, ``fp8``: a family each.
- ``row_kernels``: what a compiled program is given in place of several passes, on a GPU.
"""
