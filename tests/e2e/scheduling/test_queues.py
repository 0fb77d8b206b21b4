"""Queues on a running cluster: made from the command line, used by drivers and jobs, explained."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e._cluster import driver, environment, head, line_of, run_driver
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stoker.launch import LocalCluster

WAIT_S = 40.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with head(tmp_path_factory.mktemp("q"), num_cpus=4) as made:
        yield made


def run_cli(cluster: LocalCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stoker.cli", *arguments],
        env=environment(cluster),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def stoker_cli(cluster: LocalCluster, *arguments: str) -> Any:
    told = run_cli(cluster, *arguments, "--json")
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout)


def refused(cluster: LocalCluster, *arguments: str) -> str:
    """Return the error of a command that fails."""
    told = run_cli(cluster, *arguments)
    assert told.returncode == 1, told.stdout
    return told.stderr


def queues(cluster: LocalCluster) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in stoker_cli(cluster, "queue", "list")}


def test_a_queue_is_made_limits_its_jobs_and_says_why(cluster: LocalCluster) -> None:
    stoker_cli(cluster, "queue", "create", "team", "--weight", "3", "--limit", "CPU=1")
    program = """
        import stoker, time
        stoker.init(queue="team", priority=2)

        @stoker.remote
        def f(seconds):
            time.sleep(seconds)

        held = f.remote(1000)
        waits = f.remote(0)
        stoker.wait([held], timeout=1)
        print("waits", waits.task_id if hasattr(waits, "task_id") else "", flush=True)
        time.sleep(1000)
    """
    with driver(cluster, program) as process:
        line_of(process, "waits")

        def is_held() -> dict[str, Any] | None:
            team = queues(cluster)["team"]
            return team if team["leases"] == 1 and team["waiting"] else None

        team = until(is_held, WAIT_S, "one task runs, the other is held")
        assert team["used"] == {"CPU": 1.0} and "limit of 1 CPU" in team["held"]
        (job,) = [one for one in stoker_cli(cluster, "list", "jobs") if one["queue"] == "team"]
        assert (job["priority"], job["user"], job["state"]) == (2, "cluster", "RUNNING")
        why = stoker_cli(cluster, "explain", job["job_id"])
        assert "limit of 1 CPU" in json.dumps(why)
        assert job["job_id"] in refused(cluster, "queue", "delete", "team")
        stoker_cli(cluster, "queue", "set", "team", "--limit", "CPU=2")

        def runs() -> bool:
            return queues(cluster)["team"]["waiting"] == 0

        until(runs, WAIT_S, "the other runs too")

    def is_empty() -> bool:
        return stoker_cli(cluster, "list", "jobs")[0]["state"] != "RUNNING"

    until(is_empty, WAIT_S, "the job has ended")
    assert stoker_cli(cluster, "queue", "delete", "team")["name"] == "team"


def test_jobs_are_submitted_to_a_queue_that_may_be_stopped(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    file = tmp_path / "queues.toml"
    file.write_text('[queues.batch]\nlimit = {CPU = 2, memory = "1GiB"}\n')
    assert stoker_cli(cluster, "queue", "apply", str(file)) == {
        "created": ["batch"],
        "changed": [],
        "removed": [],
    }
    stoker_cli(cluster, "queue", "stop", "batch")
    submit = ("job", "submit", "--queue", "batch", "--num-cpus", "1", "--no-wait")
    job_id = stoker_cli(cluster, *submit, "true")["job_id"]
    late = stoker_cli(cluster, *submit, "--start-deadline", "1", "true")["job_id"]

    def explained() -> bool:
        told = stoker_cli(cluster, "explain", job_id)
        return "queue 'batch' is stopped" in told["summary"]

    until(explained, WAIT_S, "the reason is told")

    def state_of(one: str) -> str:
        state: str = stoker_cli(cluster, "get", one)["state"]
        return state

    until(lambda: state_of(late) == "FAILED", WAIT_S, "the start deadline has passed")
    message = stoker_cli(cluster, "get", late)["message"]
    assert message.startswith("its driver did not start within its start deadline of 1 s")
    assert "is stopped" in message
    stoker_cli(cluster, "queue", "start", "batch")
    until(lambda: state_of(job_id) == "SUCCEEDED", WAIT_S, "the job has run")
    stoker_cli(cluster, "queue", "delete", "batch")


def test_an_unknown_queue_is_refused_with_the_nearest(cluster: LocalCluster) -> None:
    stoker_cli(cluster, "queue", "create", "research")
    told = run_driver(cluster, "import stoker; stoker.init(queue='reserch')")
    assert told.returncode == 1 and "did you mean 'research'?" in told.stderr
    error = refused(cluster, "job", "submit", "--queue", "nowhere", "--", "true")
    assert "there is no queue 'nowhere'" in error and "research" in error
    stoker_cli(cluster, "queue", "delete", "research")
