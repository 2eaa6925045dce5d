"""Training beside the model: the loop, its records and pictures, and small helpers."""

from linnet.training.loop import Loop as Loop
from linnet.training.plots import plot_curves as plot_curves
from linnet.training.records import read_metrics as read_metrics
