"""Training beside the model: the loop with its records and curves, and helpers of flax.training.

- ``loop``: ``Loop`` and its handling of signals.
- ``displays``: how it shows its progress.
- ``batches``: what gives them, and the way to the device.
- ``agreement``: loops of several processes, which stop together.
- ``records``: ``metrics.csv``, event files, ``plot_curves``.
- ``train_state``, ``dynamic_scale``, ``early_stopping``, ``lr_schedule``, ``common_utils``,
  ``checkpoints``, ``orbax_utils``, ``prefetch_iterator``: helpers under the names that programs
  import.

A ``Loop`` takes batches from their source and copies them to the device ahead of time
(``batches``); the program's own step computes with each. What it logs waits until the arrays are
ready, and goes to the files (``records``) and to the progress display (``displays``).
"""

from linnet.training.loop import Loop as Loop
from linnet.training.records import plot_curves as plot_curves, read_metrics as read_metrics
