"""The tests that ``make test`` leaves to ``make test-all``: those that take longest, by a measured run.

    make test-all PYTEST_ARGS=--junitxml=/tmp/junit.xml
    python -m tests.tiers.slow /tmp/junit.xml --budget-s 3100

writes ``slow.txt``, which ``tests/conftest.py`` reads. The longest functions go (by the mean of their cases)
until what is left fits the budget, in seconds over all workers; those in :data:`KEPT` stay whatever they
take, as each is the only proof of a promise that README makes.
"""

from __future__ import annotations

import argparse
import collections
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

LIST = Path(__file__).with_name("slow.txt")
KEPT = Path(__file__).with_name("kept.txt")
ROOT = Path(__file__).parents[2]
RULES = Path("tests/unit")
"""The files in it, not in its folders, hold the rules of the whole tree: they stay too."""


def slow_tests() -> frozenset[str]:
    """Return the functions that are slow, as ``FILE::NAME``; of classes, ``FILE::CLASS::NAME``."""
    return read(LIST)


def read(path: Path) -> frozenset[str]:
    """Return the lines of a list that are no comments."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


def measured(report: Path) -> dict[str, list[float]]:
    """Return the seconds of each case of a JUnit report, by its function."""
    found: dict[str, list[float]] = collections.defaultdict(list)
    for case in ET.parse(report).iter("testcase"):
        parts = str(case.get("classname")).split(".")
        while parts and not (ROOT / Path(*parts)).with_suffix(".py").is_file():
            parts.pop()
        if parts:
            file = Path(*parts).with_suffix(".py").as_posix()
            classes = str(case.get("classname")).split(".")[len(parts) :]
            name = "::".join([file, *classes, str(case.get("name")).partition("[")[0]])
            found[name].append(float(case.get("time", 0.0)))
    return found


def choose(seconds: dict[str, list[float]], budget_s: float) -> list[str]:
    """Return the functions that are left out so that the others take ``budget_s`` at most."""
    left_s = sum(map(sum, seconds.values()))
    chosen, kept = [], read(KEPT)
    by_mean = sorted(seconds, key=lambda name: (-sum(seconds[name]) / len(seconds[name]), name))
    for name in by_mean:
        if left_s <= budget_s:
            break
        if name not in kept and Path(name.partition("::")[0]).parent != RULES:
            chosen.append(name)
            left_s -= sum(seconds[name])
    return sorted(chosen)


def main() -> int:
    """Write the list by a report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, help="a JUnit report of a run of all tests")
    parser.add_argument("--budget-s", type=float, default=3100.0)
    options = parser.parse_args()
    seconds = measured(options.report)
    chosen = choose(seconds, options.budget_s)
    head = "# Written by `python -m tests.tiers.slow`: what `make test` leaves to `make test-all`."
    LIST.write_text("\n".join([head, *chosen, ""]), encoding="utf-8")
    whole_s, slow_s = sum(map(sum, seconds.values())), sum(sum(seconds[one]) for one in chosen)
    print(f"{len(chosen)} of {len(seconds)} functions are slow: {slow_s:.0f} of {whole_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
