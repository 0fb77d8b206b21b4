"""Rankings: the order of the nodes for equal requirements, updated by looking only at nodes that changed.

A cluster of 1,000 nodes is scanned once per requirements; after that a placement costs a heap operation and a
look at the nodes that have more room since, of what is asked for. A node that has less room since can only be
worse than it seems, so it is looked at when it comes to the top. Only ``State`` makes and feeds these.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import TYPE_CHECKING

from stoker_scheduler.core.placement.feasibility import (
    RESOURCE_RULES,
    check_node_filters,
    first_obstacle,
    rules_for,
)
from stoker_scheduler.core.placement.scoring import (
    LOCALITY_FLOOR_BYTES,
    NODE_ORDERS,
    ScoreKey,
    ScorePolicy,
)
from stoker_scheduler.core.placement.verdicts import with_locality

if TYPE_CHECKING:
    from stoker_scheduler.core.model.nodes import NodeInfo
    from stoker_scheduler.core.model.requirements import Requirements


class DirtyNodes:
    """A log of nodes that changed; each ranking reads it from where it stopped.

    An entry is the id of a node, and the resources of which it has more now (None: it changed otherwise).
    """

    __slots__ = ("base", "entries")

    def __init__(self) -> None:
        self.base = 0
        self.entries: list[tuple[str, frozenset[str] | None]] = []

    @property
    def end(self) -> int:
        """The position behind the last entry."""
        return self.base + len(self.entries)

    def add(self, node_id: str, names: frozenset[str] | None, node_count: int) -> None:
        """Add a node that changed. Old entries go when a full scan would be cheaper than reading them."""
        self.entries.append((node_id, names))
        if len(self.entries) > 4 * node_count + 64:
            drop = len(self.entries) // 2
            del self.entries[:drop]
            self.base += drop

    def since(self, position: int, names: frozenset[str]) -> dict[str, None]:
        """Return the nodes that changed since ``position``; of those that only have more room, of ``names``.

        Without names everything counts: such requirements order nodes by their leases.
        """
        return {
            node_id: None
            for node_id, more in self.entries[position - self.base :]
            if more is None or not names or not names.isdisjoint(more)
        }


class Ranking:
    """The nodes on which ``requirements`` fit now, best first for work that runs ``kernels``."""

    __slots__ = (
        "_cursor",
        "_heap",
        "_keys",
        "_order",
        "_resource_rules",
        "_rules",
        "_seen",
        "kernels",
        "requirements",
    )

    def __init__(self, requirements: Requirements, kernels: str = "") -> None:
        self.requirements = requirements
        self.kernels = kernels
        self._rules = rules_for(requirements)
        changing = (*RESOURCE_RULES, check_node_filters) if requirements.reads else RESOURCE_RULES
        self._resource_rules = tuple(rule for rule in self._rules if rule in changing)
        self._order = NODE_ORDERS[requirements.policy]
        self._keys: dict[str, ScoreKey] = {}
        self._seen: dict[str, int] = {}
        """Node -> its count of allocations when its key was made."""
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
        while heap:
            cost, tie, node_id = heap[0]
            key = keys.get(node_id)
            if key != (cost, tie):
                heapq.heappop(heap)
                continue
            if self._is_current(nodes[node_id], policy):
                break
            now = keys.get(node_id)
            if now is None:
                heapq.heappop(heap)
            elif now != key:
                heapq.heapreplace(heap, (*now, node_id))
        else:
            return None
        best = heap[0]
        if locality and self._order.uses_locality:
            for node_id, nbytes in locality.items():
                if nbytes < LOCALITY_FLOOR_BYTES or node_id not in keys:
                    continue
                key = keys[node_id]
                self._is_current(nodes[node_id], policy)
                now = keys.get(node_id)
                if now is None:
                    continue
                if now != key:
                    heapq.heappush(heap, (*now, node_id))
                best = min(best, with_locality(now, node_id, locality))
        return best[2]

    def _is_current(self, node: NodeInfo, policy: ScorePolicy) -> bool:
        """Return whether the node's key is of its present allocations; if not, make it so (not the heap).

        A node of which more is allocated can have become unfit for that alone.
        """
        node_id = node.spec.node_id
        if self._seen[node_id] == node.allocations:
            return True
        if first_obstacle(node, self.requirements, self._resource_rules) is not None:
            del self._keys[node_id]
            return False
        self._seen[node_id] = node.allocations
        self._keys[node_id] = self._order.score_key(node, self.requirements, policy, self.kernels)
        return False

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
            self._seen = {node_id: nodes[node_id].allocations for node_id in self._keys}
            self._heap = [(*sort_key, node_id) for node_id, sort_key in self._keys.items()]
            heapq.heapify(self._heap)
            return
        names = frozenset() if self.requirements.reads else self.requirements.names
        for node_id in dirty.since(start, names):
            self._update(node_id, nodes.get(node_id), policy)

    def _update(self, node_id: str, node: NodeInfo | None, policy: ScorePolicy) -> None:
        if node is None or first_obstacle(node, self.requirements, self._rules) is not None:
            self._keys.pop(node_id, None)
            return
        sort_key = self._order.score_key(node, self.requirements, policy, self.kernels)
        self._seen[node_id] = node.allocations
        if self._keys.get(node_id) != sort_key:
            self._keys[node_id] = sort_key
            heapq.heappush(self._heap, (*sort_key, node_id))
