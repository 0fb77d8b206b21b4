"""Of what a worker ended, as a label."""

from __future__ import annotations

from typing import Any

import pytest

from stoker_nodelet.telemetry.metrics.worker_counts import ExitCause, WorkerCounts, cause_of
from stoker_wire.messages.cluster import WorkerExit


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        ({"oom": True, "signal": 9, "preempted": True}, ExitCause.OUT_OF_MEMORY),
        ({"overdue": "t_1", "signal": 9, "expected": True}, ExitCause.TIMEOUT),
        ({"preempted": True, "exit_code": 0}, ExitCause.PREEMPTED),
        ({"expected": True, "signal": 15}, ExitCause.STOPPED),
        ({"signal": 11}, ExitCause.SIGNAL),
        ({"exit_code": 3}, ExitCause.FAILED),
        ({"exit_code": 0}, ExitCause.FINISHED),
    ],
)
def test_an_end_has_one_cause(facts: dict[str, Any], cause: ExitCause) -> None:
    exit_ = WorkerExit(worker_id="w_1", node_id="n_1", **facts)
    assert cause_of(exit_) is cause
    counts = WorkerCounts()
    counts.ended(exit_)
    assert counts.exits == {one.value: int(one is cause) for one in ExitCause}
