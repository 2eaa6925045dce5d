"""Training beside the model: the loop with its records and curves, and helpers of flax.training.

- ``loop``: ``Loop`` and its handling of signals.
- ``displays``: how it shows its progress.
- ``batches``: what gives them, and the way to the device.
- ``agreement``: loops of several processes, which stop together.
- ``records``: ``metrics.csv``, event files, ``plot_curves``.
- ``train_state``, ``dynamic_scale``, ``early_stopping``, ``lr_schedule``, ``common_utils``,
  ``checkpoints``, ``orbax_utils``, ``prefetch_iterator``: helpers under the names that programs
  import.
"""

from linnet.training.loop import Loop as Loop
from linnet.training.records import plot_curves as plot_curves, read_metrics as read_metrics
