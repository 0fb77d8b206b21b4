"""Placements per second of the scheduler core alone, on a large cluster.

    python -m benchmarks.scheduler_core [nodes]
    python -m benchmarks.scheduler_core queue [nodes [requests [classes]]]

Each case goes through ``step`` with real events: asking, starting, answering, releasing, ending. Then
the time of the step that places a gang of 64 GPUs, on nodes of 8 GPUs that others use in part. ``queue``
measures single steps on a full cluster (10,000 nodes) behind a long queue (1,000,000 requests of 1,000
kinds of need), and the memory that the queue takes.
"""

from __future__ import annotations

import functools
import random
import statistics
import sys
import time
from collections.abc import Iterator

import psutil

from stoker_scheduler.core import commands as cmd
from stoker_scheduler.core import events as ev
from stoker_scheduler.core.machine import step
from stoker_scheduler.core.model.gangs import GangStrategy, make_gang
from stoker_scheduler.core.model.nodes import make_node_spec
from stoker_scheduler.core.model.requirements import Requirements, make_requirements
from stoker_scheduler.core.state import State
from stoker_wire.process import garbage

PLACEMENTS = 20_000
GANGS = 300


@functools.cache
def class_key_of(requirements: Requirements) -> str:
    """Return the class of calls with these requirements; clients make it once."""
    return requirements.text


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
        class_key=class_key_of(requirements),
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


def gang_ms(nodes: int) -> list[float]:
    """Return the milliseconds of each placement of 64 GPUs, by strategies in turn; gangs come and go."""
    state, rng = State(), random.Random(1)
    for index in range(nodes):
        spec = make_node_spec(f"n_{index:05}", {"CPU": 64.0, "GPU": 8.0})
        step(state, ev.NodeJoined(at_s=0.0, spec=spec))
    one = make_requirements({"GPU": 1})
    ask(state, 30_000_000, one, 4 * nodes, 1)
    finish(state, [lease_id for lease_id in list(state.leases) if rng.random() < 0.5])
    took: list[float] = []
    for number in range(GANGS):
        strategy = (GangStrategy.PACK, GangStrategy.SPREAD, GangStrategy.STRICT_SPREAD)[number % 3]
        gang = make_gang([make_requirements({"GPU": 1, "CPU": 1})] * 64, strategy)
        group_id = f"pg_{number}"
        step(state, ev.GroupAdded(at_s=1.0, group_id=group_id, job_id="job_1", gang=gang))
        event = ev.LeaseRequested(
            at_s=1.0,
            request_id=f"r_{group_id}.0",
            owner_id="gcs",
            job_id="job_1",
            requirements=gang,
            class_key=group_id,
            count=1,
            deadline_s=1e6,
            kind=ev.Kind.BUNDLE,
            group_id=group_id,
            indices=tuple(range(64)),
        )
        started = time.perf_counter()
        commands = step(state, event)
        took.append((time.perf_counter() - started) * 1e3)
        held = [i for c in commands if isinstance(c, cmd.HoldBundles) for i in c.lease_ids]
        assert len(held) == 64, "the gang is not placed"
        step(state, ev.GroupRemoved(at_s=1.0, group_id=group_id))
        for lease_id in held:
            step(state, ev.LeaseEnded(at_s=1.0, lease_id=lease_id))
    return took


def long_queue(nodes: int, requests: int, classes: int) -> None:
    """Print the times of steps on a full cluster with a long queue, by kind of event."""
    state, rng = State(), random.Random(1)
    for index in range(nodes):
        spec = make_node_spec(f"n_{index:05}", {"CPU": 4.0, "memory": 2.0**38})
        step(state, ev.NodeJoined(at_s=0.0, spec=spec))
    held = ask(state, 1, make_requirements({"CPU": 1}), 4 * nodes, 0)
    for lease_id in held:
        step(state, ev.LeaseStarted(at_s=1.0, lease_id=lease_id))
    before = psutil.Process().memory_info().rss
    kinds = [make_requirements({"CPU": 1, "memory": float(2**20 + n)}) for n in range(classes)]
    took: dict[str, list[float]] = {}

    def timed(what: str, event: ev.Event) -> list[cmd.Command]:
        started = time.perf_counter()
        commands = step(state, event)
        took.setdefault(what, []).append((time.perf_counter() - started) * 1e3)
        return commands

    for number in range(requests):
        requirements = kinds[number % classes]
        request = ev.LeaseRequested(
            at_s=2.0 + number * 1e-6,
            request_id=f"r_q{number}",
            owner_id=f"p_{number // classes % 100}",
            job_id="job_1",
            requirements=requirements,
            class_key=class_key_of(requirements),
            count=1,
            deadline_s=1e6,
        )
        timed("a request arrives", request)
    nbytes = psutil.Process().memory_info().rss - before
    at_s = 2.0 + requests * 1e-6
    for _ in range(2000):
        at_s += 0.001
        lease_id = held.pop(rng.randrange(len(held)))
        timed("a lease is released", ev.LeaseReleased(at_s=at_s, lease_ids=(lease_id,)))
        commands = timed("its place is assigned", ev.LeaseEnded(at_s=at_s, lease_id=lease_id))
        for command in commands:
            if isinstance(command, cmd.StartWorker):
                held.append(command.lease_id)
                timed("a worker started", ev.LeaseStarted(at_s=at_s, lease_id=command.lease_id))
        while state.timers and state.timers[0][0] <= at_s:
            timed("a timer is due", ev.Tick(at_s=at_s))
    every = [ms for some in took.values() for ms in some]
    took["all"] = every
    print(
        f"{nodes} nodes, {requests} requests of {classes} kinds, {nbytes / requests:.0f} bytes each"
    )
    for what, some in took.items():
        p99 = statistics.quantiles(some, n=100)[98] if len(some) > 1 else some[0]
        print(
            f"  {what:22} {statistics.median(some):8.3f} ms median, {p99:8.3f} p99, {max(some):8.1f} most"
        )


def results(nodes: int) -> Iterator[tuple[str, float]]:
    """Yield each case's name and its placements per second."""
    for case in (one_by_one, in_batches, many_kinds, whole_lives, behind_a_queue):
        state = cluster(nodes)
        started = time.perf_counter()
        placed = case(state)
        yield case.__name__, placed / (time.perf_counter() - started)


def main() -> None:
    """Print one line per case."""
    garbage.settle()
    if sys.argv[1:2] == ["queue"]:
        given = [int(argument) for argument in sys.argv[2:]]
        long_queue(*given, *(10_000, 1_000_000, 1_000)[len(given) :])
        return
    nodes = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    print(f"scheduler core, {nodes} nodes, {PLACEMENTS} placements per case")
    for name, rate in results(nodes):
        print(f"  {name:16} {rate:10,.0f} placements/s")
    took = gang_ms(nodes)
    p99 = statistics.quantiles(took, n=100)[98]
    print(f"  gang of 64 GPUs  {statistics.median(took):10.2f} ms median, {p99:.2f} ms p99")


if __name__ == "__main__":
    main()
