"""``make sim``: the invariants of the scheduler's core in many random clusters."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from tests.sim.test_scheduler_sim import simulate


def run_world(seed: int, nodes: int, events: int) -> tuple[int, str]:
    """Run one world; return its number of events, and what was broken."""
    nodes = nodes or random.Random(seed).randrange(1, 13)
    try:
        return simulate(seed, nodes=nodes, events=events).events, ""
    except AssertionError as error:
        return 0, str(error)


def main() -> int:
    """Run the worlds on all cores; return 1 if an invariant was broken in one."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--worlds", type=int, default=1000)
    parser.add_argument("--events", type=int, default=10_000, help="at least so many in each")
    parser.add_argument("--nodes", type=int, default=0, help="0: 1 to 12, by the seed")
    parser.add_argument("--first", type=int, help="the first seed (default: a random one)")
    options = parser.parse_args()
    first = random.randrange(1 << 30) if options.first is None else options.first
    print(f"seeds {first} to {first + options.worlds - 1}", flush=True)
    began, done, events, broken = time.monotonic(), 0, 0, 0
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        running = (
            pool.submit(run_world, seed, options.nodes, options.events)
            for seed in range(first, first + options.worlds)
        )
        for result in list(running):
            count, text = result.result()
            done, events, broken = done + 1, events + count, broken + bool(text)
            if text:
                print(f"\n{text}", flush=True)
            if text or done % 10 == 0 or done == options.worlds:
                spent_s = time.monotonic() - began
                print(
                    f"{done} of {options.worlds} worlds, {events:,} events, {broken} broken, {spent_s:.0f} s",
                    flush=True,
                )
    return min(broken, 1)


if __name__ == "__main__":
    sys.exit(main())
