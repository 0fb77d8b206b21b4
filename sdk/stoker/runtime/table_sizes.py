"""The sizes of a process's tables of calls and objects, for tests of leaks and for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.runtime.runtime import Runtime


def table_sizes(runtime: Runtime) -> dict[str, int]:
    """Return the sizes of a runtime's tables, by name."""
    borrowing, execution = runtime.objects.borrowing, runtime.worker
    borrows = borrowing.borrows
    sizes = {
        "objects": len(runtime.objects.table) - len(runtime.actors.handle_marks),
        "lent": sum(len(lent) for lent in borrows.lent_by_channel.values()),
        "borrowed": sum(len(borrowed) for borrowed in borrows.borrowed_by_channel.values()),
        "to announce": len(borrows.unannounced),
        "to return": len(borrows.releasing),
        "unacknowledged": len(borrowing.unacknowledged),
        "pending tasks": len(runtime.pending),
        "queued tasks": sum(len(q.ready) for q in runtime.tasks.queues.values()),
        "open calls": sum(len(connection.unsettled) for connection in runtime.actors.connections()),
    }
    if execution is not None:
        sizes |= {
            "running": len(execution.calls.running),
            "queued": len(execution.calls.queued),
            "pinned": len(execution.pinned),
            "credits": len(execution.calls.credits),
        }
    return sizes
