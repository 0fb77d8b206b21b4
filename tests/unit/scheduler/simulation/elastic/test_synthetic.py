"""Made-up profiles: they say what their parameters do, and live jobs go by them as simulated ones do.

The live half is that of ``python -m benchmarks.elastic_training live``, without a cluster.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.elastic_training import live_jobs, loops, profiled
from stoker_scheduler.simulation.elastic.synthetic import ERROR
from stoker_train.elastic.core.sampler import micro_batches, shares
from stoker_train.elastic.options import ResizeCost, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from stoker_scheduler.simulation.elastic.profiles import Model

SEED = 3


@pytest.fixture(scope="module")
def jobs() -> list[profiled.PlannedJob]:
    return profiled.planned(5.0, 5, SEED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, jobs: list[profiled.PlannedJob]) -> Path:
    folder = tmp_path_factory.mktemp("profiles")
    profiled.write_profiles(folder, jobs, SEED)
    return folder


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Model]:
    return dict(profiled.read_models(folder))


def test_a_profile_has_the_times_of_its_parameters_but_for_an_error_by_placement(
    jobs: list[profiled.PlannedJob], models: dict[str, Model]
) -> None:
    for job in jobs:
        for placement, pace in profiled.paces(models[job.name]).items():
            local, rest = divmod(profiled.LIMITS.min_batch, sum(placement) * pace.passes)
            if rest:  # of a count that no round gives
                continue
            said = job.params
            step_s = float(said.step_time(len(placement), sum(placement), local))
            whole_s = step_s + (pace.passes - 1) * float(said.accumulation_time(local))
            assert pace.step_s == pytest.approx(whole_s, rel=2 * ERROR), (job.name, placement)


def test_a_live_step_has_the_passes_that_a_simulated_one_has(models: dict[str, Model]) -> None:
    limits = profiled.LIMITS
    for placement, pace in profiled.paces(models["job-0"]).items():
        sizes = [size for _, size in shares(limits.min_batch, [1.0] * sum(placement))]
        passes = [micro_batches(size, limits.max_local) for size in sizes]
        assert max(map(len, passes)) == pace.passes
    assert {pace.passes for pace in profiled.paces(models["job-0"]).values()} == {1, 2}


def test_jobs_come_at_rounds_and_last_minutes_on_an_equal_share(
    jobs: list[profiled.PlannedJob],
) -> None:
    assert profiled.SHARE == 2
    assert jobs == profiled.planned(5.0, 5, SEED)
    times = [job.arrives_s for job in jobs]
    assert times[0] == 5 and times == sorted(times) and times[-1] <= 305
    assert not any(at_s % 5 for at_s in times)
    low_s, high_s = profiled.ALONE_S
    for job in jobs:
        alone_s = job.steps * float(job.params.step_time(1, 2, 48))
        assert 0.95 * low_s <= alone_s <= 1.05 * high_s


class Clock:
    """Time that passes only where somebody sleeps, or says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Rank:
    """A context of a loop, as far as the metronome looks at it: on a node of four, then on two of them."""

    def __init__(self) -> None:
        self.generation = 1
        self.nodes = {"a": 4}
        self.finished = 0
        self._engine = SimpleNamespace(membership=self)
        self._steps = SimpleNamespace(kind=SimpleNamespace(strategy=self))
        self.before_optimizer: Callable[..., None] = self._finish

    def _finish(self, exchange: Any, params: Any) -> None:
        self.finished += 1


def test_passes_and_exchanges_end_by_the_pace_of_their_placement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, rank = Clock(), Rank()
    monkeypatch.setattr(loops, "time", clock)
    paces = {(4,): profiled.Pace(2, 1.0, 0.5), (4, 4): profiled.Pace(1, 0.75, 2.0)}
    metronome = loops.Metronome(rank, paces)

    def step(passes: int, busy_s: float) -> float:
        began_s = clock.now_s
        for _ in range(passes):
            clock.now_s += busy_s
            metronome.end_pass()
        rank.before_optimizer(None, None)
        return clock.now_s - began_s

    first_s = step(2, 0.0)
    assert first_s == step(2, 0.25) == 2.5  # what a step does is a part of its time
    assert step(2, 3.0) == 6.5  # who is late is late: later steps do not catch up
    assert step(2, 0.0) == 2.5
    rank.generation, rank.nodes = 2, {"a": 4, "b": 4}
    clock.now_s += 7.0  # a change of the membership is no part of a step
    assert step(1, 0.0) == 2.75
    assert rank.finished == 5


def test_the_time_of_a_job_is_told_by_its_parts() -> None:
    paces: Mapping[tuple[int, ...], profiled.Pace]
    paces = {(1,): profiled.Pace(2, 1.0, 0.0), (2,): profiled.Pace(1, 1.0, 0.5)}
    lines = [
        loops.Line(at_s, step, 0, world, generation, 0.0, 1)
        for step, (at_s, world, generation) in enumerate(
            [(15.0, 1, 1), (17.5, 1, 1), (20.0, 2, 2), (21.5, 2, 2), (23.0, 2, 2)]
        )
    ]
    record = SimpleNamespace(created_at_s=10.0, ended_at_s=24.0)
    result = Result(resizes=[ResizeCost("memory", 2, 1, 2, 0.75, 2)])
    found = live_jobs.outcome_of("job-0", record, result, lines, paces)
    assert found == live_jobs.Outcome(
        name="job-0",
        jct_s=14.0,
        start_s=3.0,
        train_s=5.5,
        paced_s=5.0,
        pause_s=2.5,
        end_s=1.0,
        changes=("memory 1-2",),
        change_s=0.75,
    )
    assert live_jobs.costs_of([found]) == profiled.Costs(start_s=4.0, change_s=0.75)
    rows = live_jobs.beside([found], [found], {"job-0": 13.0}, {"job-0": 20.0})
    said = live_jobs.table(rows).splitlines()
    assert said[0].split()[:3] == ["job", "policy", "simulated"]
    assert said[2].split() == ["mean", "14.0", "13.0", "14.0", "20.0"]
    figures = {
        row.case: row.value
        for row in live_jobs.figures(
            [found], [found], {"job-0": 12.5}, {"job-0": 20.0}, live_jobs.costs_of([found])
        )
    }
    assert figures["live_jobs_mean_jct_by_static"] == 1.0
    assert figures["live_jobs_mean_jct_off_simulated"] == pytest.approx(12.0)
