"""Task attempts as Chrome trace events, for ``stoker.timeline`` and ``stoker timeline``. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ("trace_events",)


def trace_events(tasks: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one event per attempt that has begun and ended; times in microseconds, a row per worker."""
    return [
        {
            "cat": "actor_task" if task["actor_id"] else "task",
            "name": task["name"],
            "ph": "X",
            "pid": task["node_id"],
            "tid": task["worker_id"],
            "ts": task["started_at_s"] * 1e6,
            "dur": (task["ended_at_s"] - task["started_at_s"]) * 1e6,
            "args": {"task_id": task["task_id"], "state": task["state"]},
        }
        for task in tasks
        if task.get("started_at_s") and task.get("ended_at_s")
    ]
