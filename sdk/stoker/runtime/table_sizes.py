"""How much a process holds of what comes and goes, for tests of leaks and for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.runtime.runtime import Runtime


def table_sizes(runtime: Runtime) -> dict[str, int]:
    """Return the sizes of a runtime's tables, by name."""
    borrowing, execution = runtime.objects.borrowing, runtime.worker
    borrows = borrowing.borrows
    sizes = {
        "objects": len(runtime.objects.table) - len(runtime.actors.lives),
        "lent": sum(len(theirs) for theirs in borrows.lent.values()),
        "borrowed": sum(len(mine) for mine in borrows.borrowed.values()),
        "to announce": len(borrows.unannounced),
        "to return": len(borrows.releasing),
        "unacknowledged": len(borrowing.unacknowledged),
        "pending tasks": len(runtime.pending),
        "queued tasks": sum(len(q.ready) for q in runtime.tasks.queues.values()),
        "open calls": sum(len(x.open) for x in runtime.actors.all_links()),
    }
    if execution is not None:
        sizes |= {
            "running": len(execution.calls.running),
            "queued": len(execution.calls.queued),
            "pinned": len(execution.pinned),
            "credits": len(execution.calls.credits),
        }
    return sizes
