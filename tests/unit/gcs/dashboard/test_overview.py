"""Whose overview is shown again to whom."""

from __future__ import annotations

import asyncio
from typing import Any

from stoker_gcs.dashboard.overview import Overviews
from stoker_wire.http.principals import ROOT, Principal
from stoker_wire.messages.common import Role
from stoker_wire.messages.work import DETACHED_JOB


def actor_of(user: str, job_id: str) -> Principal:
    """The process of a detached actor that a job of a user has made."""
    return Principal(
        roles=frozenset({Role.JOB}),
        name=user,
        job_id=DETACHED_JOB,
        actor_id="a_1",
        origin_job_id=job_id,
    )


class Asked:
    """The makings of overviews: each is whom it was made for."""

    def __init__(self) -> None:
        app: Any = object()
        self.overviews: Any = Overviews(app)
        self.overviews._make = self._make
        self.by: list[Principal] = []

    async def _make(self, principal: Principal) -> Principal:
        self.by.append(principal)
        await asyncio.sleep(0)
        return principal


async def test_nobody_gets_what_was_added_up_for_another() -> None:
    asked = Asked()
    for principal in (ROOT, actor_of("alice", "job_1"), actor_of("bob", "job_2")):
        assert await asked.overviews.of(principal) is principal
        assert await asked.overviews.of(principal) is principal
    assert len(asked.by) == 3, "each one's is shown again"


async def test_pages_that_ask_at_once_cost_one() -> None:
    asked = Asked()
    assert await asyncio.gather(*(asked.overviews.of(ROOT) for _ in range(20))) == [ROOT] * 20
    assert asked.by == [ROOT]
