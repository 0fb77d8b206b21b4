"""Messages of the scheduler's own API that nobody else needs: dry-run placement."""

from __future__ import annotations

from typing import Annotated

import msgspec

from stoker_wire.messages.cluster import Demand
from stoker_wire.messages.common import Message, Record
from stoker_wire.messages.control import Verdict


class PlanQuery(Message):
    """Where would these go, one after the other, if they were asked for now?"""

    demands: Annotated[tuple[Demand, ...], msgspec.Meta(min_length=1, max_length=1000)]


class PlannedLease(Record):
    """Where a demand would go; without ``node_id`` it would wait, and ``verdicts`` say why."""

    node_id: str | None
    gpus: dict[int, float] = {}
    verdicts: tuple[Verdict, ...] = ()


class PlanReply(Record):
    """One placement per demand, in their order. Nothing was taken."""

    placements: tuple[PlannedLease, ...]
