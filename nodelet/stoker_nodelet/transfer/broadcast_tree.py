"""Broadcast along a tree: every node that has a chunk of an object serves it to others.

The root is this node, the objects' home, which assigns each puller its source. No clock, no IO. The home
sends a puller to itself while it feeds fewer than ``FAN_OUT`` pulls of the object, then to a node that
pulls or has pulled it; such a node passes on each chunk as soon as it has it, so the depth of the tree
costs a chunk's time per level, and no node's link carries the object more than ``FAN_OUT`` times.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from stoker_wire.messages.objects import ObjectSource

FAN_OUT = 2

_SILENT_S = 60.0
"""A pull that was silent for so long no longer counts as a load."""


@dataclass(slots=True)
class _Puller:
    url: str
    upstream: str
    heard_at_s: float
    whole: bool = False


@dataclass(slots=True)
class BroadcastTree:
    """Pullers of this node's objects: object id -> node id -> how far that node is."""

    _pullers: dict[str, dict[str, _Puller]] = field(default_factory=dict)

    def assign(
        self,
        object_id: str,
        home: ObjectSource,
        puller: ObjectSource,
        failed: Iterable[str],
        now_s: float,
    ) -> tuple[ObjectSource, ...]:
        """Return the sources for ``puller``, best first, and remember that it pulls from the first."""
        pullers = self._pullers.setdefault(object_id, {})
        refused = {*failed, puller.node_id}
        for node_id in refused:  # the puller has no whole copy, or has it no longer
            if node_id in pullers:
                pullers[node_id].whole = False
        load = {home.node_id: 0} | dict.fromkeys(pullers, 0)
        for node_id, one in pullers.items():
            busy = not one.whole and now_s - one.heard_at_s < _SILENT_S
            if busy and node_id != puller.node_id and one.upstream in load:
                load[one.upstream] += 1
        candidates = [home.node_id] + [
            node_id
            for node_id, one in pullers.items()
            if node_id not in refused and not self._feeds(pullers, puller.node_id, node_id)
            if one.whole or now_s - one.heard_at_s < _SILENT_S
        ]
        free = [node_id for node_id in candidates if load[node_id] < FAN_OUT]
        if home.node_id in refused and len(free) > 1:
            free.remove(home.node_id)
        upstream = free[0] if free else min(candidates, key=lambda node_id: load[node_id])
        pullers.pop(puller.node_id, None)
        pullers[puller.node_id] = _Puller(puller.url, upstream, now_s)
        rest = [node_id for node_id in candidates if node_id != upstream]
        return tuple(
            home
            if node_id == home.node_id
            else ObjectSource(node_id=node_id, url=pullers[node_id].url)
            for node_id in (upstream, *rest)
        )

    def end_pull(self, object_id: str, node_id: str, *, whole: bool, now_s: float) -> None:
        """Record the end of a pull; a node without a whole copy is no longer a source."""
        pullers = self._pullers.get(object_id, {})
        if node_id not in pullers:
            return
        if whole:
            pullers[node_id].whole = True
            pullers[node_id].heard_at_s = now_s
        else:
            del pullers[node_id]

    def forget(self, object_ids: Iterable[str]) -> dict[str, list[str]]:
        """Forget objects; return nodelet URL -> the objects of which it has, or gets, a copy."""
        copies: dict[str, list[str]] = {}
        for object_id in object_ids:
            for one in self._pullers.pop(object_id, {}).values():
                copies.setdefault(one.url, []).append(object_id)
        return copies

    def _feeds(self, pullers: dict[str, _Puller], feeder: str, node_id: str) -> bool:
        """Return whether ``node_id`` gets what it lacks from ``feeder``, directly or not."""
        for _ in range(len(pullers)):
            one = pullers.get(node_id)
            if one is None or one.whole:
                return False
            if one.upstream == feeder:
                return True
            node_id = one.upstream
        return False
