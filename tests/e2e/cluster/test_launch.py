"""A local cluster as a process: it starts, is found, ends with its driver, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from stoker.cli.local.cluster import DEFAULT_PORT
from stoker.launch import LocalCluster, find_running, spawn_local, start_local
from stoker.local.cluster import spawn_node
from stoker.runtime.net.http import HttpClient
from stoker_wire.errors import OpenBindError, PortInUseError, StartError
from stoker_wire.messages.cluster import ClusterResources
from tests.services import ReservedPort, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stoker.launch import LocalInfo

START_S = 60.0
GONE_S = 40.0
SHM = Path("/dev/shm")


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A session root of this test's own, and none of the settings of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("STOKER_")]:
        if not name.startswith("STOKER_TEST_"):
            monkeypatch.delenv(name)
    folder = tmp_path / "s"
    monkeypatch.setenv("STOKER_SESSION_ROOT", str(folder))
    return folder


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with start_local(num_cpus=1, num_gpus=0, timeout_s=START_S) as made:
        yield made


def tree(pid: int) -> list[psutil.Process]:
    """The process and all below it; those that have gone meanwhile are left out."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def lives(process: psutil.Process) -> bool:
    """Whether a process runs; it may end between two questions."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(processes: list[psutil.Process], info: LocalInfo) -> None:
    """All that the head was, is no more."""

    def left() -> list[object]:
        alive = [process for process in processes if lives(process)]
        paths = [path for path in (info.arena_dir, info.nodelet_unix) if Path(path).exists()]
        return [*alive, *paths]

    until(lambda: not left(), GONE_S, f"nothing is left of the head: {left()}")


def test_a_started_cluster_answers_with_its_token_and_offers_what_it_was_told(
    cluster: LocalCluster,
) -> None:
    info = cluster.info
    client = HttpClient(info.gcs_url, token=info.token)
    (node,) = client.call("GET", "/v1/nodes", reply=dict)["items"]
    assert (node["node_id"], node["state"]) == (info.node_id, "ALIVE")
    assert node["resources"]["CPU"] == 1.0
    found = client.to(info.scheduler_url).call("GET", "/v1/resources", reply=ClusterResources)
    assert found.available["CPU"] == 1.0
    assert Path(info.arena_dir).is_dir()
    assert Path(info.nodelet_unix).is_socket()


def test_the_session_is_private_and_the_token_in_it(cluster: LocalCluster) -> None:
    session = Path(cluster.info.session_dir)
    assert stat.S_IMODE(session.stat().st_mode) == 0o700
    assert stat.S_IMODE((session / "token").stat().st_mode) == 0o600
    assert (session / "token").read_text().strip() == cluster.info.token
    assert (session / "stoker.sqlite3").exists()
    assert (session.parent / "latest").resolve() == session.resolve()


def test_stop_leaves_nothing(cluster: LocalCluster) -> None:
    processes = tree(cluster.pid)
    cluster.stop()
    assert not cluster.is_alive()
    gone(processes, cluster.info)
    cluster.stop()


def test_a_killed_head_leaves_nothing(cluster: LocalCluster) -> None:
    processes = tree(cluster.pid)
    assert len(processes) >= 2, "head and fork server"
    os.kill(cluster.pid, signal.SIGKILL)
    cluster.stop()
    gone(processes, cluster.info)


def test_a_head_killed_with_its_fork_server_leaves_nothing(cluster: LocalCluster) -> None:
    processes = tree(cluster.pid)
    (reaper,) = processes[0].children()
    both = [processes[0], *reaper.children()]
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for process in both:
            process.send_signal(signum)
    cluster.stop()
    gone(processes, cluster.info)


def test_a_head_killed_while_it_starts_leaves_nothing() -> None:
    cluster = spawn_local(num_cpus=1, num_gpus=0)
    pattern = f"stoker-{cluster.session_dir.name}-*"
    until(lambda: list(SHM.glob(pattern)), START_S, "the head has made its arena", 0.001)
    processes = tree(cluster.pid)
    os.kill(cluster.pid, signal.SIGKILL)
    cluster.stop()

    def left() -> list[object]:
        alive = [process for process in processes if lives(process)]
        return [*alive, *SHM.glob(pattern)]

    until(lambda: not left(), GONE_S, "nothing is left of the head")


@pytest.mark.parametrize("forked", [False, True], ids=["alone", "with a forked child"])
def test_a_killed_driver_takes_its_cluster_along(forked: bool, tmp_path: Path) -> None:
    said = tmp_path / "said"
    program = (
        "import os, sys, time\nfrom stoker.launch import start_local\n"
        "cluster = start_local(num_cpus=1, num_gpus=0)\n"
        # A child made by fork holds a copy of the lifeline, and lives on.
        f"if {forked} and os.fork() == 0:\n    time.sleep(99)\n    os._exit(0)\n"
        "open(sys.argv[1] + '.part', 'w').write(cluster.info.session_dir)\n"
        "os.rename(sys.argv[1] + '.part', sys.argv[1])\n"
        "time.sleep(99)"
    )
    driver = subprocess.Popen([sys.executable, "-c", program, str(said)])
    until(said.exists, START_S, "the driver has started its cluster")
    info = find_running(embedded=True)
    assert info is not None
    processes = tree(info.pid)
    children = psutil.Process(driver.pid).children()
    driver.kill()
    driver.wait(GONE_S)
    gone(processes, info)
    for child in children:
        if child.pid != info.pid:
            child.kill()


def test_a_forked_child_of_the_driver_does_not_stop_the_cluster(cluster: LocalCluster) -> None:
    pid = os.fork()
    if pid == 0:
        cluster.stop()
        os._exit(0)
    os.waitpid(pid, 0)
    assert cluster.is_alive()


def test_an_embedded_cluster_is_found_only_when_asked_for(cluster: LocalCluster) -> None:
    assert find_running() is None
    found = find_running(embedded=True)
    assert found is not None
    assert found == cluster.info


def test_nothing_of_the_cluster_that_the_driver_belongs_to_is_inherited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STOKER_TOKEN", "of-another-cluster")
    monkeypatch.setenv("STOKER_JOB_ID", "job_of_another")
    with start_local(num_cpus=1, num_gpus=0, timeout_s=START_S) as cluster:
        assert cluster.info.token != "of-another-cluster"
        environ = psutil.Process(cluster.pid).environ()
        assert not {"STOKER_TOKEN", "STOKER_JOB_ID"} & environ.keys()


def test_a_port_in_use_is_the_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=str(port)):
            start_local(num_cpus=1, port=port, timeout_s=START_S)


def test_beyond_loopback_a_token_must_be_given_that_cannot_be_guessed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for environ, said in ((None, "without a token"), ({"STOKER_TOKEN": "x"}, "1 characters")):
        cluster = spawn_local(environ=environ, host="0.0.0.0", num_cpus=1, embedded=False)
        with pytest.raises(OpenBindError, match=said):
            cluster.wait_ready(START_S)
        assert not cluster.is_alive()


def test_a_node_does_not_listen_beyond_loopback_with_a_token_that_can_be_guessed() -> None:
    node = spawn_node("http://127.0.0.1:9", token="x", host="0.0.0.0", num_cpus=1)
    with pytest.raises(OpenBindError, match="1 characters"):
        node.wait_ready(START_S)
    assert not node.is_alive()


@pytest.mark.logs(r"Fatal Python error")
def test_a_head_that_fails_shows_its_last_lines() -> None:
    with pytest.raises(StartError, match=r"last lines of .*head\.log"):
        start_local(environ={"PYTHONPATH": "/nowhere", "PYTHONHOME": "/nowhere"}, timeout_s=START_S)


def test_a_head_that_is_not_ready_in_time_is_stopped_and_says_where_it_logs(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.kill(os.getpid(), 19)  # it stops\n")
    cluster = spawn_local(num_cpus=1, num_gpus=0, environ={"PYTHONPATH": str(tmp_path)})
    with pytest.raises(StartError, match=r"not ready within 0\.2 s"):
        cluster.wait_ready(0.2)
    assert not cluster.is_alive()


def test_a_chosen_port_is_the_one_it_listens_on() -> None:
    port = ReservedPort()
    with start_local(num_cpus=1, num_gpus=0, port=port.number, timeout_s=START_S) as cluster:
        assert cluster.info.gcs_url == f"http://127.0.0.1:{port}"


def test_the_health_check_of_the_image_is_one_of_services_and_of_a_started_head(
    cluster: LocalCluster,
) -> None:
    repository = Path(__file__).parents[3]
    dockerfile = (repository / "Dockerfile").read_text()
    (name,) = re.findall(r"^HEALTHCHECK [^[]*CMD \[\"(\S+)\"\]$", dockerfile, re.MULTILINE)
    assert f"COPY scripts/healthcheck /usr/local/bin/{name}" in dockerfile
    check = repository / "scripts/healthcheck"
    assert f"${{STOKER_PORT:-{DEFAULT_PORT}}}" in check.read_text(), (
        "where a head listens by itself"
    )
    port = cluster.info.gcs_url.rpartition(":")[2]

    def code() -> int:
        environ = {**os.environ, "STOKER_PORT": port}
        return subprocess.run(
            [check], env=environ, timeout=GONE_S, check=False, capture_output=True
        ).returncode

    assert code() == 0
    cluster.stop()
    assert code() != 0


def test_threads_that_need_a_cluster_at_once_start_one(
    driver: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = driver(
        """
        import threading, stoker

        @stoker.remote
        def double(x): return 2 * x

        together, got = threading.Barrier(4), []
        def ask(number):
            together.wait()
            got.append(stoker.get(double.remote(number), timeout=60))
        threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(sorted(got), len(stoker.nodes()))
        stoker.shutdown()
        try: double.remote(1)
        except stoker.exceptions.ConflictError as error: print(str(error).splitlines()[0])
        """
    )
    assert done.stdout.splitlines() == ["[0, 2, 4, 6] 1", "stoker.shutdown() was called."], (
        done.stderr
    )
