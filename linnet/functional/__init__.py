"""The maths of the layers: functions of arrays, each computation written once.

The functions of layers take arrays by position and options by keyword; those that Flax has too
keep its signatures. Options that many of them share:

- ``precision``, ``preferred_element_type``, ``out_sharding``: of the contraction or convolution, as
  ``jax.lax.dot_general``, ``jnp.einsum`` and ``jax.lax.conv_general_dilated`` take them. One that
  is None is not passed on, so that a function in place of JAX's need not accept it.
- ``dot_general``, ``einsum``, ``conv_general_dilated``: a function to use in place of JAX's.
- ``axis_name``, ``axis_index_groups``: take statistics over a mapped axis (of ``jax.vmap``,
  ``jax.pmap`` or ``jax.shard_map``) too, or over groups along it, as ``jax.lax.pmean`` does.
- ``epsilon``: a small number that keeps a divisor away from zero.
- ``mask``: True where values count.

The files:

- ``fusing``: decorators that compile a function which is called outside of traces; contractions
  and convolutions of JAX, looked up at each call, so that libraries can replace them.
- ``dtypes``: promotion, and precision policies. ``sharding``: arrays in a given sharding.
  ``shapes``: checks of axes and shapes.
- ``linear``, ``conv``, ``norm``, ``attention``, ``rotary``, ``recurrent``, ``pooling``,
  ``dropout``, ``activations``, ``losses``, ``sampling``, ``initializers``, ``fp8``: a family each.
- ``row_kernels``: a kernel that ``nnx.jit`` puts into programs for a GPU: maximum and sum of
  exponentials of each row in one pass.
"""
