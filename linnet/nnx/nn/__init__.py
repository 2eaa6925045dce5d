"""Layers, one file a family."""
