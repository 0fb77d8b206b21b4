"""Stops of leases that are held: what their owners give back, and what the nodelets end after notice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from stoker_scheduler.core.commands import Outbox, Preempt, StopLease
from stoker_scheduler.core.leases.lease import LeaseState, Phase
from stoker_scheduler.core.queueing.queue import GCS_OWNER
from stoker_scheduler.core.state import Timer

if TYPE_CHECKING:
    from stoker_scheduler.core.model.groups import PlacementGroup
    from stoker_scheduler.core.state import State


def ask_back(leases: Iterable[LeaseState], outbox: Outbox) -> None:
    """Have owners give leases back once what runs there has finished; the gcs keeps what it has."""
    by_owner: dict[str, list[str]] = {}
    for lease in leases:
        if lease.owner_id == GCS_OWNER or lease.phase is not Phase.HELD:
            continue  # it holds what it has until that ends; or nobody has it yet
        by_owner.setdefault(lease.owner_id, []).append(lease.lease_id)
    for owner_id, owned in by_owner.items():
        outbox.append(Preempt(owner_id=owner_id, lease_ids=tuple(owned)))


def stop_lease(
    state: State, lease: LeaseState, reason: str, grace_s: float, outbox: Outbox
) -> None:
    """Have the nodelet end a lease that is held, ``grace_s`` after its notice."""
    lease.stop_reason = reason
    due_s = state.at_s + grace_s + state.policy.stop_margin_s
    state.set_timer(due_s, Timer.STOP, lease.lease_id)
    outbox.append(
        StopLease(lease_id=lease.lease_id, node_id=lease.node_id, grace_s=grace_s, reason=reason)
    )


def stop_group(
    state: State,
    group: PlacementGroup,
    reason_of: Callable[[LeaseState], str],
    grace_s: float,
    outbox: Outbox,
) -> None:
    """Stop all that is in a group; its bundles end when that is over, or its time has passed."""
    if group.closing:
        return
    group.closing = True
    # One stands for all: with it the gcs gives up the whole group.
    bundle = state.leases[next(iter(group.bundles.values())).bundle_lease_id]
    bundle.stop_reason = reason_of(bundle)
    wait_s = 0.0 if group.is_empty else grace_s + state.policy.stop_margin_s
    state.set_timer(state.at_s + wait_s, Timer.STOP, bundle.lease_id)
    for place in group.bundles.values():
        for lease_id in place.leases:
            lease = state.leases[lease_id]
            if lease.phase is Phase.HELD and not lease.stop_reason:
                lease.preempted = True
                state.idle.pop(lease_id, None)
                stop_lease(state, lease, reason_of(lease), grace_s, outbox)
