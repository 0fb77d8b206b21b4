"""The command of a container, and what becomes of one that does not start."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pytest

from stoker_nodelet.environments.environments import Environment
from stoker_nodelet.environments.images import Container, Images
from stoker_nodelet.workers import fork_client
from stoker_nodelet.workers.containers import Containers, accept, with_gpus
from stoker_nodelet.workers.fork_client import ForkRequest, ForkServer, ForkServerPool
from stoker_nodelet.workers.forkserver import ForkServerHandle, InContainer
from stoker_wire.errors import RuntimeEnvSetupError, UnavailableError
from stoker_wire.process.background import Background

if TYPE_CHECKING:
    from collections.abc import Iterator


def command(engine: str, tmp_path: Path, container: Container) -> str:
    session = tmp_path / "session"
    (session / "logs").mkdir(parents=True, exist_ok=True)
    shared = (session, session / "logs", tmp_path / "absent", Path("/dev/shm/arena"))
    containers = Containers(MagicMock(spec=Images), "n_1", session, session, shared)
    return " ".join(containers.command(engine, "stoker-w_1", container))


def test_a_container_has_the_hosts_pids_network_and_memory_and_our_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_TOKEN", "very-secret")
    monkeypatch.setenv("STOKER_LOG_LEVEL", "debug")
    line = command("/usr/bin/docker", tmp_path, Container("sha256:a"))
    assert line.startswith("/usr/bin/docker run --rm --pull never --name stoker-w_1 ")
    for part in ("network host", "ipc host", "pid host", "label stoker.io/node-id=n_1"):
        assert f"--{part} " in line
    session = tmp_path / "session"
    assert line.count("--mount") == 1
    assert f"--mount type=bind,source={session},target={session} " in line
    assert "--env STOKER_LOG_LEVEL " in line
    assert "TOKEN" not in line and "secret" not in line and "gpu" not in line
    assert line.endswith(" --entrypoint python3 sha256:a")


def test_each_engine_is_told_of_gpus_in_its_words(tmp_path: Path) -> None:
    container = Container("a", ("GPU-1", "GPU-2"))
    assert ' --gpus "device=GPU-1,GPU-2" ' in command("/bin/docker", tmp_path, container)
    line = command("/bin/podman", tmp_path, container)
    assert " --device nvidia.com/gpu=GPU-1 --device nvidia.com/gpu=GPU-2 " in line
    assert "--gpus" not in line


def test_a_container_has_the_gpus_of_its_lease_alone() -> None:
    identity, lease = MagicMock(gpu_uuids={1: "GPU-b"}, fake_gpus=False), MagicMock()
    lease.gpus = {2: 1.0, 1: 1.0}
    environment = Environment(container=Container("a")).keyed()
    made = with_gpus(environment, lease, identity)
    assert made.container == Container("a", ("GPU-b", "2"))
    assert made.key != environment.key
    plain = Environment().keyed()
    assert with_gpus(plain, lease, identity) is plain
    identity.fake_gpus = True
    assert with_gpus(environment, lease, identity) is environment


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "sock"))
        made.listen(1)
        made.setblocking(False)
        yield made


def started(tmp_path: Path, program: str) -> InContainer:
    log = tmp_path / "log"
    with log.open("wb") as file:
        proc = subprocess.Popen(["/bin/sh", "-c", program], stdout=file, stderr=file)
    return InContainer("/bin/true", "name", proc, tmp_path / "sock", log)


async def test_one_that_connects_is_served_and_its_socket_is_gone(
    tmp_path: Path, listener: socket.socket
) -> None:
    container = started(tmp_path, "exec sleep 60")
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "sock"))
        connection = await accept(listener, container)
        client.sendall(b"ready")
        assert connection.recv(5) == b"ready"
        connection.close()
    assert not (tmp_path / "sock").exists()
    container.proc.kill()
    container.proc.wait()


async def test_one_that_does_not_start_says_why_to_who_waits_for_its_fork(
    tmp_path: Path, listener: socket.socket
) -> None:
    container = started(tmp_path, "echo 'could not select device driver'; exit 125")
    handle: Any = ForkServerHandle(container.proc, listener, "", (), "", container)
    async with Background("test") as background:
        server = ForkServer(handle, lambda _: None, background)
        server.start()
        with pytest.raises(RuntimeEnvSetupError, match=r"did not start\.\ncould not select device"):
            await server.fork(ForkRequest("w_1", "", {}))
        assert server.lost
        with pytest.raises(UnavailableError, match="did not start"):
            await server.fork(ForkRequest("w_2", "", {}))
        await server.stop()


async def test_a_container_without_a_worker_ends_after_a_while_and_no_other_fork_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_client, "_IDLE_S", -1.0)
    starts = MagicMock(spec=Containers)
    sockets: list[socket.socket] = []

    def start(container: Container, **_: object) -> ForkServerHandle:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / f"{container.image}.sock"))
        listener.listen(1)
        listener.setblocking(False)
        client = socket.socket(socket.AF_UNIX)
        client.connect(str(tmp_path / f"{container.image}.sock"))
        sockets.append(client)
        proc = MagicMock(pid=1, **{"wait.return_value": 0, "poll.return_value": None})
        where = InContainer("/bin/true", "name", proc, tmp_path / "none", tmp_path / "log")
        return ForkServerHandle(proc, listener, "", (), "", where)

    starts.start = start
    ours, theirs = socket.socketpair()
    async with Background("test") as background:
        pool = ForkServerPool("", tmp_path, lambda _: None, background, containers=starts)
        pool.attach(ForkServerHandle(MagicMock(), ours, "", (), "python"))
        idle, busy = pool.get("python", (), Container("a")), pool.get("python", (), Container("b"))
        busy._pids["w_1"] = 7
        assert pool.get("python", (), Container("a")) is idle
        pool.end_idle()
        assert pool.get("python", (), Container("b")) is busy
        assert pool.get("python", ()).handle.sock is ours
        assert pool.get("python", (), Container("c")) is not idle
        busy._pids.clear()
        await pool.stop()
        for one in (*sockets, theirs):
            one.close()
