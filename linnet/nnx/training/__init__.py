"""Training over live modules.

- ``optimizer``: ``Optimizer`` and ``ModelAndOptimizer`` over Optax, Optax's state as Variables, and
  the check that gradients belong to the parameters.
- ``metrics``: ``Metric``, ``Average``, ``Accuracy``, ``Welford``, ``MultiMetric``.
- ``ema``, ``loss_scale``: a smoothed copy of a model; loss scaling for float16.
- ``train_state``: a split model and its optimizer as one immutable value.

``Optimizer.update(model, grads)`` takes the Variables that its filter selects, compares their paths
and shapes with those of the gradients, and gives Optax both as nested dicts of arrays, with its own
state unwrapped likewise. The new parameters are written into the model's Variables, the new state
into the Variables of the optimizer. With ``LossScale`` both are kept where a gradient is not
finite; ``EMA.update(model)`` averages the result.
"""
