"""The places of replicas: parts of a node within one, larger jobs on whole nodes, and few that move.

Counts within a node are powers of two that divide it, counts beyond are multiples of it: whatever of these
fits in sum also fits in place, and no two jobs that span nodes share one (Sia, SOSP 2023, section 3.3, has
the argument). A job whose count stays keeps its nodes, unless a larger one needs them whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stoker_scheduler.core.elastic.jobs import Allocation, ElasticJob, replicas_of

FINE_NODES = 16
"""Up to so many nodes, every number of them is a count."""


def counts_of(nodes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the counts that a job may have: powers of two that divide a node, and whole nodes.

    All nodes count as the smallest one, so that a whole node is always of the same size. Of more than 16
    nodes not every number is one: steps of an eighth suffice.
    """
    size = min(nodes.values(), default=0)
    within = [1 << power for power in range(size.bit_length()) if size % (1 << power) == 0]
    if size and within[-1] != size:
        within.append(size)
    beyond, count = [], 2
    while size and count <= len(nodes):
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
    nodes: Mapping[str, int], jobs: Mapping[str, ElasticJob], counts: Mapping[str, int]
) -> dict[str, Allocation]:
    """Return where each job has its count. Raises ValueError for counts that are not of :func:`counts_of`."""
    size = min(nodes.values(), default=0)
    table, order = _Nodes(dict.fromkeys(nodes, size)), {name: i for i, name in enumerate(nodes)}
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
        wanted = count // size if count > size else 1
        share = min(count, size)
        chosen: list[str] = []
        for _ in range(wanted):
            node_id = _choose(table, share, before)
            for other in table.smaller(node_id, share):
                if table.free[node_id] >= share:
                    break
                waiting.append((table.remove(node_id, other), other))
                del placed[other]
            table.put(node_id, job_id, share)
            chosen.append(node_id)
        placed[job_id] = sorted(chosen, key=order.__getitem__)
    return {
        job_id: tuple((node_id, min(counts[job_id], size)) for node_id in node_ids)
        for job_id, node_ids in placed.items()
    }


def _keeps(present: Allocation, size: int, table: _Nodes) -> bool:
    """Return whether a job can stay where it is: there still, and in a place that this module would give."""
    whole = len(present) == 1 or all(count == size for _, count in present)
    return whole and all(table.free.get(node_id, 0) >= count for node_id, count in present)


def _choose(table: _Nodes, share: int, before: set[str]) -> str:
    """Return the node with the least room that suffices, or that where least must move for it."""
    room = [node_id for node_id, free in table.free.items() if free >= share]
    if room:
        return min(room, key=lambda node_id: (node_id not in before, table.free[node_id]))

    def cost(node_id: str) -> tuple[bool, int]:
        moved = sum(table.smaller(node_id, share).values())
        return table.free[node_id] + moved < share, moved

    best = min(table.free, key=cost)
    if cost(best)[0]:
        raise ValueError(f"there is no room for {share} GPUs in one node: {table.free}")
    return best
