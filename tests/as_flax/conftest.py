"""Programs that import Flax run in processes of their own; pytest does not import them."""

collect_ignore = ["flax_program.py", "what_it_sees.py"]
