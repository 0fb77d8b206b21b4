"""The question to a policy of elastic jobs, and its answer: GPUs by node.

A policy sees the nodes with the GPUs that elastic jobs may have, the jobs with what they have now, and each
job's hints: nothing of models, ends or arrivals to come. It answers with the allocation of every job that is
to have one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from stoker_goodput.batches import BatchLimits
from stoker_goodput.efficiency import GradientNoise
from stoker_goodput.throughput import ThroughputParams
from stoker_scheduler.core.elastic.allocations import Allocation as Allocation
from stoker_scheduler.core.elastic.allocations import replicas_of as replicas_of


@dataclass(frozen=True, slots=True)
class Oracle:
    """Knowledge that only a study has: the seconds of a step by replicas (1, 2, ...), and the steps left."""

    step_s: tuple[float, ...]
    steps: float


@dataclass(frozen=True, slots=True)
class Hints:
    """The word of a job on itself. ``params`` and ``noise`` are None until it has measured.

    ``profiled_replicas`` is the most that it ever ran with, ``restart_s`` the seconds that a change of its
    allocation costs it, ``progress`` what it has done, in samples of M0's worth, and ``done`` the part of the
    epochs that it has declared, None if it has declared none.
    """

    limits: BatchLimits
    params: ThroughputParams | None = None
    noise: GradientNoise | None = None
    profiled_replicas: int = 0
    restart_s: float = 30.0
    oracle: Oracle | None = None
    progress: float = 0.0
    done: float | None = None

    @property
    def left(self) -> float | None:
        """The work that is left, in samples of M0's worth, if the epochs to come are as those before."""
        if not self.done or self.progress <= 0:
            return None
        return self.progress * max(0.0, 1 / self.done - 1)


@dataclass(frozen=True, slots=True)
class ElasticJob:
    """A job as it stands: since when, with what, and what it has had.

    ``replicas`` is the number of a job that cannot choose (0: any), ``service_gpu_s`` the GPU-seconds that it
    has held, ``restarts`` how often its allocation changed after it had begun.
    """

    job_id: str
    submitted_s: float
    allocation: Allocation = ()
    service_gpu_s: float = 0.0
    restarts: int = 0
    replicas: int = 0
    min_replicas: int = 1
    max_replicas: int = 1 << 20

    def age_s(self, now_s: float) -> float:
        """Return the seconds since its submission."""
        return now_s - self.submitted_s


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The cluster as a policy sees it: GPUs by node, and jobs in the order of their submission.

    ``speeds`` says of nodes how many times as fast as a reference their GPUs compute, where that is not 1.
    ``size`` is that of a whole node, where other work leaves less of some; 0 for that of the smallest.
    """

    nodes: Mapping[str, int]
    jobs: tuple[ElasticJob, ...]
    speeds: Mapping[str, float] = field(default_factory=dict)
    size: int = 0

    @property
    def gpus(self) -> int:
        """Their sum; of a node that is larger than others, those that one of the others has."""
        return sum(min(free, self.node_size) for free in self.nodes.values())

    @property
    def node_size(self) -> int:
        """The GPUs of a whole node."""
        return self.size or min(self.nodes.values(), default=0)


class ElasticPolicy(Protocol):
    """Decides a round. It may remember earlier ones, but asks no clock and draws only from its own seed."""

    def allocate(
        self, snapshot: Snapshot, hints: Mapping[str, Hints], now_s: float
    ) -> dict[str, Allocation]:
        """Return the allocation of each job that is to have GPUs."""


@dataclass(slots=True)
class FreeGpus:
    """The GPUs of each node that a round has not given away yet."""

    by_node: dict[str, int]
    _order: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self._order = {node_id: index for index, node_id in enumerate(self.by_node)}

    def take(self, allocation: Allocation) -> None:
        """Give an allocation away."""
        for node_id, count in allocation:
            self.by_node[node_id] -= count

    def spread(self, replicas: int) -> Allocation:
        """Give ``replicas`` away, on the emptiest nodes first; the caller knows that there are so many."""
        taken: list[tuple[str, int]] = []
        while replicas:
            node_id = max(self.by_node, key=lambda name: (self.by_node[name], -self._order[name]))
            count = min(self.by_node[node_id], replicas)
            taken.append((node_id, count))
            self.by_node[node_id] -= count
            replicas -= count
        return tuple(taken)


def check(snapshot: Snapshot, allocations: Mapping[str, Allocation]) -> None:
    """Raise ValueError, with the job or node, for an answer that no cluster can carry out."""
    jobs = {job.job_id: job for job in snapshot.jobs}
    used: dict[str, int] = {}
    for job_id, allocation in allocations.items():
        if job_id not in jobs:
            raise ValueError(f"there is no job {job_id!r}")
        job, replicas = jobs[job_id], replicas_of(allocation)
        if len(dict(allocation)) < len(allocation):
            raise ValueError(f"job {job_id!r} has a node twice: {allocation}")
        if replicas and not job.min_replicas <= replicas <= job.max_replicas:
            raise ValueError(
                f"job {job_id!r} has {replicas} replicas, not {job.min_replicas} to {job.max_replicas}"
            )
        for node_id, count in allocation:
            if count < 1 or node_id not in snapshot.nodes:
                raise ValueError(f"job {job_id!r} has {count} GPUs of node {node_id!r}")
            used[node_id] = used.get(node_id, 0) + count
    for node_id, count in used.items():
        if count > snapshot.nodes[node_id]:
            raise ValueError(f"node {node_id!r} has {snapshot.nodes[node_id]} GPUs, not {count}")


def kept(snapshot: Snapshot, jobs: Iterable[ElasticJob]) -> tuple[dict[str, Allocation], FreeGpus]:
    """Return the allocations of ``jobs`` as they are, and what is free beside them."""
    free = FreeGpus(dict(snapshot.nodes))
    allocations = {job.job_id: job.allocation for job in jobs if job.allocation}
    for allocation in allocations.values():
        free.take(allocation)
    return allocations, free
