"""Placement groups: bundles of resources that are reserved all or none, before work runs in them; and plans.

The gcs owns the group, the scheduler chooses the nodes, and nodelets hold the bundles: first prepared, to be
given up unless a commit follows, then committed until they are released. Plans (``POST /v1/plan``) say where
bundles and leases would go: the scheduler answers them, the gcs forwards them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from stoker_wire.constraints.taints import Tolerations
from stoker_wire.messages.cluster import Demand, GraceS, Lease
from stoker_wire.messages.common import (
    Asked,
    Count,
    GroupId,
    Int64,
    Message,
    Name,
    NodeFilterText,
    Record,
    RequestId,
    Selector,
    stated,
)
from stoker_wire.messages.control import Constraint, Holder, Remedy, Verdict
from stoker_wire.messages.work import Owner

MAX_BUNDLES = 1_000
MAX_PLANNED = 1000


class GroupStrategy(StrEnum):
    """The rule by which the bundles of a placement group share nodes."""

    PACK = "PACK"
    """As few nodes as can be."""
    SPREAD = "SPREAD"
    """As many nodes as can be."""
    STRICT_PACK = "STRICT_PACK"
    """All on one node."""
    STRICT_SPREAD = "STRICT_SPREAD"
    """Each on a node of its own."""


class GroupState(StrEnum):
    """PENDING -> CREATED -> RESCHEDULING -> CREATED ... -> REMOVED (terminal)."""

    PENDING = "PENDING"
    """Waits for room for all bundles at once."""
    CREATED = "CREATED"
    """Every bundle is reserved."""
    RESCHEDULING = "RESCHEDULING"
    """A node died: the bundles that were on it wait for room."""
    REMOVED = "REMOVED"


class Reschedule(StrEnum):
    """Bundles that are placed again when a node with some of them dies."""

    BUNDLES = "bundles"
    """Those that were lost; the others, and what runs in them, stay."""
    GROUP = "group"
    """All: what runs in the others is ended."""
    NEVER = "never"
    """None: the group goes on without them, and ends with its last bundle."""


class Bundle(Message):
    """Resources, one at least, to be reserved on one node, which the selector and the filter admit."""

    resources: Annotated[Asked, stated(minProperties=1)]
    label_selector: Selector = {}
    node_filter: NodeFilterText = ""
    tolerations: Tolerations = ()


Bundles = Annotated[tuple[Bundle, ...], msgspec.Meta(min_length=1, max_length=MAX_BUNDLES)]


class CreatePlacementGroup(Message):
    """Request to reserve ``bundles``.

    ``name`` is unique per namespace while the group lives. A ``detached`` group outlives its job and its
    ``owner``. A ``preemptible`` one gives way as a whole, ``preemption_grace_s`` after a notice.
    """

    group_id: GroupId
    job_id: Name
    bundles: Bundles
    strategy: GroupStrategy = GroupStrategy.PACK
    name: Name = ""
    namespace: Name = ""
    detached: bool = False
    reschedule: Reschedule = Reschedule.BUNDLES
    owner: Owner | None = None
    preemptible: bool = False
    preemption_grace_s: GraceS | None = None


class BundlePlacement(Record):
    """Place of a bundle: the lease that reserves it, on this incarnation of a node."""

    lease_id: str
    node_id: str
    node_incarnation: int


class PlacementGroup(Record):
    """A placement group as the gcs knows it.

    ``placements`` are by the number of the bundle; one that is not reserved now is absent. ``attempt`` counts
    how often bundles were asked for, and fences late grants.
    """

    group_id: str
    job_id: str
    state: GroupState
    strategy: GroupStrategy
    bundles: tuple[Bundle, ...]
    name: str = ""
    namespace: str = ""
    detached: bool = False
    reschedule: Reschedule = Reschedule.BUNDLES
    owner: Owner | None = None
    placements: dict[int, BundlePlacement] = {}
    released: tuple[int, ...] = ()
    """The numbers of bundles that it has given up, or lost for good (:attr:`Reschedule.NEVER`)."""
    attempt: int = 0
    reschedules: int = 0
    created_at_s: float = 0.0
    placed_at_s: float | None = None
    removed_at_s: float | None = None
    reason: str = ""
    """Why it waits, or why it was removed."""
    preemptible: bool = False
    preemption_grace_s: float | None = None
    preemptions: int = 0
    """How often it gave way to other work; counted in ``reschedules`` too."""


class PreemptGroup(Message):
    """Order to have all bundles of a group placed again, if ``lease_id`` holds one of them."""

    lease_id: str
    reason: str


class ReleaseBundles(Message):
    """The numbers of bundles that a group gives up, for good: what runs in them ends."""

    bundles: Annotated[tuple[Count, ...], msgspec.Meta(min_length=1, max_length=MAX_BUNDLES)]


class RequestBundles(Message):
    """Request of the gcs to the scheduler for some bundles of a group, all or none.

    ``indices`` are their numbers in the group, one for each; ``taken`` the nodes of those that it has.
    """

    request_id: RequestId
    group_id: GroupId
    job_id: str
    bundles: Bundles
    indices: tuple[Int64, ...]
    strategy: GroupStrategy
    taken: tuple[str, ...] = ()
    name: str = ""
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0
    preemptible: bool = False
    preemption_grace_s: GraceS | None = None


class HoldBundles(Message):
    """Order of the scheduler to a nodelet to hold bundles, all or none. Fenced by ``epoch``.

    With ``prepare`` they are given up unless :class:`CommitBundles` follows within
    ``PREPARED_TTL_S``; without, they are held until they are released.
    """

    leases: tuple[Lease, ...]
    epoch: Int64
    prepare: bool = False


class CommitBundles(Message):
    """Order of the scheduler to a nodelet to hold prepared bundles until they are released."""

    lease_ids: tuple[str, ...]
    epoch: Int64


class CommittedBundles(Record):
    """The bundles that are held from now on; others were given up before."""

    lease_ids: tuple[str, ...]


PREPARED_TTL_S = 30.0
"""How long a nodelet holds a bundle that is not committed."""


class PlanRequest(Message):
    """Demands to place one after the other, as if they were requested now; nothing is allocated.

    With ``bundles`` it is a placement group that is placed, before the demands; of the two
    there is one at least. All is as work of the job
    ``job_id``, or where that is empty of a job in ``queue`` with ``priority``, of ``user`` (the caller, if
    empty).
    """

    demands: Annotated[tuple[Demand, ...], msgspec.Meta(max_length=MAX_PLANNED)] = ()
    bundles: Annotated[tuple[Bundle, ...], msgspec.Meta(max_length=MAX_PLANNED)] = ()
    strategy: GroupStrategy = GroupStrategy.PACK
    job_id: str = ""
    queue: str = ""
    user: str = ""
    priority: Int64 = 0


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
