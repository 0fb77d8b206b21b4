"""Retries, arrays, dependencies, schedules of jobs as a user sees them: commands, logs of every attempt."""

from __future__ import annotations

import json
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from stoker.jobs import JobState, JobSubmissionClient
from stoker_wire.errors import NameTakenError
from tests.e2e._cluster import cli, head
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stoker.launch import LocalCluster

END_S = 60.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with head(tmp_path_factory.mktemp("j"), num_cpus=2) as made:
        yield made


@pytest.fixture
def client(cluster: LocalCluster) -> JobSubmissionClient:
    return JobSubmissionClient(cluster.info.gcs_url, cluster.info.token)


def test_a_failed_driver_is_run_again_with_nothing_left_of_the_attempt_before(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    (tmp_path / "main.py").write_text(
        textwrap.dedent(
            """
            import os, sys, stoker

            attempt = int(os.environ["STOKER_JOB_ATTEMPT"])
            stoker.init(namespace="test")

            @stoker.remote
            class Counter:
                def count(self):
                    return attempt

            counter = Counter.options(name="the one").remote()
            print("attempt", stoker.get(counter.count.remote()))
            where = os.path.join(os.environ["STOKER_JOB_OUTPUT_DIR"], "seen")
            with open(where, "a") as seen:
                print(attempt, file=seen)
            if attempt == 1:
                sys.exit(3)
            if attempt == 2:
                os.kill(os.getpid(), 9)
            print("before", open(where).read().split())
            """
        )
    )
    done = cli(
        cluster, "job", "submit", "--retries", "3", "--retry-delay", "0.5", "--job-id", "job_r",
        "--working-dir", str(tmp_path), "--", "exec python main.py",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "attempt 1", "attempt 2", "attempt 3", "before ['1', '2', '3']",
    ]  # fmt: skip
    assert "attempt 1 of 4 failed: the driver exited with code 3" in done.stderr
    job = json.loads(cli(cluster, "job", "status", "job_r", "--json").stdout)
    assert (job["state"], job["attempt"], job["retries"]) == ("SUCCEEDED", 3, 3)
    assert [(one["attempt"], one["exit_code"]) for one in job["attempts"]] == [(1, 3), (2, -9)]
    shown = cli(cluster, "job", "status", "job_r").stdout
    assert "attempt    3 of 4" in shown and "attempt 2  failed after" in shown, shown
    assert cli(cluster, "job", "logs", "--attempt", "1", "job_r").stdout == "attempt 1\n"
    assert "attempt 3" in cli(cluster, "job", "logs", "job_r").stdout
    refused = cli(cluster, "job", "logs", "--attempt", "9", "job_r")
    assert refused.returncode == 1 and "has at most 4" in refused.stderr
    events = cli(cluster, "list", "events", "--filter", "kind=job.retrying", "--json").stdout
    assert len([one for one in json.loads(events) if one["subject"] == "job_r"]) == 2


def test_a_job_that_is_stopped_between_two_attempts_stays_stopped(
    client: JobSubmissionClient, cluster: LocalCluster
) -> None:
    job_id = client.submit_job(entrypoint="exit 1", retries=5, retry_delay_s=3600.0)

    def waits() -> Any:
        job = client.get_job(job_id)
        return job.attempt == 2 and job

    job = until(waits, END_S, "the second attempt waits")
    assert job.state is JobState.PENDING and job.retry_at_s > job.attempts[0].ended_at_s + 1700
    explained = cli(cluster, "explain", job_id).stdout
    assert "attempt 2 of 6 starts in" in explained and "exited with code 1" in explained, explained
    client.stop_job(job_id)
    assert client.wait(job_id, timeout_s=END_S).state is JobState.STOPPED


def test_an_array_with_retries_then_what_comes_after_it(
    client: JobSubmissionClient, cluster: LocalCluster
) -> None:
    done = cli(
        cluster, "job", "submit", "--array", "0-3%2", "--retries", "1", "--retry-delay", "0.1",
        "--job-id", "job_array", "--no-wait", "--",
        'echo "$STOKER_ARRAY_INDEX try $STOKER_JOB_ATTEMPT"; test $STOKER_ARRAY_INDEX != 2 || '
        "test $STOKER_JOB_ATTEMPT = 2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    after = client.submit_job(entrypoint="echo after", after={"job_array": "ok"})
    never = client.submit_job(entrypoint="echo never", after={"job_array": "failed"})
    ended = client.wait(after, timeout_s=END_S)
    assert ended.state is JobState.SUCCEEDED, ended.message
    assert client.get_job("job_array").message == "4 of 4 have ended"
    assert client.get_job_logs("job_array.2") == "2 try 2\n"
    assert client.get_job_logs("job_array.2", attempt=1) == "2 try 1\n"
    assert client.get_job_logs("job_array.3") == "3 try 1\n"
    refused = client.wait(never, timeout_s=END_S)
    assert refused.state is JobState.FAILED and "had failed" in refused.message
    assert client.delete_job("job_array").job_id == "job_array"
    with pytest.raises(NameTakenError, match="which is deleted"):
        client.submit_job(entrypoint="echo again", job_id="job_array.2")


def test_one_per_node_runs_on_the_nodes_that_can(
    client: JobSubmissionClient, cluster: LocalCluster
) -> None:
    done = cli(
        cluster, "job", "submit", "--one-per-node", "--job-id", "job_each", "--",
        "echo on $STOKER_NODE_ID",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    only = client.get_job("job_each.0")
    assert client.get_job_logs("job_each.0") == f"on {only.only_node_id}\n"
    nowhere = client.submit_job(
        entrypoint="echo", one_per_node=True, entrypoint_resources={"tpu": 1.0}
    )
    ended = client.wait(nowhere, timeout_s=END_S)
    assert ended.state is JobState.FAILED and "no node can run it" in ended.message


def test_a_schedule_is_made_shown_paused_and_deleted(
    client: JobSubmissionClient, cluster: LocalCluster
) -> None:
    made = cli(
        cluster, "schedule", "create", "yearly", "--cron", "0 0 1 1 *", "--time-zone",
        "Europe/Zurich", "--concurrency", "Forbid", "--retries", "2", "--", "echo", "happy new year",
    )  # fmt: skip
    assert made.returncode == 0 and "schedule yearly runs in " in made.stdout, made
    schedule = client.get_schedule("yearly")
    assert (schedule.job.entrypoint, schedule.job.retries) == ("echo 'happy new year'", 2)
    listed = cli(cluster, "schedule", "list").stdout
    assert "yearly" in listed and "0 0 1 1 *" in listed
    assert cli(cluster, "schedule", "pause", "yearly").stdout == "schedule yearly is paused\n"
    assert "yearly  paused" in cli(cluster, "schedule", "get", "yearly").stdout
    assert "runs in" in cli(cluster, "schedule", "resume", "yearly").stdout
    assert cli(cluster, "schedule", "delete", "yearly").returncode == 0
    assert client.list_schedules() == []
    refused = cli(cluster, "schedule", "create", "x", "--cron", "99 * * * *", "--", "true")
    assert refused.returncode == 1 and "bad minute" in refused.stderr, refused


def test_a_preemptible_job_gives_way_and_runs_again_for_nothing(
    cluster: LocalCluster, client: JobSubmissionClient, tmp_path: Path
) -> None:
    program = """
        import os, signal, sys, time

        if os.environ["STOKER_JOB_ATTEMPT"] == "1":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saves", flush=True) or 1))
            open("began", "w").close()
            time.sleep(600)
        print("resumes", flush=True)
    """
    (tmp_path / "main.py").write_text(
        textwrap.dedent(program).replace('"began"', repr(str(tmp_path / "began")))
    )
    low = client.submit_job(
        entrypoint=f"{sys.executable} {tmp_path / 'main.py'}",
        entrypoint_num_cpus=2,
        preemptible=True,
        preemption_grace_s=5.0,
    )
    until((tmp_path / "began").exists, END_S, "the job runs")
    high = client.submit_job(entrypoint="true", entrypoint_num_cpus=2, priority=5)
    assert client.wait(high, timeout_s=END_S).state is JobState.SUCCEEDED
    ended = client.wait(low, timeout_s=END_S)
    assert (ended.state, ended.attempt, ended.retries) == (JobState.SUCCEEDED, 2, 0)
    (first,) = ended.attempts
    assert first.preempted and "preempted on node" in first.cause
    assert "saves" in client.get_job_logs(low, attempt=1)
    assert "resumes" in client.get_job_logs(low)
