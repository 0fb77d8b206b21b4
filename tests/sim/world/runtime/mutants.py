"""Bugs planted in the ownership of objects (see :mod:`tests.sim.world.mutants`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker.runtime.objects.borrowing import Borrowing
from stoker.runtime.objects.recovery import Recovery
from stoker.runtime.serialization.exceptions import encode_error
from stoker.runtime.tasks.reconstruction import Reconstruction
from stoker.runtime.worker.cancellation import Cancellation
from tests.sim.world.mutants import Mutant, patched
from tests.sim.world.world import Plan

if TYPE_CHECKING:
    import asyncio


def overtaken_borrow() -> Any:
    """A worker answers before the owners of the refs that it keeps know of them: who passed them lets go."""

    def would_overtake_borrow(self: Any, behind: Any) -> bool:
        return False

    return patched((Borrowing, "would_overtake_borrow", would_overtake_borrow))


def made_twice() -> Any:
    """Two that wait for results of one task, which are lost, each have it executed again."""

    def execute(self: Any, record: Any, why: str) -> asyncio.Task[Any]:
        work = self._run(record, why)
        return self._io.background.spawn(work, name="reconstruction", report=False)

    return patched((Reconstruction, "_execute", execute))


def taken_for_present() -> Any:
    """An argument that is lost is taken for present when the task that needs it is executed again."""

    def is_lost(self: Any, entry: Any) -> bool:
        return False

    return patched((Recovery, "is_lost", is_lost))


def deaf_worker() -> Any:
    """A worker does not stop a call that it has begun."""

    def interrupt(self: Any, received: Any, error: Any, *, grace_s: float | None) -> None:
        if self._calls.queued.pop(received.call.task_id, None) is not None:
            self._worker.fail_early(received, encode_error(error))

    return patched((Cancellation, "_interrupt", interrupt))


MUTANTS = (
    Mutant(name="overtaken borrow", origin="an earlier version of Borrowing", plant=overtaken_borrow,
           finds=r"\S+ was freed before it was borrowed",
           plan=Plan(rounds=("nested",), faults=0, messages=300), first=1),
    Mutant(name="made twice", origin="planted", plant=made_twice,
           finds=r"cannot read \S+: \S+ is lost with its node",
           plan=Plan(rounds=("lost",), kinds=("kill nodelet",), messages=300)),
    Mutant(name="taken for present", origin="planted", plant=taken_for_present,
           finds=r"cannot read \S+: \S+ is no longer on node",
           plan=Plan(rounds=("lost",), kinds=("kill nodelet",), messages=300)),
    Mutant(name="deaf worker", origin="planted", plant=deaf_worker,
           finds=r"s after its cancel",
           plan=Plan(rounds=("cancel",), faults=0, messages=300)),
)  # fmt: skip
