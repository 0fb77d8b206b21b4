"""The compose file on a real engine: build, start, submit the demo, read it back, take it down.

Runs where a container engine answers (or where ``STOKER_TEST_ENGINE`` names a command that brings
one up); slow, because it builds the image.
"""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker._http import HttpClient
from stoker.exceptions import StokerError
from stoker.jobs import JobSubmissionClient
from stoker_wire.messages.cluster import Node, NodeState
from stoker_wire.messages.control import Page
from tests.services import ReservedPort, until

REPO = Path(__file__).resolve().parents[2]
BUILD_S, UP_S, JOB_S, DOWN_S = 1500, 240, 400, 120


def compose(project: str, env: dict[str, str], *arguments: str, timeout_s: float) -> str:
    """Run docker-compose; its output is the error's text if it fails."""
    done = subprocess.run(
        ["docker-compose", "-p", project, *arguments],
        cwd=REPO, env={**os.environ, **env}, capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (
        f"docker-compose {' '.join(arguments)}:\n{done.stdout}\n{done.stderr}"
    )
    return done.stdout


def alive_nodes(url: str, token: str) -> int:
    """Return how many nodes are alive; 0 while the gcs does not answer."""
    try:
        nodes = HttpClient(url, token=token).call("GET", "/v1/nodes", reply=Page[Node], timeout_s=5)
    except StokerError:
        return 0
    return sum(node.state is NodeState.ALIVE for node in nodes.items)


@pytest.fixture
def cluster() -> Iterator[JobSubmissionClient]:
    """A whole cluster in containers: redis, postgres, gcs, scheduler, two nodelets."""
    command = os.environ.get("STOKER_TEST_ENGINE")
    if command:
        subprocess.run(shlex.split(command), check=True, timeout=BUILD_S)
    project, port = f"stokertest{secrets.token_hex(4)}", ReservedPort()
    env = {
        "STOKER_TOKEN": secrets.token_hex(16),
        "STOKER_DB_PASSWORD": secrets.token_hex(16),
        "STOKER_PUBLISH_PORT": str(port),
    }
    try:
        compose(project, env, "build", timeout_s=BUILD_S)
        compose(project, env, "up", "-d", timeout_s=UP_S)
        url = f"http://127.0.0.1:{port}"
        until(lambda: alive_nodes(url, env["STOKER_TOKEN"]) == 2, UP_S, "both nodelets have joined")
        yield JobSubmissionClient(url, token=env["STOKER_TOKEN"])
    finally:
        sys.stdout.write(compose(project, env, "logs", "--tail", "40", timeout_s=DOWN_S))
        compose(project, env, "down", "-v", "--timeout", "5", timeout_s=DOWN_S)


@pytest.mark.engine
@pytest.mark.timeout(BUILD_S + UP_S + JOB_S + DOWN_S)
def test_the_demo_trains_on_a_cluster_in_containers(cluster: JobSubmissionClient) -> None:
    job_id = cluster.submit_job(
        entrypoint="python train_gpt.py --steps 6 --batch 8 --block 32 --workers 2",
        runtime_env={"working_dir": str(REPO / "examples")},
    )
    job = cluster.wait(job_id, timeout_s=JOB_S)
    log = cluster.get_job_logs(job_id)
    assert job.state == "SUCCEEDED", log
    assert "loss" in log
