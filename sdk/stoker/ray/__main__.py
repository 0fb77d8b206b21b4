"""``python -m stoker.ray FILE [ARGUMENT...]``: run a program that imports ``ray`` as it is."""

from __future__ import annotations

import os
import runpy
import sys

from stoker.ray import install


def main() -> None:
    """Run the file that the command line names."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m stoker.ray FILE [ARGUMENT...]")
    install()
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
