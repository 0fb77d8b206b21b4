"""A flood of refused requests, from however many senders, is a few events."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from stoker_gcs.controllers import audit
from stoker_gcs.controllers.audit import MAX_SENDERS, Audit
from stoker_wire.errors import ForbiddenError, UnauthorizedError
from stoker_wire.http.principals import ANONYMOUS, Principal
from stoker_wire.http.server.dispatch import Refused
from stoker_wire.messages.common import Role

if TYPE_CHECKING:
    import pytest


class State:
    """Takes what would be written."""

    def __init__(self) -> None:
        self.written: list[tuple[Any, ...]] = []
        self.writer = self

    def now(self) -> float:
        return 1.0

    def event(self, kind: str, subject: str, record: Any, *, by: Any) -> Any:
        return SimpleNamespace(kind=kind, subject=subject, record=record, by=by)

    async def apply(self, change: Any) -> None:
        self.written.append(change.events)


async def test_many_senders_are_one_event_for_the_rest_and_nothing_more_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(audit, "FIRST_S", 0.0)
    state: Any = State()
    log = Audit(state)
    alice = Principal(roles=frozenset({Role.USER}), name="alice", token_id="tok_1")

    def flood() -> None:
        for number in range(1000):
            address = f"10.0.{number // 250}.{number % 250}"
            log.note_refused(Refused(UnauthorizedError("no"), "GET /v1/jobs", ANONYMOUS, address))

    for _ in range(3):
        log.note_refused(Refused(ForbiddenError("no"), "POST /v1/queues", alice, "::1"))
    flood()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(log.run())
        while not state.written:  # noqa: ASYNC110
            await asyncio.sleep(0)
        flood()
        for _ in range(100):
            await asyncio.sleep(0)
        task.cancel()
    (events,) = state.written
    assert len(events) == MAX_SENDERS + 1
    first, rest = events[0], events[-1]
    assert (first.subject, first.record.count, first.by.name) == ("user alice", 3, "alice")
    assert (rest.subject, rest.by.name) == ("others", "")
    assert sum(one.record.count for one in events) == 1003
