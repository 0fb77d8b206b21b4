"""Fate sharing: an actor or placement group that is not detached ends with the process that created it.

Whether an owner has ended is decided from SQL (its actor's record, its exit, its node), so the decision
survives any crash of the gcs. The index only says what to check when something ends. Called by the
reconciler, which feeds it the log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.registry.actors.rules import ACTORS, exit_cause
from stoker_gcs.registry.groups.rules import GROUPS
from stoker_gcs.registry.nodes.rules import NODES
from stoker_gcs.registry.worker_exits import find_exit
from stoker_wire.ids import Prefix, is_id
from stoker_wire.messages.cluster import NodeState
from stoker_wire.messages.common import ErrorInfo
from stoker_wire.messages.groups import GroupState, PlacementGroup
from stoker_wire.messages.work import Actor, ActorState, Owner

if TYPE_CHECKING:
    from stoker_gcs.registry.actors.registry import ActorRegistry
    from stoker_gcs.registry.groups.registry import GroupRegistry
    from stoker_gcs.state.records import StateStore


class Ownership:
    """Living actors and groups by their owner (worker, actor or node); ends those whose owner ended."""

    def __init__(self, state: StateStore, actors: ActorRegistry, groups: GroupRegistry) -> None:
        self._state = state
        self._actors = actors
        self._groups = groups
        self._owned: dict[str, set[str]] = {}
        """The ids of actors and groups by the id of their owner: worker, its actor, and its node."""

    def track(self, owned: Actor | PlacementGroup) -> None:
        """Index an actor or a placement group while it lives."""
        owned_id = _id_of(owned)
        for owner_id in _owners(owned):
            if not _has_ended(owned):
                self._owned.setdefault(owner_id, set()).add(owned_id)
            elif (others := self._owned.get(owner_id)) is not None:
                others.discard(owned_id)
                if not others:
                    del self._owned[owner_id]

    def owns_any(self, owner_id: str) -> bool:
        """Return whether anything belongs to this worker, actor or node."""
        return owner_id in self._owned

    async def end_owned_by(self, owner_id: str) -> None:
        """End what belongs to a worker, actor or node that ended (or began anew)."""
        for owned_id in sorted(self._owned.get(owner_id, ())):
            await self.end_if_orphaned(owned_id)

    async def end_if_orphaned(self, owned_id: str) -> bool:
        """End the actor or group if its owner has ended; return whether it has."""
        is_group = is_id(owned_id, Prefix.GROUP)
        owned: Actor | PlacementGroup
        if is_group:
            owned = await self._state.get(GROUPS, owned_id)
        else:
            owned = await self._state.get(ACTORS, owned_id)
        cause = await self._cause_of_orphan(owned)
        if cause is None:
            return False
        if is_group:
            await self._groups.remove(owned_id, cause.message)
        else:
            await self._actors.lose_worker(owned_id, cause, restart=False, release=True)
        return True

    async def _cause_of_orphan(self, owned: Actor | PlacementGroup) -> ErrorInfo | None:
        owner = owned.owner
        if owner is None or not _owners(owned) or _has_ended(owned):
            return None
        row = await self._state.find(ACTORS, owner.actor_id) if owner.actor_id else None
        parent = row.record if row is not None else None
        name = f"worker {owner.peer_id}"
        if parent is not None:
            name = f"actor {parent.class_name} {parent.actor_id}"
        why = await self._end_of(owner, parent)
        if not why:
            return None
        return ErrorInfo(
            code="actor_died",
            message=f"its owner, {name}, died: {why}",
            extra={"owner": msgspec.to_builtins(owner)},
        )

    async def _end_of(self, owner: Owner, actor: Actor | None) -> str:
        """Return why the owner ended, '' if it lives; ``actor`` is the record of an owner that is one."""
        if actor is not None and actor.state is ActorState.DEAD:
            return actor.death_cause.message if actor.death_cause else "no cause was recorded"
        exit_ = await find_exit(self._state, owner.peer_id)
        if exit_ is not None:
            return exit_cause(exit_).message
        if actor is not None and actor.incarnation > owner.incarnation:
            return actor.death_cause.message if actor.death_cause else "it started again"
        node = await self._state.find(NODES, owner.node_id)
        if node is None:
            return ""
        if node.record.incarnation > owner.node_incarnation:
            return f"node {owner.node_id} started again"
        return f"node {owner.node_id} died" if node.record.state is NodeState.DEAD else ""


def _id_of(owned: Actor | PlacementGroup) -> str:
    return owned.actor_id if isinstance(owned, Actor) else owned.group_id


def _has_ended(owned: Actor | PlacementGroup) -> bool:
    return owned.state in (ActorState.DEAD, GroupState.REMOVED)


def _owners(owned: Actor | PlacementGroup) -> tuple[str, ...]:
    """Return the ids to index it by; none for what ends with its job, or never."""
    owner = owned.owner
    if owner is None or owned.detached or not owner.node_id:
        return ()
    return tuple(i for i in (owner.peer_id, owner.actor_id, owner.node_id) if i)
