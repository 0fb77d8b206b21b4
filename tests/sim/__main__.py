"""``make sim``: the invariants of many random clusters, of the scheduler's core and of all parts together."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from tests.sim.test_scheduler_sim import simulate
from tests.sim.world.world import run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

WORLDS = 1000
CLUSTERS = 5000
"""How many of each kind are run if none is asked for."""


def run_world(seed: int, nodes: int, events: int) -> tuple[int, int, str]:
    """Run one world of the scheduler's core; return its events, its faults (0) and what was broken."""
    nodes = nodes or random.Random(seed).randrange(1, 13)
    try:
        return simulate(seed, nodes=nodes, events=events).events, 0, ""
    except AssertionError as error:
        return 0, 0, str(error)


def run_cluster(seed: int) -> tuple[int, int, str]:
    """Run one world of all parts; return its messages, its faults and what was broken."""
    try:
        outcome = run(seed)
    except AssertionError as error:
        return 0, 0, f"{error}\nrepeat: python -m tests.sim --first {seed} --clusters 1"
    return outcome.messages, outcome.faults, ""


def run_all(run_one: Callable[[int], tuple[int, int, str]], seeds: range, unit: str) -> int:
    """Run one kind of world on all cores; print how it goes, and return how many were broken."""
    began, done, events, faults, broken = time.monotonic(), 0, 0, 0, 0
    print(f"seeds {seeds.start} to {seeds.stop - 1}", flush=True)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        results: Iterable[tuple[int, int, str]] = pool.map(run_one, seeds, chunksize=4)
        for count, some_faults, text in results:
            done, events, faults = done + 1, events + count, faults + some_faults
            broken += bool(text)
            if text:
                print(f"\n{text}", flush=True)
            if text or done % 10 == 0 or done == len(seeds):
                spent_s = time.monotonic() - began
                more = f", {faults:,} faults" if faults else ""
                print(
                    f"{done} of {len(seeds)}, {events:,} {unit}{more}, {broken} broken, {spent_s:.0f} s",
                    flush=True,
                )
    return broken


def main() -> int:
    """Run the worlds on all cores; return 1 if an invariant was broken in one."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--worlds", type=int, help="worlds of the scheduler's core")
    parser.add_argument("--events", type=int, default=10_000, help="at least so many in each")
    parser.add_argument("--nodes", type=int, default=0, help="of each, 0: 1 to 12, by the seed")
    parser.add_argument("--clusters", type=int, help="worlds of all parts")
    parser.add_argument("--first", type=int, help="the first seed (default: a random one)")
    options = parser.parse_args()
    worlds, clusters = options.worlds or 0, options.clusters or 0
    if options.worlds is None and options.clusters is None:
        worlds, clusters = WORLDS, CLUSTERS
    first = random.randrange(1 << 30) if options.first is None else options.first
    broken = 0
    if worlds:
        one = partial(run_world, nodes=options.nodes, events=options.events)
        broken += run_all(one, range(first, first + worlds), "events")
    if clusters:
        broken += run_all(run_cluster, range(first, first + clusters), "messages")
    return min(broken, 1)


if __name__ == "__main__":
    sys.exit(main())
