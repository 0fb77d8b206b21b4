"""The order of the nodes for one need, kept up to date by looking only at nodes that changed.

A cluster of 1,000 nodes is scanned once per kind of need; after that a placement costs a heap
operation and a look at the nodes touched since. Only ``State`` makes and feeds these.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import TYPE_CHECKING

from stoker_scheduler.core.placement.feasibility import first_obstacle
from stoker_scheduler.core.placement.plan import with_locality
from stoker_scheduler.core.placement.scoring import LOCALITY_FLOOR_BYTES, Key, ScorePolicy, key

if TYPE_CHECKING:
    from stoker_scheduler.core.model.nodes import Node
    from stoker_scheduler.core.model.requirements import Need


class Touched:
    """A log of node ids that changed; each ranking reads it from where it stopped."""

    __slots__ = ("base", "ids")

    def __init__(self) -> None:
        self.base = 0
        self.ids: list[str] = []

    @property
    def end(self) -> int:
        """The position behind the last entry."""
        return self.base + len(self.ids)

    def add(self, node_id: str, node_count: int) -> None:
        """Note a change. Old entries go when a full scan would be cheaper than reading them."""
        self.ids.append(node_id)
        if len(self.ids) > 4 * node_count + 64:
            drop = len(self.ids) // 2
            del self.ids[:drop]
            self.base += drop


class Ranking:
    """The nodes on which one need fits now, best first for work that runs ``kernels``."""

    __slots__ = ("_cursor", "_heap", "_keys", "kernels", "need")

    def __init__(self, need: Need, kernels: str = "") -> None:
        self.need = need
        self.kernels = kernels
        self._keys: dict[str, Key] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._cursor = -1

    def best(
        self,
        nodes: Mapping[str, Node],
        touched: Touched,
        policy: ScorePolicy,
        locality: Mapping[str, int] | None = None,
    ) -> str | None:
        """Return the node to use, or None if the need fits nowhere now."""
        self._catch_up(nodes, touched, policy)
        heap, keys = self._heap, self._keys
        while heap and keys.get(heap[0][2]) != heap[0][:2]:
            heapq.heappop(heap)
        if not heap:
            return None
        best = heap[0]
        if locality and not self.need.spread:
            for node_id, nbytes in locality.items():
                if nbytes >= LOCALITY_FLOOR_BYTES and node_id in keys:
                    best = min(best, with_locality(keys[node_id], node_id, locality))
        return best[2]

    def _catch_up(self, nodes: Mapping[str, Node], touched: Touched, policy: ScorePolicy) -> None:
        start, self._cursor = self._cursor, touched.end
        if start == touched.end:
            return
        if start < touched.base or len(self._heap) > 8 * len(nodes) + 64:
            self._keys = {
                node.node_id: key(node, self.need, policy, self.kernels)
                for node in nodes.values()
                if first_obstacle(node, self.need) is None
            }
            self._heap = [(*found, node_id) for node_id, found in self._keys.items()]
            heapq.heapify(self._heap)
            return
        for node_id in dict.fromkeys(touched.ids[start - touched.base :]):
            self._look_at(node_id, nodes.get(node_id), policy)

    def _look_at(self, node_id: str, node: Node | None, policy: ScorePolicy) -> None:
        if node is None or first_obstacle(node, self.need) is not None:
            self._keys.pop(node_id, None)
            return
        found = key(node, self.need, policy, self.kernels)
        if self._keys.get(node_id) != found:
            self._keys[node_id] = found
            heapq.heappush(self._heap, (*found, node_id))
