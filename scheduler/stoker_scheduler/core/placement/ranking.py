"""Rankings: the order of the nodes for equal requirements, updated by looking only at nodes that changed.

A cluster of 1,000 nodes is scanned once per requirements; after that a placement costs a heap operation and a
look at the nodes that have more room since, of what is asked for. A node that has less room since can only be
worse than it seems, so it is looked at when it comes to the top. Only ``State`` makes and feeds these.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stoker_scheduler.core.placement.feasibility import (
    check_gpus,
    check_node_filters,
    rules_for,
)
from stoker_scheduler.core.placement.scoring import (
    LOCALITY_FLOOR_BYTES,
    NODE_ORDERS,
    ScorePolicy,
    taint_cost,
    terms_for,
)
from stoker_scheduler.core.placement.verdicts import with_locality

if TYPE_CHECKING:
    from stoker_scheduler.core.model.nodes import NodeInfo
    from stoker_scheduler.core.model.requirements import Requirements
    from stoker_scheduler.core.placement.feasibility import Check


Entry = list[Any]
"""Cost, tie-break and id of a node, and its count of allocations when these were found: an item of a heap."""


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
        "_changing_rules",
        "_cursor",
        "_entries",
        "_heap",
        "_order",
        "_rules",
        "_terms",
        "_tie",
        "kernels",
        "requirements",
    )

    def __init__(self, requirements: Requirements, kernels: str = "") -> None:
        self.requirements = requirements
        self.kernels = kernels
        self._rules = rules_for(requirements)
        changing = (check_gpus, check_node_filters) if requirements.reads else (check_gpus,)
        self._changing_rules = tuple(rule for rule in self._rules if rule in changing)
        """Those that a node can come to break when more of it is allocated; the cost knows the others."""
        self._order = NODE_ORDERS[requirements.policy]
        self._terms = terms_for(self._order.terms, requirements, kernels)
        tie = self._order.tie
        self._tie = tie.value if tie.counts_for(requirements) else None
        self._entries: dict[str, Entry] = {}
        """Node -> its entry; others of the node that are in the heap are of the past."""
        self._heap: list[Entry] = []
        self._cursor = -1

    def __len__(self) -> int:
        """Return how many entries the ranking keeps, which is what it costs in memory."""
        return len(self._heap)

    def best(
        self,
        nodes: Mapping[str, NodeInfo],
        dirty: DirtyNodes,
        policy: ScorePolicy,
        locality: Mapping[str, int] | None = None,
    ) -> str | None:
        """Return the best node, or None if the requirements fit nowhere now."""
        self._catch_up(nodes, dirty, policy)
        heap, entries, rules = self._heap, self._entries, self._changing_rules
        while heap:
            entry = heap[0]
            node_id = entry[2]
            if entries.get(node_id) is not entry:
                heapq.heappop(heap)
                continue
            node = nodes[node_id]
            if node.allocations == entry[3]:
                break
            # More of it is allocated: it can have become unfit, or worse, for that alone.
            now = self._enter(node, policy, rules, entry)
            if now is entry:
                break
            if now is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, now)
        else:
            return None
        if locality and self._order.uses_locality:
            return self._best_with_locality(nodes, policy, locality)
        best: str = heap[0][2]
        return best

    def _best_with_locality(
        self, nodes: Mapping[str, NodeInfo], policy: ScorePolicy, locality: Mapping[str, int]
    ) -> str:
        """Return the best of the first node and those that store a large part of the arguments."""
        cost, tie, best_id, _ = self._heap[0]
        best: tuple[float, int, str] = (cost, tie, best_id)
        for node_id, nbytes in locality.items():
            known = self._entries.get(node_id)
            if nbytes < LOCALITY_FLOOR_BYTES or known is None:
                continue
            entry = self._enter(nodes[node_id], policy, self._changing_rules, known)
            if entry is None:
                continue
            if entry is not known:
                heapq.heappush(self._heap, entry)
            best = min(best, with_locality((entry[0], entry[1]), node_id, locality))
        return best[2]

    def _enter(
        self, node: NodeInfo, policy: ScorePolicy, rules: Sequence[Check], known: Entry | None
    ) -> Entry | None:
        """Return the node's entry as of now, None if a rule is broken.

        That is the ``known`` one if the node is as good as before; else a new one, not in the heap yet.
        """
        requirements, node_id = self.requirements, node.spec.node_id
        for check in rules:
            if check(node, requirements):
                self._entries.pop(node_id, None)
                return None
        cost, kernels = 0.0, self.kernels
        for weight, value in self._terms:  # as cost_of does, without a call
            cost += weight * value(node, requirements, policy, kernels)
        if node.spec.shunned:
            cost += taint_cost(node, requirements)
        if cost == math.inf:
            self._entries.pop(node_id, None)
            return None
        tie = 0 if self._tie is None else self._tie(node)
        if known is not None and known[0] == cost and known[1] == tie:
            known[3] = node.allocations
            return known
        entry = self._entries[node_id] = [cost, tie, node_id, node.allocations]
        return entry

    def _catch_up(
        self, nodes: Mapping[str, NodeInfo], dirty: DirtyNodes, policy: ScorePolicy
    ) -> None:
        start, end = self._cursor, dirty.end
        if start == end:
            return
        self._cursor = end
        entries, rules = self._entries, self._rules
        if start < dirty.base or len(self._heap) > 8 * len(nodes) + 64:
            entries.clear()
            for node in nodes.values():
                self._enter(node, policy, rules, None)
            self._heap = list(entries.values())
            heapq.heapify(self._heap)
            return
        names = frozenset() if self.requirements.reads else self.requirements.names
        for node_id in dirty.since(start, names):
            changed, known = nodes.get(node_id), entries.get(node_id)
            if changed is None:
                entries.pop(node_id, None)
                continue
            entry = self._enter(changed, policy, rules, known)
            if entry is not None and entry is not known:
                heapq.heappush(self._heap, entry)
