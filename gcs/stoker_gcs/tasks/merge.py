"""How reports about one attempt become one record: pure, commutative where it matters, idempotent.

Several processes tell of the same attempt, late, twice and out of order. The further state wins,
a terminal one absorbs, and facts that only one of them knew (node, start time, demand) are kept.
An end that the gcs only inferred ("its job ended") yields to one that a process reports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stoker_wire.messages.common import ErrorInfo
from stoker_wire.messages.work import TaskRecord, TaskState

if TYPE_CHECKING:
    from collections.abc import Iterable

_RANK = {
    TaskState.WAITING: 0,
    TaskState.QUEUED: 1,
    TaskState.RUNNING: 2,
    TaskState.FINISHED: 4,
    TaskState.FAILED: 4,
    TaskState.CANCELLED: 4,
}
_INFERRED_RANK = 3
_DEFAULTS = {
    "actor_id": "",
    "parent_task_id": "",
    "submitted_at_s": None,
    "started_at_s": None,
    "ended_at_s": None,
    "node_id": "",
    "worker_id": "",
    "args_nbytes": 0,
    "result_nbytes": 0,
    "demand": None,
    "name": "",
}


def rank(record: TaskRecord) -> int:
    """How far the attempt has come: 0 to 2 open, 3 ended as inferred, 4 ended as reported."""
    if record.error is not None and record.error.extra.get("inferred"):
        return _INFERRED_RANK
    return _RANK[record.state]


def merge(old: TaskRecord, new: TaskRecord) -> TaskRecord:
    """Return what is known after ``new`` when ``old`` was known before."""
    if rank(old) >= _RANK[TaskState.FINISHED] or rank(new) < rank(old):
        winner, other = old, new
    else:
        winner, other = new, old
    missing = {
        name: getattr(other, name)
        for name, default in _DEFAULTS.items()
        if getattr(winner, name) == default and getattr(other, name) != default
    }
    if winner.state.terminal and not other.state.terminal:
        missing.pop("waiting_for", None)
    return msgspec.structs.replace(winner, **missing) if missing else winner


def merge_all(records: Iterable[TaskRecord]) -> dict[tuple[str, int], TaskRecord]:
    """Fold reports by (task_id, attempt)."""
    merged: dict[tuple[str, int], TaskRecord] = {}
    for record in records:
        key = (record.task_id, record.attempt)
        known = merged.get(key)
        merged[key] = record if known is None else merge(known, record)
    return merged


def inferred_end(record: TaskRecord, reason: str, at_s: float) -> TaskRecord:
    """End an attempt that nobody will report on: running ones FAILED, waiting ones CANCELLED."""
    ran = record.state is TaskState.RUNNING
    return msgspec.structs.replace(
        record,
        state=TaskState.FAILED if ran else TaskState.CANCELLED,
        ended_at_s=at_s,
        waiting_for="",
        error=ErrorInfo(
            code="worker_died" if ran else "task_cancelled",
            message=reason,
            extra={"inferred": True},
        ),
    )
