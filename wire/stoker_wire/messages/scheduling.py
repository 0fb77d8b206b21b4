"""Messages of dry-run placement (``POST /v1/plan``), which the scheduler answers and the gcs forwards."""

from __future__ import annotations

from typing import Annotated

import msgspec

from stoker_wire.messages.cluster import Demand
from stoker_wire.messages.common import Message, Record
from stoker_wire.messages.control import Verdict


class PlanRequest(Message):
    """Demands to place one after the other, as if they were requested now; nothing is allocated."""

    demands: Annotated[tuple[Demand, ...], msgspec.Meta(min_length=1, max_length=1000)]


class PlannedLease(Record):
    """The node for one demand; without ``node_id`` it would wait, and ``verdicts`` say why."""

    node_id: str | None
    gpus: dict[int, float] = {}
    verdicts: tuple[Verdict, ...] = ()


class PlanReply(Record):
    """One placement per demand, in their order."""

    placements: tuple[PlannedLease, ...]
