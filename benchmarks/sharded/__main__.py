"""What sharded training costs, and whether it is the same training: ``python -m benchmarks.sharded NAME``.

    equality   losses beside those of one process, bytes of states, bytes that are sent
    predicted  step times that the planner predicts beside measured ones
    restart    seconds from the death of a rank to the next commit, and steps made again
    checkpointing  what a sharded checkpoint costs the training

Each has options of its own: ``python -m benchmarks.sharded NAME --help``. The machine's load is printed
before and after. Figures go to results.csv, too, unless ``--out ''`` comes before the name.
"""

from __future__ import annotations

import argparse
import os
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from benchmarks.results import HERE, append, show

NAMES = sorted(one.name for one in iter_modules([str(Path(__file__).parent)]) if one.name[0] != "_")
"""Each module here that is a benchmark: its ``run(arguments)`` prints, and may return figures."""


def main() -> None:
    """Measure, print, and append to results.csv."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--out", default=str(Path(HERE) / "results.csv"))
    given, own = parser.parse_known_args()
    print(f"load {os.getloadavg()[0]:.1f}", flush=True)
    rows = import_module(f"benchmarks.sharded.{given.name}").run(own) or []
    show(rows)
    print(f"load {os.getloadavg()[0]:.1f}", flush=True)
    if given.out and rows:
        append(given.out, "stoker", "sharded", rows)


if __name__ == "__main__":
    main()
