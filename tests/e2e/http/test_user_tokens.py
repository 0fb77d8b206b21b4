"""People work with tokens of their own: init(), the data path and the command line, and no more than that."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from stoker_wire.messages.control import CreateToken, PersonRole, Token
from tests.e2e._cluster import cli, head, http, run_driver

if TYPE_CHECKING:
    import subprocess
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


CACHED = """
    import stoker
    from stoker.runtime import current
    from stoker_wire.messages.objects import new_detached_id
    stoker.init()

    @stoker.remote(cache="cluster", cache_key="answer")
    def answer():
        return "asked for"

    @stoker.remote
    def plant():
        runtime = current.runtime()
        objects = runtime.objects.detached
        from stoker.runtime.objects.detached import Durability
        planted = new_detached_id(NAMESPACE + " answer")
        objects.store(planted, objects.packed("planted"), "planted", name="x", durability=Durability())

    if PLANTS:
        stoker.get(plant.remote())
    print(stoker.get(answer.remote()))
"""


def test_nobody_finds_what_another_user_has_made_under_the_id_of_a_cached_result(
    cluster: LocalCluster,
) -> None:
    for name, plants in (("mallory", "True"), ("", "False")):
        program = CACHED.replace("NAMESPACE", "'stoker.cache'").replace("PLANTS", plants)
        secret = token(cluster, name) if name else cluster.info.token
        done = run_driver(cluster, program, STOKER_TOKEN=secret)
        assert done.stdout.split("\n")[0] == "asked for", done.stderr


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


def test_the_command_line_makes_lists_and_revokes_tokens(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    file = tmp_path / "dave"
    made = cli(cluster, "token", "create", "dave", "--expires-in", "30d", "--output", str(file))
    assert made.returncode == 0, made.stderr
    assert file.stat().st_mode & 0o777 == 0o600
    [dave] = [
        one
        for one in json.loads(cli(cluster, "token", "list", "--json").stdout)
        if one["name"] == "dave"
    ]
    assert (dave["role"], dave["namespaces"], dave["secret"]) == ("user", ["dave"], "")
    secret = file.read_text().strip()
    assert cli(cluster, "list", "jobs", STOKER_TOKEN=secret).returncode == 0
    for refused in (("token", "list"), ("token", "create", "eve"), ("queue", "create", "q")):
        shown = cli(cluster, *refused, STOKER_TOKEN=secret)
        assert (shown.returncode, "is not for user dave" in shown.stderr) == (1, True), shown.stderr
    assert cli(cluster, "token", "revoke", dave["token_id"]).returncode == 0
    shown = cli(cluster, "list", "jobs", STOKER_TOKEN=secret)
    assert "user dave was revoked" in shown.stderr
    shown = cli(cluster, "token", "create", "x", "--expires-in", "soon")
    assert (shown.returncode, "write it like 30m" in shown.stderr) == (2, True)
