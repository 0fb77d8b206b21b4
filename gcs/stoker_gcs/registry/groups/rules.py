"""The state machine of a placement group: pure rules over its record (called by ``groups.registry``).

=====================  ==============================  ============
from                   event                           to
=====================  ==============================  ============
(none)                 created                         PENDING
PENDING, RESCHEDULING  all missing bundles granted     CREATED
CREATED, RESCHEDULING  node of some bundles lost       RESCHEDULING
CREATED, RESCHEDULING  preempted                       RESCHEDULING
not REMOVED            some bundles released            the same
not REMOVED            the last bundle released         REMOVED
not REMOVED            removed; its job or owner ends  REMOVED
=====================  ==============================  ============

Each request for bundles is of an attempt of its own; a grant to an older one is refused. The scheduler
follows the events: it releases the bundles of a group that is removed; and those that a later attempt
requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.state import schema
from stoker_gcs.state.records import RecordTable, Transition
from stoker_wire.errors import BadRequestError, ConflictError
from stoker_wire.messages.events import EventKind
from stoker_wire.messages.groups import (
    BundlePlacement,
    CreatePlacementGroup,
    GroupState,
    GroupStrategy,
    PlacementGroup,
    Reschedule,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from stoker_wire.messages.cluster import GrantedLease

GROUPS: RecordTable[PlacementGroup] = RecordTable(
    schema.PLACEMENT_GROUPS,
    PlacementGroup,
    lambda group: {
        "group_id": group.group_id,
        "job_id": group.job_id,
        "state": group.state.value,
        "namespace": group.namespace,
        "name": group.name,
        "live_name": live_name(group.namespace, group.name)
        if group.name and group.state is not GroupState.REMOVED
        else None,
    },
    label="placement group",
)
LIVING = (GroupState.PENDING.value, GroupState.CREATED.value, GroupState.RESCHEDULING.value)
_replace = msgspec.structs.replace


def live_name(namespace: str, name: str) -> str:
    """Return what must be unique among living groups."""
    return f"{namespace}/{name}"


def created(body: CreatePlacementGroup, namespace: str, now_s: float) -> PlacementGroup:
    """Return the group that a request creates."""
    return PlacementGroup(
        group_id=body.group_id,
        job_id=body.job_id,
        state=GroupState.PENDING,
        strategy=body.strategy,
        bundles=body.bundles,
        name=body.name,
        namespace=namespace,
        detached=body.detached,
        reschedule=body.reschedule,
        owner=body.owner,
        created_at_s=now_s,
        preemptible=body.preemptible,
        preemption_grace_s=body.preemption_grace_s,
    )


def missing(group: PlacementGroup) -> tuple[int, ...]:
    """Return the numbers of the bundles that are to be placed."""
    if group.state is GroupState.REMOVED:
        return ()
    gone = {*group.placements, *group.released}
    return tuple(i for i in range(len(group.bundles)) if i not in gone)


def delayed(group: PlacementGroup, reason: str) -> Transition[PlacementGroup] | None:
    """Record why it waits; None if for the same reason as before."""
    if not missing(group) or group.reason == reason:
        return None
    return Transition(_replace(group, reason=reason), EventKind.GROUP_DELAYED)


def placed(
    group: PlacementGroup, granted: tuple[GrantedLease, ...], attempt: int, now_s: float
) -> Transition[PlacementGroup] | None:
    """Record where its missing bundles are; None if that is no longer wanted."""
    if not missing(group) or group.attempt != attempt:
        return None
    placements = dict(group.placements)
    for one in granted:
        lease = one.lease
        placements[lease.bundle] = BundlePlacement(
            lease_id=lease.lease_id,
            node_id=lease.node_id,
            node_incarnation=lease.node_incarnation,
        )
    then = _replace(
        group,
        state=GroupState.CREATED,
        placements=dict(sorted(placements.items())),
        placed_at_s=now_s,
        reason="",
    )
    return Transition(then, EventKind.GROUP_PLACED)


def node_lost(
    group: PlacementGroup, node_id: str, before_incarnation: int, reason: str, now_s: float
) -> Transition[PlacementGroup] | None:
    """Have the bundles placed again that were on these incarnations of a node; None if none was.

    Those of a group that reschedules none leave it.
    """
    kept = {
        index: placement
        for index, placement in group.placements.items()
        if placement.node_id != node_id or placement.node_incarnation >= before_incarnation
    }
    if group.state is GroupState.REMOVED or len(kept) == len(group.placements):
        return None
    if group.reschedule is Reschedule.NEVER:
        return _without(group, group.placements.keys() - kept.keys(), reason, now_s)
    whole = group.reschedule is Reschedule.GROUP or group.strategy is GroupStrategy.STRICT_PACK
    then = _replace(
        group,
        state=GroupState.RESCHEDULING,
        placements={} if whole else kept,
        attempt=group.attempt + 1,
        reschedules=group.reschedules + 1,
        reason=reason,
    )
    return Transition(then, EventKind.GROUP_RESCHEDULING)


def released(
    group: PlacementGroup, bundles: Collection[int], reason: str, now_s: float
) -> Transition[PlacementGroup] | None:
    """Give bundles up for good; None if they are. BadRequestError for one that the group never had.

    Until all are placed nothing is given up: a request for them is on its way.
    """
    unknown = sorted(index for index in bundles if index >= len(group.bundles))
    if unknown:
        raise BadRequestError(
            f"bundles: placement group {group.group_id} has no bundle {unknown[0]}\n"
            f"its bundles are 0 to {len(group.bundles) - 1}",
            field="bundles",
        )
    if group.state is GroupState.REMOVED or not set(bundles) - set(group.released):
        return None
    if missing(group):
        raise ConflictError(
            f"placement group {group.group_id} is {group.state}: it is not placed whole\n"
            "remove it, or wait until it is CREATED"
        )
    return _without(group, bundles, reason, now_s)


def _without(
    group: PlacementGroup, bundles: Collection[int], reason: str, now_s: float
) -> Transition[PlacementGroup]:
    """Return the group without some bundles for good; one that has no other ends."""
    kept = {i: place for i, place in group.placements.items() if i not in bundles}
    gone = tuple(sorted({*group.released, *bundles}))
    if len(gone) == len(group.bundles):
        then = _replace(
            group,
            state=GroupState.REMOVED,
            placements={},
            released=gone,
            removed_at_s=now_s,
            reason=reason,
        )
        return Transition(then, EventKind.GROUP_REMOVED)
    then = _replace(group, placements=kept, released=gone, reason=reason)
    return Transition(then, EventKind.GROUP_SHRUNK)


def preempted(
    group: PlacementGroup, lease_id: str, reason: str, now_s: float
) -> Transition[PlacementGroup] | None:
    """Have all bundles placed again, for others need the room; None if ``lease_id`` holds none of them.

    A group that reschedules none ends.
    """
    if lease_id not in (placement.lease_id for placement in group.placements.values()):
        return None
    if group.reschedule is Reschedule.NEVER:
        return removed(group, reason, now_s)
    then = _replace(
        group,
        state=GroupState.RESCHEDULING,
        placements={},
        attempt=group.attempt + 1,
        reschedules=group.reschedules + 1,
        preemptions=group.preemptions + 1,
        reason=reason,
    )
    return Transition(then, EventKind.GROUP_RESCHEDULING)


def removed(group: PlacementGroup, reason: str, now_s: float) -> Transition[PlacementGroup] | None:
    """End it; None if it has ended."""
    if group.state is GroupState.REMOVED:
        return None
    then = _replace(
        group, state=GroupState.REMOVED, placements={}, removed_at_s=now_s, reason=reason
    )
    return Transition(then, EventKind.GROUP_REMOVED)
