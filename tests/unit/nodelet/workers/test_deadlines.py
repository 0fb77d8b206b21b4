"""The end of workers that are past the deadline of their call."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from stoker_nodelet.workers.deadlines import Deadlines
from stoker_nodelet.workers.processes import Process, Processes
from stoker_wire.process.call_deadline import DeadlineCell, cell_path

if TYPE_CHECKING:
    from collections.abc import Callable

OVERDUE_S = -1.0


class Node:
    """Workers of one node, and the kills that were ordered."""

    def __init__(self, arena_dir: Path) -> None:
        self.identity: Any = SimpleNamespace(arena_dir=arena_dir)
        nothing = cast("Any", None)
        self.processes = Processes(
            self.identity, nothing, nothing, nothing, nothing, nothing, nothing
        )
        self.killed: list[tuple[str, str]] = []

    def kill(self, worker_id: str, reason: str) -> None:
        self.killed.append((worker_id, reason))

    def start(self, worker_id: str) -> DeadlineCell:
        self.processes.living[worker_id] = Process(cast("Any", None), Path("log"))
        return DeadlineCell(str(self.identity.arena_dir), worker_id)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def look(node: Node) -> Callable[[], None]:
    deadlines = Deadlines(cast("Any", node))
    deadlines.open()
    return deadlines.look


def test_a_worker_past_its_deadline_is_killed_once(node: Node, look: Callable[[], None]) -> None:
    late, in_time, idle = (node.start(name) for name in ("w_late", "w_in_time", "w_idle"))
    late.arm("t_1", 1.0, OVERDUE_S - 1.0)
    in_time.arm("t_2", 60.0, 4.0)
    idle.arm("t_3", 0.0, OVERDUE_S)
    idle.disarm()
    look()
    look()
    ((worker_id, reason),) = node.killed
    assert worker_id == "w_late"
    assert reason.startswith("task t_1 ran longer than its timeout of 1 s")
    assert node.processes.overdue_task("w_late") == "t_1"
    assert node.processes.overdue_task("w_in_time") == ""


def test_a_worker_that_wanted_to_leave_and_did_not_is_killed(
    node: Node, look: Callable[[], None]
) -> None:
    node.start("w_1").leave("t_1", OVERDUE_S)
    look()
    assert node.killed[0][1].startswith("task t_1 was stopped, and this worker did not end it")


def test_a_call_that_ended_in_the_last_moment_is_not_to_blame(
    node: Node, look: Callable[[], None]
) -> None:
    cell = node.start("w_1")
    cell.arm("t_1", 0.0, OVERDUE_S)
    look()
    cell.arm("t_2", 60.0, 4.0)
    assert node.killed
    assert node.processes.overdue_task("w_1") == ""


def test_what_a_worker_wrote_goes_with_it(node: Node, look: Callable[[], None]) -> None:
    node.start("w_1").arm("t_1", 0.0, OVERDUE_S)
    path = cell_path(node.identity.arena_dir, "w_1")
    assert path.exists()
    node.processes.remove("w_1")
    assert not path.exists()
    look()
    assert not node.killed
