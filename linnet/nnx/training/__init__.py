"""Training over live modules.

- ``optimizer``: ``Optimizer`` and ``ModelAndOptimizer`` over Optax, Optax's state as Variables, and
  the check that gradients belong to the parameters.
- ``metrics``: ``Metric``, ``Average``, ``Accuracy``, ``Welford``, ``MultiMetric``.
- ``ema``, ``loss_scale``: a smoothed copy of a model; loss scaling for float16.
- ``train_state``: a split model and its optimizer as one immutable value.
"""
