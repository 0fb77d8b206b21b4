"""Studies: the published times to the second where the study's data are, and rules on made-up profiles."""

from __future__ import annotations

import csv
import os
import statistics
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stoker_scheduler.core.elastic import pollux
from stoker_scheduler.core.elastic.goodput_policy import GoodputPolicy
from stoker_scheduler.core.elastic.jobs import Allocation, Hints, Snapshot, replicas_of
from stoker_scheduler.simulation.elastic.figures import figures
from stoker_scheduler.simulation.elastic.policies import KINDS, PolicyKind
from stoker_scheduler.simulation.elastic.profiles import Model, read_profiles
from stoker_scheduler.simulation.elastic.study import Log, NodeType, World, run
from stoker_scheduler.simulation.elastic.synthetic import write
from stoker_scheduler.simulation.elastic.workloads import WorkloadJob, read_workload
from stoker_scheduler.simulation.inputs import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

DATA = Path(os.environ.get("POLLUX_DATA", ""))
needs_data = pytest.mark.skipif(
    not os.environ.get("POLLUX_DATA"),
    reason="needs the data of Pollux's study: name their folder in POLLUX_DATA",
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profiles")
    write(folder, jobs=15, hours=0.5)
    return folder


@pytest.fixture(scope="module")
def models(made: Path) -> dict[str, Model]:
    return read_profiles(made)


@pytest.fixture
def workload(made: Path, models: dict[str, Model]) -> list[WorkloadJob]:
    return read_workload(made / "workload.csv", models, SMALL.gpus)


@pytest.fixture(autouse=True)
def _short_evolution(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of its generations is enough for what is asked here, and takes seconds."""
    monkeypatch.setattr(pollux, "GENERATIONS", 10)


SMALL = World(nodes=4)


@needs_data
@pytest.mark.parametrize("policy", ["tiresias", "optimus"])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_every_published_completion_time_comes_out(policy: str, number: int) -> None:
    jobs = read_workload(DATA / f"workloads/workload-{number}.csv", read_profiles(DATA), 64)
    with (DATA / "published/jcts-1.0.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["workload"] == str(number)]
    log = run(World(), jobs, KINDS[policy])
    assert {row.job: row.completion_s for row in log.jobs} == {
        row["name"]: float(row[f"{policy}_s"]) for row in rows
    }


@needs_data
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_the_mean_is_below_that_of_pollux(number: int) -> None:
    jobs = read_workload(DATA / f"workloads/workload-{number}.csv", read_profiles(DATA), 64)
    with (DATA / "published/jcts-1.0.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["workload"] == str(number)]
    published_s = statistics.fmean(float(row["pollux_s"]) for row in rows)
    log = run(World(), jobs, KINDS["stoker"])
    assert figures(log, World(), jobs).mean_jct_s < published_s


@pytest.mark.parametrize("policy", list(KINDS))
def test_all_jobs_end_and_what_is_written_down_holds(
    policy: str, workload: list[WorkloadJob]
) -> None:
    log = run(SMALL, workload, KINDS[policy])
    assert sorted(row.job for row in log.jobs) == sorted(job.name for job in workload)
    ends = {row.job: row for row in log.jobs}
    used: dict[int, dict[str, int]] = {}
    progress: dict[str, float] = {}
    for row in log.rounds:
        for node, count in row.allocation:
            nodes = used.setdefault(row.at_s, {})
            nodes[node] = nodes.get(node, 0) + count
        assert row.progress >= progress.get(row.job, 0.0), "progress falls"
        progress[row.job] = row.progress
        assert row.at_s <= ends[row.job].finished_s
    assert all(count <= 4 for nodes in used.values() for count in nodes.values())
    result = figures(log, SMALL, workload)
    assert result.utilisation <= 1
    assert result.p50_jct_s <= result.p99_jct_s <= result.makespan_s
    assert statistics.fmean(row.completion_s for row in log.jobs) == result.mean_jct_s


def test_the_same_seed_is_the_same_study(workload: list[WorkloadJob]) -> None:
    world = replace(SMALL, noise=0.05)

    def once(seed: int) -> Log:
        return run(world, workload, KINDS["stoker"], seed=seed)

    first, again, other = once(1), once(1), once(2)
    assert first.jobs == again.jobs and first.rounds == again.rounds
    assert other.rounds != first.rounds


class Script:
    """A policy that plays back what each round is to be, and sees what it is told."""

    def __init__(self, *rounds: Allocation) -> None:
        self.rounds = list(rounds)
        self.told: list[Snapshot] = []

    def allocate(
        self, snapshot: Snapshot, hints: dict[str, Hints], now_s: float
    ) -> dict[str, Allocation]:
        self.told.append(snapshot)
        allocation = self.rounds.pop(0) if len(self.rounds) > 1 else self.rounds[0]
        return {job.job_id: allocation for job in snapshot.jobs if allocation}


def scripted(policy: Script) -> PolicyKind:
    return PolicyKind(lambda seed: policy)


ONE: Allocation = (("node-000", 1),)
TWO: Allocation = (("node-000", 2),)


def test_a_change_stalls_and_counts_and_taking_all_away_does_not(
    models: dict[str, Model],
) -> None:
    job = WorkloadJob("a", 0, models["small"], 1, 64)

    def end_s(*rounds: Allocation, restart_s: float = 30.0) -> tuple[float, int]:
        world = replace(SMALL, restart_s=restart_s)
        log = run(world, [job], scripted(Script(*rounds)))
        return log.jobs[0].finished_s, log.jobs[0].restarts

    calm_s, none = end_s(ONE)
    moved_s, one = end_s(ONE, ONE, (("node-001", 1),))
    away_s, back = end_s(ONE, ONE, (), ONE)
    assert (none, one, back) == (0, 1, 1)
    assert moved_s == pytest.approx(calm_s + 30, abs=2)
    assert away_s == pytest.approx(calm_s + 90, abs=2)
    free_s, _ = end_s(ONE, restart_s=0.0)
    assert free_s == pytest.approx(calm_s - 30, abs=2)


def test_a_start_costs_what_is_said_of_starts_and_a_change_what_is_said_of_changes(
    models: dict[str, Model],
) -> None:
    job = WorkloadJob("a", 0, models["small"], 1, 64)

    def end_s(start_s: float | None, restart_s: float, *rounds: Allocation) -> float:
        world = replace(SMALL, restart_s=restart_s, start_s=start_s)
        return run(world, [job], scripted(Script(*rounds))).jobs[0].finished_s

    plain_s = end_s(None, 30.0, ONE)
    assert end_s(10.0, 30.0, ONE) == pytest.approx(plain_s - 20, abs=2)
    moved = (ONE, ONE, (("node-001", 1),))
    assert end_s(10.0, 30.0, *moved) == pytest.approx(plain_s + 10, abs=2)


def test_a_job_is_seen_at_the_round_after_its_submission(models: dict[str, Model]) -> None:
    script = Script(ONE)
    job = WorkloadJob("a", 107, models["small"], 1, 64)
    log = run(SMALL, [job], scripted(script))
    assert log.jobs[0].started_s == 120
    assert script.told[0].jobs[0].submitted_s == 107
    assert script.told[1].jobs[0].allocation == ONE


def test_a_restart_costs_what_its_model_says(models: dict[str, Model]) -> None:
    job = WorkloadJob("a", 0, models["small"], 1, 64)
    calm = run(SMALL, [job], scripted(Script(ONE))).jobs[0].finished_s
    world = replace(SMALL, restart_by_model={"small": 250.0})
    assert run(world, [job], scripted(Script(ONE))).jobs[0].finished_s == pytest.approx(
        calm + 220, abs=2
    )


def test_interference_slows_those_that_share_a_node_across_nodes(
    models: dict[str, Model],
) -> None:
    class Crossed:
        def allocate(
            self, snapshot: Snapshot, hints: dict[str, Hints], now_s: float
        ) -> dict[str, Allocation]:
            places = {
                "a": (("node-000", 2), ("node-001", 2)),
                "b": (("node-001", 2), ("node-002", 2)),
            }
            return {job.job_id: places[job.job_id] for job in snapshot.jobs}

    kind = PolicyKind(lambda seed: Crossed())
    jobs = [WorkloadJob(name, 0, models["medium"], 4, 128) for name in "ab"]
    calm = run(SMALL, jobs, kind).jobs[-1].finished_s
    slow = run(replace(SMALL, interference=0.5), jobs, kind).jobs[-1].finished_s
    assert slow > calm * 1.6


def test_gpus_of_half_the_speed_compute_half_as_fast(models: dict[str, Model]) -> None:
    job = WorkloadJob("a", 0, models["small"], 1, 64)

    def took_s(*types: NodeType) -> float:
        world = World(types=types, restart_s=0.0)
        (row,) = run(world, [job], KINDS["fifo"]).jobs
        return row.finished_s - row.started_s

    whole, half = NodeType("whole", 1, 4, 1.0), NodeType("half", 1, 4, 0.5)
    plain = run(World(nodes=1, restart_s=0.0), [job], KINDS["fifo"]).jobs[0]
    assert took_s(whole) == plain.finished_s - plain.started_s
    assert took_s(half) == pytest.approx(2 * took_s(whole), rel=0.05)


@pytest.mark.parametrize("policy", list(KINDS))
def test_all_jobs_end_on_mixed_gpus(policy: str, workload: list[WorkloadJob]) -> None:
    world = World(types=(NodeType("a100", 2, 4, 1.0), NodeType("t4", 2, 4, 0.4)))
    log = run(world, workload, KINDS[policy])
    assert len(log.jobs) == len(workload)
    assert {node_id for row in log.rounds for node_id, _ in row.allocation} == {
        "a100-000", "a100-001", "t4-000", "t4-001",
    }  # fmt: skip
    figures(log, world, workload)


def test_a_study_that_never_ends_names_its_jobs(
    models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker_scheduler.simulation.elastic.study.MAX_ROUNDS", 50)
    job = WorkloadJob("starved", 0, models["small"], 1, 64)
    with pytest.raises(InputError, match="starved"):
        run(SMALL, [job], scripted(Script(())))


def test_ours_is_ahead_of_the_others_on_made_up_profiles(workload: list[WorkloadJob]) -> None:
    means = {
        name: figures(run(SMALL, workload, kind), SMALL, workload).mean_jct_s
        for name, kind in KINDS.items()
    }
    assert min(means, key=means.__getitem__) == "stoker", means


def test_jobs_that_declare_their_epochs_say_what_is_done(workload: list[WorkloadJob]) -> None:
    told: dict[str, list[float | None]] = {}

    class Listens(GoodputPolicy):
        def allocate(
            self, snapshot: Snapshot, hints: Mapping[str, Hints], now_s: float
        ) -> dict[str, Allocation]:
            for name, one in hints.items():
                told.setdefault(name, []).append(one.done)
            return super().allocate(snapshot, hints, now_s)

    kind = PolicyKind(lambda seed: Listens())
    run(replace(SMALL, declare_epochs=True), workload, kind)
    for parts in told.values():
        assert parts[0] == 0 and parts == sorted(parts)  # type: ignore[type-var]
        assert all(part is not None and part < 1 for part in parts)
    told.clear()
    run(SMALL, workload[:3], kind)
    assert {part for parts in told.values() for part in parts} == {None}


def test_gpus_of_a_round_are_those_of_its_jobs(workload: list[WorkloadJob]) -> None:
    log = run(SMALL, workload, KINDS["stoker"])
    held: dict[str, int] = {}
    for row in log.rounds:
        held[row.job] = held.get(row.job, 0) + 60 * replicas_of(row.allocation)
    assert held == {row.job: row.service_gpu_s for row in log.jobs}
