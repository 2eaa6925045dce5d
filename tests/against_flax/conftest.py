"""Without Flax there is nothing to compare with: `make test-flax` has it."""

import importlib.util

collect_ignore_glob = ["*"] if importlib.util.find_spec("flax") is None else []
