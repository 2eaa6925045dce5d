"""The programs import Flax, and run in processes of their own; pytest does not import them."""

collect_ignore_glob = ["linen/[!t]*.py", "linen/transformer.py"]
