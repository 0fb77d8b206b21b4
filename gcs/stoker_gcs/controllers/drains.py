"""The controller of drains: nodes that are to be emptied, step by step, until they leave.

A drain is an order in the node's record. Each step asks the nodelet what is still there and does what can be
done about it, so that a step may be repeated by any replica at any time. The scheduler, which follows the
record, places nothing more there and has tasks and drivers end; actors, placement groups and objects are
moved from here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from stoker_gcs.registry.actors.rules import ACTORS
from stoker_gcs.registry.groups.rules import GROUPS
from stoker_wire.errors import ConflictError, NotFoundError, PreemptedError, StokerError
from stoker_wire.messages.cluster import (
    DrainStatus,
    HeldLeases,
    LeaseKind,
    Node,
    NodeState,
    Remainder,
)
from stoker_wire.messages.common import Empty, ErrorInfo
from stoker_wire.messages.groups import PlacementGroup, Reschedule
from stoker_wire.messages.node_api import (
    DrainOrder,
    HeldWork,
    KillWorker,
    LeaveOrder,
    MoveWorker,
    TakenOver,
)
from stoker_wire.messages.objects import ObjectSource
from stoker_wire.messages.work import ActorState
from stoker_wire.process.background import Background

if TYPE_CHECKING:
    from stoker_gcs.peer_clients import PeerClients
    from stoker_gcs.registry.actors.registry import ActorRegistry
    from stoker_gcs.registry.groups.registry import GroupRegistry
    from stoker_gcs.registry.nodes.registry import NodeRegistry
    from stoker_gcs.state.records import StateStore
    from stoker_wire.http.client.client import Client
    from stoker_wire.messages.cluster import Drain, HeldLease
    from stoker_wire.messages.work import Actor

_log = logging.getLogger(__name__)
EVERY_S = 0.25
CALL_S = 5.0
TAKE_OVER_S = 30.0
ENDED_S = 15.0
"""How long after the deadline what was ended may take to be gone; then the node leaves all the same."""
_IN_WORDS = {
    LeaseKind.TASK: "its tasks finish",
    LeaseKind.ACTOR: "it is moved once its running calls have finished",
    LeaseKind.DRIVER: "it is ended in time for the deadline, and run again elsewhere",
    LeaseKind.BUNDLE: "it is placed elsewhere once what runs in it has finished",
}
_STAYS = "it has max_restarts=0 and saves no state, so it cannot be moved: it ends at the deadline"


class Drains:
    """The drains of all nodes; ``run`` is for the leading replica."""

    def __init__(
        self,
        state: StateStore,
        peers: PeerClients,
        *,
        nodes: NodeRegistry,
        actors: ActorRegistry,
        groups: GroupRegistry,
    ) -> None:
        self._state = state
        self._peers = peers
        self._nodes = nodes
        self._actors = actors
        self._groups = groups
        self._busy: set[str] = set()
        self._waits: dict[str, StokerError] = {}
        """Why the last step of a drain could not be done; of this replica, if it leads."""

    async def run(self) -> None:
        """Take all drains on, until cancelled."""
        async with Background("gcs-drains") as work:
            self._busy.clear()
            while True:
                for node in list(self._nodes.view.values()):
                    drains = node.drain is not None and node.state is not NodeState.DEAD
                    if drains and node.node_id not in self._busy:
                        self._busy.add(node.node_id)
                        work.spawn(self._take_on(node.node_id), name=f"drain-{node.node_id}")
                await asyncio.sleep(EVERY_S)

    async def _take_on(self, node_id: str) -> None:
        try:
            await self._step(node_id)
            self._waits.pop(node_id, None)
        except StokerError as error:
            known = self._waits.get(node_id)
            if known is None or known.code != error.code:
                _log.info("the drain of %s waits: %s", node_id, error)
            self._waits[node_id] = error
        finally:
            self._busy.discard(node_id)

    async def status(self, node_id: str) -> DrainStatus:
        """Return how a node's drain goes."""
        node = await self._nodes.get(node_id)
        if node.state is NodeState.DEAD:
            done = node.drain is not None and node.drain.ended_at_s > 0
            return DrainStatus(
                node_id=node_id,
                state="DRAINED" if done else "DEAD",
                summary=f"{node.end} ({node.reason})",
                drain=node.drain,
            )
        if node.drain is None:
            closed = node.cordon.text if node.cordon else "open to new work"
            text = f"node {node_id} is not drained: it is {closed}"
            return DrainStatus(node_id=node_id, state="NONE", summary=text)
        left: tuple[Remainder, ...] = ()
        waits = self._waits.get(node_id)
        try:
            held = await self._held(self._peers.client(node.url))
        except StokerError as error:
            waits = error
        else:
            left = _left(held, await self._stay(held))
        things = f"{len(left)} thing{'s are' if len(left) != 1 else ' is'} left"
        return DrainStatus(
            node_id=node_id,
            state="DRAINING",
            summary=f"node {node_id} is {node.drain.text}; {waits or things}",
            drain=node.drain,
            left=left,
        )

    async def _stay(self, held: HeldWork) -> set[str]:
        """Return the actors that may not be started again, and so stay until the deadline."""
        of_actors = [one for one in held.leases if one.lease.kind is LeaseKind.ACTOR]
        found = [(one, await self._state.find(ACTORS, one.lease.actor_id)) for one in of_actors]
        return {
            row.record.actor_id
            for one, row in found
            if row is not None and not _may_move(row.record, one)
        }

    async def _held(self, client: Client) -> HeldWork:
        return await client.call(
            "POST", "/v1/drain", DrainOrder(), reply=HeldWork, timeout_s=CALL_S, retry=False
        )

    async def _step(self, node_id: str) -> None:
        node = await self._nodes.get(node_id)
        drain = node.drain
        if drain is None or node.state is NodeState.DEAD:
            return
        client = self._peers.client(node.url)
        late_s = self._state.now() - drain.deadline_at_s
        held = await self._held(client)
        for one in held.leases:
            if one.lease.kind is LeaseKind.ACTOR:
                await self._move_actor(client, node, drain, one, late=late_s >= 0)
        await self._move_bundles(node, drain, held, late=late_s >= 0)
        if late_s >= 0:
            await self._end_owners(client, held, f"node {node_id} is {drain.text}")
        if (held.leases or held.workers) and late_s < ENDED_S:
            return
        moved = await self._move_objects(client, node, held)
        if not moved and late_s < ENDED_S:
            return
        leave = LeaveOrder(incarnation=node.incarnation)
        await client.call("POST", "/v1/leave", leave, reply=Empty, timeout_s=CALL_S, retry=False)

    async def _move_actor(
        self, client: Client, node: Node, drain: Drain, held: HeldLease, *, late: bool
    ) -> None:
        row = await self._state.find(ACTORS, held.lease.actor_id)
        if row is None or row.record.lease_id != held.lease.lease_id:
            return  # it is elsewhere, and what it had here ends
        actor = row.record
        reason = f"node {node.node_id} is {drain.text}"
        if late:
            await self._actors.lose_worker(
                actor.actor_id,
                _cause(actor, held, reason),
                lease_id=held.lease.lease_id,
                restart=_may_move(actor, held),
                release=True,
                moves=True,
            )
        elif actor.state is ActorState.ALIVE and _may_move(actor, held):
            path = f"/v1/workers/{actor.worker_id}/move"
            try:
                await client.call(
                    "POST", path, MoveWorker(reason=reason), reply=Empty, timeout_s=CALL_S
                )
            except (ConflictError, NotFoundError):
                return  # it ends, or does not run yet

    async def _end_owners(self, client: Client, held: HeldWork, reason: str) -> None:
        """End the workers that run nothing, and stayed because others need what they own."""
        for worker_id in held.workers:
            path = f"/v1/workers/{worker_id}/kill"
            with contextlib.suppress(NotFoundError):
                await client.call(
                    "POST", path, KillWorker(reason=reason), reply=Empty, timeout_s=CALL_S
                )

    async def _move_bundles(self, node: Node, drain: Drain, held: HeldWork, *, late: bool) -> None:
        groups = {one.lease.group_id for one in held.leases if one.lease.kind is LeaseKind.BUNDLE}
        in_use = {
            one.lease.group_id for one in held.leases if one.lease.kind is not LeaseKind.BUNDLE
        }
        if not groups:
            return
        found = [await self._state.find(GROUPS, group_id) for group_id in sorted(groups)]
        known = [one.record for one in found if one is not None]
        stay = [] if late else [one for one in known if await self._is_used(one, node, in_use)]
        if len(stay) < len(known):
            await self._groups.node_lost(
                node.node_id,
                node.incarnation + 1,
                f"node {node.node_id} is {drain.text}",
                stay=stay,
            )

    async def _is_used(self, group: PlacementGroup, node: Node, in_use: set[str]) -> bool:
        """Return whether a group stays until the deadline: something runs in what is to be moved of it."""
        if group.group_id in in_use:
            return True
        if group.reschedule is not Reschedule.GROUP:
            return False
        for node_id in {one.node_id for one in group.placements.values()} - {node.node_id}:
            other = self._nodes.view.get(node_id)
            if other is None or other.state is NodeState.DEAD:
                continue
            held = await self._peers.client(other.url).call(
                "GET", "/v1/leases", reply=HeldLeases, timeout_s=CALL_S, retry=False
            )
            if any(
                one.lease.group_id == group.group_id and one.lease.kind is not LeaseKind.BUNDLE
                for one in held.leases
            ):
                return True
        return False

    async def _move_objects(self, client: Client, node: Node, held: HeldWork) -> bool:
        """Have another node take over the objects, also those to come; return whether all are there."""
        target = self._nodes.view.get(node.objects_at)
        if target is None or target.state is NodeState.DEAD or target.drain is not None:
            others = [one for one in self._nodes.view.values() if one.node_id != node.node_id]
            fit = [self._nodes.with_heartbeat(one) for one in others if _takes_objects(one)]
            if not fit:
                return held.objects == 0
            target = min(fit, key=lambda one: (one.usage.get("object_bytes", 0.0), one.node_id))
            await self._nodes.hand_over(node.node_id, target.node_id)
        taken = await client.call(
            "POST",
            "/v1/objects/hand-over",
            ObjectSource(node_id=target.node_id, url=target.url),
            reply=TakenOver,
            timeout_s=TAKE_OVER_S,
            retry=False,
        )
        return taken.left == 0


