"""The clock of a study: rounds in virtual time, in which a policy gives GPUs to the jobs of a workload."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from stoker_scheduler.core.elastic.jobs import (
    Allocation,
    ElasticPolicy,
    Hints,
    Snapshot,
    check,
    replicas_of,
)
from stoker_scheduler.simulation.elastic.agent import Agent
from stoker_scheduler.simulation.elastic.failures import Failure, Failures
from stoker_scheduler.simulation.elastic.steps import Steps
from stoker_scheduler.simulation.elastic.world import SimulatedJob
from stoker_scheduler.simulation.inputs import InputError

if TYPE_CHECKING:
    from stoker_scheduler.simulation.elastic.policies import PolicyKind
    from stoker_scheduler.simulation.elastic.workloads import WorkloadJob

MAX_ROUNDS = 100_000
"""A study of so many rounds does not end."""


@dataclass(frozen=True, slots=True)
class NodeType:
    """Some equal nodes, whose GPUs compute ``speed`` times as fast as those of the profiles."""

    name: str
    nodes: int
    gpus_per_node: int
    speed: float


@dataclass(frozen=True, slots=True)
class World:
    """The cluster and the rules of a study.

    ``interference`` slows jobs that share a node while both span several, ``restart_s`` is what a change of
    an allocation costs, by model where ``restart_by_model`` has it, the first one ``start_s`` where that is
    given, ``noise`` the relative error of what jobs measure. With ``declare_epochs`` jobs say how many they
    have, which Pollux's study keeps from policies. A node fails after ``failures_h`` hours in the mean
    (0: never), and is back after ``repair_s``; its jobs go on from their last commit, of which they make one
    every ``commit_s`` and before each restart. With ``types`` there are those instead of ``nodes`` equal
    ones; a job that has several goes by the slowest.
    """

    nodes: int = 16
    gpus_per_node: int = 4
    interval_s: int = 60
    restart_s: float = 30.0
    restart_by_model: Mapping[str, float] = field(default_factory=dict)
    start_s: float | None = None
    interference: float = 0.0
    noise: float = 0.0
    declare_epochs: bool = False
    failures_h: float = 0.0
    repair_s: float = 600.0
    commit_s: float = 600.0
    types: tuple[NodeType, ...] = ()

    @property
    def gpus(self) -> int:
        """Their number."""
        return sum(self.gpus_by_node().values())

    @property
    def whole_node(self) -> int:
        """The GPUs of a node; of the largest, if they differ."""
        return max((one.gpus_per_node for one in self.types), default=self.gpus_per_node)

    def gpus_by_node(self) -> dict[str, int]:
        """Return the nodes by name."""
        if not self.types:
            return {f"node-{index:03}": self.gpus_per_node for index in range(self.nodes)}
        return {
            f"{one.name}-{index:03}": one.gpus_per_node
            for one in self.types
            for index in range(one.nodes)
        }

    def speeds(self) -> dict[str, float]:
        """Return the speeds of nodes, where they have types."""
        return {
            f"{one.name}-{index:03}": one.speed for one in self.types for index in range(one.nodes)
        }


@dataclass(frozen=True, slots=True)
class RoundRow:
    """One job in one round: where it runs, with what batch, and how far it is at the round's beginning.

    ``efficiency`` is what a sample is worth there, by one of a batch of M0.
    """

    at_s: int
    job: str
    allocation: Allocation
    local_batch: int
    accumulated: int
    progress: float
    efficiency: float

    @property
    def batch(self) -> int:
        """The samples of a step."""
        return replicas_of(self.allocation) * self.local_batch * (self.accumulated + 1)


@dataclass(frozen=True, slots=True)
class JobRow:
    """One job: when it was submitted, began and finished, its restarts, and what it has held."""

    job: str
    model: str
    submitted_s: int
    started_s: float
    finished_s: float
    restarts: int
    service_gpu_s: float

    @property
    def completion_s(self) -> float:
        """Its completion time (JCT): from its submission to its end."""
        return self.finished_s - self.submitted_s


@dataclass(slots=True)
class Log:
    """The record of a study: every figure can be computed from it."""

    rounds: list[RoundRow] = field(default_factory=list)
    jobs: list[JobRow] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    policy_s: list[float] = field(default_factory=list)
    """How long the policy took for each round that had jobs, seconds of this machine."""


def run(
    world: World,
    workload: Sequence[WorkloadJob],
    kind: PolicyKind,
    *,
    seed: int = 0,
    progress: Callable[[int], None] = lambda finished: None,
) -> Log:
    """Run a workload to its end. Raises InputError, with the jobs, where it would never end."""
    random = Random(seed)
    policy = kind.make(seed)
    nodes, speeds = world.gpus_by_node(), world.speeds()
    jobs = [_job(row, world, kind, Random(random.random()), speeds) for row in workload]
    failures = Failures(nodes, world.failures_h * 3600, world.repair_s, seed)
    steps, log = Steps(), Log()
    now_s = 0
    for _ in range(MAX_ROUNDS):
        running = [job for job in jobs if job.finished_s is None]
        if not running:
            return log
        contended = _contended(running) if world.interference else frozenset()
        failed = failures.before(now_s + world.interval_s)
        log.failures += failed
        for job in running:
            slowdown = world.interference if _touches(job.allocation, contended) else 0.0
            lost_s = _lost_s(job.allocation, failed)
            if lost_s is None:
                job.advance(now_s, world.interval_s, slowdown)
            else:
                job.fail(now_s, world.interval_s, lost_s, slowdown)
            if job.finished_s is not None:
                log.jobs.append(_row(job))
        now_s += world.interval_s
        active = [j for j in running if j.finished_s is None and j.row.submitted_s <= now_s]
        progress(len(log.jobs))
        there = failures.up(nodes, now_s)
        if active and there:
            _round(policy, kind, there, active, now_s, world, steps, log)
        log.rounds += [_round_row(job, now_s) for job in active if job.allocation]
    names = ", ".join(job.row.name for job in jobs if job.finished_s is None)
    raise InputError(f"after {MAX_ROUNDS} rounds these have not finished: {names[:300]}")


def _job(
    row: WorkloadJob,
    world: World,
    kind: PolicyKind,
    random: Random,
    speeds: Mapping[str, float],
) -> SimulatedJob:
    fixed = row.model.fixed_batch if kind.fixes_models else 0
    return SimulatedJob(
        row,
        Agent(row.model.limits, as_pollux=kind.fixes_models),
        restart_s=world.restart_by_model.get(row.model.name, world.restart_s),
        start_s=world.start_s,
        tuned_batch=fixed or (0 if kind.tunes_batches else row.batch),
        noise=world.noise,
        declares=world.declare_epochs,
        commit_s=world.commit_s,
        speeds=speeds,
        random=random,
    )


def _round(
    policy: ElasticPolicy,
    kind: PolicyKind,
    nodes: Mapping[str, int],
    active: list[SimulatedJob],
    now_s: int,
    world: World,
    steps: Steps,
    log: Log,
) -> None:
    """Ask the policy, and bring every job to what it answers."""
    standing, hints = [], {}
    for job in active:
        most = _max_replicas(job, world, kind)
        standing.append(job.standing(fixed_replicas=kind.fixes_replicas, max_replicas=most))
        oracle = job.oracle(most, world.whole_node) if kind.needs_oracle else None
        hints[job.row.name] = job.hints(oracle)
    snapshot = Snapshot(nodes, tuple(standing), speeds=world.speeds())
    allocations = _timed(policy, snapshot, hints, now_s, log)
    check(snapshot, allocations)
    targets = {job.row.name: allocations.get(job.row.name, ()) for job in active}
    steps.take(targets, nodes, now_s)
    for job in active:
        job.set_allocation(targets[job.row.name], now_s)


def _timed(
    policy: ElasticPolicy, snapshot: Snapshot, hints: dict[str, Hints], now_s: int, log: Log
) -> dict[str, Allocation]:
    begun_s = time.perf_counter()
    allocations = policy.allocate(snapshot, hints, float(now_s))
    log.policy_s.append(time.perf_counter() - begun_s)
    return allocations


def _max_replicas(job: SimulatedJob, world: World, kind: PolicyKind) -> int:
    if kind.fixes_replicas:
        return job.row.replicas
    if kind.fixes_models and job.model.fixed_batch:
        return 1
    limits = job.model.limits
    batch = limits.max_batch if kind.tunes_batches else job.row.batch
    return min(world.gpus, batch // limits.min_local)


def _contended(running: Sequence[SimulatedJob]) -> frozenset[str]:
    """Return the nodes on which two jobs or more run that span several."""
    seen: dict[str, int] = {}
    for job in running:
        for node_id, _ in job.allocation if len(job.allocation) > 1 else ():
            seen[node_id] = seen.get(node_id, 0) + 1
    return frozenset(node_id for node_id, count in seen.items() if count > 1)


def _touches(allocation: Allocation, contended: frozenset[str]) -> bool:
    return len(allocation) > 1 and any(node_id in contended for node_id, _ in allocation)


def _lost_s(allocation: Allocation, failed: Sequence[Failure]) -> int | None:
    """Return when the first of a job's nodes fails, if any does."""
    at = {one.node_id: one.at_s for one in failed}
    return min((at[node_id] for node_id, _ in allocation if node_id in at), default=None)


def _round_row(job: SimulatedJob, now_s: int) -> RoundRow:
    batch = job.batch
    return RoundRow(
        now_s,
        job.row.name,
        job.allocation,
        batch.local,
        batch.accumulated,
        job.progress,
        job.efficiency,
    )


def _row(job: SimulatedJob) -> JobRow:
    assert job.started_s is not None and job.finished_s is not None, "it has finished"
    return JobRow(
        job.row.name,
        job.model.name,
        job.row.submitted_s,
        job.started_s,
        job.finished_s,
        job.restarts,
        job.service_gpu_s,
    )
