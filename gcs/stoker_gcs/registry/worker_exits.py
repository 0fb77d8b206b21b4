"""Exits of workers as nodelets report them: each is logged once, then actors and jobs end or restart.

The event ``worker.exited`` is also the record of the exit: whatever learns of a worker later (a grant
that arrives after its worker died, an owner that is looked up after a restart) finds it here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from stoker_gcs.registry.nodes.rules import NODES
from stoker_gcs.state import schema
from stoker_gcs.store.changes import Change
from stoker_wire.messages.cluster import WorkerExit
from stoker_wire.messages.events import EventKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker_gcs.state.records import StateStore
    from stoker_wire.messages.cluster import WorkersExited


class ExitListener(Protocol):
    """A registry whose records depend on workers."""

    async def worker_exited(self, exit_: WorkerExit) -> None:
        """Change what the worker's end changes; called again for the same exit, change nothing."""
        ...


class WorkerExits:
    """The one place that records exits of workers and tells ``listeners``, in their order."""

    def __init__(self, state: StateStore, listeners: Sequence[ExitListener]) -> None:
        self._state = state
        self._listeners = listeners

    async def report(self, body: WorkersExited) -> None:
        """Record the exits of a nodelet's report.

        Those of an earlier incarnation of the node ended with it, and change nothing.
        """
        fenced = set()
        for node_id in {exit_.node_id for exit_ in body.exits}:
            node = await self._state.find(NODES, node_id)
            if node is not None and 0 < body.incarnation < node.record.incarnation:
                fenced.add(node_id)
        await self.record(tuple(exit_ for exit_ in body.exits if exit_.node_id not in fenced))

    async def record(self, exits: tuple[WorkerExit, ...]) -> None:
        """Log each exit once, then let actors and jobs die or restart of it."""
        if not exits:
            return
        ids = tuple({exit_.worker_id for exit_ in exits})
        rows = await self._state.store.select(
            schema.EVENTS,
            {"subject": ids, "kind": EventKind.WORKER_EXITED.value},
            columns=("subject",),
        )
        logged = {row["subject"] for row in rows}
        new = {exit_.worker_id: exit_ for exit_ in exits if exit_.worker_id not in logged}
        if new:
            now = self._state.now()
            events = tuple(
                self._state.event(
                    EventKind.WORKER_EXITED,
                    worker_id,
                    exit_ if exit_.at_s else msgspec.structs.replace(exit_, at_s=now),
                )
                for worker_id, exit_ in new.items()
            )
            await self._state.writer.apply(Change(events=events))
        # Also for those logged before: the process that logged them may have died before this.
        for exit_ in exits:
            for listener in self._listeners:
                await listener.worker_exited(exit_)


async def find_exit(state: StateStore, worker_id: str) -> WorkerExit | None:
    """Return how a worker ended, if its nodelet has reported it (perhaps before its grant arrived)."""
    if not worker_id:
        return None
    where = {"subject": worker_id, "kind": EventKind.WORKER_EXITED.value}
    rows = await state.store.select(schema.EVENTS, where, limit=1)
    if not rows:
        return None
    return msgspec.msgpack.decode(rows[0]["payload"], type=WorkerExit)
