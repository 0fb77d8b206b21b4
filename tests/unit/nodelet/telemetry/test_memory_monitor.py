"""The memory monitor's loop: what it measures, whom it stops, and what it tells of the node."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from stoker_nodelet.core import State, WorkerEntry, WorkerPhase, WorkKind
from stoker_nodelet.core.leases import LeaseTerms
from stoker_nodelet.core.memory import NodeMemory, Watermarks
from stoker_nodelet.core.state import LeaseEntry, LeasePhase
from stoker_nodelet.telemetry.memory_monitor import MemoryMonitor
from stoker_wire.messages.cluster import ActorSpec, Lease, LeaseKind, WorkerSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from stoker_wire.messages.common import MemoryUse

MIB = 1 << 20
HOARD = f"import sys; kept = b'x' * {64 * MIB}; print('has it', flush=True); sys.stdin.read()"


class Node:
    """Workers as the monitor sees them, and the memory of their node."""

    def __init__(self) -> None:
        self.state = State()
        self.processes = SimpleNamespace(launches={}, living={})
        self.killed: list[tuple[str, str, MemoryUse]] = []
        self.use = NodeMemory(10 * MIB, 1000 * MIB)

    def kill(self, worker_id: str, reason: str, *, memory: MemoryUse) -> None:
        self.killed.append((worker_id, reason, memory))

    def add(
        self, worker_id: str, pid: int, *, kind: WorkKind = WorkKind.TASK, memory: float = 0.0
    ) -> None:
        lease_id = f"l_{worker_id}"
        terms = LeaseTerms(lease_id=lease_id, job_id="job_1", kind=kind, node_incarnation=1)
        self.state.leases[lease_id] = LeaseEntry(
            terms, LeasePhase.READY, "", False, worker_id, worker_id
        )
        self.state.workers[worker_id] = WorkerEntry(
            worker_id, WorkerPhase.LEASED, 0.0, 0.0, kind=kind, lease_id=lease_id, pid=pid
        )
        self.processes.living[worker_id] = object()
        lease = Lease(
            lease_id=lease_id,
            owner_id="p_1",
            job_id="job_1",
            kind=LeaseKind(kind),
            node_id="n_1",
            node_incarnation=1,
            resources={"memory": memory} if memory else {},
        )
        actor = ActorSpec(actor_id="a_1", incarnation=1, class_name="A", payload=b"")
        spec = WorkerSpec(actor=actor if kind is WorkKind.ACTOR else None)
        self.processes.launches[lease_id] = SimpleNamespace(lease=lease, spec=spec)


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def hoarder() -> Iterator[Callable[[], int]]:
    """Start processes that have 64 MiB each."""
    started: list[subprocess.Popen[str]] = []

    def start() -> int:
        process = subprocess.Popen(
            [sys.executable, "-c", HOARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "has it\n"
        return process.pid

    yield start
    for process in started:
        process.communicate("")


def monitor_of(node: Node, *disks: Path, told: list[bool] | None = None, **marks: Any) -> Any:
    told = [] if told is None else told
    return MemoryMonitor(
        node,  # type: ignore[arg-type]
        Watermarks(marks.get("memory_at", 0.0), marks.get("disk_bytes", 0)),
        threshold=0.9,
        period_s=0.25,
        disks=disks,
        on_change=lambda: told.append(True),
        measure=lambda: node.use,
    )


async def test_who_exceeds_its_limit_is_stopped_with_the_numbers(
    node: Node, hoarder: Callable[[], int]
) -> None:
    pid = hoarder()
    node.add("w_greedy", pid, memory=32.0 * MIB)
    node.add("w_modest", hoarder(), memory=900.0 * MIB)
    await monitor_of(node).look()
    [(worker_id, reason, memory)] = node.killed
    assert worker_id == "w_greedy"
    assert reason == f"exceeded memory={32 * MIB} bytes (used {memory.used_bytes})"
    assert 64 * MIB < memory.used_bytes < 128 * MIB
    assert (memory.limit_bytes, memory.node_total_bytes) == (32 * MIB, 1000 * MIB)
    assert pid in {one.pid for one in memory.largest} and len(memory.largest) == 2
    assert memory.largest[0].nbytes > 64 * MIB and memory.largest[0].command.startswith("python")
    assert "of memory=32 MiB, the node 10 MiB of 1000 MiB" in memory.text


async def test_one_at_a_time_is_stopped_while_the_node_is_short(
    node: Node, hoarder: Callable[[], int]
) -> None:
    for name in ("w_1", "w_2"):
        node.add(name, hoarder())
    node.add("w_actor", hoarder(), kind=WorkKind.ACTOR)
    monitor = monitor_of(node)
    await monitor.look()
    assert node.killed == []
    node.use = NodeMemory(940 * MIB, 1000 * MIB)
    assert await monitor.look() == 0.05
    [(first, reason, _)] = node.killed
    assert first in ("w_1", "w_2")
    assert reason.startswith(f"the node is out of memory ({940 * MIB} of {1000 * MIB} bytes used")
    await monitor.look()
    assert len(node.killed) == 1, "the first may still have its memory"
    del node.processes.living[first]
    lease = next(i for i, one in node.state.leases.items() if one.worker_id == first)
    del node.state.leases[lease]
    await monitor.look()
    assert len(node.killed) == 2 and node.killed[1][0] != "w_actor"


async def test_the_beginning_and_the_end_of_a_condition_are_told_once(
    node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[bool] = []
    monitor = monitor_of(node, tmp_path, told=told, memory_at=0.9)
    assert await monitor.look() == 1.0, "nothing is at work"
    node.use = NodeMemory(950 * MIB, 1000 * MIB)
    for _ in range(3):
        await monitor.look()
    assert told == [True]
    [record] = caplog.records
    assert record.levelname == "WARNING" and "takes no new work: 950.0 MiB" in record.message
    node.use = NodeMemory(500 * MIB, 1000 * MIB)
    await monitor.look()
    assert told == [True, True] and monitor.watermarks.memory == ""
