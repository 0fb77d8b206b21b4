"""Who pulls this node's objects, and from whom: a tree whose root is this node, the objects' home.

No clock, no IO. The home sends a puller to itself while it feeds fewer than ``FAN_OUT`` pulls of the
object, then to a node that pulls or has pulled it; such a node passes on each chunk as soon as it
has it, so the depth of the tree costs a chunk's time per level, and nobody's line carries the object
more than ``FAN_OUT`` times.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from stoker_wire.messages.work import ObjectSource

FAN_OUT = 2

_SILENT_S = 60.0
"""A pull of which nothing was heard for so long does not count as a load any more."""


@dataclass(slots=True)
class _Puller:
    url: str
    upstream: str
    heard_at_s: float
    whole: bool = False


@dataclass(slots=True)
class Spreading:
    """Object id -> node id -> how far that node is, for objects that others pulled from here."""

    home: ObjectSource
    _pullers: dict[str, dict[str, _Puller]] = field(default_factory=dict)

    def assign(
        self, object_id: str, puller: ObjectSource, failed: Iterable[str], now_s: float
    ) -> tuple[ObjectSource, ...]:
        """Return where ``puller`` shall pull from, best first, and remember that it does."""
        known = self._pullers.setdefault(object_id, {})
        refused = {*failed, puller.node_id}
        for node_id in refused:  # who asks has no whole copy, or no longer
            if node_id in known:
                known[node_id].whole = False
        load = {self.home.node_id: 0} | dict.fromkeys(known, 0)
        for node_id, one in known.items():
            busy = not one.whole and now_s - one.heard_at_s < _SILENT_S
            if busy and node_id != puller.node_id and one.upstream in load:
                load[one.upstream] += 1
        candidates = [self.home.node_id] + [
            node_id
            for node_id, one in known.items()
            if node_id not in refused and not self._feeds(known, puller.node_id, node_id)
            if one.whole or now_s - one.heard_at_s < _SILENT_S
        ]
        free = [node_id for node_id in candidates if load[node_id] < FAN_OUT]
        if self.home.node_id in refused and len(free) > 1:
            free.remove(self.home.node_id)
        upstream = free[0] if free else min(candidates, key=lambda node_id: load[node_id])
        known.pop(puller.node_id, None)
        known[puller.node_id] = _Puller(puller.url, upstream, now_s)
        rest = [node_id for node_id in candidates if node_id != upstream]
        return tuple(self._source(known, node_id) for node_id in (upstream, *rest))

    def ended(self, object_id: str, node_id: str, *, whole: bool, now_s: float) -> None:
        """A pull has ended; a node without a whole copy is no source any more."""
        known = self._pullers.get(object_id, {})
        if node_id not in known:
            return
        if whole:
            known[node_id].whole = True
            known[node_id].heard_at_s = now_s
        else:
            del known[node_id]

    def freed(self, object_ids: Iterable[str]) -> dict[str, list[str]]:
        """Forget objects; return nodelet URL -> the objects of which it has, or gets, a copy."""
        told: dict[str, list[str]] = {}
        for object_id in object_ids:
            for one in self._pullers.pop(object_id, {}).values():
                told.setdefault(one.url, []).append(object_id)
        return told

    def _feeds(self, known: dict[str, _Puller], feeder: str, node_id: str) -> bool:
        """Whether ``node_id`` gets what it lacks from ``feeder``, directly or not."""
        for _ in range(len(known)):
            one = known.get(node_id)
            if one is None or one.whole:
                return False
            if one.upstream == feeder:
                return True
            node_id = one.upstream
        return False

    def _source(self, known: dict[str, _Puller], node_id: str) -> ObjectSource:
        if node_id == self.home.node_id:
            return self.home
        return ObjectSource(node_id=node_id, url=known[node_id].url)
