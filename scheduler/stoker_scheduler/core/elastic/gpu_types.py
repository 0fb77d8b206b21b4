"""Clusters with GPUs of several types, of which a job uses one at a time.

A type is known by its speed: how many times as fast as a reference its GPUs compute. The exchange of
gradients takes as long on each. A column of a table is a type with a count of its GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from stoker_scheduler.core.elastic.packing import counts_of, counts_with, pack

if TYPE_CHECKING:
    from stoker_goodput.throughput import Floats
    from stoker_scheduler.core.elastic.jobs import Allocation, ElasticJob, Snapshot


@dataclass(frozen=True, slots=True)
class GpuType:
    """The nodes of one speed, the size of a whole one, and the counts of their GPUs that a job may have."""

    speed: float
    nodes: Mapping[str, int]
    size: int
    counts: tuple[int, ...]
    regular: tuple[int, ...]
    """Those that every job may have; of the others, only a job whose limits have none of these."""

    @property
    def gpus(self) -> int:
        """Their number; of a node that is larger than others, those that one of the others has."""
        return sum(min(free, self.size) for free in self.nodes.values())

    def has(self, allocation: Allocation) -> bool:
        """Return whether all of an allocation is on these nodes."""
        return all(node_id in self.nodes for node_id, _ in allocation)


def types_of(snapshot: Snapshot) -> tuple[GpuType, ...]:
    """Return the types of a cluster, the fastest first."""
    nodes: dict[float, dict[str, int]] = {}
    for node_id, gpus in snapshot.nodes.items():
        nodes.setdefault(snapshot.speeds.get(node_id, 1.0), {})[node_id] = gpus
    found = []
    for speed in sorted(nodes)[::-1]:
        size = snapshot.size or min(nodes[speed].values())
        counts = counts_with(nodes[speed], size, snapshot.jobs)
        found.append(GpuType(speed, nodes[speed], size, counts, counts_of(nodes[speed], size)))
    return tuple(found)


def share_out_types(values: Floats, types: Sequence[GpuType]) -> list[tuple[int, int]]:
    """Return the type and the count of each job, (0, 0) for none, with the greatest sum of values.

    Exact, as an integer program (as Sia's, SOSP 2023, section 3.4): one column for each job at most, and no
    more GPUs of a type than there are. The columns of ``values`` are the counts of the first type, then those
    of the next.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    columns = [(index, count) for index, one in enumerate(types) for count in one.counts]
    rows, of_column = np.nonzero(values > 0)
    if not len(rows):
        return [(0, 0)] * len(values)
    chosen = np.arange(len(rows))
    kinds, counts = np.array(columns)[of_column].T
    one_each = csr_array((np.ones(len(rows)), (rows, chosen)), shape=(len(values), len(rows)))
    used = csr_array((counts, (kinds, chosen)), shape=(len(types), len(rows)))
    found = milp(
        -values[rows, of_column],
        integrality=np.ones(len(rows)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(one_each, 0, 1),
            LinearConstraint(used, 0, [one.gpus for one in types]),
        ],
        options={"mip_rel_gap": 0},  # else it ends within 1 in 10,000 of the greatest sum
    )
    answer = [(0, 0)] * len(values)
    for index in np.flatnonzero(np.round(found.x)):
        answer[rows[index]] = columns[of_column[index]]
    return answer


def pack_types(
    types: Sequence[GpuType], jobs: Sequence[ElasticJob], chosen: Sequence[tuple[int, int]]
) -> dict[str, Allocation]:
    """Return where each job has its count, on nodes of its type."""
    answer: dict[str, Allocation] = {}
    for index, one in enumerate(types):
        there, counts = {}, {}
        for job, (kind, count) in zip(jobs, chosen, strict=True):
            if count and kind == index:
                stays = one.has(job.allocation)
                there[job.job_id] = job if stays else replace(job, allocation=())
                counts[job.job_id] = count
        answer |= pack(one.nodes, there, counts, one.size)
    return answer
