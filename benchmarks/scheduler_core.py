"""Placements per second of the scheduler core alone, on a large cluster.

    python -m benchmarks.scheduler_core [nodes]

Each case goes through ``step`` with real events: asking, starting, answering, releasing, ending.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from stoker_scheduler.core import commands as cmd
from stoker_scheduler.core import events as ev
from stoker_scheduler.core.machine import step
from stoker_scheduler.core.model.nodes import make_node_spec
from stoker_scheduler.core.model.requirements import Requirements, make_requirements
from stoker_scheduler.core.state import State

PLACEMENTS = 20_000


def cluster(nodes: int) -> State:
    """Return a cluster of which one node in ten has GPUs."""
    state = State()
    for index in range(nodes):
        resources = {"CPU": 64.0, "memory": 2.0**38, "GPU": 8.0 if index % 10 == 0 else 0.0}
        spec = make_node_spec(f"n_{index:05}", resources)
        step(state, ev.NodeJoined(at_s=0.0, spec=spec))
    return state


def ask(state: State, number: int, requirements: Requirements, count: int, owner: int) -> list[str]:
    """Ask, and return the leases that were placed."""
    event = ev.LeaseRequested(
        at_s=1.0 + number * 1e-6,
        request_id=f"r_{number}",
        owner_id=f"p_{owner}",
        job_id="job_1",
        requirements=requirements,
        class_key=requirements.text,
        count=count,
        deadline_s=1e6,
    )
    return [c.lease_id for c in step(state, event) if isinstance(c, cmd.StartWorker)]


def finish(state: State, lease_ids: list[str]) -> None:
    """Take leases through the rest of their life."""
    at_s = state.at_s
    for lease_id in lease_ids:
        step(state, ev.LeaseStarted(at_s=at_s, lease_id=lease_id))
    step(state, ev.LeaseReleased(at_s=at_s, lease_ids=tuple(lease_ids)))
    for lease_id in lease_ids:
        step(state, ev.LeaseEnded(at_s=at_s, lease_id=lease_id))


def one_by_one(state: State) -> int:
    """One lease per request, one kind of need, eight owners; placing only."""
    requirements = make_requirements({"CPU": 1})
    return sum(len(ask(state, n, requirements, 1, n % 8)) for n in range(PLACEMENTS))


def in_batches(state: State) -> int:
    """A thousand leases per request; placing only."""
    requirements = make_requirements({"CPU": 1})
    return sum(len(ask(state, n, requirements, 1000, n)) for n in range(PLACEMENTS // 1000))


def many_kinds(state: State) -> int:
    """Twenty kinds of need, turn by turn; placing only."""
    requirement_sets = [make_requirements({"CPU": 1, "memory": 2.0 ** (20 + n)}) for n in range(20)]
    return sum(len(ask(state, n, requirement_sets[n % 20], 1, n % 8)) for n in range(PLACEMENTS))


def whole_lives(state: State) -> int:
    """Ask, start, answer, release and end, one lease at a time (four events each)."""
    requirements = make_requirements({"CPU": 1})
    for number in range(PLACEMENTS):
        finish(state, ask(state, number, requirements, 1, number % 8))
    return PLACEMENTS


def behind_a_queue(state: State) -> int:
    """The same while a thousand requests of ten kinds wait for GPUs that are all taken."""
    total = sum(len(node.spec.gpus) for node in state.nodes.values())
    ask(state, 10_000_000, make_requirements({"GPU": 1}), total, 1)
    for number in range(1000):
        requirements = make_requirements({"GPU": 1, "memory": 2.0 ** (20 + number % 10)})
        ask(state, 20_000_000 + number, requirements, 1, number % 50)
    return whole_lives(state)


def results(nodes: int) -> Iterator[tuple[str, float]]:
    """Yield each case's name and its placements per second."""
    for case in (one_by_one, in_batches, many_kinds, whole_lives, behind_a_queue):
        state = cluster(nodes)
        started = time.perf_counter()
        placed = case(state)
        yield case.__name__, placed / (time.perf_counter() - started)


def main() -> None:
    """Print one line per case."""
    nodes = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    print(f"scheduler core, {nodes} nodes, {PLACEMENTS} placements per case")
    for name, rate in results(nodes):
        print(f"  {name:16} {rate:10,.0f} placements/s")


if __name__ == "__main__":
    main()
