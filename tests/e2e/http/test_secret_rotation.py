"""The secret changes under running work: no call fails, and what the former one signed is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stoker.launch import spawn_local
from stoker.local import certificates
from stoker.local.cluster import spawn_node
from stoker.runtime.net.http import HttpClient
from stoker_wire.errors import ForbiddenError, StokerError, UnauthorizedError
from stoker_wire.http.auth import load_secrets, write_private
from stoker_wire.http.cluster_secret import secret_id
from stoker_wire.http.server.tokens import TokenSigner
from stoker_wire.messages.common import Role
from stoker_wire.messages.control import (
    SECRET_PATH,
    CreateToken,
    Event,
    Page,
    PersonRole,
    SecretStatus,
    Token,
)
from stoker_wire.messages.events import SecretsInUse, payload_as
from tests.e2e._cluster import cli, driver, head, http, line_of, run_driver, session_root
from tests.services import until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from stoker.launch import LocalCluster

LOOP = """
    import os, time
    import stoker
    stoker.init(namespace="loop")
    folder = os.environ["FOLDER"]

    @stoker.remote(num_cpus=0.1)
    def add(x, y):
        return x + y

    @stoker.remote(num_cpus=0.1)
    def wait(path):
        while not os.path.exists(path):
            time.sleep(0.05)
        return stoker.get(add.remote(20, 1)), stoker.get(stoker.get_actor("counter").call.remote())

    @stoker.remote(num_cpus=0.1)
    class Counter:
        def __init__(self):
            self.calls = 0
        def call(self):
            self.calls += 1
            return self.calls
        def put(self):
            return stoker.get(add.remote(1, 1))

    counter = Counter.options(name="counter").remote()
    stoker.get(counter.call.remote())
    long = wait.remote(os.path.join(folder, "end"))
    print("UP", flush=True)
    calls = 0
    while not os.path.exists(os.path.join(folder, "stop")):
        assert stoker.get(add.remote(calls, 1)) == calls + 1
        stoker.get(counter.call.remote())
        stoker.kv.put("calls", str(calls).encode())
        if calls % 20 == 0:
            fresh = Counter.remote()
            assert stoker.get(fresh.put.remote()) == 2
        calls += 1
    answer = stoker.get(long)
    assert answer[0] == 21 and answer[1] > 2, answer
    assert stoker.get(counter.put.remote()) == 2
    print("DONE", calls, flush=True)
"""
SUBMITTED = """
while [ ! -e "$FOLDER/late" ]; do sleep 0.1; done
python -c 'import stoker; stoker.init(); print(stoker.kv.put("late", b"1"))'
"""

KILLED = """
    import os, signal, time
    import stoker
    stoker.init()

    @stoker.remote(num_cpus=0.1, max_retries=3)
    def pid(mark):
        if mark and not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()

    first = stoker.get(pid.remote(""))
    print("UP", flush=True)
    while not os.path.exists(os.environ["FOLDER"] + "/stop"):
        stoker.get(pid.remote(""))
    killed = stoker.get(pid.remote(os.environ["FOLDER"] + "/mark"))
    print("DONE", killed != first, flush=True)
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with head(tmp_path / "cluster", num_cpus=4) as made:
        yield made


