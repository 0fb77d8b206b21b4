"""The copies of detached objects: as many nodes have each as it shall, and readers are told which."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from stoker_wire.errors import NotFoundError, ObjectLostError, StokerError, UnavailableError
from stoker_wire.messages.cluster import NodeState
from stoker_wire.messages.objects import (
    AdoptedObjects,
    AdoptObjects,
    DetachedObject,
    DetachedState,
    LocatedObject,
    ObjectInfo,
    ObjectSource,
    PullObject,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from stoker_gcs.peer_clients import PeerClients
    from stoker_gcs.registry.objects.registry import DetachedObjects
    from stoker_wire.messages.cluster import Node

_ASK_S = 10.0
_PULL_S = 600.0
_log = logging.getLogger(__name__)


class ObjectCopies:
    """The search for copies of detached objects, and the making of more."""

    def __init__(
        self, objects: DetachedObjects, peers: PeerClients, nodes: Mapping[str, Node]
    ) -> None:
        self._objects = objects
        self._peers = peers
        self._nodes = nodes
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def commit(self, object_id: str, node_id: str) -> DetachedObject:
        """Note that a node has an object; return once as many nodes as it shall have it."""
        one = await self._objects.get(object_id)
        await self._objects.placed(object_id, {*one.nodes, node_id})
        return await self.secure(object_id)

    async def locate(self, object_id: str, without: str = "") -> LocatedObject:
        """Return from where an object can be read; ``without`` is a node that has it no more.

        Raises ObjectLostError, which says why, if it is nowhere.
        """
        one = await self._objects.get(object_id)
        if one.inline:
            return LocatedObject(object=one, value=await self._objects.value(object_id))
        if without or one.state is DetachedState.LOST or not self._sources(one):
            one = await self.secure(object_id)
        if one.state is DetachedState.LOST and not one.path:
            raise ObjectLostError(f"detached object {object_id} is lost\n{one.message}")
        if one.state is DetachedState.CREATING:
            raise UnavailableError(f"detached object {object_id} is being written")
        return LocatedObject(object=one, sources=self._sources(one))

    def _sources(self, one: DetachedObject) -> tuple[ObjectSource, ...]:
        nodes = (self._nodes.get(node_id) for node_id in one.nodes)
        return tuple(
            ObjectSource(node_id=node.node_id, url=node.url)
            for node in nodes
            if node is not None and node.state is not NodeState.DEAD
        )

    async def secure(self, object_id: str) -> DetachedObject:
        """See to it that as many nodes have an object as it shall, or as there are; return its record.

        It is lost if every node that had it is dead and no other has it.
        """
        lock = self._locks.setdefault(object_id, asyncio.Lock())
        async with lock:
            one = await self._objects.get(object_id)
            if one.inline or (one.state is DetachedState.CREATING and not one.nodes):
                return one
            alive = {
                node.node_id: node for node in self._nodes.values() if node.state is NodeState.ALIVE
            }
            holders = await self._holders(one, [alive[i] for i in one.nodes if i in alive])
            if len(holders) < min(one.copies, len(alive)):
                others = [node for i, node in alive.items() if i not in one.nodes]
                holders |= await self._holders(one, others)
            if not holders:
                return await self._not_found(one)
            for node in sorted(alive.values(), key=_load):
                if len(holders) >= one.copies:
                    break
                if node.node_id not in holders:
                    holders |= await self._copy(one, node, alive[min(holders)])
            return await self._objects.placed(object_id, holders)

    async def _not_found(self, one: DetachedObject) -> DetachedObject:
        silent = [
            node_id
            for node_id in one.nodes
            if (node := self._nodes.get(node_id)) is not None and node.state is not NodeState.DEAD
        ]
        if silent:
            raise UnavailableError(
                f"detached object {one.object_id} was on {', '.join(silent)}, which does not answer"
            )
        deaths = [
            node.death if (node := self._nodes.get(node_id)) is not None else f"{node_id} is gone"
            for node_id in one.nodes
        ]
        kept = f"{one.copies} of them, {'on disk' if one.disk else 'in memory'}"
        back = "\nit is back once a node comes back with its copy on disk" if one.disk else ""
        why = f"all nodes that had it are dead ({kept}): " + "; ".join(deaths)
        return await self._objects.lost(one.object_id, why + back)

    async def _holders(self, one: DetachedObject, nodes: Iterable[Node]) -> set[str]:
        """Return which of these nodes have an object, and keep it from now on."""
        body = AdoptObjects(object_ids=(one.object_id,), disk=one.disk)

        async def ask(node: Node) -> str:
            try:
                adopted = await self._peers.client(node.url).call(
                    "POST",
                    "/v1/objects/adopt",
                    body,
                    reply=AdoptedObjects,
                    timeout_s=_PULL_S if one.disk else _ASK_S,
                    retry=False,
                )
            except StokerError as error:
                _log.info("%s does not say whether it has %s: %s", node.url, one.object_id, error)
                return ""
            return node.node_id if adopted.objects else ""

        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(ask(node)) for node in nodes]
        return {task.result() for task in asked} - {""}

    async def _copy(self, one: DetachedObject, to: Node, source: Node) -> set[str]:
        """Have a node pull an object and keep it; return its id if it does."""
        pull = PullObject(node_id=source.node_id, url=source.url, nbytes=one.nbytes)
        try:
            await self._peers.client(to.url).call(
                "POST",
                f"/v1/objects/{one.object_id}/pull",
                pull,
                reply=ObjectInfo,
                timeout_s=_PULL_S,
                retry=False,
            )
        except StokerError as error:
            _log.info("%s does not copy %s: %s", to.url, one.object_id, error)
            return set()
        return await self._holders(one, [to])

    async def report(self, node_id: str, object_ids: Iterable[str]) -> tuple[str, ...]:
        """Note what a node has; return what it may free, as it is no detached object any more."""
        unknown = []
        for object_id in object_ids:
            try:
                one = await self._objects.get(object_id)
                if node_id not in one.nodes and one.state is not DetachedState.CREATING:
                    living = {source.node_id for source in self._sources(one)}
                    await self._objects.placed(object_id, living | {node_id})
            except NotFoundError:
                unknown.append(object_id)
        return tuple(unknown)


def _load(node: Node) -> tuple[bool, float, str]:
    return node.drain is not None, node.usage.get("object_bytes", 0.0), node.node_id
