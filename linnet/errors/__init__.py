"""The errors that Linnet raises, and how they print paths and lists.

Every message says what went wrong, where (the path of the module or Variable), what was found there
and how to fix it. Each error is a subclass of the builtin that programs already catch.

``general`` has those of NNX, of the storage and the rest, ``linen`` those of Linen.
"""

from linnet.errors.general import *
from linnet.errors.linen import *

# Programs import the classes from here, and tracebacks name them so.
for _value in list(globals().values()):
    if isinstance(_value, type) and issubclass(_value, Exception):
        _value.__module__ = __name__
