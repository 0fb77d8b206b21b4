"""The worth of one replica more or less, and of one node: for who asks why, and for an autoscaler.

The unit is that of the policy's values (docs/elastic.md): seconds by which the work of a second on one GPU
comes sooner, or with a ``fairness`` terms of its power mean. Of policies, ``stoker`` puts values on counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stoker_scheduler.core.elastic.goodput_policy import GoodputPolicy, share_out
from stoker_scheduler.core.elastic.jobs import replicas_of
from stoker_scheduler.core.elastic.packing import counts_with

if TYPE_CHECKING:
    from stoker_goodput.throughput import Floats
    from stoker_scheduler.core.elastic.jobs import Allocation, ElasticPolicy, Hints, Snapshot


@dataclass(frozen=True, slots=True)
class ReplicaWorth:
    """The worth of a job's next step up or down, each per replica; None where there is none.

    ``speedup`` is that over one replica which its target is expected to bring.
    """

    speedup: float | None
    more: int | None
    """The next larger count that it could use."""
    gain: float | None
    less: int | None
    loss: float | None
    more_speedup: float | None = None
    """That over one replica which ``more`` would bring."""


@dataclass(frozen=True, slots=True)
class Worth:
    """The worth of replicas by job, and what all jobs together would gain or lose by a node.

    ``node_more`` is the gain by one more node like the others, ``node_less`` the loss without each of those
    there are, both in the sum of values, ``total``.
    """

    jobs: Mapping[str, ReplicaWorth]
    total: float
    node_more: float
    node_less: Mapping[str, float]

    def holder_for(self, job_id: str) -> str:
        """Return the job to whom a replica is worth least among the others; '' if nobody has any."""
        others = [
            (one.loss, name)
            for name, one in self.jobs.items()
            if name != job_id and one.loss is not None
        ]
        return min(others, default=(0.0, ""))[1]


def worth_of(
    policy: ElasticPolicy,
    snapshot: Snapshot,
    hints: Mapping[str, Hints],
    targets: Mapping[str, Allocation],
    now_s: float,
) -> Worth | None:
    """Return the worth of replicas after a round; None if the policy does not value them."""
    if not isinstance(policy, GoodputPolicy) or not snapshot.jobs or not snapshot.nodes:
        return None
    counts = counts_with(snapshot.nodes, snapshot.node_size, snapshot.jobs)
    values = policy.values(snapshot, hints, now_s)
    speedups = policy.speedups(snapshot, hints)
    jobs = {
        job.job_id: _of_job(row, of_job, counts, replicas_of(targets[job.job_id]))
        for job, row, of_job in zip(snapshot.jobs, values, speedups, strict=True)
    }
    total = _best(values, counts, snapshot.gpus)
    rooms = {min(room, snapshot.node_size) for room in snapshot.nodes.values()}
    less = {room: total - _best(values, counts, snapshot.gpus - room) for room in rooms}
    return Worth(
        jobs=jobs,
        total=total,
        node_more=_best(values, counts, snapshot.gpus + snapshot.node_size) - total,
        node_less={
            node_id: less[min(room, snapshot.node_size)] for node_id, room in snapshot.nodes.items()
        },
    )


def _of_job(values: Floats, speedups: Floats, counts: Sequence[int], present: int) -> ReplicaWorth:
    allowed = [(count, i) for i, count in enumerate(counts) if np.isfinite(values[i])]
    value = {count: float(values[i]) for count, i in allowed} | {0: 0.0}
    speedup = {count: float(speedups[i]) for count, i in allowed}
    more = min((count for count, _ in allowed if count > present), default=None)
    less = max((count for count in value if count < present), default=None)
    now = value.get(present, 0.0)
    return ReplicaWorth(
        speedup=speedup.get(present),
        more=more,
        gain=None if more is None else (value[more] - now) / (more - present),
        less=less,
        loss=None if less is None else (now - value[less]) / (present - less),
        more_speedup=None if more is None else speedup[more],
    )


def _best(values: Floats, counts: Sequence[int], gpus: int) -> float:
    """Return the greatest sum of values that ``gpus`` allow."""
    if gpus <= 0:
        return 0.0
    chosen = share_out(values, counts, gpus)
    of_count = {count: i for i, count in enumerate(counts)}
    return float(
        sum(row[of_count[count]] for row, count in zip(values, chosen, strict=True) if count)
    )