@pytest.fixture
def mutual_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is started, and this process as a client, speaks mutual TLS."""
    monkeypatch.setenv("STOKER_TLS", "mutual")
    certificates.init(tmp_path / "certs", name="the cluster's CA")
    certificates.issue(tmp_path / "certs", "node")
    for name, file in (("CERT", "node.pem"), ("KEY", "node.key"), ("CA", "ca.pem")):
        monkeypatch.setenv(f"STOKER_TLS_{name}", str(tmp_path / "certs" / file))


def status_of(url: str, secret: str) -> SecretStatus:
    return HttpClient(url, token=secret).call("GET", SECRET_PATH, reply=SecretStatus)


def test_running_work_goes_on_and_the_former_secret_is_refused_everywhere(
    mutual_tls: None, cluster: LocalCluster, tmp_path: Path
) -> None:
    info, path = cluster.info, Path(cluster.info.token_file)
    (former,) = load_secrets(path)
    signer = TokenSigner(former)
    body = CreateToken(name="alice", role=PersonRole.USER)
    alice = http(cluster).call("POST", "/v1/tokens", body, reply=Token)
    stoker_ = ("--token-file", str(path), "--address", info.gcs_url)
    submit = ("job", "submit", "--no-wait", "--env", f"FOLDER={tmp_path}", *stoker_)
    with driver(cluster, LOOP, FOLDER=str(tmp_path)) as loop:
        line_of(loop, "UP")
        # Without STOKER_TOKEN, which would be the former secret afterwards.
        submitted = cli(cluster, *submit, "--", "bash", "-c", SUBMITTED, STOKER_TOKEN="")
        assert submitted.returncode == 0, submitted.stderr
        rotated = cli(cluster, "token", "rotate", *stoker_, "--json", STOKER_TOKEN="")
        assert rotated.returncode == 0, rotated.stderr
        said = json.loads(rotated.stdout)
        assert [one["token_id"] for one in said["tokens"]] == [alice.token_id]
        signs, other = load_secrets(path)
        assert other == former
        assert path.stat().st_mode & 0o777 == 0o600
        urls = (info.gcs_url, info.scheduler_url, info.nodelet_url)
        for url in urls:
            assert not status_of(url, signs).behind
            assert status_of(url, former).signs == status_of(url, signs).signs
        finished = cli(cluster, "token", "rotate", "--finish", *stoker_, STOKER_TOKEN="")
        assert finished.returncode == 0, finished.stderr
        assert alice.token_id in finished.stdout
        old = (
            former,
            alice.secret,
            signer.job("job_1"),
            signer.service(Role.ADMIN, "x"),
            signer.service(Role.NODE, info.node_id),
        )
        for url in urls:
            for one in old:
                with pytest.raises(UnauthorizedError):
                    HttpClient(url, token=one).call("GET", "/v1/nodes")
        (tmp_path / "late").touch()
        (tmp_path / "end").touch()
        gcs = HttpClient(info.gcs_url, token=signs)
        until(lambda: _has_late(gcs), 40, "the submitted job's program runs after the rotation")
        (tmp_path / "stop").touch()
        assert int(line_of(loop, "DONE")) > 0
    changes = gcs.call("GET", "/v1/events", reply=Page[Event], query={"kind": "secret."}).items
    used = [payload_as(event, SecretsInUse) for event in changes]
    assert [(one.signs, len(one.accepts)) for one in used if one is not None] == [
        (secret_id(former), 2),
        (secret_id(signs), 2),
        (secret_id(signs), 1),
    ]
    after = run_driver(
        cluster,
        "import stoker; stoker.init(); print(stoker.get(stoker.remote(lambda: 7).remote()))",
        STOKER_TOKEN=signs,
    )
    assert after.stdout.split() == ["7"], after.stderr
    late = gcs.call("POST", "/v1/tokens", body, reply=Token)
    assert gcs.call("DELETE", f"/v1/tokens/{late.token_id}", reply=Token).revoked

    def is_refused() -> bool:
        try:
            HttpClient(info.gcs_url, token=late.secret).call("GET", "/v1/jobs")
        except UnauthorizedError:
            return True
        return False

    until(is_refused, 1.0, "a token that was revoked is refused")
    assert (Path(info.session_dir) / "token").read_text().strip() == signs


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[tuple[LocalCluster, Path, Path]]:
    """A head and a node, each with a token file of its own, as on two machines."""
    files = tmp_path / "head-token", tmp_path / "node-token"
    for path in files:
        write_private(path, "the secret with which all began\n")
    environ = {"STOKER_TOKEN_FILE": str(files[0])}
    with session_root(tmp_path / "sessions"):
        cluster = spawn_local(environ=environ, embedded=False, num_cpus=0, num_gpus=0)
        node = None
        try:
            cluster.wait_ready()
            node = spawn_node(
                cluster.info.gcs_url, token="", token_file=str(files[1]), num_cpus=2, num_gpus=0
            )
            node.wait_ready()
            yield cluster, *files
        finally:
            if node is not None:
                node.stop()
            cluster.stop()


def test_a_rotation_waits_for_the_file_of_each_machine_and_goes_on_where_it_stopped(
    apart: tuple[LocalCluster, Path, Path],
) -> None:
    cluster, of_head, of_node = apart
    options = ("--token-file", str(of_head), "--address", cluster.info.gcs_url, "--timeout", "3s")

    def rotate(*more: str) -> subprocess.CompletedProcess[str]:
        return cli(cluster, "token", "rotate", *options, *more, STOKER_TOKEN="")

    waits = rotate()
    assert waits.returncode != 0
    assert "has not got the next secret" in waits.stderr and "node n_" in waits.stderr
    assert "copy the token file" in waits.stderr
    former, signs = load_secrets(of_head)
    write_private(of_node, of_head.read_text())
    waits = rotate()
    assert "does not sign by the new secret" in waits.stderr, "it was accepted, and is used here"
    assert load_secrets(of_head) == (signs, former)
    early = rotate("--finish")
    assert early.returncode != 0 and "would be locked out" in early.stderr
    assert load_secrets(of_head) == (signs, former)
    step = cli(cluster, "token", "rotate", "--token-file", str(of_node), "--step", "use")
    assert step.returncode == 0, step.stderr
    rotated = rotate()
    assert rotated.returncode == 0, rotated.stderr
    with driver(cluster, KILLED, STOKER_TOKEN=signs, FOLDER=str(of_head.parent)) as calls:
        line_of(calls, "UP")
        assert "still accepts the former secret" in rotate("--finish").stderr
        write_private(of_node, f"{signs}\n")
        until(lambda: len(accepted(cluster, signs)) == 1, 40, "every service has one secret")
        (of_head.parent / "stop").touch()
        assert line_of(calls, "DONE") == "True"
    (alone,) = load_secrets(of_head)
    assert alone == signs


def accepted(cluster: LocalCluster, secret: str) -> set[tuple[str, ...]]:
    nodes = HttpClient(cluster.info.gcs_url, token=secret).call("GET", "/v1/nodes", reply=dict)
    urls = [cluster.info.scheduler_url, *(one["url"] for one in nodes["items"])]
    return {status_of(url, secret).accepts for url in urls}


def test_a_secret_that_was_given_as_text_is_not_rotated_and_nothing_is_changed(
    tmp_path: Path,
) -> None:
    with session_root(tmp_path):
        environ = {"STOKER_TOKEN": "a secret in the environment"}
        cluster = spawn_local(environ=environ, embedded=False, num_cpus=1, num_gpus=0)
        try:
            cluster.wait_ready()
            tried = cli(cluster, "token", "rotate", STOKER_TOKEN="")
            assert tried.returncode != 0
            assert "start it with STOKER_TOKEN_FILE" in tried.stderr
            assert len(load_secrets(cluster.info.token_file)) == 1
        finally:
            cluster.stop()


def _has_late(gcs: HttpClient) -> bool:
    try:
        jobs = gcs.call("GET", "/v1/jobs", reply=dict)["items"]
    except (ForbiddenError, StokerError):
        return False
    return any(job["submitted"] and job["state"] == "SUCCEEDED" for job in jobs)


def test_a_machine_joins_by_a_token_that_is_good_once(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    file = str(tmp_path / "join")
    made = cli(cluster, "token", "create", "m1", "--role", "join", "--once", "--output", file)
    assert made.returncode == 0, made.stderr
    assert "--join-token-file" in made.stderr
    join = ("start", "--address", cluster.info.gcs_url, "--join-token-file", file)
    offer = ("--num-cpus", "1", "--num-gpus", "0")
    machine = {"STOKER_TOKEN": "", "STOKER_SESSION_ROOT": str(tmp_path / "sessions")}

    def start(name: str) -> subprocess.CompletedProcess[str]:
        return cli(cluster, *join, *offer, STOKER_TOKEN_FILE=str(tmp_path / name), **machine)

    started = start("token")
    assert started.returncode == 0, started.stderr
    try:
        assert load_secrets(tmp_path / "token") == (cluster.info.token,)
        assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
        nodes = http(cluster).call("GET", "/v1/nodes", reply=dict)["items"]
        assert len(nodes) == 2
        again = start("another")
        assert again.returncode != 0 and "revoked" in again.stderr
        assert not (tmp_path / "another").exists()
    finally:
        stopped = cli(cluster, "stop", **machine)
        assert stopped.returncode == 0, stopped.stderr
