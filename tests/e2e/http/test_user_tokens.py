"""People work with tokens of their own: init(), the data path and the command line, and no more than that."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from stoker_wire.messages.control import CreateToken, PersonRole, Token
from tests.e2e._cluster import environment, head, http, run_driver

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stoker.launch import LocalCluster

WORK = """
    import os, sys
    import numpy
    import stoker
    stoker.init(namespace="team")

    @stoker.remote(num_cpus=0.5)
    def seen():
        from stoker.runtime import current
        initial = open("/proc/self/environ").read()
        return current.runtime().identity.token, dict(os.environ), initial

    @stoker.remote(num_cpus=0.1)
    class Service:
        def __init__(self):
            self.calls = 0
        def call(self, values):
            self.calls += 1
            return self.calls, float(values.sum())

    big = stoker.put(numpy.ones(500_000))
    if sys.argv[1] == "serve":
        service = Service.options(name="svc", lifetime="detached").remote()
    else:
        service = stoker.get_actor("svc")
    stoker.kv.put("by", os.environ["WHO"].encode())
    print(stoker.get(service.call.remote(big)))
    print([len(stoker.get(seen.remote())[0]) > 100, "SECRET" in str(stoker.get(seen.remote()))])
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with head(tmp_path_factory.mktemp("cluster"), num_cpus=2) as made:
        yield made


def token(cluster: LocalCluster, name: str, role: str = "user", **more: Any) -> str:
    body = CreateToken(name=name, role=PersonRole(role), **more)
    return http(cluster).call("POST", "/v1/tokens", body, reply=Token).secret


def work(
    cluster: LocalCluster, name: str, what: str, **more: Any
) -> subprocess.CompletedProcess[str]:
    secret = token(cluster, name, **more)
    program = WORK.replace("sys.argv[1]", repr(what)).replace('"SECRET"', repr(cluster.info.token))
    return run_driver(cluster, program, STOKER_TOKEN=secret, WHO=name)


def test_users_share_a_namespace_and_no_process_of_theirs_has_the_secret(
    cluster: LocalCluster,
) -> None:
    alice = work(cluster, "alice", "serve", namespaces=("team",))
    assert alice.stdout.splitlines() == ["(1, 500000.0)", "[True, False]"], alice.stderr
    bob = work(cluster, "bob", "use", namespaces=("team",))
    assert bob.stdout.splitlines() == ["(2, 500000.0)", "[True, False]"], bob.stderr
    eve = work(cluster, "eve", "use", namespaces=("eve",))
    assert eve.returncode == 1
    assert "user eve may not use 'team'" in eve.stderr


def test_a_submitted_job_has_a_token_of_its_own(cluster: LocalCluster) -> None:
    job = """
        import os
        import stoker
        from stoker.jobs import JobSubmissionClient
        client = JobSubmissionClient()
        job_id = client.submit_job(entrypoint="env; cat /proc/self/environ | tr '\\\\0' '\\\\n'")
        client.wait(job_id, timeout_s=60)
        print(client.get_job_logs(job_id))
    """
    shown = run_driver(cluster, job, STOKER_TOKEN=token(cluster, "carol"))
    assert "STOKER_TOKEN=eyJ" in shown.stdout, shown.stdout + shown.stderr
    assert cluster.info.token not in shown.stdout


def stoker(cluster: LocalCluster, *args: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stoker.cli", *args],
        env=environment(cluster, **more),
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )


def test_the_command_line_makes_lists_and_revokes_tokens(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    file = tmp_path / "dave"
    made = stoker(cluster, "token", "create", "dave", "--expires-in", "30d", "--output", str(file))
    assert made.returncode == 0, made.stderr
    assert file.stat().st_mode & 0o777 == 0o600
    [dave] = [
        one
        for one in json.loads(stoker(cluster, "token", "list", "--json").stdout)
        if one["name"] == "dave"
    ]
    assert (dave["role"], dave["namespaces"], dave["secret"]) == ("user", ["dave"], "")
    secret = file.read_text().strip()
    assert stoker(cluster, "list", "jobs", STOKER_TOKEN=secret).returncode == 0
    for refused in (("token", "list"), ("token", "create", "eve"), ("queue", "create", "q")):
        shown = stoker(cluster, *refused, STOKER_TOKEN=secret)
        assert (shown.returncode, "is not for user dave" in shown.stderr) == (1, True), shown.stderr
    assert stoker(cluster, "token", "revoke", dave["token_id"]).returncode == 0
    shown = stoker(cluster, "list", "jobs", STOKER_TOKEN=secret)
    assert "user dave was revoked" in shown.stderr
    shown = stoker(cluster, "token", "create", "x", "--expires-in", "soon")
    assert (shown.returncode, "write it like 30m" in shown.stderr) == (2, True)
