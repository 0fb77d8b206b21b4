"""Messages of plans (``POST /v1/plan``), which the scheduler answers and the gcs forwards."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from stoker_wire.messages.cluster import Demand
from stoker_wire.messages.common import Message, Record
from stoker_wire.messages.control import Constraint, Holder, Remedy, Verdict
from stoker_wire.messages.groups import Bundle, GroupStrategy

MAX_PLANNED = 1000


class PlanRequest(Message):
    """Demands to place one after the other, as if they were requested now; nothing is allocated.

    With ``bundles`` it is a placement group that is placed, before the demands. All is as work of the job
    ``job_id``, or where that is empty of a job in ``queue`` with ``priority``, of ``user`` (the caller, if
    empty).
    """

    demands: Annotated[tuple[Demand, ...], msgspec.Meta(max_length=MAX_PLANNED)] = ()
    bundles: Annotated[tuple[Bundle, ...], msgspec.Meta(max_length=MAX_PLANNED)] = ()
    strategy: GroupStrategy = GroupStrategy.PACK
    job_id: str = ""
    queue: str = ""
    user: str = ""
    priority: int = 0


class PlanOutcome(StrEnum):
    """Fate of a demand that is planned."""

    STARTS = "starts"
    PREEMPTS = "preempts"
    """It would wait for leases that are asked back for it."""
    WAITS = "waits"
    REJECTED = "rejected"


class PlannedBundle(Record):
    """The node and GPUs of one bundle of a placement group."""

    bundle: int
    node_id: str
    gpus: dict[int, float] = {}


class PlannedLease(Record):
    """Fate of one demand, or of the placement group, and the node where it goes.

    Where it ``preempts``, the node is that where it goes once ``victims`` have ended; null if others ahead of
    it take their room. ``reason`` says why it would not start at once, ``verdicts`` what each node says
    before it; only the first 20 of a plan have them.
    """

    node_id: str | None
    gpus: dict[int, float] = {}
    verdicts: tuple[Verdict, ...] = ()
    outcome: PlanOutcome = PlanOutcome.STARTS
    bundles: tuple[PlannedBundle, ...] = ()
    victims: tuple[Holder, ...] = ()
    reason: str = ""
    constraint: Constraint | None = None
    remedies: tuple[Remedy, ...] = ()


class PlanReply(Record):
    """One placement per demand, in their order; that of the placement group is the first."""

    placements: tuple[PlannedLease, ...]
