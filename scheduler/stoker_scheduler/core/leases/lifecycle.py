"""The moves of a lease and of a request: placed, started, told, released, lost.

Each function makes one move and leaves the state's books balanced; ``machine`` decides when.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from stoker_scheduler.core.commands import (
    Command,
    Lost,
    Refusal,
    Reject,
    ReleaseLease,
    Reply,
    StartLease,
)
from stoker_scheduler.core.events import Kind
from stoker_scheduler.core.model.resources import CPU
from stoker_scheduler.core.queueing.queue import GCS_OWNER, Ask
from stoker_scheduler.core.state import Answer, LeaseState, Phase, State

if TYPE_CHECKING:
    from stoker_scheduler.core.model.nodes import Node
    from stoker_scheduler.core.model.requirements import Need


def place(state: State, ask: Ask, node: Node, out: list[Command]) -> None:
    """Take what one lease of ``ask`` needs on ``node``, where it fits, and have it started."""
    asked, need = ask.asked, ask.need
    gpus = node.devices.choose(need.gpu) or {}
    lease = LeaseState(
        lease_id=lease_id_of(asked.request_id, state.term, state.next_number()),
        owner_id=asked.owner_id,
        account=ask.account,
        job_id=asked.job_id,
        kind=asked.kind,
        node_id=node.node_id,
        incarnation=node.spec.incarnation,
        need=need,
        gpus=gpus,
        class_key=asked.class_key,
        priority=asked.priority,
        granted_at_s=state.at_s,
        request_id=asked.request_id,
        actor_id=asked.actor_id,
        name=asked.name,
    )
    if need.spread:
        node.turn = state.next_number()
    occupy(state, lease, node)
    ask.starting[lease.lease_id] = None
    ask.wanted -= 1
    if ask.wanted == 0:
        state.queue.drop(ask)
    state.placed += 1
    kept = state.reserved.get(need)
    if kept is not None and kept.node_id == node.node_id:
        unreserve(state, need)
    out.append(
        StartLease(
            lease_id=lease.lease_id,
            request_id=asked.request_id,
            node_id=node.node_id,
            gpus=gpus,
        )
    )


def unreserve(state: State, need: Need) -> None:
    """Open the node that was kept for ``need`` to all again."""
    kept = state.reserved.pop(need)
    node = state.nodes[kept.node_id]
    node.reserved_for, node.reserved_names = None, frozenset()
    state.touch(kept.node_id)


def occupy(state: State, lease: LeaseState, node: Node) -> None:
    """Enter a new lease into the books."""
    node.take(lease.need, lease.gpus, blocked=lease.blocked)
    node.leases[lease.lease_id] = None
    state.leases[lease.lease_id] = lease
    if lease.phase is Phase.STARTING:
        state.starts.add(lease)
    state.charge(lease.account, lease.held, +1)
    state.touch(node.node_id)


def forget(state: State, lease: LeaseState) -> None:
    """Take a lease out of the books: what it held is free."""
    detach(state, lease)
    del state.leases[lease.lease_id]
    state.charge(lease.account, lease.held, -1)
    node = state.nodes[lease.node_id]
    del node.leases[lease.lease_id]
    node.give(lease.need, lease.gpus, blocked=lease.blocked)
    state.touch(lease.node_id)


def detach(state: State, lease: LeaseState, *, again: bool = True) -> Ask | None:
    """Part a lease from the request that waits for it, which then wants another (``again``)."""
    state.starts.drop(lease)
    state.idle.pop(lease.lease_id, None)
    state.unclaimed.pop(lease.lease_id, None)
    ask = state.asks.get(lease.request_id)
    if ask is None or lease.phase not in (Phase.STARTING, Phase.READY):
        return None
    ask.starting.pop(lease.lease_id, None)
    ask.ready.pop(lease.lease_id, None)
    state.unsettled[ask.request_id] = None
    lease.request_id = ""
    if again:
        ask.wanted += 1
        state.queue.put(ask)
    return ask


def release(
    state: State, lease: LeaseState, out: list[Command], *, kill: bool, reason: str, tell: bool
) -> None:
    """End a lease; its resources are free when the nodelet confirms. ``tell`` its owner too."""
    told = lease.phase is Phase.HELD
    if lease.phase is not Phase.RELEASING:
        if lease.phase is not Phase.HELD:
            kill = True  # nobody knows yet what its worker has begun
        detach(state, lease)
        lease.move(Phase.RELEASING)
        lease.idle = False
    elif lease.kill or not kill:
        return
    lease.kill = kill
    out.append(
        ReleaseLease(lease_id=lease.lease_id, node_id=lease.node_id, kill=kill, reason=reason)
    )
    if told and tell:
        out.append(Lost(owner_id=lease.owner_id, lease_ids=(lease.lease_id,)))


def lose(state: State, lease: LeaseState, out: list[Command]) -> None:
    """Drop a lease whose worker or node is gone; the owner learns of it."""
    if lease.phase is Phase.HELD:
        out.append(Lost(owner_id=lease.owner_id, lease_ids=(lease.lease_id,)))
    forget(state, lease)


def block(state: State, lease: LeaseState, blocked: bool) -> None:
    """Free the lease's CPU while its worker waits in ``get``, or take it back."""
    if lease.blocked is blocked or lease.phase is Phase.RELEASING:
        return
    cpu = dict(lease.need.items).get(CPU, 0)
    lease.blocked = blocked
    if not cpu:
        return
    sign = 1 if blocked else -1
    node = state.nodes[lease.node_id]
    node.available[CPU] = node.available.get(CPU, 0) + sign * cpu
    state.charge(lease.account, ((CPU, cpu),), -sign)
    state.touch(lease.node_id)


