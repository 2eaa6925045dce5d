"""``python -m linnet``: runs programs written for Flax on Linnet, and reads them.

Options stand before the program; what follows it belongs to it.
"""

import sys
from importlib import import_module

from linnet import __version__
from linnet.as_flax import FLAX_VERSION, install
from linnet.as_flax.check import check
from linnet.as_flax.program import run_input, run_module, run_script, run_text

USAGE = """\
Runs a program written for Flax on Linnet, without a change to it.

  python -m linnet [--exclude LIBRARY]... PROGRAM.py [ARGUMENTS]
  python -m linnet [--exclude LIBRARY]... -m MODULE [ARGUMENTS]
  python -m linnet [--exclude LIBRARY]... -c "TEXT" [ARGUMENTS]
  python -m linnet --check PATH...
  python -m linnet --to-nnx PROGRAM.py [-o OUT.py] [--example CALL]

  --exclude LIBRARY   a package whose imports of Flax get the real one
  --check             run nothing: list the Flax names in files and folders that Linnet lacks
  --to-nnx            run nothing: rewrite a Linen program for NNX; see docs/migration.md
  --version           Linnet's version, and the Flax version whose API it offers
"""


def main(arguments: list[str]) -> None:
    """Does what the arguments of the command say."""
    excluded = []
    while arguments:
        option, *rest = arguments
        match option:
            case "--exclude" if rest:
                excluded += rest[0].split(",")
                arguments = rest[1:]
            case _ if option.startswith("--exclude="):
                excluded += option.removeprefix("--exclude=").split(",")
                arguments = rest
            case "--check" if rest:
                sys.exit(check(rest))
            case "--to-nnx" if rest:
                # Only this needs libcst, which takes a while to import.
                sys.exit(import_module("linnet.migration").main(rest))
            case "--version":
                print(f"linnet {__version__} (the API of Flax {FLAX_VERSION})")
                return
            case "-h" | "--help":
                print(USAGE, end="")
                return
            case "-m" | "-c" if rest:
                install(excluded)
                (run_module if option == "-m" else run_text)(rest[0], rest[1:])
                return
            case "-":
                install(excluded)
                run_input(rest)
                return
            case _ if option.startswith("-"):
                sys.exit(f"python -m linnet: {option} is no option or lacks its value\n\n{USAGE}")
            case _:
                install(excluded)
                run_script(option, rest)
                return
    sys.exit(f"python -m linnet: which program?\n\n{USAGE}")


if __name__ == "__main__":
    main(sys.argv[1:])
