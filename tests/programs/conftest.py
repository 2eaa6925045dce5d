"""The programs import Flax, and run in processes of their own; pytest does not import them."""

collect_ignore_glob = ["*/[!t]*.py", "linen/transformer.py"]
