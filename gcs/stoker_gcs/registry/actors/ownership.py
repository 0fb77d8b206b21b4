"""Fate sharing: an actor that is not detached ends with the process that created it.

Whether an owner has ended is decided from what SQL keeps (its actor's record, its exit, its node), so
it is found after any crash of the gcs. The index only says whom to look at when something ends. Called
by the reconciler, which feeds it the log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.controllers.lease_requests import exit_of
from stoker_gcs.registry.actors.rules import ACTORS, exit_cause
from stoker_gcs.registry.nodes.rules import NODES
from stoker_wire.messages.cluster import NodeState
from stoker_wire.messages.common import ErrorInfo
from stoker_wire.messages.work import Actor, ActorState, Owner

if TYPE_CHECKING:
    from stoker_gcs.registry.actors.registry import ActorRegistry
    from stoker_gcs.state.records import Truth


class Ownership:
    """Which living actors belong to which worker, actor or node; ends those whose owner ended."""

    def __init__(self, truth: Truth, registry: ActorRegistry) -> None:
        self._truth = truth
        self._registry = registry
        self._owned: dict[str, set[str]] = {}
        """The ids of living actors by the id of their owner: worker, its actor, and its node."""

    def note(self, actor: Actor) -> None:
        """Keep an actor in mind while it lives."""
        for owner_id in _owners(actor):
            if actor.state is not ActorState.DEAD:
                self._owned.setdefault(owner_id, set()).add(actor.actor_id)
            elif (owned := self._owned.get(owner_id)) is not None:
                owned.discard(actor.actor_id)
                if not owned:
                    del self._owned[owner_id]

    def has(self, owner_id: str) -> bool:
        """Return whether anything belongs to this worker, actor or node."""
        return owner_id in self._owned

    async def ended(self, owner_id: str) -> None:
        """A worker, actor or node ended (or began anew): end what it leaves behind."""
        for actor_id in sorted(self._owned.get(owner_id, ())):
            await self.ends(actor_id)

    async def ends(self, actor_id: str) -> bool:
        """End the actor if its owner has ended; return whether it is so."""
        actor = await self._truth.get(ACTORS, actor_id)
        cause = await self._orphaned(actor)
        if cause is None:
            return False
        await self._registry.lose(actor_id, cause, restart=False, release=True)
        return True

    async def _orphaned(self, actor: Actor) -> ErrorInfo | None:
        owner = actor.owner
        if owner is None or not _owners(actor) or actor.state is ActorState.DEAD:
            return None
        found = await self._truth.find(ACTORS, owner.actor_id) if owner.actor_id else None
        of = found.record if found is not None else None
        name = f"actor {of.class_name} {of.actor_id}" if of else f"worker {owner.peer_id}"
        why = await self._end_of(owner, of)
        if not why:
            return None
        return ErrorInfo(
            code="actor_died",
            message=f"its owner, {name}, died: {why}",
            extra={"owner": msgspec.to_builtins(owner)},
        )

    async def _end_of(self, owner: Owner, actor: Actor | None) -> str:
        """Return what ended the owner, '' if it lives; ``actor`` is the one that it is."""
        if actor is not None and actor.state is ActorState.DEAD:
            return actor.death_cause.message if actor.death_cause else "no cause was recorded"
        exit_ = await exit_of(self._truth, owner.peer_id)
        if exit_ is not None:
            return exit_cause(exit_).message
        if actor is not None and actor.incarnation > owner.incarnation:
            return actor.death_cause.message if actor.death_cause else "it started again"
        kept = await self._truth.find(NODES, owner.node_id)
        if kept is None:
            return ""
        if kept.record.incarnation > owner.node_incarnation:
            return f"node {owner.node_id} started again"
        return f"node {owner.node_id} died" if kept.record.state is NodeState.DEAD else ""


def _owners(actor: Actor) -> tuple[str, ...]:
    """Return under which ids it is found; none for those that end with their job, or never."""
    owner = actor.owner
    if owner is None or actor.detached or not owner.node_id:
        return ()
    return tuple(i for i in (owner.peer_id, owner.actor_id, owner.node_id) if i)
