"""Nodes that fail: seeded, and their jobs go on from their last commit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from stoker_scheduler.simulation.elastic.failures import Failures
from stoker_scheduler.simulation.elastic.policies import KINDS
from stoker_scheduler.simulation.elastic.profiles import Model, read_profiles
from stoker_scheduler.simulation.elastic.study import World, run
from stoker_scheduler.simulation.elastic.synthetic import write
from stoker_scheduler.simulation.elastic.workloads import WorkloadJob, read_workload

if TYPE_CHECKING:
    from pathlib import Path

NODES = {f"node-{index}": 4 for index in range(20)}
WORLD = World(nodes=4, failures_h=1.0, repair_s=900.0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profiles")
    write(folder, jobs=10, hours=0.5)
    return folder


@pytest.fixture(scope="module")
def models(made: Path) -> dict[str, Model]:
    return read_profiles(made)


def test_nodes_fail_as_often_as_is_asked_and_come_back(seed: int) -> None:
    failures = Failures(NODES, 3600.0, 600.0, seed)
    found = []
    for now_s in range(0, 100 * 3600, 60):
        for one in failures.before(now_s + 60):
            assert now_s <= one.at_s < now_s + 60
            assert one.until_s == one.at_s + 600
            found.append(one)
        there = failures.up(NODES, now_s + 60)
        away = {one.node_id for one in found if one.until_s > now_s + 60}
        assert set(NODES) - set(there) == away
    assert len(found) == pytest.approx(20 * 100 * 3600 / 4200, rel=0.15)
    first = {one.node_id: one for one in reversed(found)}
    again = Failures(NODES, 3600.0, 600.0, seed).before(100 * 3600)
    assert again == [first[node_id] for node_id in NODES]


def test_without_a_mean_time_none_fails() -> None:
    failures = Failures(NODES, 0.0, 600.0, 1)
    assert failures.before(10**9) == []
    assert failures.up(NODES, 0) is NODES


@pytest.mark.parametrize("policy", ["stoker", "sia", "tiresias", "optimus", "fifo"])
def test_all_jobs_end_and_none_runs_on_a_node_that_is_away(
    policy: str, made: Path, models: dict[str, Model], seed: int
) -> None:
    workload = read_workload(made / "workload.csv", models, WORLD.gpus)
    workload = [job for job in workload if job.replicas <= 8]
    fails = 0
    for turn in range(20):  # one run of ten has no failure
        log = run(WORLD, workload, KINDS[policy], seed=seed + turn)
        assert len(log.jobs) == len(workload)
        for row in log.rounds:
            for node_id, _ in row.allocation:
                assert not any(
                    one.node_id == node_id and one.at_s <= row.at_s < one.until_s
                    for one in log.failures
                )
        fails += len(log.failures)
        if fails:
            break
    assert fails


def test_what_was_not_committed_is_done_again(models: dict[str, Model]) -> None:
    job = WorkloadJob("a", 0, models["large"], 1, 64)
    calm = run(World(nodes=1), [job], KINDS["fifo"]).jobs[0]
    often = replace(World(nodes=1), failures_h=1.0, repair_s=1.0)
    ends = {
        commit_s: run(replace(often, commit_s=commit_s), [job], KINDS["fifo"], seed=3).jobs[0]
        for commit_s in (60.0, 1800.0)
    }
    assert calm.finished_s < ends[60.0].finished_s < ends[1800.0].finished_s
    assert ends[60.0].restarts > 0
    lost_s = ends[60.0].finished_s - calm.finished_s
    assert lost_s <= (ends[60.0].restarts + 1) * (60 + 60 + 30), (
        "an interval, its rest, and a stall"
    )
