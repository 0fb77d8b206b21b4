"""Two replicas of the gcs on one PostgreSQL: one is killed, or frozen, under load, and nothing fails."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker import kv
from stoker.jobs import JobState, JobSubmissionClient
from stoker.runtime.net.http import HttpClient
from stoker_migrations.command import upgrade
from tests.chaos._load import GET_S, Load
from tests.chaos._services import Apart, apart
from tests.e2e._cluster import session_root
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# What is broken here on purpose is warned of; errors and tracebacks stay unexpected.
pytestmark = pytest.mark.logs(
    r'"level": "warning"', r"^this process: stoker[._]", "idle-in-transaction"
)

ENOUGH = {"task": 50, "actor": 2, "count": 20, "log": 20, "http": 20}
"""Rounds of each kind of load that must succeed after a fault."""
PAUSE_S = 0.02
SLOWEST_S = 10.0
"""More than a client takes to move to another replica, even on a busy machine."""
ELECTED_S = 25.0
"""More than the election of another leader takes, for which the creation of an actor waits."""

PATIENT = {"STOKER_SUSPECT_AFTER_S": "300", "STOKER_DEAD_AFTER_S": "600"}
"""Silence tells nothing for as long as the test runs."""


@pytest.fixture
def cluster(tmp_path: Path, postgres_url: str) -> Iterator[Apart]:
    upgrade(postgres_url)
    with (
        session_root(tmp_path / "s"),
        apart(tmp_path, cpus=4, database_url=postgres_url, replicas=2, **PATIENT) as made,
    ):
        stoker.init(made.address, token=made.token, log_to_driver=False, namespace="load")
        try:
            yield made
        finally:
            for replica in made.replicas:
                with contextlib.suppress(ProcessLookupError):
                    replica.send(signal.SIGCONT)
            stoker.shutdown()


@stoker.remote(num_cpus=0.1)
def double(number: int) -> int:
    return 2 * number


@stoker.remote(num_cpus=0)
class Counter:
    def add(self) -> int:
        return 1


def _load(cluster: Apart, seen: list[bytes]) -> Load:
    client = cluster.client
    watch = kv.watch("log/", timeout=GET_S)

    def task(number: int) -> None:
        assert stoker.get(double.remote(number), timeout=GET_S) == 2 * number

    def actor(_: int) -> None:
        made = Counter.remote()
        assert stoker.get(made.add.remote(), timeout=GET_S) == 1
        stoker.kill(made)

    def count(number: int) -> None:
        assert kv.add("count") == number + 1, "each addition counts once"

    def log(number: int) -> None:
        kv.put(f"log/{number}", str(number))
        change = next(watch)
        assert change.value is not None
        seen.append(change.value)

    def http(number: int) -> None:
        client.call("PUT", f"/v1/kv/http/{number}", b"v", reply=dict[str, Any])

    return Load(ENOUGH, pause_s=PAUSE_S, task=task, actor=actor, count=count, log=log, http=http)


def _check_speed(load: Load) -> None:
    slow = {kind: took_s for kind, took_s in load.slowest_s.items() if kind != "actor"}
    assert max(slow.values()) < SLOWEST_S, load.slowest_s
    assert load.slowest_s["actor"] < ELECTED_S, load.slowest_s


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_replica_that_is_gone_hurts_no_call(
    cluster: Apart, fault: signal.Signals, record_property: Callable[[str, object], None]
) -> None:
    seen: list[bytes] = []
    job_id = stoker.get_runtime_context().job_id
    with _load(cluster, seen) as load:
        load.goes_on()
        for replica in cluster.replicas:
            load.slowest_s = dict.fromkeys(load.slowest_s, 0.0)
            replica.send(fault)
            load.goes_on()
            record_property("slowest", json.dumps(load.slowest_s))
            _check_speed(load)
            if fault is signal.SIGKILL:
                replica.kill()
                replica.start()
            else:
                replica.send(signal.SIGCONT)
                replica.until_ready()
            load.goes_on()
    assert load.failures == []
    assert seen == [str(number).encode() for number in range(len(seen))], "each change, in order"
    job = cluster.client.call("GET", f"/v1/jobs/{job_id}", reply=dict[str, Any])
    assert job["state"] == "RUNNING"
    assert all(node["state"] == "ALIVE" for node in cluster.nodes().values())


def test_the_command_line_and_job_submission_go_to_the_replica_that_lives(cluster: Apart) -> None:
    client = JobSubmissionClient(cluster.address, cluster.token)
    first = client.submit_job(entrypoint="true")
    assert client.wait(first, timeout_s=GET_S).state is JobState.SUCCEEDED
    cluster.gcs.kill()
    began_s = time.monotonic()
    assert client.get_job(first).state is JobState.SUCCEEDED
    shown = subprocess.run(
        [sys.executable, "-m", "stoker.cli", "list", "jobs", "--json"],
        env={**cluster.environ, "STOKER_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        timeout=GET_S,
        check=False,
    )
    assert shown.returncode == 0 and first in shown.stdout, shown.stderr
    fresh = JobSubmissionClient(cluster.address, cluster.token)
    assert first in [job.job_id for job in fresh.list_jobs()]
    assert time.monotonic() - began_s < 4 * SLOWEST_S
    second = client.submit_job(entrypoint="true")
    assert client.wait(second, timeout_s=GET_S).state is JobState.SUCCEEDED


def test_what_was_sent_to_a_frozen_replica_does_not_happen_after_what_came_since(
    cluster: Apart,
) -> None:
    frozen, other = cluster.replicas
    client = cluster.client
    for number in range(3):
        path = f"/v1/kv/late/{number}"
        frozen.send(signal.SIGSTOP)
        client.call("PUT", path, b"first", reply=dict[str, Any])
        direct = HttpClient(other.url, token=cluster.token)
        direct.call("PUT", path, b"second", reply=dict[str, Any])
        frozen.send(signal.SIGCONT)
        frozen.until_ready()
        HttpClient(frozen.url, token=cluster.token).call(
            "PUT", f"{path}/after", b"v", reply=dict[str, Any]
        )
        assert cluster.read(path) == b"second"
        client = HttpClient(cluster.address, token=cluster.token)


def test_the_replica_that_a_killed_nodelet_was_connected_to_says_that_it_is_dead(
    tmp_path: Path, postgres_url: str
) -> None:
    upgrade(postgres_url)
    with apart(tmp_path, nodelets=0, database_url=postgres_url, replicas=2, **PATIENT) as made:
        urls = made.address.split(",")
        for number, address in enumerate((urls, urls[::-1])):
            made.address = ",".join(address)  # of the two, one leads
            made.add_nodelet(cpus=1).kill()
            until(partial(_refuses, made, f"n{number}"), 40, "its death is noticed")


def _refuses(made: Apart, name: str) -> bool:
    node = made.nodes()[name]
    return node["state"] == "DEAD" and "refuses connections" in node["reason"]
