"""The controller of detached objects: copies are made again when nodes die, and what is over is freed.

Runs on the leading replica only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

from stoker_wire.errors import NotFoundError, StokerError
from stoker_wire.messages.cluster import NodeState
from stoker_wire.messages.objects import ACTOR_NAMESPACE, DetachedState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stoker_gcs.registry.actors.registry import ActorRegistry
    from stoker_gcs.registry.objects.copies import ObjectCopies
    from stoker_gcs.registry.objects.registry import DetachedObjects
    from stoker_wire.messages.cluster import Node
    from stoker_wire.messages.objects import DetachedObject

_log = logging.getLogger(__name__)
LOOK_S = 1.0
AT_ONCE = 8
UNREPORTED_S = 60.0
"""How long a saved state may be there that its actor's record does not name: it is not reported yet."""


class ObjectController:
    """The loop over all detached objects."""

    def __init__(
        self,
        objects: DetachedObjects,
        actors: ActorRegistry,
        copies: ObjectCopies,
        nodes: Mapping[str, Node],
    ) -> None:
        self._actors = actors
        self._objects = objects
        self._copies = copies
        self._nodes = nodes

    async def run(self) -> None:
        """Mend what has fewer copies than it shall, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._objects.view:
                await self.mend()

    async def mend(self) -> None:
        """Free what is over, and make copies of what dead nodes had."""
        slots = asyncio.Semaphore(AT_ONCE)

        async def secure(one: DetachedObject) -> None:
            async with slots:
                try:
                    await self._copies.secure(one.object_id)
                except StokerError as error:
                    _log.info("detached object %s: %s", one.object_id, error)

        alive = sum(node.state is NodeState.ALIVE for node in self._nodes.values())
        found = list(self._objects.view.values())
        spent = await self._spent([one for one in found if one.namespace == ACTOR_NAMESPACE])
        async with asyncio.TaskGroup() as group:
            for one in found:
                if self._objects.is_over(one) or one.object_id in spent:
                    with contextlib.suppress(NotFoundError):
                        await self._objects.free(one.object_id)
                elif self._is_short(one, alive):
                    group.create_task(secure(one))

    async def _spent(self, states: list[DetachedObject]) -> set[str]:
        """Return the saved states that no actor will go on with: it is dead, or has saved a later one."""
        if not states:
            return set()
        actors = {one.object_id: one.name.partition(":")[0] for one in states}
        current = await self._actors.saved_states(set(actors.values()))
        return {
            one.object_id
            for one in states
            if (saved := current.get(actors[one.object_id])) is None
            or (
                saved != one.object_id
                and one.state is DetachedState.READY
                and time.time() - one.created_at_s > UNREPORTED_S
            )
        }

    def _is_short(self, one: DetachedObject, alive: int) -> bool:
        """Return whether too few of the nodes that have it live, and more could."""
        if one.state is not DetachedState.READY or one.inline:
            return False
        living = sum(
            (node := self._nodes.get(node_id)) is not None and node.state is not NodeState.DEAD
            for node_id in one.nodes
        )
        return living < min(one.copies, max(alive, 1))
