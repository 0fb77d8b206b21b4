"""Evictions: leases that must leave their node, for it drains or has a taint that they do not tolerate.

A NoExecute taint ends what does not tolerate it, with the notice of a preemption, so that it runs again
elsewhere and uses up no retry. A drain lets what runs finish: owners give back the leases of tasks, and get
no others there; what is preemptible gets its notice at once, and what is left in time to be gone at the
deadline. Actors and placement groups are moved by the gcs, which knows what may be started again.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stoker_scheduler.core.events import Kind
from stoker_scheduler.core.leases.lease import LeaseState, Phase
from stoker_scheduler.core.leases.lifecycle import release, set_expiry
from stoker_scheduler.core.leases.stops import ask_back, stop_group, stop_lease
from stoker_scheduler.core.model.taints import Effect, leaves_at
from stoker_scheduler.core.state import Timer

if TYPE_CHECKING:
    from stoker_scheduler.core.commands import Outbox
    from stoker_scheduler.core.model.nodes import NodeInfo, NodeSpec
    from stoker_scheduler.core.state import State

_LEFT_TO_GCS = (Kind.ACTOR, Kind.BUNDLE)


def evict(state: State, node: NodeInfo, outbox: Outbox) -> None:
    """Do what is due with the leases of a node now, and set a timer for the rest; again changes nothing."""
    spec = node.spec
    if not spec.evicts:
        return
    next_s = math.inf
    asked: list[LeaseState] = []
    for lease in _leases_of(state, node):
        if lease.phase is Phase.RELEASING or lease.stop_reason:
            continue
        due_s, reason = _due(state, spec, lease)
        if lease.phase is not Phase.HELD:
            # Nobody uses it yet: its request gets another one elsewhere.
            if spec.drain_until_s is not None or due_s <= state.at_s:
                release(state, lease, outbox, kill=True, reason=reason, notify=False)
            continue
        if spec.drain_until_s is not None and lease.kind is Kind.TASK and not lease.preempted:
            lease.preempted = True
            if lease.idle:  # its owner may be stopped, and not give back what it does not use
                set_expiry(state, lease, state.policy.lease_ttl_s)
            state.idle.pop(lease.lease_id, None)
            asked.append(lease)
        if due_s <= state.at_s:
            _stop(state, lease, reason, outbox)
        else:
            next_s = min(next_s, due_s)
    ask_back(asked, outbox)
    if next_s < math.inf:
        state.set_timer(next_s, Timer.EVICT, node.node_id)


def _leases_of(state: State, node: NodeInfo) -> list[LeaseState]:
    """Return the leases on a node, those in its bundles too."""
    found = [state.leases[lease_id] for lease_id in node.leases]
    for bundle in list(found):
        if bundle.holds is not None:
            found += [state.leases[lease_id] for lease_id in bundle.holds.leases]
    return found


def _due(state: State, spec: NodeSpec, lease: LeaseState) -> tuple[float, str]:
    """Return when a lease must be given notice, and why; never for what nothing here ends."""
    due_s, reason = math.inf, f"node {spec.node_id} is {spec.cordon}"
    until_s = spec.drain_until_s
    if until_s is not None and lease.kind not in _LEFT_TO_GCS:
        due_s = state.at_s if lease.preemptible else until_s - state.grace_s(lease)
    if lease.in_bundle:
        return due_s, reason  # its bundle is what tolerates the node
    for taint in spec.taints:
        if taint.effect is not Effect.NO_EXECUTE:
            continue
        leaves_s = leaves_at(taint, lease.requirements.tolerations)
        if leaves_s < due_s:
            due_s = leaves_s
            reason = f"node {spec.node_id} has the taint {taint.text}, which it does not tolerate"
            if leaves_s > -math.inf:
                reason += f" for longer than {leaves_s - taint.at_s:g} s"
    return due_s, reason


def _stop(state: State, lease: LeaseState, reason: str, outbox: Outbox) -> None:
    grace_s, until_s = state.grace_s(lease), lease.place.spec.drain_until_s
    if until_s is not None:
        grace_s = min(grace_s, max(0.0, until_s - state.at_s))
    lease.preempted = True
    state.idle.pop(lease.lease_id, None)
    if lease.kind is Kind.BUNDLE:
        stop_group(state, state.groups[lease.group_id], lambda _: reason, grace_s, outbox)
    else:
        stop_lease(state, lease, reason, grace_s, outbox)
