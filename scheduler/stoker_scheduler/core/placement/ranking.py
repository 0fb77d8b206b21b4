"""Rankings: the order of the nodes for equal requirements, updated by looking only at dirty nodes.

A cluster of 1,000 nodes is scanned once per requirements; after that a placement costs a heap operation
and a look at the nodes that changed since. Only ``State`` makes and feeds these.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import TYPE_CHECKING

from stoker_scheduler.core.placement.feasibility import first_obstacle, rules_for
from stoker_scheduler.core.placement.plan import with_locality
from stoker_scheduler.core.placement.scoring import (
    LOCALITY_FLOOR_BYTES,
    NODE_ORDERS,
    ScoreKey,
    ScorePolicy,
)

if TYPE_CHECKING:
    from stoker_scheduler.core.model.nodes import NodeInfo
    from stoker_scheduler.core.model.requirements import Requirements


class DirtyNodes:
    """A log of the ids of nodes that changed; each ranking reads it from where it stopped."""

    __slots__ = ("base", "ids")

    def __init__(self) -> None:
        self.base = 0
        self.ids: list[str] = []

    @property
    def end(self) -> int:
        """The position behind the last entry."""
        return self.base + len(self.ids)

    def add(self, node_id: str, node_count: int) -> None:
        """Add a node that changed. Old entries go when a full scan would be cheaper than reading them."""
        self.ids.append(node_id)
        if len(self.ids) > 4 * node_count + 64:
            drop = len(self.ids) // 2
            del self.ids[:drop]
            self.base += drop


class Ranking:
    """The nodes on which ``requirements`` fit now, best first for work that runs ``kernels``."""

    __slots__ = ("_cursor", "_heap", "_keys", "_order", "_rules", "kernels", "requirements")

    def __init__(self, requirements: Requirements, kernels: str = "") -> None:
        self.requirements = requirements
        self.kernels = kernels
        self._rules = rules_for(requirements)
        self._order = NODE_ORDERS[requirements.policy]
        self._keys: dict[str, ScoreKey] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._cursor = -1

    def best(
        self,
        nodes: Mapping[str, NodeInfo],
        dirty: DirtyNodes,
        policy: ScorePolicy,
        locality: Mapping[str, int] | None = None,
    ) -> str | None:
        """Return the best node, or None if the requirements fit nowhere now."""
        self._catch_up(nodes, dirty, policy)
        heap, keys = self._heap, self._keys
        while heap and keys.get(heap[0][2]) != heap[0][:2]:
            heapq.heappop(heap)
        if not heap:
            return None
        best = heap[0]
        if locality and self._order.uses_locality:
            for node_id, nbytes in locality.items():
                if nbytes >= LOCALITY_FLOOR_BYTES and node_id in keys:
                    best = min(best, with_locality(keys[node_id], node_id, locality))
        return best[2]

    def _catch_up(
        self, nodes: Mapping[str, NodeInfo], dirty: DirtyNodes, policy: ScorePolicy
    ) -> None:
        start, end = self._cursor, dirty.end
        if start == end:
            return
        self._cursor = end
        if start < dirty.base or len(self._heap) > 8 * len(nodes) + 64:
            score_key = self._order.score_key
            self._keys = {
                node.node_id: score_key(node, self.requirements, policy, self.kernels)
                for node in nodes.values()
                if first_obstacle(node, self.requirements, self._rules) is None
            }
            self._heap = [(*sort_key, node_id) for node_id, sort_key in self._keys.items()]
            heapq.heapify(self._heap)
            return
        for node_id in dict.fromkeys(dirty.ids[start - dirty.base :]):
            self._update(node_id, nodes.get(node_id), policy)

    def _update(self, node_id: str, node: NodeInfo | None, policy: ScorePolicy) -> None:
        if node is None or first_obstacle(node, self.requirements, self._rules) is not None:
            self._keys.pop(node_id, None)
            return
        sort_key = self._order.score_key(node, self.requirements, policy, self.kernels)
        if self._keys.get(node_id) != sort_key:
            self._keys[node_id] = sort_key
            heapq.heappush(self._heap, (*sort_key, node_id))
