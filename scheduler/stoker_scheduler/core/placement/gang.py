"""The choice of nodes for a gang: all of its bundles, or none.

A :class:`GangRanking` remembers how many bundles of each kind every node has room for and looks only at nodes
that changed, so that a gang that cannot be placed costs little however long it waits. The search itself
works on copies of the few nodes that matter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from stoker_scheduler.core.model.gangs import Gang, GangStrategy
from stoker_scheduler.core.model.nodes import Health, NodeInfo
from stoker_scheduler.core.model.resources import GPU_MEMORY, UNIT
from stoker_scheduler.core.placement.feasibility import (
    Check,
    check_reserved,
    first_obstacle,
    idle_rules_for,
    is_reserved,
    rules_for,
)
from stoker_scheduler.core.placement.ranking import DirtyNodes
from stoker_scheduler.core.placement.scoring import (
    COMMON_TERMS,
    ScorePolicy,
    cost_of,
    nearness,
    terms_for,
)

if TYPE_CHECKING:
    from stoker_scheduler.core.model.requirements import Requirements

GangPlacement = list[tuple[int, str]]
"""Number of a bundle, and its node, in the order in which devices are to be allocated."""

RACK = "rack"
"""The label that says in which rack a node is."""
_RackRank = tuple[bool, int, str]
_NO_RACK: _RackRank = (True, 0, "")
MAX_CANDIDATES = 64
"""Nodes that a search among unequal bundles looks at: those with most room."""
MAX_STEPS = 5_000
"""Steps of the search for fewer nodes than the first that were found."""


class GangRanking:
    """The room that each node has for a gang, and the search for its placement."""

    __slots__ = ("_costs", "_cursor", "_found", "_gang", "_is_known", "_room", "_rules", "_totals")

    def __init__(
        self, gang: Gang, rules: Callable[[Requirements], tuple[Check, ...]] = rules_for
    ) -> None:
        self._gang = gang
        self._rules = [
            tuple(rule for rule in rules(kind) if rule is not check_reserved) for kind in gang.kinds
        ]
        self._room: dict[str, tuple[int, ...]] = {}
        """Node -> how many bundles of each kind alone it has room for now; absent if for none."""
        self._costs: dict[str, dict[int, float]] = {}
        """Node -> the cost of a bundle of each kind there, where it was asked for."""
        self._totals = [0] * len(gang.kinds)
        self._cursor = -1
        self._found: GangPlacement | None = None
        self._is_known = False
        """Whether a search would find the same again."""

    def best(
        self, nodes: Mapping[str, NodeInfo], dirty: DirtyNodes, policy: ScorePolicy
    ) -> GangPlacement | None:
        """Return the best placement of all bundles, or None if they do not fit together now."""
        self._catch_up(nodes, dirty)
        return self._search(nodes, policy)

    def best_if(
        self,
        nodes: Mapping[str, NodeInfo],
        dirty: DirtyNodes,
        policy: ScorePolicy,
        changed: Mapping[str, NodeInfo],
    ) -> GangPlacement | None:
        """Return what :meth:`best` would if some nodes were as ``changed`` says."""
        self._catch_up(nodes, dirty)
        twin = copy.copy(self)
        twin._room, twin._costs = dict(self._room), dict(self._costs)
        twin._totals = list(self._totals)
        for node_id, node in changed.items():
            twin._update(node_id, node)
        return twin._search({**nodes, **changed}, policy)

    def _search(self, nodes: Mapping[str, NodeInfo], policy: ScorePolicy) -> GangPlacement | None:
        gang = self._gang
        if not self._is_known:
            enough = all(map(int.__ge__, self._totals, gang.counts))
            search = _Search(gang, nodes, self._room, self._costs, policy)
            self._found = search.placement() if enough else None
            self._is_known = True
        return self._found

    def room(self, nodes: Mapping[str, NodeInfo], dirty: DirtyNodes) -> tuple[int, ...]:
        """Return how many bundles of each of the gang's kinds have room now, each kind for itself."""
        self._catch_up(nodes, dirty)
        return tuple(map(min, self._totals, self._gang.counts))

    def _catch_up(self, nodes: Mapping[str, NodeInfo], dirty: DirtyNodes) -> None:
        start, end = self._cursor, dirty.end
        if start == end:
            return
        self._cursor = end
        if start < dirty.base:
            changed: Iterable[str] = dict.fromkeys((*self._room, *nodes))
        else:
            changed = dirty.since(start, frozenset())
        for node_id in changed:
            self._update(node_id, nodes.get(node_id))

    def _update(self, node_id: str, node: NodeInfo | None) -> None:
        gang, none = self._gang, (0,) * len(self._totals)
        room = none
        if node is not None and not is_reserved(node, gang, gang.names):
            room = tuple(
                0 if first_obstacle(node, kind, rules) is not None else _room(node, kind, count)
                for kind, count, rules in zip(gang.kinds, gang.counts, self._rules, strict=True)
            )
        self._costs.pop(node_id, None)
        before = self._room.pop(node_id, none)
        if any(room):
            self._room[node_id] = room
        for index, (has, had) in enumerate(zip(room, before, strict=True)):
            self._totals[index] += has - had
            # What does not fit together still does not when there is less room. Of several kinds each is
            # counted alone, so that what they have room for together can grow while the counts do not.
            if self._found is not None or has > had or (len(room) > 1 and (has or had)):
                self._is_known = False


