"""Optimizers and metrics."""
