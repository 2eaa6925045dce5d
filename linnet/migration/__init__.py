"""Linen programs rewritten for NNX: ``python -m linnet --to-nnx model.py``.

Files, in the order data goes through them:

- ``names``: what a name in the program means, through its imports.
- ``layers``: the table of Linen's layers and their twins.
- ``program``: the classes and functions of a program, and facts that hold across them.
- ``values``: what is known of a value without running the program.
- ``making``, ``feeding``, ``expressions``, ``declaring``, ``stages``: an interpreter that runs
  through a class once. It tells what belongs to the constructor from what stays in a call, and
  follows the sizes of arrays.
- ``tracing``: sizes from an example call, for what the interpreter cannot know.
- ``rendering``, ``emitting``: the constructor and the methods of a converted class.
- ``bindings``, ``building``, ``uses``, ``training``: what the program does with its models.
- ``converting``: all of it, for one module.
- ``command``: the command.

``linnet.io.load_linen`` loads the variables of the Linen model into the converted one. It needs
libcst, which keeps comments and formatting: ``pip install "linnet[convert]"``.
"""

try:
    import libcst as libcst
except ImportError as error:
    raise ImportError(
        "linnet.migration needs libcst, which is not installed.\n"
        'Fix: pip install libcst, or pip install "linnet[convert]".'
    ) from error

from linnet.migration.command import main as main, to_nnx as to_nnx
from linnet.migration.converting import Conversion as Conversion, Remark as Remark
from linnet.migration.tracing import trace as trace
