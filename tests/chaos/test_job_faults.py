"""Retries of jobs whose node is killed, and then all services, while an actor of theirs lives elsewhere."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from stoker.jobs import Job, JobState, JobSubmissionClient
from tests.chaos._services import Service, apart
from tests.e2e._cluster import session_root
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# What is broken here on purpose is warned of; errors and tracebacks stay unexpected.
pytestmark = pytest.mark.logs(r'"level": "warning"', r"^this process: stoker[._]")
WAIT_S = 60.0
DRIVER = """
    import os, time, stoker

    attempt = os.environ["STOKER_JOB_ATTEMPT"]
    stoker.init(namespace="test")

    @stoker.remote
    class Holder:
        def node(self):
            return stoker.get_runtime_context().node_id

    # The first does not fit beside its driver: it is on the node that lives on.
    holder = Holder.options(name="the one", num_cpus=1 if attempt == "1" else 0.5).remote()
    print(attempt, os.environ["STOKER_NODE_ID"], stoker.get(holder.node.remote()))
    while attempt == "1":
        time.sleep(1)
"""


@pytest.mark.parametrize("end", [Service.kill, Service.stop])
def test_a_job_goes_on_elsewhere_when_its_node_ends_and_then_all_services_are_killed(
    tmp_path: Path, end: Callable[[Service], object]
) -> None:
    (tmp_path / "main.py").write_text(textwrap.dedent(DRIVER))
    with session_root(tmp_path / "s"), apart(tmp_path, nodelets=2, cpus=1) as cluster:
        client = JobSubmissionClient(cluster.gcs.url, cluster.token)
        job_id = client.submit_job(
            entrypoint=f"exec python {tmp_path / 'main.py'}",
            entrypoint_num_cpus=0.5,
            retries=2,
            retry_delay_s=2.0,
        )

        def answered() -> list[str]:
            words = client.get_job_logs(job_id).split()
            return words if len(words) == 3 else []

        attempt, node_id, actor_node = until(answered, WAIT_S, "its actor has answered")
        assert attempt == "1" and actor_node != node_id
        names = {node["node_id"]: name for name, node in cluster.nodes().items()}
        end(cluster.nodelets[int(names[node_id][1:])])

        def waits() -> Job | None:
            job = client.get_job(job_id)
            return job if job.attempt == 2 else None

        waiting = until(waits, WAIT_S, "its second attempt waits")
        assert waiting is not None and waiting.attempts[0].node_id == node_id
        for service in (cluster.gcs, cluster.scheduler):
            service.kill()
            service.start()
        ended = client.wait(job_id, timeout_s=WAIT_S)
        assert ended.state is JobState.SUCCEEDED, ended.message
        assert (ended.attempt, len(ended.attempts)) == (2, 1)
        assert client.get_job_logs(job_id).split() == ["2", actor_node, actor_node]


def test_who_follows_a_job_learns_its_end_when_the_node_of_its_driver_dies(tmp_path: Path) -> None:
    with session_root(tmp_path / "s"), apart(tmp_path, cpus=1) as cluster:
        entrypoint = "echo it runs; exec sleep 600"
        command = [sys.executable, "-m", "stoker.cli", "job", "submit", "--address"]
        with subprocess.Popen(
            [*command, cluster.gcs.url, "--token", cluster.token, "--", "sh", "-c", entrypoint],
            env=cluster.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as follower:
            try:
                assert follower.stdout is not None
                assert follower.stdout.readline() == "it runs\n"
                cluster.nodelets[0].kill()
                _, said = follower.communicate(timeout=WAIT_S)
            finally:
                follower.kill()
        (job,) = JobSubmissionClient(cluster.gcs.url, cluster.token).list_jobs()
        assert job.state is JobState.FAILED
        *_, last = said.splitlines()
        assert last.startswith(f"{job.job_id} FAILED after ") and "its host refuses" in last
        assert "error:" not in said
        assert follower.returncode == 1