def _room(node: NodeInfo, bundle: Requirements, limit: int) -> int:
    """Return how many times ``bundle`` fits on ``node`` by its resources, up to ``limit``."""
    room = limit
    for name, count in bundle.items:
        room = min(room, node.available.get(name, 0) // count)
    if bundle.gpu >= UNIT:
        room = min(room, node.devices.whole_rooms(bundle.gpu))
    elif bundle.needs_gpu:
        room = min(room, node.devices.rooms(bundle.gpu, bundle.gpu_memory))
    return room


def could_ever_be_placed(nodes: Mapping[str, NodeInfo], gang: Gang, policy: ScorePolicy) -> bool:
    """Return whether all bundles would fit together if the nodes, and their GPUs, were idle and healthy."""
    idle = {
        node.node_id: NodeInfo(
            replace(
                node.spec,
                health=Health.ALIVE,
                cordon="",
                taints=(),
                pressure="",
                gpu_facts=replace(node.spec.gpu_facts, quarantined={}),
            )
        )
        for node in nodes.values()
        if node.spec.health is not Health.DEAD
    }
    return GangRanking(gang, idle_rules_for).best(idle, DirtyNodes(), policy) is not None


def gpus_together(
    nodes: Mapping[str, NodeInfo], gang: Gang, placement: GangPlacement
) -> dict[str, tuple[int, ...]]:
    """Return the whole GPUs that all bundles on a node get together: near each other, where that is known.

    Not where others get parts of GPUs, for which these may be the only ones.
    """
    units: dict[str, int] = {}
    bundles = [(gang.bundles[index], node_id) for index, node_id in placement]
    in_parts = {
        node_id: None for bundle, node_id in bundles if bundle.needs_gpu and bundle.gpu < UNIT
    }
    for bundle, node_id in bundles:
        gpu = bundle.gpu
        if node_id in in_parts:
            continue
        if gpu >= UNIT and nodes[node_id].devices.facts.topology is not None:
            units[node_id] = units.get(node_id, 0) + gpu
    chosen = {node_id: nodes[node_id].devices.choose(gpu) for node_id, gpu in units.items()}
    return {node_id: tuple(gpus) for node_id, gpus in chosen.items() if gpus is not None}


def _least_room(rooms: Iterable[int], wanted: int) -> int:
    """Return the least room of the nodes that are needed if those with most of it are taken first."""
    for room in sorted(rooms, reverse=True):
        wanted -= room
        if wanted <= 0:
            return room
    return 0


class _Trial:
    """Copies of nodes on which bundles are placed one by one, and taken away again."""

    __slots__ = ("_copies", "_nodes")

    def __init__(self, nodes: Mapping[str, NodeInfo]) -> None:
        self._nodes = nodes
        self._copies: dict[str, NodeInfo] = {}

    def place(self, bundle: Requirements, node_id: str) -> bool:
        """Allocate ``bundle`` on the node, if it fits there besides the others."""
        node = self._copies.get(node_id)
        if node is None:
            node = self._copies[node_id] = self._nodes[node_id].copy()
        available = node.available
        if any(available.get(name, 0) < count for name, count in bundle.items):
            return False
        gpus = node.choose(bundle)
        if gpus is None:
            return False
        node.allocate(bundle, gpus)
        return True

    def reset(self, node_id: str) -> None:
        """Take away all that was placed on the node."""
        self._copies.pop(node_id, None)

    def branch(self, node_id: str) -> _Trial:
        """Return a trial that may place on the node and leaves this one as it is."""
        twin = _Trial(self._nodes)
        twin._copies = dict(self._copies)
        if node_id in twin._copies:
            twin._copies[node_id] = twin._copies[node_id].copy()
        return twin


class _Search:
    """One search; ``room`` names the nodes that have room for some bundle."""

    def __init__(
        self,
        gang: Gang,
        nodes: Mapping[str, NodeInfo],
        room: Mapping[str, tuple[int, ...]],
        costs: dict[str, dict[int, float]],
        policy: ScorePolicy,
    ) -> None:
        self._gang = gang
        self._nodes = nodes
        self._room = room
        self._policy = policy
        kind_of = {kind: index for index, kind in enumerate(gang.kinds)}
        self._kind = [kind_of[bundle] for bundle in gang.bundles]
        # The largest first: in this order they are tried, and in this order devices are allocated.
        self._order = sorted(range(len(gang.bundles)), key=lambda index: (self._kind[index], index))
        self._costs = costs

    def placement(self) -> GangPlacement | None:
        match self._gang.strategy:
            case GangStrategy.STRICT_PACK:
                return self._on_one_node()
            case GangStrategy.PACK:
                return self._packed()
            case GangStrategy.STRICT_SPREAD:
                return self._apart()
            case GangStrategy.SPREAD:
                return self._spread()

    def _cost(self, node_id: str, kind: int) -> float:
        costs = self._costs.setdefault(node_id, {})
        cost = costs.get(kind)
        if cost is None:
            bundle = self._gang.kinds[kind]
            terms = terms_for(COMMON_TERMS, bundle, "")
            cost = costs[kind] = cost_of(terms, self._nodes[node_id], bundle, self._policy)
        return cost

    # Together

    def _apart_on(self, gpus: Mapping[str, int]) -> dict[str, float]:
        """Return how far apart so many whole GPUs of each node are, 0 to 1; nothing if no paths are known."""
        nodes = self._nodes
        if all(nodes[node_id].devices.facts.topology is None for node_id in gpus):
            return {}
        return {
            node_id: 1.0 - nearness(nodes[node_id], count)
            for node_id, count in gpus.items()
            if count > 1
        }

    def _racks(self, room: Mapping[str, int], wanted: int) -> dict[str, _RackRank]:
        """Return the order of nodes by rack: the smallest with room for all, then the one with most room."""
        rack_of = {node_id: self._nodes[node_id].spec.labels.get(RACK) for node_id in room}
        total: dict[str | None, int] = {}
        for node_id, rack in rack_of.items():
            total[rack] = total.get(rack, 0) + room[node_id]
        if total.keys() <= {None}:
            return {}
        return {
            node_id: (
                (False, total[rack], rack) if total[rack] >= wanted else (True, -total[rack], rack)
            )
            for node_id, rack in rack_of.items()
            if rack is not None
        }

    def _on_one_node(self) -> GangPlacement | None:
        gang = self._gang
        able = [
            node_id
            for node_id, room in self._room.items()
            if all(map(int.__ge__, room, gang.counts)) and self._has_all(node_id)
        ]
        gpus = sum(bundle.gpu // UNIT for bundle in gang.bundles)
        apart = self._apart_on(dict.fromkeys(able, gpus))
        for node_id in sorted(able, key=lambda n: (apart.get(n, 0.0), *self._tightness(n), n)):
            placement = self._fill(_Trial(self._nodes), node_id, self._order)
            if len(placement) == len(self._order):
                return placement
        return None

    def _has_all(self, node_id: str) -> bool:
        """Return whether the sum of all bundles is available on the node, but for parts of GPUs."""
        available = self._nodes[node_id].available_units
        return all(
            available.get(name, 0) >= count
            for name, count in self._gang.vector
            if name != GPU_MEMORY
        )

    def _tightness(self, node_id: str) -> tuple[float, int]:
        """Order nodes by what a bundle costs there, then by the GPUs that would stay free: best fit."""
        return self._cost(node_id, 0), self._nodes[node_id].devices.free_units

    def _fill(self, trial: _Trial, node_id: str, wanted: Sequence[int]) -> GangPlacement:
        """Place as many of the bundles on one node as fit, in their order."""
        bundles, room = self._gang.bundles, self._room[node_id]
        return [
            (index, node_id)
            for index in wanted
            if room[self._kind[index]] and trial.place(bundles[index], node_id)
        ]

    def _packed(self) -> GangPlacement | None:
        if len(self._gang.kinds) == 1:
            return self._pack_equal()
        greedy = self._pack_greedily()
        used = len({node_id for _, node_id in greedy}) if greedy is not None else None
        fewer = self._pack_by_search(used)
        return fewer if fewer is not None else greedy

    def _pack_equal(self) -> GangPlacement | None:
        """Take the nodes with most room; the last is the one with the least that suffices."""
        missing, taken = len(self._order), dict.fromkeys(self._gang.taken)
        room = {node_id: counts[0] for node_id, counts in self._room.items()}
        gpus = self._gang.kinds[0].gpu // UNIT
        least = _least_room(room.values(), missing)
        apart = self._apart_on({n: has * gpus for n, has in room.items() if has >= least})
        racks = self._racks(room, missing)
        order = sorted(
            room,
            key=lambda n: (
                n not in taken,
                -room[n],
                apart.get(n, 0.0),
                self._cost(n, 0),
                racks.get(n, _NO_RACK),
                n,
            ),
        )
        chosen: list[tuple[str, int]] = []
        for node_id in order:
            if room[node_id] >= missing:
                chosen.append((self._last(order, room, missing, chosen, racks), missing))
                break
            chosen.append((node_id, room[node_id]))
            missing -= room[node_id]
        else:
            return None
        hosts = [node_id for node_id, count in chosen for _ in range(count)]
        return list(zip(self._order, hosts, strict=True))

    def _last(
        self,
        order: list[str],
        room: Mapping[str, int],
        missing: int,
        chosen: Sequence[tuple[str, int]],
        racks: Mapping[str, _RackRank],
    ) -> str:
        """Return the best node for the bundles that are missing behind those of ``chosen``."""
        taken = dict.fromkeys(self._gang.taken)
        rest = [n for n in order if room[n] >= missing and (n, room[n]) not in chosen]
        apart = self._apart_on(dict.fromkeys(rest, missing * self._gang.kinds[0].gpu // UNIT))
        used = {racks.get(n, _NO_RACK) for n, _ in chosen}
        return min(
            rest,
            key=lambda n: (
                n not in taken,
                apart.get(n, 0.0),
                room[n],
                *self._tightness(n),
                racks.get(n, _NO_RACK) not in used,
                racks.get(n, _NO_RACK),
                n,
            ),
        )

    def _candidates(self) -> list[str]:
        """Return the nodes with most room, at most :data:`MAX_CANDIDATES`."""
        taken = dict.fromkeys(self._gang.taken)
        room = {node_id: sum(counts) for node_id, counts in self._room.items()}
        racks = self._racks(room, len(self._order))
        most = sum(bundle.gpu // UNIT for bundle in self._gang.bundles)
        apart = self._apart_on({n: min(most, self._nodes[n].devices.wholly_free) for n in room})
        return sorted(
            room,
            key=lambda n: (
                n not in taken,
                -room[n],
                apart.get(n, 0.0),
                self._cost(n, 0),
                racks.get(n, _NO_RACK),
                n,
            ),
        )[:MAX_CANDIDATES]

    def _pack_greedily(self) -> GangPlacement | None:
        """Take, again and again, the node on which most of the remaining bundles fit."""
        trial, remaining = _Trial(self._nodes), list(self._order)
        placement: GangPlacement = []
        candidates = self._candidates()
        while remaining:
            best: GangPlacement = []
            for node_id in candidates:
                filled = self._fill(trial, node_id, remaining)
                trial.reset(node_id)
                if len(filled) > len(best):
                    best = filled
                if len(filled) == len(remaining):
                    break
            if not best:
                return None
            placement += best
            candidates.remove(best[0][1])
            done = {index for index, _ in best}
            remaining = [index for index in remaining if index not in done]
        return placement

    def _pack_by_search(self, limit: int | None) -> GangPlacement | None:
        """Look for a placement on fewer than ``limit`` nodes (None: on any number), in bounded steps."""
        candidates = self._candidates()
        most = len(candidates) if limit is None else limit - 1
        steps = [MAX_STEPS]
        for size in range(1, most + 1):
            found = self._search(candidates, size, 0, [], _Trial(self._nodes), steps)
            if found is not None or steps[0] <= 0:
                return found
        return None

    def _search(
        self,
        candidates: list[str],
        size: int,
        position: int,
        placement: GangPlacement,
        trial: _Trial,
        steps: list[int],
    ) -> GangPlacement | None:
        """Place the bundles from ``position`` on; at most ``size`` nodes are used."""
        if position == len(self._order):
            return placement
        index = self._order[position]
        used = dict.fromkeys(node_id for _, node_id in placement)
        opened = list(used)
        if len(used) < size:
            opened += [node_id for node_id in candidates if node_id not in used]
        for node_id in opened:
            steps[0] -= 1
            if steps[0] <= 0:
                return None
            if not self._room[node_id][self._kind[index]]:
                continue
            branch = trial.branch(node_id)
            if branch.place(self._gang.bundles[index], node_id):
                found = self._search(
                    candidates, size, position + 1, [*placement, (index, node_id)], branch, steps
                )
                if found is not None or steps[0] <= 0:
                    return found
        return None

    # Apart

    def _apart(self) -> GangPlacement | None:
        matched = self._matching()
        return matched if len(matched) == len(self._order) else None

    def _spread(self) -> GangPlacement | None:
        """Give as many bundles as can be a node of their own; the others go where fewest are."""
        placement = self._matching()
        trial = _Trial(self._nodes)
        uses = dict.fromkeys(self._gang.taken, 1)
        for index, node_id in placement:
            trial.place(self._gang.bundles[index], node_id)
            uses[node_id] = uses.get(node_id, 0) + 1
        matched = {index for index, _ in placement}
        for index in self._order:
            if index in matched:
                continue
            kind = self._kind[index]
            hosts = sorted(
                (n for n, room in self._room.items() if room[kind]),
                key=lambda n: (uses.get(n, 0), self._cost(n, kind), n),
            )
            bundle = self._gang.bundles[index]
            host = next((n for n in hosts if trial.place(bundle, n)), None)
            if host is None:
                # Apart they are in each other's way: together is better than not at all.
                return self._packed()
            uses[host] = uses.get(host, 0) + 1
            placement.append((index, host))
        return placement

    def _matching(self) -> GangPlacement:
        """Return as many bundles as can be on different nodes, none of them taken.

        A maximum bipartite matching by shortest augmenting paths. Of n bundles each needs to know only its n
        best nodes: with so many, one is always free for it.
        """
        taken = dict.fromkeys(self._gang.taken)
        best: list[list[str]] = []
        for kind in range(len(self._gang.kinds)):
            able = (n for n, room in self._room.items() if room[kind] and n not in taken)
            ordered = sorted(able, key=lambda n: (self._cost(n, kind), n))
            best.append(ordered[: len(self._order)])
        guest: dict[str, int] = {}
        node_of: dict[int, str] = {}
        for index in self._order:
            # Whoever stands on a node may move to another one that is free.
            reached_from: dict[str, int] = {}
            free: str | None = self._free_node(index, best, guest, reached_from)
            while free is not None:
                mover = reached_from[free]
                guest[free] = mover
                left = node_of.get(mover)
                node_of[mover] = free
                free = left
        return [(index, node_of[index]) for index in self._order if index in node_of]

    def _free_node(
        self,
        first: int,
        best: list[list[str]],
        guest: Mapping[str, int],
        reached_from: dict[str, int],
    ) -> str | None:
        """Return the nearest free node from bundle ``first``; ``reached_from`` tells the way back."""
        frontier = [first]
        while frontier:
            following: list[int] = []
            for index in frontier:
                for node_id in best[self._kind[index]]:
                    if node_id in reached_from:
                        continue
                    reached_from[node_id] = index
                    if node_id not in guest:
                        return node_id
                    following.append(guest[node_id])
            frontier = following
        return None