def claim(state: State, ask: Ask) -> None:
    """Give ``ask`` the leases of its owner and class whose own request has ended."""
    for lease_id in list(state.unclaimed):
        if ask.wanted == 0:
            return
        lease = state.leases[lease_id]
        if lease.account == ask.account and lease.class_key == ask.asked.class_key:
            adopt_by(state, lease, ask)
            ask.wanted -= 1


def adopt_by(state: State, lease: LeaseState, ask: Ask) -> None:
    """Enter an unclaimed lease into the ask's books (the caller counts ``wanted``)."""
    del state.unclaimed[lease.lease_id]
    lease.request_id = ask.request_id
    into = ask.starting if lease.phase is Phase.STARTING else ask.ready
    into[lease.lease_id] = None
    state.unsettled[ask.request_id] = None


def disclaim(state: State, ask: Ask) -> None:
    """Part an ending ask from its leases; they wait for the owner's next ask, for a while."""
    for lease_id in (*ask.starting, *ask.ready):
        lease = state.leases[lease_id]
        lease.request_id = ""
        state.unclaimed[lease_id] = None
        if lease.phase is Phase.READY:
            state.set_timer(state.at_s + state.policy.lease_ttl_s, "unclaimed", lease_id)
    ask.starting.clear()
    ask.ready.clear()
    state.queue.drop(ask)
    del state.asks[ask.request_id]
    state.unsettled.pop(ask.request_id, None)


def reply(state: State, ask: Ask, out: list[Command], note: str = "") -> None:
    """Answer ``ask`` with what is ready; what still starts is kept for the owner's next ask."""
    at_s, granted = state.at_s, tuple(ask.ready)
    position = 0 if granted or not ask.wanted else state.queue.position(ask)
    if not granted and ask.wanted:
        state.queue.remember(ask, at_s)
    for lease_id in granted:
        lease = state.leases[lease_id]
        lease.move(Phase.HELD)
        if lease.owner_id != GCS_OWNER:
            lease.expires_at_s = at_s + state.policy.lease_ttl_s
            state.set_timer(lease.expires_at_s, "expire", lease_id)
    ask.ready.clear()
    disclaim(state, ask)
    if granted:
        remember_answer(state, ask.request_id, granted)
    out.append(
        Reply(request_id=ask.request_id, lease_ids=granted, queue_position=position, note=note)
    )


def reject(state: State, ask: Ask, refusal: Refusal, text: str, out: list[Command]) -> None:
    """Refuse ``ask`` for good."""
    disclaim(state, ask)
    out.append(Reject(request_id=ask.request_id, refusal=refusal, text=text))


def lease_id_of(request_id: str, term: str, number: int) -> str:
    """Name a lease after its request: ``r_ab`` -> ``l_ab.1.2f``.

    A later scheduler that adopts the lease so knows which request it has answered.
    """
    return f"l_{request_id.removeprefix('r_')}.{term}.{number:x}"


def request_id_of(lease_id: str) -> str:
    """Return the request that a lease was granted to, by its id."""
    return "r_" + lease_id.removeprefix("l_").rsplit(".", 2)[0]


def remember_answer(state: State, request_id: str, lease_ids: tuple[str, ...]) -> None:
    """Keep what a request was told for as long as its leases live, and a while at least."""
    answers = state.answers
    answers[request_id] = Answer(state.at_s, lease_ids)
    for oldest_id in list(itertools.islice(answers, 2)):
        oldest = answers[oldest_id]
        if oldest.at_s >= state.at_s - state.policy.remember_answers_s:
            return
        del answers[oldest_id]
        if any(lease_id in state.leases for lease_id in oldest.lease_ids):
            answers[oldest_id] = Answer(state.at_s, oldest.lease_ids)


def must_kill(lease: LeaseState) -> bool:
    """Whether the lease's worker serves it alone, so that no other lease may have it."""
    return lease.kind is not Kind.TASK
