"""The places of replicas: parts of a node within one, larger jobs on whole nodes, and few that move.

Counts within a node are powers of two that divide it, counts beyond are multiples of it: whatever of these
fits in sum also fits in place, and no two jobs that span nodes share one (Sia, SOSP 2023, section 3.3, has
the argument). A job whose count stays keeps its nodes, unless a larger one needs them whole. Where other
work leaves parts of nodes, what fits in sum may not fit in place: then a job gets the next smaller count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stoker_scheduler.core.elastic.jobs import Allocation, ElasticJob, replicas_of

FINE_NODES = 16
"""Up to so many nodes, every number of them is a count."""


def counts_of(nodes: Mapping[str, int], size: int) -> tuple[int, ...]:
    """Return the counts that a job may have: powers of two that divide a node of ``size``, and whole nodes.

    Larger nodes count as one of ``size``. Of more than 16 nodes not every number is one: steps of an eighth
    suffice.
    """
    largest = min(size, max(nodes.values(), default=0))
    within = [1 << power for power in range(size.bit_length()) if size % (1 << power) == 0]
    if size and within[-1] != size:
        within.append(size)
    within = [count for count in within if count <= largest]
    whole = sum(free >= size for free in nodes.values())
    beyond, count = [], 2
    while size and count <= whole:
        beyond.append(size * count)
        count += max(1, count // FINE_NODES * 2)
    return (*within, *beyond)


@dataclass(slots=True)
class _Nodes:
    """The nodes as they fill: what is free, and who is where."""

    free: dict[str, int]
    jobs: dict[str, dict[str, int]] = field(default_factory=dict)
    """Node -> job -> replicas there."""

    def put(self, node_id: str, job_id: str, count: int) -> None:
        self.free[node_id] -= count
        self.jobs.setdefault(node_id, {})[job_id] = count

    def remove(self, node_id: str, job_id: str) -> int:
        count = self.jobs[node_id].pop(job_id)
        self.free[node_id] += count
        return count

    def smaller(self, node_id: str, share: int) -> dict[str, int]:
        """Return the jobs there with fewer replicas, the smallest first: they find room elsewhere."""
        there = self.jobs.get(node_id, {}).items()
        return dict(sorted((one for one in there if one[1] < share), key=lambda one: one[1]))


def pack(
    nodes: Mapping[str, int],
    jobs: Mapping[str, ElasticJob],
    counts: Mapping[str, int],
    size: int,
) -> dict[str, Allocation]:
    """Return where each job has its count of :func:`counts_of`, or the largest below it that has room."""
    order, counts = {name: i for i, name in enumerate(nodes)}, dict(counts)
    table = _Nodes({node_id: min(free, size) for node_id, free in nodes.items()})
    placed: dict[str, list[str]] = {}
    waiting: list[tuple[int, str]] = []
    for job_id, count in counts.items():
        present = jobs[job_id].allocation
        if count and count == replicas_of(present) and _keeps(present, size, table):
            placed[job_id] = [node_id for node_id, _ in present]
            for node_id, there in present:
                table.put(node_id, job_id, there)
        elif count:
            waiting.append((count, job_id))
    while waiting:
        waiting.sort(key=lambda one: (one[0], one[1]))
        count, job_id = waiting.pop()
        before = {node_id for node_id, _ in jobs[job_id].allocation}
        share = min(count, size)
        chosen = _places(table, count // share, share, before)
        if chosen is None:
            less = count - size if count > size else count // 2
            if less >= max(1, jobs[job_id].min_replicas):
                counts[job_id] = less
                waiting.append((less, job_id))
            continue
        for node_id in chosen:
            for other in table.smaller(node_id, share):
                if table.free[node_id] >= share:
                    break
                waiting.append((table.remove(node_id, other), other))
                del placed[other]
            table.put(node_id, job_id, share)
        placed[job_id] = sorted(chosen, key=order.__getitem__)
    return {
        job_id: tuple((node_id, min(counts[job_id], size)) for node_id in node_ids)
        for job_id, node_ids in placed.items()
    }


def _keeps(present: Allocation, size: int, table: _Nodes) -> bool:
    """Return whether a job can stay where it is: there still, and in a place that this module would give."""
    whole = len(present) == 1 or all(count == size for _, count in present)
    return whole and all(table.free.get(node_id, 0) >= count for node_id, count in present)


def _places(table: _Nodes, nodes: int, share: int, before: set[str]) -> list[str] | None:
    """Return the nodes for ``nodes`` shares, one on each; None if there are not so many."""
    chosen: list[str] = []
    for _ in range(nodes):
        node_id = _choose(table, share, before, chosen)
        if node_id is None:
            return None
        chosen.append(node_id)
    return chosen


def _choose(table: _Nodes, share: int, before: set[str], taken: list[str]) -> str | None:
    """Return the node with the least room that suffices, or that where least must move for it."""
    open_ = [node_id for node_id in table.free if node_id not in taken]
    room = [node_id for node_id in open_ if table.free[node_id] >= share]
    if room:
        return min(room, key=lambda node_id: (node_id not in before, table.free[node_id]))

    def cost(node_id: str) -> tuple[bool, int]:
        moved = sum(table.smaller(node_id, share).values())
        return table.free[node_id] + moved < share, moved

    best = min(open_, key=cost, default=None)
    return None if best is None or cost(best)[0] else best
