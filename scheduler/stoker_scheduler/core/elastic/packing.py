"""The places of replicas: parts of a node within one, larger jobs on whole nodes, and few that move.

Counts within a node are powers of two that divide it, counts beyond are multiples of it: whatever of these
fits in sum also fits in place, and no two jobs that span nodes share one (Sia, SOSP 2023, section 3.3, has
the argument). A job whose count stays keeps its nodes, unless a larger one needs them whole. Where other
work leaves parts of nodes, what fits in sum may not fit in place: then a job gets the next smaller count.
So may it where a job's limits have none of these counts: it gets the least that it may have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


def counts_with(nodes: Mapping[str, int], size: int, jobs: Iterable[ElasticJob]) -> tuple[int, ...]:
    """Return :func:`counts_of`, and the least count of each job whose limits have none of them.

    Of those that the empty nodes have room for.
    """
    regular = counts_of(nodes, size)
    odd = {
        job.min_replicas
        for job in jobs
        if not any(job.min_replicas <= one <= job.max_replicas for one in regular)
    }
    return tuple(sorted({*regular, *(one for one in odd if _has_room(nodes, one, size))}))


def usable(job: ElasticJob, counts: Sequence[int], regular: Sequence[int]) -> list[bool]:
    """Return which of ``counts`` a job may have: regular ones in its limits, else its least."""
    within = [one in regular and job.min_replicas <= one <= job.max_replicas for one in counts]
    return (
        within if any(within) else [one == job.min_replicas <= job.max_replicas for one in counts]
    )


def _has_room(nodes: Mapping[str, int], count: int, size: int) -> bool:
    """Return whether empty nodes have room for the shares of a count, one on each."""
    shares = _shares(count, size)
    rooms = sorted((min(free, size) for free in nodes.values()), reverse=True)
    return len(shares) <= len(rooms) and all(
        share <= room for share, room in zip(shares, rooms, strict=False)
    )


def _shares(count: int, size: int) -> list[int]:
    """Return the replicas of a job on each of its nodes, the most first: all whole but the last."""
    rest = [count % size] if size and count % size else []
    return [size] * (count // size if size else 0) + rest


@dataclass(slots=True)
class _Nodes:
    """The nodes as they fill: what is free, and who is where."""

    free: dict[str, int]
    jobs: dict[str, dict[str, int]] = field(default_factory=dict)
    """Node -> job -> replicas there."""
    spanning: set[str] = field(default_factory=set)
    """Jobs on several nodes: they are not moved for another."""

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
        smaller = (one for one in there if one[1] < share and one[0] not in self.spanning)
        return dict(sorted(smaller, key=lambda one: one[1]))


def pack(
    nodes: Mapping[str, int],
    jobs: Mapping[str, ElasticJob],
    counts: Mapping[str, int],
    size: int,
) -> dict[str, Allocation]:
    """Return where each job has its count of :func:`counts_with`, or the largest below it that has room."""
    order, counts = {name: i for i, name in enumerate(nodes)}, dict(counts)
    table = _Nodes({node_id: min(free, size) for node_id, free in nodes.items()})
    placed: dict[str, dict[str, int]] = {}
    waiting: list[tuple[int, str]] = []
    for job_id, count in counts.items():
        present = jobs[job_id].allocation
        if count and count == replicas_of(present) and _keeps(present, size, table):
            placed[job_id] = dict(present)
            if len(present) > 1:
                table.spanning.add(job_id)
            for node_id, there in present:
                table.put(node_id, job_id, there)
        elif count:
            waiting.append((count, job_id))
    while waiting:
        waiting.sort(key=lambda one: (one[0], one[1]))
        count, job_id = waiting.pop()
        before = {node_id for node_id, _ in jobs[job_id].allocation}
        chosen = _places(table, _shares(count, size), before)
        if chosen is None:
            less = count - size if count > size else count // 2
            if less >= max(1, jobs[job_id].min_replicas):
                counts[job_id] = less
                waiting.append((less, job_id))
            continue
        if len(chosen) > 1:
            table.spanning.add(job_id)
        for node_id, share in chosen.items():
            for other in table.smaller(node_id, share):
                if table.free[node_id] >= share:
                    break
                waiting.append((table.remove(node_id, other), other))
                del placed[other]
            table.put(node_id, job_id, share)
        placed[job_id] = chosen
    return {
        job_id: tuple(sorted(chosen.items(), key=lambda one: order[one[0]]))
        for job_id, chosen in placed.items()
    }


def _keeps(present: Allocation, size: int, table: _Nodes) -> bool:
    """Return whether a job can stay where it is: there still, and in a place that this module would give."""
    shares = sorted((count for _, count in present), reverse=True)
    whole = len(present) == 1 or shares == _shares(sum(shares), size)
    return whole and all(table.free.get(node_id, 0) >= count for node_id, count in present)


def _places(table: _Nodes, shares: Sequence[int], before: set[str]) -> dict[str, int] | None:
    """Return the nodes for the shares, one on each; None if there are not so many."""
    chosen: dict[str, int] = {}
    for share in shares:
        taken = set(chosen)
        if share < shares[0]:  # what is left of a job that spans nodes: no other such one is there
            taken |= {node_id for node_id, jobs in table.jobs.items() if table.spanning & set(jobs)}
        node_id = _choose(table, share, before, taken)
        if node_id is None:
            return None
        chosen[node_id] = share
    return chosen


def _choose(table: _Nodes, share: int, before: set[str], taken: set[str]) -> str | None:
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
