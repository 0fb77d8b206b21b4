"""Nodes and the Unix users of jobs: one for all work, a nodelet that is not root, a head that is killed."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from stoker.jobs import JobSubmissionClient
from stoker.local import certificates
from stoker_wire.messages.control import CreateToken, Token
from tests.e2e._cluster import environment, head, http
from tests.e2e.nodelet.unix_users import account, processes, readable_python, user
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 90.0
NOBODY = "nobody"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run jobs as another user")


class Machine(NamedTuple):
    """A user of this machine, and a folder that all can enter."""

    user: pwd.struct_passwd
    folder: Path


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    folder = Path(tempfile.mkdtemp(prefix="stoker-run-as-", dir="/tmp"))
    folder.chmod(0o755)
    group = f"stk-one-{os.getpid()}"
    account("groupadd", "--system", group)
    try:
        with user("carol", folder, group) as carol:
            monkeypatch.setattr(sys, "executable", readable_python(folder))
            yield Machine(carol, folder)
    finally:
        account("groupdel", group)
        shutil.rmtree(folder)


EMBEDDED = """
    import json, os
    import numpy
    import stoker
    stoker.init(num_cpus=2, log_to_driver=False)

    @stoker.remote
    def uid(values):
        return os.getuid(), float(values.sum())

    @stoker.remote(num_cpus=0.5)
    class Reads:
        def sum(self, refs):
            return float(stoker.get(refs[0]).sum())

    @stoker.remote(num_cpus=0.5)
    class Asks:
        def of(self, other, refs):
            return stoker.get(other.sum.remote(refs))  # who reads has no channel to this process

    big = stoker.put(numpy.ones(500_000))
    asked = Asks.remote().of.remote(Reads.remote(), [big])
    print(json.dumps([stoker.get(uid.remote(big)), stoker.get(asked)]))
"""


def drive(machine: Machine, run_as: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(EMBEDDED)],
        env={
            **os.environ,
            "STOKER_RUN_AS": run_as,
            "STOKER_SESSION_ROOT": str(machine.folder / "sessions"),
        },
        cwd=machine.folder,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )


def test_work_of_no_user_runs_as_the_one_of_the_setting(machine: Machine) -> None:
    done = drive(machine, machine.user.pw_name)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[machine.user.pw_uid, 500_000.0], 500_000.0]


def test_a_nodelet_does_not_start_with_a_user_whom_it_does_not_know(machine: Machine) -> None:
    for name, why in (("no-such-user", "there is no Unix user"), ("root", "is root on node")):
        done = drive(machine, name)
        assert done.returncode != 0
        assert f"STOKER_RUN_AS='{name}'" in done.stderr
        assert why in done.stderr


OWN = """
    import json, os, sys
    from stoker.jobs import JobSubmissionClient
    from stoker.launch import start_local
    from stoker.runtime.net.http import HttpClient
    from stoker_wire.messages.control import CreateToken, Token

    ended = []
    with start_local(num_cpus=2, num_gpus=0) as cluster:
        admin = HttpClient(cluster.info.gcs_url, token=cluster.info.token)
        for run_as in sys.argv[1:]:
            body = CreateToken(name=run_as, run_as=run_as)
            token = admin.call("POST", "/v1/tokens", body, reply=Token).secret
            client = JobSubmissionClient(cluster.info.gcs_url, token)
            job = client.wait(client.submit_job(entrypoint=f"test $(id -u) = {os.getuid()}"), timeout_s=60)
            ended.append([job.state, job.message])
    print(json.dumps(ended))
"""


def test_a_nodelet_that_is_not_root_runs_its_own_users_work_alone(machine: Machine) -> None:
    nobody, name = pwd.getpwnam(NOBODY), machine.user.pw_name
    own = machine.folder / "nobodys"
    own.mkdir(mode=0o700)
    os.chown(own, nobody.pw_uid, nobody.pw_gid)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(OWN), name, NOBODY],
        env={**os.environ, "HOME": str(own), "STOKER_SESSION_ROOT": str(own / "sessions")},
        cwd=own,
        user=nobody.pw_uid,
        group=nobody.pw_gid,
        extra_groups=(),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 0, done.stderr
    (foreign, why), (same, _) = json.loads(done.stdout)
    assert foreign == "FAILED"
    assert f"cannot run anything as '{name}', as its nodelet runs as nobody" in why
    assert f"start it as root or as {name}" in why
    assert same == "SUCCEEDED"


TASK = """
    import stoker
    stoker.init(log_to_driver=False)
    try:
        print(stoker.get(stoker.remote(max_retries=0)(lambda: "has run").remote(), timeout=60))
    except stoker.exceptions.StokerError as error:
        print(type(error).__name__, error)
"""


def test_with_tls_a_users_worker_needs_the_key_and_says_so(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = machine.folder / "certificates"
    certificates.init(folder, name="CA of the test")
    certificates.issue(folder, "node", ["127.0.0.1", "localhost"])
    folder.chmod(0o755)
    key, name = folder / "node.key", machine.user.pw_name
    for setting, value in (("", "server"), ("_CERT", folder / "node.pem"), ("_KEY", key)):
        monkeypatch.setenv(f"STOKER_TLS{setting}", str(value))
    monkeypatch.setenv("STOKER_TLS_CA", str(folder / "ca.pem"))
    for public in ("node.pem", "ca.pem"):
        (folder / public).chmod(0o644)
    with head(machine.folder / "sessions", num_cpus=2) as cluster:
        body = CreateToken(name=name, run_as=name)
        token = http(cluster).call("POST", "/v1/tokens", body, reply=Token).secret

        def run() -> str:
            done = subprocess.run(
                [sys.executable, "-c", textwrap.dedent(TASK)],
                env=environment(cluster, STOKER_TOKEN=token),
                cwd=machine.folder,
                capture_output=True,
                text=True,
                timeout=WAIT_S,
            )
            assert done.returncode == 0, done.stderr
            return done.stdout

        said = run()
        assert "RuntimeEnvSetupError" in said
        assert "STOKER_TLS_KEY" in said
        key.chmod(0o640)
        os.chown(key, 0, machine.user.pw_gid)
        assert run() == "has run\n"


def test_a_head_that_is_killed_leaves_nothing_of_its_users(machine: Machine) -> None:
    name, uid = machine.user.pw_name, str(machine.user.pw_uid)
    with head(machine.folder / "sessions", num_cpus=2) as cluster:
        body = CreateToken(name=name, run_as=name)
        token = http(cluster).call("POST", "/v1/tokens", body, reply=Token).secret
        client = JobSubmissionClient(cluster.info.gcs_url, token)
        client.submit_job(entrypoint="sleep 600 & setsid sleep 601 & wait")
        until(lambda: len(processes("-u", uid, "sleep")) == 2, WAIT_S, "both sleep")
        folder = Path(f"/tmp/stoker-users-{cluster.info.node_id}")
        assert folder.is_dir()
        os.kill(cluster.pid, signal.SIGKILL)
        until(lambda: not processes("-u", uid), WAIT_S, "none of the user's processes is left")
        until(lambda: not folder.exists(), WAIT_S, "the user's folder is gone")
