"""The death of a worker, as its caller sees it: from SIGKILL to the error of the call that it was executing.

``python -m benchmarks.worker_death`` kills the workers of tasks and of actors, one after the other, and
prints percentiles. ``--peer ray=PYTHON`` has the Python of another environment do the same with Ray. It is
Ray's API that both have: so this file imports neither before it knows which.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LONG_S = 600.0
STARTED_S = 60.0


def hold(folder: str, number: int) -> None:
    """Say which process this is, and run until it is killed."""
    part = Path(folder) / f"{number}.part"
    part.write_text(str(os.getpid()))
    part.rename(Path(folder) / str(number))
    time.sleep(LONG_S)


class Holder:
    """An actor whose method runs until it is killed."""

    def hold(self, folder: str, number: int) -> None:
        """Run ``hold``."""
        hold(folder, number)


def deaths(api: Any, kind: str, count: int, folder: str) -> list[float]:
    """Return the seconds from so many kills to the errors of their callers."""
    task = api.remote(max_retries=0)(hold)
    actor = api.remote(max_restarts=0)(Holder)
    took = []
    for number in range(count):
        name = Path(folder) / f"{kind}{number}"
        if kind == "task":
            ref = task.remote(folder, name.name)
        else:
            holder = actor.remote()
            ref = holder.hold.remote(folder, name.name)
        deadline_s = time.monotonic() + STARTED_S
        while not name.exists():
            assert time.monotonic() < deadline_s, f"{name.name} did not start"
            time.sleep(0.001)
        time.sleep(0.02)
        pid = int(name.read_text())
        began_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        try:
            api.get(ref, timeout=STARTED_S)
        except Exception as error:  # each has its own class
            took.append(time.monotonic() - began_s)
            assert "imeout" not in type(error).__name__, error
        else:
            raise AssertionError(f"{name.name} returned")
    return took


def measure(name: str, count: int) -> None:
    """Print the percentiles of one API."""
    api = importlib.import_module(name)
    api.init(num_cpus=2, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for kind in ("task", "actor"):
                took = deaths(api, kind, count, folder)
                cuts = statistics.quantiles(took, n=100)
                print(
                    f"{name}: the death of the worker of one {kind} is seen after {cuts[49] * 1e3:.0f} ms "
                    f"(median), {cuts[98] * 1e3:.0f} ms (p99), {max(took) * 1e3:.0f} ms (longest of {count})",
                    flush=True,
                )
    finally:
        api.shutdown()


def main() -> int:
    """Measure Stoker, and the peers that are named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.worker_death", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="kills of each kind (default 200)")
    parser.add_argument("--api", default="stoker", help="module to import (default stoker)")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    options = parser.parse_args()
    measure(options.api, options.count)
    for peer in options.peer:
        name, _, python = peer.partition("=")
        command = [python, __file__, "--api", name, "--count", str(options.count)]
        subprocess.run(command, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
