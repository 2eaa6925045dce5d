"""Old paths of what has a place of its own now: ``nnx``."""
