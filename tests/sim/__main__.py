"""``make sim``: the invariants of many random worlds: of all parts, and of some alone."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tests.sim.test_cluster_sim import simulate_cluster
from tests.sim.test_refs_sim import simulate_refs
from tests.sim.test_scheduler_sim import simulate
from tests.sim.training.world import simulate as simulate_training

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

WORLDS = 1000
REFS = 2000
TRAINING = 5000
CLUSTERS = 5000
"""How many of each kind are run if none is asked for."""


@dataclass(frozen=True, slots=True)
class Run:
    """One world: its events or messages, its faults, and what was broken."""

    events: int = 0
    faults: int = 0
    broken: str = ""


def run_world(seed: int, nodes: int, events: int) -> Run:
    """Run one world of the scheduler's core."""
    nodes = nodes or random.Random(seed).randrange(1, 13)
    try:
        return Run(simulate(seed, nodes=nodes, events=events).events)
    except AssertionError as error:
        return Run(broken=str(error))


def run_refs(seed: int) -> Run:
    """Run one world of objects."""
    try:
        outcome = simulate_refs(seed)
    except AssertionError as error:
        return Run(broken=str(error))
    return Run(outcome.messages, outcome.faults)


def run_training(seed: int) -> Run:
    """Run one world of an elastic job."""
    try:
        outcome = simulate_training(seed)
    except AssertionError as error:
        return Run(broken=str(error))
    return Run(outcome.messages, outcome.faults.total())


def run_cluster(seed: int) -> Run:
    """Run one world of all parts."""
    try:
        outcome = simulate_cluster(seed)
    except AssertionError as error:
        return Run(broken=str(error))
    return Run(outcome.messages, outcome.faults)


def run_all(run_one: Callable[[int], Run], seeds: range, unit: str) -> int:
    """Run one kind of world on all cores; print how it goes, and return how many were broken."""
    began, runs, broken = time.monotonic(), [], 0
    print(f"seeds {seeds.start} to {seeds.stop - 1}", flush=True)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        results: Iterable[Run] = pool.map(run_one, seeds, chunksize=4)
        for done, result in enumerate(results, 1):
            if result.broken:
                broken += 1
                print(f"\n{result.broken}", flush=True)
            else:
                runs.append(result)
            if result.broken or done % 10 == 0 or done == len(seeds):
                spent_s = time.monotonic() - began
                events = _total([one.events for one in runs], unit)
                faults = _total([one.faults for one in runs], "faults")
                print(
                    f"{done} of {len(seeds)}, {events}, {faults}, {broken} broken, {spent_s:.0f} s",
                    flush=True,
                )
    return broken


def _total(counts: list[int], unit: str) -> str:
    return f"{sum(counts):,} {unit} (at least {min(counts, default=0):,} each)"


def main() -> int:
    """Run the worlds on all cores; return 1 if an invariant was broken in one."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--worlds", type=int, help="worlds of the scheduler's core")
    parser.add_argument("--events", type=int, default=10_000, help="at least so many in each")
    parser.add_argument("--nodes", type=int, default=0, help="of each, 0: 1 to 12, by the seed")
    parser.add_argument("--refs", type=int, help="worlds of objects and their borrowers")
    parser.add_argument("--training", type=int, help="worlds of an elastic job")
    parser.add_argument("--clusters", type=int, help="worlds of all parts")
    parser.add_argument("--first", type=int, help="the first seed (default: a random one)")
    options = parser.parse_args()
    kinds = (options.worlds, options.refs, options.training, options.clusters)
    worlds, refs, training, clusters = (count or 0 for count in kinds)
    if all(count is None for count in kinds):
        worlds, refs, training, clusters = WORLDS, REFS, TRAINING, CLUSTERS
    first = random.randrange(1 << 30) if options.first is None else options.first
    broken = 0
    if worlds:
        one = partial(run_world, nodes=options.nodes, events=options.events)
        broken += run_all(one, range(first, first + worlds), "events")
    if refs:
        broken += run_all(run_refs, range(first, first + refs), "messages")
    if training:
        broken += run_all(run_training, range(first, first + training), "messages")
    if clusters:
        broken += run_all(run_cluster, range(first, first + clusters), "messages")
    return min(broken, 1)


if __name__ == "__main__":
    sys.exit(main())
