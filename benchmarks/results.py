"""Where results go: one table on the screen, and a CSV that is committed with the code."""

from __future__ import annotations

import csv
import datetime
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
COLUMNS = ("at", "commit", "machine", "python", "backend", "version", "case", "value", "unit")


class Row(NamedTuple):
    """One figure."""

    case: str
    value: float
    unit: str


def show(rows: Iterable[Row]) -> None:
    """Print figures, one per line."""
    for row in rows:
        print(f"{row.case:40} {row.value:>12.5g} {row.unit}", flush=True)


def commit() -> str:
    """Return the commit that is measured, with a + if the tree has changes."""
    head = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"],
        capture_output=True,
        text=True,
        cwd=HERE,
        check=False,
    )
    return head.stdout.strip()


def device() -> str:
    """Name the machine by its processor and, where there is one, its GPU."""
    model = platform.machine()
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return f"{len(os.sched_getaffinity(0))} x {model}"


def append(path: str | Path, backend: str, version: str, rows: Iterable[Row]) -> None:
    """Add figures of one backend to the CSV at ``path``."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    said, known = commit(), Path(path).exists()
    with open(path, "a", newline="") as file:
        table = csv.writer(file)
        if not known:
            table.writerow(COLUMNS)
        for row in rows:
            table.writerow(
                (
                    now,
                    said,
                    device(),
                    platform.python_version(),
                    backend,
                    version,
                    row.case,
                    f"{row.value:.5g}",
                    row.unit,
                )
            )
