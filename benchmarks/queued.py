"""``python -m benchmarks.queued``: many tasks queued at once: what each costs while it waits.

Both CPUs are taken first, so that all of them wait; then they run to the end. Prints the driver's
memory per waiting task, the rates, and what is left of the memory when every ref is dropped.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
import tempfile
import time
from pathlib import Path

import psutil

import stoker
from benchmarks.results import Row, append, show

CPUS = 2
GET_S = 600.0
_CHUNK = 10_000


@stoker.remote
def noop() -> None:
    """Do nothing."""


@stoker.remote
def hold(opened: str) -> None:
    """Take a CPU until the file is there."""
    while not Path(opened).exists():
        time.sleep(0.02)


def resident_bytes() -> int:
    """Return this process's memory without what its allocator keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def measure(count: int) -> list[Row]:
    """Queue ``count`` tasks, run them, drop them."""
    stoker.get([noop.remote() for _ in range(_CHUNK)])
    with tempfile.TemporaryDirectory() as folder:
        opened = Path(folder) / "opened"
        held = [hold.remote(str(opened)) for _ in range(CPUS)]
        before = resident_bytes()
        began = time.perf_counter()
        refs = [noop.remote() for _ in range(count)]
        submitted_s = time.perf_counter() - began
        waiting = resident_bytes()
        opened.touch()
        began = time.perf_counter()
        stoker.get(held + refs, timeout=GET_S)
        ran_s = time.perf_counter() - began
    done = resident_bytes()
    began = time.perf_counter()
    del refs, held
    dropped_s = time.perf_counter() - began
    stoker.get([noop.remote() for _ in range(_CHUNK)])
    after = resident_bytes()
    name = f"queued_{count}"
    return [
        Row(f"{name}_submit", count / submitted_s, "/s"),
        Row(f"{name}_bytes_per_waiting_task", (waiting - before) / count, "B"),
        Row(f"{name}_run", count / ran_s, "/s"),
        Row(f"{name}_bytes_per_settled_ref", (done - before) / count, "B"),
        Row(f"{name}_drop", count / dropped_s, "/s"),
        Row(f"{name}_left", (after - before) / 2**20, "MB"),
    ]


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.queued", description=__doc__)
    parser.add_argument("--tasks", type=int, default=1_000_000)
    parser.add_argument("--csv", default="", help="append results to this file")
    options = parser.parse_args()
    stoker.init(num_cpus=CPUS, num_gpus=0, log_to_driver=False)
    try:
        rows = measure(options.tasks)
    finally:
        stoker.shutdown()
    show(rows)
    if options.csv:
        append(options.csv, "stoker", stoker.__version__, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
