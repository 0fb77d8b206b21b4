"""Elastic jobs as rounds take them: hints without what makes no sense, and the question of the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from stoker_goodput.efficiency import GradientNoise
from stoker_goodput.throughput import ThroughputParams
from stoker_scheduler.core.dry_run.fork import fork
from stoker_scheduler.core.elastic import generations
from stoker_scheduler.core.elastic.goodput_policy import GoodputPolicy
from stoker_scheduler.core.elastic.rounds import decide
from stoker_scheduler.elastic.candidates import candidate_of, hints_of, limits_of
from stoker_scheduler.simulation.elastic import steps, study
from stoker_scheduler.simulation.elastic.policies import KINDS
from stoker_scheduler.simulation.elastic.profiles import read_profiles
from stoker_scheduler.simulation.elastic.study import World
from stoker_scheduler.simulation.elastic.synthetic import write
from stoker_scheduler.simulation.elastic.workloads import read_workload
from stoker_wire.messages.elastic import ElasticState, Replica, Scaling, StepTimeParams
from stoker_wire.messages.elastic import Hints as WireHints
from tests.unit.scheduler.core_driver import Core
from tests.unit.scheduler.elastic.generations_world import World as Cluster

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from random import Random

    from stoker_scheduler.core.elastic.jobs import Allocation, Hints, Snapshot

THETA = (0.1, 0.002, 0.02, 0.0005, 0.01, 0.0005, 1.5)
SCALING = Scaling(base_batch=64, max_batch=1024, max_local_batch=64)


def said(**more: Any) -> WireHints:
    names = StepTimeParams.__struct_fields__
    theta = StepTimeParams(**dict(zip(names, THETA, strict=True)))
    return WireHints(**{"params": theta, "grad_sqr": 1.0, "grad_var": 4.0, **more})


def test_hints_are_what_the_job_said() -> None:
    found = hints_of(said(profiled_replicas=3, restart_s=7.0, progress=9.0), limits_of(SCALING))
    assert found.params == ThroughputParams(*THETA) and found.noise == GradientNoise(1.0, 4.0)
    assert (found.profiled_replicas, found.restart_s, found.progress) == (3, 7.0, 9.0)


@pytest.mark.parametrize("name", StepTimeParams.__struct_fields__)
@pytest.mark.parametrize("value", [None, -1.0, float("nan"), float("inf")])
def test_what_makes_no_sense_never_reaches_a_policy(name: str, value: float | None) -> None:
    bad = said()
    assert bad.params is not None
    bad = msgspec.structs.replace(bad, params=msgspec.structs.replace(bad.params, **{name: value}))
    assert hints_of(bad, limits_of(SCALING)).params is None


def test_a_job_of_one_batch_needs_no_noise() -> None:
    fixed = limits_of(Scaling(base_batch=64, max_local_batch=64))
    assert hints_of(said(grad_sqr=None, grad_var=None), fixed).noise == GradientNoise(1.0, 0.0)


def test_a_job_counts_with_what_it_is_offered_and_what_it_has_had() -> None:
    one = Cluster(_random(1), {"n_1": 4})
    one.join("job_1")
    job = one.directory.jobs["job_1"]
    here = Replica(group_id="pg_1", bundle=0, node_id="n_1")
    state = ElasticState(scaling=SCALING, replicas=(here,), since_s=10.0, service_s=5.0)
    found = candidate_of(job, state, (), 30.0).job
    assert (found.allocation, found.service_gpu_s) == ((("n_1", 1),), 25.0)


def _random(seed: int) -> Random:
    from random import Random

    return Random(seed)


class Recorder(GoodputPolicy):
    """The policy, and all that it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[Snapshot, dict[str, Hints], float]] = []

    def allocate(
        self, snapshot: Snapshot, hints: Mapping[str, Hints], now_s: float
    ) -> dict[str, Allocation]:
        self.asked.append((snapshot, dict(hints), now_s))
        return super().allocate(snapshot, hints, now_s)


def test_the_simulator_asks_what_a_cluster_asks_and_takes_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question of a study's round, made of the records of a cluster, is the same question.

    So is the answer, and the steps to it.
    """
    write(tmp_path, jobs=4, hours=0.1)
    world = World(nodes=2, gpus_per_node=4)
    workload = read_workload(tmp_path / "workload.csv", read_profiles(tmp_path), world.gpus)
    recorder, taken = Recorder(), []
    simulated = generations.settle

    def settle(*args: Any) -> Any:
        taken.append((args, simulated(*args)))
        return taken[-1][1]

    monkeypatch.setattr(steps, "settle", settle)
    study.run(world, workload, replace(KINDS["stoker"], make=lambda _: recorder))
    assert len(recorder.asked) > 10 and len(taken) > 10
    core = Core(*[{"GPU": world.gpus_per_node}] * world.nodes)
    names = {f"n_{i + 1}": node for i, node in enumerate(world.gpus_by_node())}
    for snapshot, hints, now_s in recorder.asked:
        candidates = [_live(job, hints[job.job_id], names, core, now_s) for job in snapshot.jobs]
        live = Recorder()
        found = decide(fork(core.state), (), candidates, lambda _: live, now_s)  # noqa: B023
        ((asked, told, at_s),) = live.asked
        assert told == hints and at_s == now_s
        assert {names[node]: gpus for node, gpus in asked.nodes.items()} == snapshot.nodes
        assert [_renamed(job.allocation, names) for job in asked.jobs] == [
            job.allocation for job in snapshot.jobs
        ]
        for ours, theirs in zip(asked.jobs, snapshot.jobs, strict=True):
            assert replace(ours, allocation=()) == replace(theirs, allocation=())
        assert asked.node_size == snapshot.node_size
        answer = GoodputPolicy().allocate(snapshot, hints, now_s)
        assert {n: _renamed(a, names) for n, a in found.targets.items() if a} == answer
    assert all(isinstance(one, generations.Standing) for args, _ in taken for one in args[0])


def _live(job: Any, hints: Hints, names: dict[str, str], core: Core, now_s: float) -> Any:
    """The candidate that the gcs's record of such a job would give."""
    back = {node: name for name, node in names.items()}
    limits = hints.limits
    theta = noise = None
    if hints.params is not None:
        fields = StepTimeParams.__struct_fields__
        theta = StepTimeParams(**{name: getattr(hints.params, name) for name in fields})
    if hints.noise is not None:
        noise = hints.noise
    record = ElasticState(
        scaling=Scaling(
            base_batch=limits.min_batch,
            max_batch=limits.max_batch,
            min_local_batch=limits.min_local,
            max_local_batch=limits.max_local,
            max_replicas=job.max_replicas,
        ),
        replicas=tuple(
            Replica(group_id="pg_1", bundle=0, node_id=back[node])
            for node, count in job.allocation
            for _ in range(count)
        ),
        since_s=now_s,
        service_s=job.service_gpu_s,
        restarts=job.restarts,
        hints=WireHints(
            params=theta,
            grad_sqr=None if noise is None else noise.sqr,
            grad_var=None if noise is None else noise.var,
            profiled_replicas=hints.profiled_replicas,
            restart_s=hints.restart_s,
            progress=hints.progress,
            done_fraction=hints.done,
        ),
    )
    made = Cluster(_random(1), {})
    made.join(job.job_id)
    known = msgspec.structs.replace(made.directory.jobs[job.job_id], created_at_s=job.submitted_s)
    return candidate_of(known, record, (), now_s)


def _renamed(allocation: Allocation, names: dict[str, str]) -> Allocation:
    return tuple((names[node], count) for node, count in allocation)
