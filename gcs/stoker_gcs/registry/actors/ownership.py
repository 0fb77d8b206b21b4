"""Fate sharing: an actor that is not detached ends with the process that created it.

Whether an owner has ended is decided from SQL (its actor's record, its exit, its node), so the
decision survives any crash of the gcs. The index only says which actors to check when something
ends. Called by the reconciler, which feeds it the log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.registry.actors.rules import ACTORS, exit_cause
from stoker_gcs.registry.nodes.rules import NODES
from stoker_gcs.registry.worker_exits import find_exit
from stoker_wire.messages.cluster import NodeState
from stoker_wire.messages.common import ErrorInfo
from stoker_wire.messages.work import Actor, ActorState, Owner

if TYPE_CHECKING:
    from stoker_gcs.registry.actors.registry import ActorRegistry
    from stoker_gcs.state.records import StateStore


class Ownership:
    """The living actors by their owner (worker, actor or node); ends those whose owner ended."""

    def __init__(self, state: StateStore, registry: ActorRegistry) -> None:
        self._state = state
        self._registry = registry
        self._owned: dict[str, set[str]] = {}
        """The ids of living actors by the id of their owner: worker, its actor, and its node."""

    def track(self, actor: Actor) -> None:
        """Index an actor while it lives."""
        for owner_id in _owners(actor):
            if actor.state is not ActorState.DEAD:
                self._owned.setdefault(owner_id, set()).add(actor.actor_id)
            elif (owned := self._owned.get(owner_id)) is not None:
                owned.discard(actor.actor_id)
                if not owned:
                    del self._owned[owner_id]

    def owns_any(self, owner_id: str) -> bool:
        """Return whether anything belongs to this worker, actor or node."""
        return owner_id in self._owned

    async def end_owned_by(self, owner_id: str) -> None:
        """End the actors of a worker, actor or node that ended (or began anew)."""
        for actor_id in sorted(self._owned.get(owner_id, ())):
            await self.end_if_orphaned(actor_id)

    async def end_if_orphaned(self, actor_id: str) -> bool:
        """End the actor if its owner has ended; return whether it has."""
        actor = await self._state.get(ACTORS, actor_id)
        cause = await self._cause_of_orphan(actor)
        if cause is None:
            return False
        await self._registry.lose_worker(actor_id, cause, restart=False, release=True)
        return True

    async def _cause_of_orphan(self, actor: Actor) -> ErrorInfo | None:
        owner = actor.owner
        if owner is None or not _owners(actor) or actor.state is ActorState.DEAD:
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


def _owners(actor: Actor) -> tuple[str, ...]:
    """Return the ids to index it by; none for those that end with their job, or never."""
    owner = actor.owner
    if owner is None or actor.detached or not owner.node_id:
        return ()
    return tuple(i for i in (owner.peer_id, owner.actor_id, owner.node_id) if i)
