"""The fork server of a killed nodelet: it lives on only to clean up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from stoker_nodelet.workers.forkserver import HEAD, start_forkserver
from stoker_wire.process.files import umask
from tests.services import until

if TYPE_CHECKING:
    import socket
    from pathlib import Path


OWNER = """
import os, pathlib, signal, sys
from stoker_nodelet.objects import arena
from stoker_nodelet.workers.forkserver import _send, fork_forkserver
log, folder = map(pathlib.Path, sys.argv[1:])
server = fork_forkserver(log, target="tests.e2e.nodelet.worker_target:main")
arena.create_owned(folder)
(folder / "object").write_text("x")
_send(server.sock, {"op": "cleanup_path", "path": str(folder)})
print(server.proc.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_forked_fork_server_outlives_its_killed_owner_only_to_clean_up(tmp_path: Path) -> None:
    folder = tmp_path / "arena"
    done = subprocess.run(
        [sys.executable, "-c", OWNER, str(tmp_path / "log"), str(folder)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid = int(done.stdout)
    until(lambda: not os.path.exists(f"/proc/{pid}"), 40.0, "the fork server ends")
    assert not folder.exists()


PROGRAM = """
import pathlib, signal, sys, time

def save(*_):
    time.sleep(0.3)
    print("saved", flush=True)
    if sys.argv[2] == "ends":
        sys.exit(0)

signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1]).touch()
while True:
    time.sleep(60)
"""


@pytest.mark.parametrize("then", ["ends", "goes on"])
@pytest.mark.parametrize(
    "entrypoint",
    [
        "{}",
        "cd / && {}",
        "({}; true)",
        "{{ {}; echo more; }} | cat",
        "{} & wait",
        "sh -c '{}; true'",
    ],
)
def test_what_a_shell_runs_has_its_grace_though_the_shell_dies_of_sigterm(
    entrypoint: str, then: str, tmp_path: Path
) -> None:
    (tmp_path / "main.py").write_text(PROGRAM)
    began, output = tmp_path / "began", tmp_path / "child.log"
    run = f'{sys.executable} {tmp_path}/main.py {began} "{then}"'
    server = start_forkserver(target="os:getpid", log_path=tmp_path / "server.log")
    events = Events(server.sock)
    try:
        events.next("ready")
        fork = {
            "op": "fork",
            "worker_id": "w_1",
            "argv": ["/bin/sh", "-c", entrypoint.format(run)],
            "cgroup": "",
            "boot": b"",
            "env": {},
            "cwd": "",
            "log_path": str(output),
            "sys_path": [],
        }
        end = {"op": "signal", "worker_id": "w_1", "signum": signal.SIGTERM}
        server.sock.sendall(frame(fork))
        until(began.exists, 40.0, "the program runs")
        server.sock.sendall(frame(end))
        if then == "goes on":
            until(lambda: "saved" in output.read_text(), 40.0, "it has saved")
            server.sock.sendall(frame({**end, "signum": signal.SIGKILL}))
        status = events.next("exited")["status"]
        # A shell that sees its child's death before its own signal says it by its exit code.
        code = os.waitstatus_to_exitcode(status)
        assert code == 0 or code < 0 or code == 128 + signal.SIGTERM
        assert "saved" in output.read_text() and "more" not in output.read_text()
        left = subprocess.run(
            ["pgrep", "-f", str(began)], capture_output=True, text=True, check=False
        )
        assert left.stdout == ""
    finally:
        events.file.close()
        server.sock.close()
        server.proc.wait()


def test_a_signal_right_after_the_fork_is_not_lost(tmp_path: Path) -> None:
    """As when a job is stopped that was just submitted: the child still has the fork server's handlers."""
    log = tmp_path / "server.log"
    server = start_forkserver(target="os:getpid", log_path=log)
    events = Events(server.sock)
    try:
        events.next("ready")
        for number in range(30):
            worker_id = f"w_{number}"
            fork = {
                "op": "fork",
                "worker_id": worker_id,
                "argv": ["sleep", "600"],
                "cgroup": "",
                "boot": b"",
                "env": {},
                "cwd": "",
                "log_path": str(tmp_path / "child.log"),
                "sys_path": [],
            }
            end = {"op": "signal", "worker_id": worker_id, "signum": signal.SIGTERM}
            server.sock.sendall(frame(fork) + frame(end))
            assert events.next("exited")["status"] == signal.SIGTERM
    finally:
        events.file.close()
        server.sock.close()
        server.proc.wait()
    assert log.read_text() == ""


def frame(message: dict[str, Any]) -> bytes:
    body = msgspec.msgpack.encode(message)
    return HEAD.pack(len(body)) + body


class Events:
    """What a fork server says."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(40.0)
        self.file = sock.makefile("rb")

    def next(self, kind: str) -> dict[str, Any]:
        """The next event of this kind."""
        while True:
            (nbytes,) = HEAD.unpack(self.file.read(HEAD.size))
            event: dict[str, Any] = msgspec.msgpack.decode(self.file.read(nbytes))
            if event["ev"] == kind:
                return event


def test_the_kernel_ends_a_worker_before_the_services_when_memory_is_short(tmp_path: Path) -> None:
    output = tmp_path / "child.log"
    server = start_forkserver(target="os:getpid", log_path=tmp_path / "server.log")
    events = Events(server.sock)
    try:
        events.next("ready")
        fork = {
            "op": "fork",
            "worker_id": "w_1",
            "argv": ["/bin/cat", "/proc/self/oom_score_adj"],
            "cgroup": "",
            "boot": b"",
            "env": {},
            "cwd": "",
            "log_path": str(output),
            "sys_path": [],
        }
        server.sock.sendall(frame(fork))
        events.next("exited")
        with open("/proc/self/oom_score_adj") as file:
            services = int(file.read())
        assert int(output.read_text()) == min(1000, services + 500)
    finally:
        events.file.close()
        server.sock.close()
        server.proc.wait()


def test_users_code_has_the_umask_of_the_user_and_not_that_of_the_services(tmp_path: Path) -> None:
    output = tmp_path / "child.log"
    before = os.umask(0o077)  # as in a nodelet that starts another fork server
    try:
        server = start_forkserver(target="os:getpid", log_path=tmp_path / "server.log")
    finally:
        os.umask(before)
    events = Events(server.sock)
    try:
        events.next("ready")
        fork = {
            "op": "fork",
            "worker_id": "w_1",
            "argv": ["/bin/sh", "-c", "umask"],
            "cgroup": "",
            "boot": b"",
            "env": {},
            "cwd": "",
            "log_path": str(output),
            "sys_path": [],
        }
        server.sock.sendall(frame(fork))
        events.next("exited")
        assert int(output.read_text(), 8) == umask.INHERITED == before
    finally:
        events.file.close()
        server.sock.close()
        server.proc.wait()
