"""Jobs of an event log, run again: they are what was recorded of them, and what is missing is said."""

from __future__ import annotations

import json
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from click.testing import CliRunner

from stoker_gcs.registry.jobs import elastic_rules
from stoker_scheduler.simulation.elastic.__main__ import main
from stoker_scheduler.simulation.elastic.policies import KINDS
from stoker_scheduler.simulation.elastic.recorded import read_events
from stoker_scheduler.simulation.elastic.study import World, run
from stoker_scheduler.simulation.inputs import InputError
from stoker_wire.messages.control import Event
from stoker_wire.messages.elastic import Hints, StepTimeParams
from stoker_wire.messages.work import JobState
from tests.unit.scheduler.elastic.generations_world import World as Cluster

if TYPE_CHECKING:
    from pathlib import Path

    from stoker_wire.messages.work import Job

THETA = StepTimeParams(
    alpha_c=0.1, beta_c=0.002, alpha_n=0.05, beta_n=0.001, alpha_r=0.02, beta_r=0.001, gamma=1.5
)


class Log:
    """Events as a cluster writes them."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, kind: str, job: Job, at_s: float) -> None:
        payload = msgspec.to_builtins(job)
        self.events.append(
            Event(
                seq=len(self.events) + 1, at_s=at_s, kind=kind, subject=job.job_id, payload=payload
            )
        )

    def write(self, path: Path) -> Path:
        path.write_text("\n".join(msgspec.json.encode(one).decode() for one in self.events))
        return path


def trained(log: Log, job_id: str, begin_s: float, work: float, *, ends: bool = True) -> None:
    """A job that says ten times how far it is, to its end or to its half."""
    cluster = Cluster(Random(1), {})
    cluster.now_s = begin_s
    cluster.join(job_id)
    job = cluster.directory.jobs[job_id]
    log.add("job.hinted", job, begin_s)
    for number in range(1, 11):
        hints = Hints(
            params=THETA,
            grad_sqr=1.0,
            grad_var=float(number),
            progress=work * number / 10,
            batch=128,
            done_fraction=number / (10 if ends else 20),
        )
        transition = elastic_rules.hinted(job, hints, begin_s + number)
        assert transition is not None
        job = transition.record
        log.add("job.hinted", job, begin_s + number)
    if ends:
        job = msgspec.structs.replace(job, state=JobState.SUCCEEDED, ended_at_s=begin_s + 500)
        log.add("job.finished", job, begin_s + 500)


@pytest.fixture
def log() -> Log:
    made = Log()
    trained(made, "job_1", 1000.0, 640_000)
    trained(made, "job_2", 1060.0, 64_000)
    trained(made, "job_3", 1120.0, 320_000, ends=False)
    silent = Cluster(Random(1), {})
    silent.join("job_4")
    made.add("job.hinted", silent.directory.jobs["job_4"], 1200.0)
    return made


def test_jobs_are_as_they_were_recorded(log: Log, tmp_path: Path) -> None:
    found = read_events(log.write(tmp_path / "events.jsonl"), gpus=8)
    assert [(one.name, one.submitted_s) for one in found.jobs] == [
        ("job_1", 1000), ("job_2", 1060), ("job_3", 1120),
    ]  # fmt: skip
    assert found.completion_s == (500.0, 500.0)
    assert found.left_out == ("job_4",)
    first, _, third = (one.model for one in found.jobs)
    assert first.goals[-1] == 640_000 / 64
    assert third.goals[-1] == 640_000 / 64, "twice what it had done by its half"
    assert [first.noise(epoch, 128).var for epoch in range(10)] == list(range(1, 11))
    assert first.step_time((2, 2), 32).step_s > first.step_time((4,), 32).step_s
    assert found.jobs[0].batch == 128


@pytest.mark.parametrize("policy", sorted(KINDS.keys() - {"pollux"}))
def test_they_run_again_under_any_policy(log: Log, tmp_path: Path, policy: str) -> None:
    found = read_events(log.write(tmp_path / "events.jsonl"), gpus=8)
    ended = run(World(nodes=2, gpus_per_node=4), found.jobs, KINDS[policy])
    assert {row.job for row in ended.jobs} == {"job_1", "job_2", "job_3"}


def test_the_command_takes_them_instead_of_profiles(log: Log, tmp_path: Path) -> None:
    events = [msgspec.to_builtins(one) for one in reversed(log.events)]
    path = tmp_path / "events.json"
    path.write_text(json.dumps(events))
    options = ["--events", str(path), "--nodes", "2", "--policy", "stoker", "--json"]
    done = CliRunner().invoke(main, options)
    assert done.exit_code == 0, done.output
    (result,) = json.loads(done.stdout)["results"]
    assert (result["workload"], result["policy"], result["jobs"]) == ("events", "stoker", 3)
    assert "2 had ended, after 500 s on average; 1 had not said" in done.stderr
    wrong = CliRunner().invoke(main, [*options, "--profiles", str(tmp_path)])
    assert wrong.exit_code == 2 and "or --events" in wrong.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}\nno json", ":2: this is no JSON"),
        ('[{"seq": "x"}]', ":1: this is no event of Stoker's"),
        ("[]", "no elastic job of it has said how fast it is"),
    ],
)
def test_what_is_no_log_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "events"
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        read_events(path, gpus=4)


def test_unknown_members_of_a_newer_cluster_are_let_pass(log: Log, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [msgspec.to_builtins(one) for one in log.events]
    for row in rows:
        row["payload"]["elastic"]["newer"] = 1
    path = tmp_path / "events"
    path.write_text(json.dumps({"items": rows}))
    assert len(read_events(path, gpus=8).jobs) == 3