def _may_move(actor: Actor, held: HeldLease) -> bool:
    return actor.max_restarts != 0 or actor.saves_state or held.lease.preemptible


def _cause(actor: Actor, held: HeldLease, reason: str) -> ErrorInfo:
    if held.lease.preemptible:
        return ErrorInfo(code=PreemptedError.code, message=f"it was ended as {reason}")
    if _may_move(actor, held):
        text = f"it was ended as {reason}\nits calls had not finished by then"
    else:
        text = (
            f"it was ended as {reason}\n"
            "it has max_restarts=0 and saves no state, so it could not be moved"
        )
    return ErrorInfo(code="actor_died", message=text, extra={"node_id": held.lease.node_id})


def _takes_objects(node: Node) -> bool:
    return node.state is NodeState.ALIVE and node.drain is None


def _left(held: HeldWork, stay: set[str]) -> tuple[Remainder, ...]:
    left = [
        Remainder(
            kind=one.lease.kind.value,
            id=one.lease.actor_id or one.lease.group_id or one.lease.job_id,
            name=one.lease.name,
            why=_STAYS if one.lease.actor_id in stay else _IN_WORDS[one.lease.kind],
        )
        for one in held.leases
    ]
    left += [
        Remainder(kind="worker", id=one, why="others need objects, calls or actors that it owns")
        for one in held.workers
    ]
    if held.objects:
        why = f"{held.objects} are to be taken over by another node"
        left.append(Remainder(kind="objects", name=str(held.objects), why=why))
    return tuple(left)
