"""EarlyStopping: when a metric that should fall has stopped falling."""

from __future__ import annotations

import math
from typing import Any, Self

from linnet import struct


class EarlyStopping(struct.PyTreeNode):
    """Counts updates in which a metric that should fall did not, and says when to stop.

    Args:
      min_delta: the metric has improved if it fell by more than this.
      patience: how many updates without improvement to wait for.
      best_metric: the least value so far.
      patience_count: how many updates in a row brought no improvement.
      should_stop: whether the patience is used up.
      has_improved: whether the last update brought an improvement.

    Example:
      >>> from linnet.training.early_stopping import EarlyStopping
      >>> stopping = EarlyStopping(min_delta=0.01, patience=1)
      >>> for loss in [1.0, 0.5, 0.496, 0.6, 0.7]:
      ...     stopping = stopping.update(loss)
      ...     if stopping.should_stop:
      ...         break
      >>> loss, stopping.best_metric
      (0.6, 0.5)
    """

    min_delta: float = 0
    patience: int = 0
    best_metric: float = float("inf")
    patience_count: int = 0
    should_stop: bool = False
    has_improved: bool = False

    def reset(self) -> Self:
        """Forgets all values of the metric, and keeps the settings.

        Returns:
          The state before the first update.
        """
        return self.replace(
            best_metric=float("inf"), patience_count=0, should_stop=False, has_improved=False
        )

    def update(self, metric: Any) -> Self:
        """Takes the next value of the metric into account.

        Args:
          metric: a number; nan never improves on anything.

        Returns:
          The next state.
        """
        first = math.isinf(self.best_metric) and not math.isnan(metric)
        if first or self.best_metric - metric > self.min_delta:
            return self.replace(best_metric=metric, patience_count=0, has_improved=True)
        return self.replace(
            patience_count=self.patience_count + 1,
            should_stop=self.should_stop or self.patience_count >= self.patience,
            has_improved=False,
        )
