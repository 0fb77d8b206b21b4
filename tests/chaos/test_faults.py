"""Nodes, drivers and workers that die, freeze or come late: work moves, errors are clear, nothing stays."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import stoker
from stoker import exceptions
from stoker.runtime.options.strategies import NodeAffinity
from tests import leaks
from tests.chaos._services import Apart, apart
from tests.e2e._cluster import caught, environment, head, session_root
from tests.leaks import alive
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator

# What is broken here on purpose is warned of; errors and tracebacks stay unexpected.
pytestmark = pytest.mark.logs(r'"level": "warning"', r"^this process: stoker[._]")

GET_S = 40.0
HELD_S = 100.0
"""A task that is to end when it is told, or never, gives up after so long."""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Apart]:
    """Two nodes of one CPU each; this process is the driver, on the first."""
    with session_root(tmp_path / "s"), apart(tmp_path, nodelets=1, cpus=1) as made:
        stoker.init(made.gcs.url, token=made.token, log_to_driver=False)
        made.add_nodelet(cpus=1)
        try:
            yield made
        finally:
            stoker.shutdown()


def get(refs: Any, timeout: float = GET_S) -> Any:
    return stoker.get(refs, timeout=timeout)


def on(cluster: Apart, name: str, *, soft: bool = False) -> NodeAffinity:
    return NodeAffinity(node_id=cluster.nodes()[name]["node_id"], soft=soft)


def until_node(cluster: Apart, name: str, state: str) -> None:
    until(lambda: cluster.nodes()[name]["state"] == state, 40, f"{name} is {state}")


@stoker.remote
def where(gate: str = "") -> str:
    """The node it runs on, once the gate is there."""
    if gate:
        until(Path(gate).exists, HELD_S, "the gate opens")
    return stoker.get_runtime_context().node_id


@stoker.remote
def meet(folder: str, count: int) -> str:
    """The node it runs on, once so many run at the same time."""
    Path(folder, stoker.get_runtime_context().task_id).touch()
    until(lambda: len(os.listdir(folder)) >= count, HELD_S, f"{count} run at once")
    return stoker.get_runtime_context().node_id


def met(folder: Path, count: int) -> set[str]:
    """The nodes of so many tasks that run at the same time."""
    folder.mkdir()
    return set(get([meet.remote(str(folder), count) for _ in range(count)]))


@stoker.remote
class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self) -> int:
        self.count += 1
        return self.count

    def node(self) -> str:
        return stoker.get_runtime_context().node_id

    def pid(self) -> int:
        return os.getpid()


def test_a_second_node_takes_its_share_and_large_values_travel(pair: Apart, tmp_path: Path) -> None:
    assert met(tmp_path / "met", 2) == {node["node_id"] for node in pair.nodes().values()}

    @stoker.remote
    def make(nbytes: int) -> bytes:
        return b"z" * nbytes

    @stoker.remote
    def measure(value: bytes) -> tuple[int, str]:
        return len(value), stoker.get_runtime_context().node_id

    first, second = on(pair, "n0"), on(pair, "n1")
    far = make.options(scheduling_strategy=second).remote(5_000_000)
    assert len(get(far)) == 5_000_000
    size, node = get(measure.options(scheduling_strategy=first).remote(far))
    assert (size, node) == (5_000_000, first.node_id)
    mine = stoker.put(b"m" * 3_000_000)
    size, node = get(measure.options(scheduling_strategy=second).remote(mine))
    assert (size, node) == (3_000_000, second.node_id)
    # Left to itself, a task goes where its large argument lies.
    for there, cpus in ((first, 0.2), (second, 0.3)):
        big = make.options(scheduling_strategy=there, num_cpus=0).remote(4_000_000)
        stoker.wait([big], timeout=40)
        until(lambda: stoker.available_resources()["CPU"] == 2, 40, "idle leases went back")
        assert get(measure.options(num_cpus=cpus).remote(big)) == (4_000_000, there.node_id)
        del big
    arenas = [Path(node["arena_dir"]) for node in pair.nodes().values()]
    del far, mine
    until(
        lambda: not [p for a in arenas for p in a.glob("o_*")],
        40,
        "both arenas are empty again",
    )


def test_a_killed_node_is_dead_at_once_and_its_work_runs_elsewhere(
    pair: Apart, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    victim = pair.nodelets[1]
    node_id = pair.nodes()["n1"]["node_id"]
    near = on(pair, "n1", soft=True)
    counter = Counter.options(scheduling_strategy=near, max_restarts=1, num_cpus=0).remote()
    mortal = Counter.options(scheduling_strategy=on(pair, "n1"), num_cpus=0).remote()
    assert get([counter.node.remote(), mortal.node.remote()]) == [node_id, node_id]
    running = where.options(scheduling_strategy=near).remote(str(gate))
    once = where.options(scheduling_strategy=near, max_retries=0)
    pinned = where.options(scheduling_strategy=on(pair, "n1"), max_retries=0, num_cpus=0)
    doomed = pinned.remote(str(tmp_path / "never"))
    until(lambda: _runs_on(pair, node_id, 2), 40, "both run there")
    workers = [p.pid for p in psutil.Process(victim.pid).children(recursive=True)]
    victim.kill()
    until(lambda: not any(alive(pid) for pid in workers), 40, "its workers go with it")
    until_node(pair, "n1", "DEAD")
    assert "refuses connections" in pair.nodes()["n1"]["reason"]
    other = pair.nodes()["n0"]["node_id"]
    gate.touch()
    assert get(running) == other
    assert get(once.remote()) == other, "new work does not wait for a dead node"
    lost = caught(lambda: get(doomed), exceptions.NodeDiedError)
    assert f"node {node_id} on " in str(lost) and "is dead since" in str(lost)
    assert _last_life(counter) == other
    error = caught(lambda: get(mortal.add.remote()), exceptions.ActorDiedError)
    assert "worker" in str(error) or "node" in str(error)


def _runs_on(cluster: Apart, node_id: str, count: int = 1) -> bool:
    page = cluster.client.call("GET", "/v1/tasks", reply=dict[str, Any], query={"state": "RUNNING"})
    return sum(task["node_id"] == node_id for task in page["items"]) >= count


def _last_life(actor: Any) -> str:
    try:
        return str(get(actor.node.remote()))
    except exceptions.ActorUnavailableError:
        return str(get(actor.node.remote()))


def test_a_frozen_node_is_given_up_and_does_no_harm_when_it_wakes(
    pair: Apart, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    victim = psutil.Process(pair.nodelets[1].pid)
    old = pair.nodes()["n1"]
    counter = Counter.options(scheduling_strategy=on(pair, "n1"), num_cpus=0).remote()
    again = Counter.options(
        scheduling_strategy=on(pair, "n1", soft=True),
        num_cpus=0,
        max_restarts=1,
        max_task_retries=1,
    ).remote()
    pid = get(counter.pid.remote())
    assert get([again.add.remote() for _ in range(3)]) == [1, 2, 3]
    running = where.options(scheduling_strategy=on(pair, "n1", soft=True)).remote(str(gate))
    until(lambda: _runs_on(pair, old["node_id"]), 40, "it runs there")
    frozen = [victim, *victim.children(recursive=True)]
    for process in frozen:
        process.suspend()
    waiting, retried = counter.add.remote(), again.add.remote()
    until_node(pair, "n1", "DEAD")
    gate.touch()
    assert isinstance(caught(lambda: get(waiting)), exceptions.ActorDiedError)
    assert isinstance(caught(lambda: get(counter.add.remote())), exceptions.ActorDiedError)
    assert get(retried) == 1, "a new life on the other node, not the frozen one"
    other = pair.nodes()["n0"]["node_id"]
    assert get([where.remote(), running, again.node.remote()]) == [other] * 3
    for process in frozen:
        with contextlib.suppress(psutil.NoSuchProcess):  # the nodelet ends the others as it wakes
            process.resume()
    until_node(pair, "n1", "ALIVE")
    assert pair.nodes()["n1"]["incarnation"] > old["incarnation"]
    until(lambda: not alive(pid), 40, "the actor that was given up is gone")
    there = where.options(scheduling_strategy=on(pair, "n1")).remote()
    assert get(there) == old["node_id"], "it takes work again"


def test_objects_of_a_dead_node_are_lost_with_a_clear_error(pair: Apart) -> None:
    @stoker.remote(max_retries=0)  # else it would be made again
    def make() -> bytes:
        return os.urandom(2_000_000)

    @stoker.remote
    def measure(value: bytes) -> int:
        return len(value)

    ref = make.options(scheduling_strategy=on(pair, "n1")).remote()
    stoker.wait([ref], timeout=GET_S)
    arena = Path(pair.nodes()["n1"]["arena_dir"])
    pair.nodelets[1].kill()
    until_node(pair, "n1", "DEAD")
    for path in arena.glob("o_*"):
        path.unlink()
    dead = pair.nodes()["n1"]["node_id"]
    for reads in (lambda: get(ref), lambda: get(measure.remote(ref))):
        error = caught(reads)
        assert isinstance(error, exceptions.ObjectLostError), repr(error)
        assert isinstance(error, exceptions.NodeDiedError), repr(error)
        assert ref.id in str(error) and f"node {dead} on " in str(error), error
        assert "is dead since" in str(error) and "Cannot connect" not in str(error), error


def open_spools() -> list[str]:
    return [name for name in leaks._open_files() if "/spool/" in name]


def test_init_and_shutdown_again_and_again_leave_nothing(tmp_path: Path) -> None:
    with session_root(tmp_path / "s"):
        before, spools_before = leaks.Snapshot.take(), open_spools()
        for round_ in range(5):
            stoker.init(num_cpus=1, num_gpus=0, log_to_driver=False)
            assert get(where.remote())
            if round_ % 3 == 0:
                counter = Counter.remote()
                assert get(counter.add.remote()) == 1
            stoker.put(b"x" * 500_000)
            stoker.shutdown()
            stoker.shutdown()
        assert before.leaks() == []
        assert open_spools() == spools_before, "a driver kept the files of its history"
        assert psutil.Process().num_fds() <= before.fds + 3
        assert [t.name for t in __import__("threading").enumerate() if "stoker" in t.name] == []


def test_handles_and_functions_of_an_earlier_cluster_fail_clearly_in_the_next(
    tmp_path: Path,
) -> None:
    with session_root(tmp_path / "s"):
        stoker.init(num_cpus=1, num_gpus=0, log_to_driver=False)
        counter = Counter.remote()
        assert get(counter.add.remote()) == 1
        ref = stoker.put(b"x" * 500_000)
        stoker.shutdown()
        error = caught(lambda: counter.add.remote(), exceptions.StokerError)
        assert "init()" in str(error)
        stoker.init(num_cpus=1, num_gpus=0, log_to_driver=False)
        assert get(where.remote()), "a function is of no cluster"
        try:
            error = caught(lambda: get(counter.add.remote()))
            assert isinstance(error, exceptions.ActorDiedError), repr(error)
            error = caught(lambda: get(ref))
            assert isinstance(error, exceptions.ObjectLostError), repr(error)
        finally:
            stoker.shutdown()


def test_init_auto_and_by_address_join_a_started_head(tmp_path: Path) -> None:
    with head(tmp_path / "s", num_cpus=1) as cluster:
        for address in ("auto", cluster.info.gcs_url):
            info = stoker.init(address, token=cluster.info.token, log_to_driver=False)
            try:
                assert info.address == cluster.info.gcs_url
                assert get(where.remote()) == cluster.info.node_id
            finally:
                stoker.shutdown()
        assert cluster.is_alive()
        error = caught(lambda: stoker.init("auto", num_cpus=3), exceptions.StokerError)
        assert "num_cpus" in str(error)
        error = caught(lambda: stoker.init(cluster.info.gcs_url, token="wrong"))
        assert "token" in str(error)
    error = caught(lambda: stoker.init("auto"), exceptions.StokerError)
    assert "start --head" in str(error)
    error = caught(lambda: stoker.init(cluster.info.gcs_url, token="t" * 20))
    assert cluster.info.gcs_url.removeprefix("http://") in str(error)
    assert not stoker.is_initialized()


def test_a_node_joins_by_the_cli_and_leaves_by_it(tmp_path: Path) -> None:
    with head(tmp_path / "s", num_cpus=1) as cluster:
        env = environment(cluster, STOKER_SESSION_ROOT=str(tmp_path / "s"))
        command = [sys.executable, "-m", "stoker.cli"]
        joined = subprocess.run(
            [*command, "start", "--address", cluster.info.gcs_url, "--num-cpus", "1"],
            env=env,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert joined.returncode == 0, joined.stderr
        stoker.init(cluster.info.gcs_url, token=cluster.info.token, log_to_driver=False)
        try:
            assert len(met(tmp_path / "met", 2)) == 2
        finally:
            stoker.shutdown()
            stopped = subprocess.run(
                [*command, "stop"], env=env, capture_output=True, text=True, timeout=90, check=False
            )
        assert stopped.returncode == 0, stopped.stderr


def test_a_port_in_use_is_told_with_the_fix(tmp_path: Path) -> None:
    with session_root(tmp_path / "s"), socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = caught(lambda: stoker.init(port=port, num_cpus=1), exceptions.PortInUseError)
        assert str(port) in str(error)
        assert not stoker.is_initialized()


def test_a_killed_head_fails_what_its_driver_waits_for(tmp_path: Path) -> None:
    with session_root(tmp_path / "s"):
        stoker.init(num_cpus=1, num_gpus=0, log_to_driver=False)
        try:
            counter = Counter.remote()
            assert get(counter.add.remote()) == 1
            refs = [where.remote(str(tmp_path / "never")) for _ in range(2)]
            pid = stoker.runtime.process.current_runtime.LIFECYCLE.cluster.pid
            os.kill(pid, signal.SIGKILL)
            error = caught(lambda: get(refs))
            assert isinstance(error, exceptions.UnavailableError)
            assert str(pid) in str(error)
            for call in (where, counter.add):
                error = caught(lambda call=call: get(call.remote()))
                assert isinstance(error, exceptions.UnavailableError)
        finally:
            stoker.shutdown()


def test_workers_that_are_shot_at_random_do_not_stop_a_thousand_tasks(tmp_path: Path) -> None:
    with session_root(tmp_path / "s"):
        stoker.init(num_cpus=2, num_gpus=0, log_to_driver=False)
        try:

            @stoker.remote(max_retries=-1)
            def work(number: int) -> tuple[int, int]:
                time.sleep(0.002)
                return number, os.getpid()

            refs = [work.remote(i) for i in range(1000)]
            for share in (100, 300, 500):
                ready, _ = stoker.wait(refs, num_returns=share, timeout=GET_S)
                # Of those that did so much; who was shot before may be among them.
                living = [pid for _, pid in get(ready) if alive(pid)]
                if living:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(living[-1], signal.SIGKILL)
            assert [number for number, _ in get(refs)] == list(range(1000))
        finally:
            stoker.shutdown()
