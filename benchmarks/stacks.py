"""``python -m benchmarks.stacks``: how long ``stoker stack`` takes to tell where a task is.

A task that computes and one that waits, on a cluster of this machine, asked for by HTTP again and again;
``way`` in the output says how the stacks were had (py-spy, where there is the right to trace).
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import stoker
from benchmarks.results import HERE, Row, append, show
from stoker.runtime.net.http import HttpClient
from stoker_wire.messages.node_api import Stacks
from stoker_wire.version import VERSION

ROUNDS = 10


@stoker.remote
def computes(seconds: float) -> None:
    """Hold the interpreter."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        pass


@stoker.remote
def waits(seconds: float) -> None:
    """Sleep."""
    time.sleep(seconds)


def measured(rounds: int) -> list[Row]:
    """Return the median and the longest time of each."""
    rows = []
    with stoker.init(num_cpus=2, log_to_driver=False) as cluster:
        client = HttpClient(cluster.address, token=cluster.token)
        for name, function in (("computes", computes), ("waits", waits)):
            ref = function.remote(600.0)
            stoker.wait([ref], timeout=1.0)  # the history has it by then
            ways, took = set(), []
            for _ in range(rounds):
                began = time.perf_counter()
                query = {"target": ref.task_id}
                stacks: Stacks = client.call("GET", "/v1/stacks", reply=Stacks, query=query)
                took.append(time.perf_counter() - began)
                ways |= {one.way for one in stacks.processes}
            print(name, "by", *ways)
            stoker.cancel(ref, force=True)
            rows += [
                Row(f"stack_{name}_p50", statistics.median(took), "s"),
                Row(f"stack_{name}_max", max(took), "s"),
            ]
    return rows


def main() -> int:
    """Run it."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--csv", type=Path, default=HERE / "results.csv")
    given = options.parse_args()
    rows = measured(given.rounds)
    show(rows)
    append(given.csv, "stoker", VERSION, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
