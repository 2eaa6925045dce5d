"""``python -m linnet.migration``: the same as ``python -m linnet --to-nnx``."""

import sys

from linnet.migration.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
