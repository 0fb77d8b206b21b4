"""Another user of the machine: reads nothing of a cluster, writes nothing, connects to nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from stoker.jobs import JobSubmissionClient
from stoker.launch import LocalCluster, start_local
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 60.0
NOBODY = 65534
JOB = """
import pathlib, sys, time
import stoker

stoker.init()
kept = stoker.put(bytes(1 << 20))

@stoker.remote
def hold(folder):
    pathlib.Path(folder, "up").touch()
    while not pathlib.Path(folder, "end").exists():
        time.sleep(0.02)

stoker.get(hold.remote(sys.argv[1]))
"""
PROBE = """
import encodings.idna, json, os, socket, sys, urllib.error, urllib.request  # before it may read none

given = json.load(sys.stdin)
uid = given["uid"]
os.setgroups([])
os.setgid(uid)
os.setuid(uid)
done = []

def attempt(what, act):
    try:
        act()
    except OSError:
        return
    done.append(what)

def connect(path):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)

def read(path):
    with open(path, "rb") as file:
        assert file.read(1) or True

for path in given["paths"]:
    attempt(f"look at {path}", lambda: os.stat(path))
    attempt(f"list {path}", lambda: os.listdir(path))
    attempt(f"read {path}", lambda: read(path))
    attempt(f"write {path}", lambda: open(path, "ab").close())
    attempt(f"connect to {path}", lambda: connect(path))
for pid in given["pids"]:
    for name in ("environ", "mem", "maps"):
        attempt(f"read {name} of {pid}", lambda: read(f"/proc/{pid}/{name}"))
    attempt(f"signal {pid}", lambda: os.kill(pid, 0))
for url in given["urls"]:
    attempt(f"get {url}", lambda: urllib.request.urlopen(f"{url}/v1/nodes"))
json.dump(done, sys.stdout)
"""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    """A cluster whose session lies where all users may look, with the umask that hides the least."""
    folder = Path(tempfile.mkdtemp(prefix="stoker-second-user-", dir="/tmp"))
    folder.chmod(0o755)
    monkeypatch.setenv("STOKER_SESSION_ROOT", str(folder / "s"))
    before = os.umask(0)
    try:
        with start_local(num_cpus=2, num_gpus=0, timeout_s=WAIT_S) as made:
            yield made
    finally:
        os.umask(before)
        shutil.rmtree(folder)


def probe(
    paths: list[Path], processes: list[psutil.Process], urls: list[str], uid: int
) -> list[str]:
    """What a process of that user could do."""
    asked = {
        "uid": uid,
        "paths": [str(path) for path in paths],
        "pids": [process.pid for process in processes],
        "urls": urls,
    }
    command = [sys.executable, "-I", "-S", "-c", textwrap.dedent(PROBE)]
    done = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_second_user_reads_nothing_and_connects_to_nothing(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    info = cluster.info
    client = JobSubmissionClient(info.gcs_url, info.token)
    job = client.submit_job(entrypoint=f"python -c '{JOB}' {tmp_path}")
    until((tmp_path / "up").exists, WAIT_S, "a task runs")
    arena = Path(info.arena_dir)
    roots = [Path(info.session_dir), arena]
    paths = [path for root in roots for path in (root, *root.rglob("*"))]
    names = {path.name for path in paths}
    assert {"token", "stoker.sqlite3", "logs", "head.log", "sockets", "jobs"} <= names
    assert any(path.is_socket() and path.name.startswith("w_") for path in paths)
    assert any(path.name.startswith("o_") for path in arena.iterdir())
    processes = [psutil.Process(info.pid), *psutil.Process(info.pid).children(recursive=True)]
    assert not any(info.token in word for one in processes for word in one.cmdline())
    urls = [info.gcs_url, info.scheduler_url, info.nodelet_url]
    below = [path for path in paths if path not in roots]
    assert probe(below, processes, urls, NOBODY) == []
    assert len(probe([Path(info.session_dir, "token")], [], [], os.getuid())) == 3, "as root it can"
    (tmp_path / "end").touch()
    assert client.wait(job, timeout_s=WAIT_S).state == "SUCCEEDED"
