"""Services as processes of their own, killed and started again under a driver that goes on."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import stoker
from stoker import exceptions
from stoker.runtime.actors import create
from stoker.runtime.options.strategies import NodeAffinity
from tests.chaos._services import Apart, apart
from tests.e2e._cluster import caught, session_root, waits_for
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.services import PostgresServer, RedisServer

# What is broken here on purpose is warned of; errors and tracebacks stay unexpected.
pytestmark = pytest.mark.logs(r'"level": "warning"', r"^this process: stoker[._]")

GET_S = 40.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Apart]:
    with session_root(tmp_path / "s"), apart(tmp_path) as made:
        yield made


@pytest.fixture
def joined(cluster: Apart) -> Iterator[Apart]:
    yield from _join(cluster)


def _join(cluster: Apart) -> Iterator[Apart]:
    stoker.init(cluster.gcs.url, token=cluster.token, log_to_driver=False)
    try:
        yield cluster
    finally:
        stoker.shutdown()


def get(refs: Any, timeout: float = GET_S) -> Any:
    return stoker.get(refs, timeout=timeout)


def states(cluster: Apart) -> set[str]:
    return {node["state"] for node in cluster.nodes().values()}


@stoker.remote
def double(number: int) -> int:
    return 2 * number


@stoker.remote
def slow(number: int, seconds: float = 0.002) -> int:
    time.sleep(seconds)
    return number


@stoker.remote
class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self) -> int:
        self.count += 1
        return self.count

    def pid(self) -> int:
        return os.getpid()


def test_separate_services_run_tasks_and_actors_and_stop_in_good_order(joined: Apart) -> None:
    assert get([double.remote(i) for i in range(200)]) == [2 * i for i in range(200)]
    counter = Counter.remote()
    assert get([counter.add.remote() for _ in range(10)])[-1] == 10


def test_an_actor_is_created_by_a_gcs_that_was_away_for_longer_than_a_request_may_take(
    joined: Apart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(create, "_CREATE_S", 1.0)
    monkeypatch.setattr(create, "_TRY_S", 0.5, raising=False)
    joined.gcs.kill()
    called = Counter.remote().add.remote()
    until(lambda: "the gcs does not answer" in waits_for(called), GET_S, "its call says why")
    pauses = [waits_for(called) for _ in range(2)]
    assert all("the gcs does not answer" in text for text in pauses)
    joined.gcs.start()
    assert get(called) == 1


def test_a_worker_runs_a_function_that_is_new_to_it_while_the_gcs_is_away(
    joined: Apart, tmp_path: Path
) -> None:
    def task_id() -> str:
        return stoker.get_runtime_context().task_id

    def meet(folder: Path, count: int) -> int:
        folder.mkdir(exist_ok=True)
        (folder / f"{os.getpid()}").touch()
        while len(list(folder.iterdir())) < count:
            time.sleep(0.01)
        return os.getpid()

    known = stoker.remote(lambda folder: meet(folder, 2))
    new = stoker.remote(lambda folder, count: meet(folder, count * bool(task_id())))
    workers = set(get([known.remote(tmp_path / "known") for _ in range(2)]))
    assert get(new.remote(tmp_path / "first", 1)) in workers
    joined.gcs.kill()
    assert set(get([new.remote(tmp_path / "second", 2) for _ in range(2)])) == workers


def test_a_node_of_which_nothing_was_read_yet_is_read_from_while_the_gcs_is_away(
    joined: Apart,
) -> None:
    joined.add_nodelet(cpus=2)
    there = NodeAffinity(node_id=joined.nodes()["n1"]["node_id"])

    @stoker.remote(scheduling_strategy=there)
    def made(number: int) -> np.ndarray:
        return np.full(200_000, number)

    refs = [made.remote(number) for number in range(5)]
    assert len(stoker.wait(refs, num_returns=5, timeout=GET_S)[0]) == 5
    joined.gcs.kill()
    began_s = time.monotonic()
    for number, ref in enumerate(refs):
        assert (get(ref) == number).all()
    assert time.monotonic() - began_s < 30, (
        "the gcs is asked once, not for ten seconds by each read"
    )


def test_the_scheduler_may_be_killed_in_the_middle_of_two_thousand_tasks(joined: Apart) -> None:
    refs = [slow.remote(i) for i in range(2000)]
    stoker.wait(refs, num_returns=300, timeout=GET_S)
    joined.scheduler.kill()
    stoker.wait(refs, num_returns=400, timeout=GET_S)
    joined.scheduler.start()
    assert get(refs) == list(range(2000))
    counter = Counter.remote()
    assert get(counter.add.remote()) == 1, "the new one places work"
    until(lambda: states(joined) == {"ALIVE"}, GET_S, "the node is alive")


def test_a_new_scheduler_learns_which_tasks_wait_without_their_cpu(joined: Apart) -> None:
    @stoker.remote(num_cpus=2)
    def innermost() -> str:
        return "done"

    @stoker.remote(num_cpus=2)
    def middle(folder: Path) -> str:
        (folder / "runs").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
        return stoker.get(innermost.remote())

    @stoker.remote(num_cpus=2)
    def outermost(folder: Path) -> str:
        return stoker.get(middle.remote(folder))

    ref = outermost.remote(joined.folder)
    until((joined.folder / "runs").exists, GET_S, "the task in the middle runs")
    joined.scheduler.kill()
    joined.scheduler.start()
    (joined.folder / "go").touch()
    assert get(ref) == "done"


def test_the_gcs_may_be_killed_while_tasks_and_actors_run(joined: Apart) -> None:
    named = Counter.options(name="kept", namespace="n").remote()
    counter = Counter.remote()
    assert get([counter.add.remote(), named.add.remote()]) == [1, 1]
    pid = get(counter.pid.remote())
    refs = [slow.remote(i) for i in range(1500)]
    stoker.wait(refs, num_returns=100, timeout=GET_S)
    joined.gcs.kill()
    assert get([counter.add.remote() for _ in range(50)])[-1] == 51, "without a gcs"
    stoker.wait(refs, num_returns=300, timeout=GET_S)
    joined.gcs.start()
    assert get(refs) == list(range(1500))
    assert get(counter.add.remote()) == 52
    assert get(counter.pid.remote()) == pid
    found = stoker.get_actor("kept", namespace="n")
    assert get(found.add.remote()) == 2
    assert get(Counter.remote().add.remote()) == 1
    job_id = stoker.get_runtime_context().job_id
    job = joined.client.call("GET", f"/v1/jobs/{job_id}", reply=dict[str, Any])
    assert job["state"] == "RUNNING"


def test_no_acknowledged_row_is_lost_when_the_gcs_is_killed(cluster: Apart) -> None:
    client = cluster.client
    told: dict[str, int] = {}
    for number in range(200):
        client.call("PUT", f"/v1/kv/test/{number}", f"value {number}".encode(), reply=dict)
        told[str(number)] = number
        if number == 120:
            cluster.gcs.kill()
            cluster.gcs.start()
            client = cluster.client
    job = client.call("POST", "/v1/jobs", {"entrypoint": "sleep 60"}, reply=dict[str, Any])
    cluster.gcs.kill()
    cluster.gcs.start()
    client = cluster.client
    for key, number in told.items():
        assert cluster.read(f"/v1/kv/test/{key}") == f"value {number}".encode()
    kept = client.call("GET", f"/v1/jobs/{job['job_id']}", reply=dict[str, Any])
    assert kept["entrypoint"] == "sleep 60"
    client.call("POST", f"/v1/jobs/{job['job_id']}/stop")

    def stopped() -> bool:
        found = client.call("GET", f"/v1/jobs/{job['job_id']}", reply=dict[str, Any])
        return bool(found["state"] == "STOPPED")

    until(stopped, 40, "the job is stopped")


def test_an_actor_that_dies_while_the_gcs_is_away_is_noticed_afterwards(joined: Apart) -> None:
    counter = Counter.options(max_restarts=1).remote()
    pid = get(counter.pid.remote())
    joined.gcs.kill()
    os.kill(pid, signal.SIGKILL)
    ref = counter.add.remote()
    joined.gcs.start()
    try:
        assert get(ref) == 1
    except exceptions.ActorUnavailableError:
        assert get(counter.add.remote()) == 1
    assert get(counter.pid.remote()) != pid


REDIS_AWAY_S = 8.0
"""Half of it frozen (connections hang), half of it killed (they are refused)."""
PATIENT = {"STOKER_SUSPECT_AFTER_S": "3", "STOKER_DEAD_AFTER_S": "10"}
"""Shorter than Redis is away, and longer than a busy machine holds up a heartbeat."""


def test_calls_outlive_a_constructor_that_dies_while_the_gcs_is_away(
    joined: Apart, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes: they have run nowhere."""
    for bound in ("_DEATH_NOTICE_S", "_LOOK_UP_S"):
        monkeypatch.setattr(f"stoker.runtime.actors.connection.{bound}", 0.2)

    @stoker.remote(num_cpus=0, max_restarts=1)
    class Fragile:
        def __init__(self) -> None:
            pids = tmp_path / "pids"
            first = not pids.exists()
            with pids.open("a") as file:
                file.write(f"{os.getpid()}\n")
            if first:
                time.sleep(2 * GET_S)

        def answer(self) -> int:
            return 42

    ref = Fragile.remote().answer.remote()
    until(lambda: "has not returned" in waits_for(ref), GET_S, "the call is at the worker")
    until((tmp_path / "pids").exists, GET_S, "the constructor runs")
    joined.gcs.kill()
    os.kill(int((tmp_path / "pids").read_text()), signal.SIGKILL)
    until(lambda: "connection" in waits_for(ref), GET_S, "the driver has noticed")
    time.sleep(1.0)  # several times what it may take the gcs to notice
    joined.gcs.start()
    assert get(ref) == 42


@pytest.mark.logs(r"lease did not start: .* got no answer")
def test_an_actor_goes_on_with_its_saved_state_when_its_node_has_died(tmp_path: Path) -> None:
    @stoker.remote(max_restarts=1, max_task_retries=1)
    class Keeper:
        def __init__(self) -> None:
            self.data = b""

        def take(self, data: bytes) -> str:
            self.data = data
            return str(stoker.get_runtime_context().node_id)

        def read(self) -> tuple[int, str]:
            return len(self.data), str(stoker.get_runtime_context().node_id)

        def __stoker_save__(self) -> bytes:
            return self.data

        def __stoker_restore__(self, data: bytes) -> None:
            self.data = data

    with (
        session_root(tmp_path / "s"),
        apart(tmp_path, nodelets=2, STOKER_SHARE_ARENAS="0") as cluster,
        contextlib.contextmanager(_join)(cluster),
    ):
        keeper = Keeper.remote()
        first = get(keeper.take.remote(bytes(1 << 20)))
        (name,) = (name for name, one in cluster.nodes().items() if one["node_id"] == first)
        cluster.nodelets[int(name.removeprefix("n"))].kill()
        nbytes, second = get(keeper.read.remote())
        assert nbytes == 1 << 20 and second != first


def test_functions_need_the_gcs_once_and_wait_for_it_while_it_is_away(
    cluster: Apart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_REQUEST_TIMEOUT_S", "1.5")
    for joined in _join(cluster):
        assert get([slow.remote(i, 0.2) for i in range(4)]) == list(range(4))  # by all workers
        joined.gcs.kill()
        assert get(slow.options(name="again", max_retries=0).remote(7)) == 7
        new = stoker.remote(lambda: "new")
        ref = new.remote()
        stoker.wait([ref], timeout=4.0)  # several times as long as one request may take
        assert "being stored" in waits_for(ref)
        joined.gcs.start()
        assert get(ref) == "new"


@pytest.fixture
def patient_leader(tmp_path: Path) -> Iterator[Apart]:
    """A leader whose leadership would expire long after a test has ended."""
    with session_root(tmp_path / "s"), apart(tmp_path, STOKER_LEADER_TTL_S="250") as made:
        yield from _join(made)


def test_a_standby_leads_as_soon_as_the_leader_is_gone(patient_leader: Apart) -> None:
    standby = patient_leader.add_scheduler()
    assert get(double.remote(1)) == 2
    patient_leader.scheduler.kill()
    standby.until_ready()
    assert get([double.options(num_cpus=0.5).remote(i) for i in range(10)]) == list(range(0, 20, 2))


def test_a_leader_that_freezes_holds_nothing_up_for_long(joined: Apart) -> None:
    standby = joined.add_scheduler()
    counter = Counter.remote()
    assert get([double.remote(1), counter.add.remote()]) == [2, 1]
    new = double.options(num_cpus=0.25)
    with_leader = Counter.options(num_cpus=0.5)
    joined.scheduler.send(signal.SIGSTOP)
    try:
        waiting = [new.remote(4), with_leader.remote().add.remote(), counter.add.remote()]
        # A request that the frozen one has must not wait for it: that was 35 s.
        assert get(waiting, timeout=25.0) == [8, 1, 2]
        standby.until_ready()
    finally:
        joined.scheduler.send(signal.SIGCONT)


@stoker.remote(max_retries=0)
def hold_the_interpreter(runs: Path) -> None:
    runs.with_suffix(".part").write_text(str(os.getpid()))
    runs.with_suffix(".part").rename(runs)
    ctypes.PyDLL(None).sleep(600)


def test_a_forced_cancel_needs_no_scheduler(joined: Apart) -> None:
    runs = joined.folder / "runs"
    ref = hold_the_interpreter.remote(runs)
    until(runs.exists, GET_S, "the task runs")
    pid = int(runs.read_text())
    joined.scheduler.send(signal.SIGSTOP)
    try:
        stoker.cancel(ref, force=True)
        assert isinstance(caught(lambda: get(ref)), exceptions.TaskCancelledError)
        until(lambda: not os.path.exists(f"/proc/{pid}"), 20.0, "its worker is killed")
    finally:
        joined.scheduler.send(signal.SIGCONT)


def test_the_death_of_a_node_is_noticed_while_the_gcs_restarts_all_the_time(joined: Apart) -> None:
    nodelet = joined.add_nodelet()
    until(lambda: joined.nodes().get("n1", {}).get("state") == "ALIVE", GET_S, "it joins")
    nodelet.kill()
    for _ in range(30):
        joined.gcs.kill()
        joined.gcs.start()
        time.sleep(1.0)  # far less than the silence that is a death
        if joined.nodes()["n1"]["state"] == "DEAD":
            break
    assert "refuses connections" in joined.nodes()["n1"]["reason"]
    assert get(double.remote(4)) == 8


def test_postgres_and_redis_serve_as_well_and_redis_may_go_away(
    own_redis: RedisServer, postgres_server: PostgresServer, tmp_path: Path
) -> None:
    name = postgres_server.create_database()
    url = postgres_server.url(name)
    migrated = subprocess.run(
        [sys.executable, "-m", "stoker_migrations", "upgrade", "--database-url", url],
        env={**os.environ, "STOKER_DATABASE_URL": url},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert migrated.returncode == 0, migrated.stderr
    try:
        with (
            session_root(tmp_path / "s"),
            apart(tmp_path, database_url=url, redis_url=own_redis.url, **PATIENT) as cluster,
        ):
            for joined in _join(cluster):
                counter = Counter.remote()
                assert get([double.remote(4), counter.add.remote()]) == [8, 1]
                calls = 1
                for leave, come_back in (
                    (own_redis.pause, own_redis.resume),
                    (own_redis.stop, own_redis.start),
                ):
                    leave()
                    back_at = time.monotonic() + REDIS_AWAY_S / 2
                    while time.monotonic() < back_at:
                        calls += 1
                        assert get(counter.add.remote()) == calls
                        assert get([slow.remote(i, 0.01) for i in range(50)]) == list(range(50))
                        assert states(joined) == {"ALIVE"}
                    assert get(Counter.remote().add.remote()) == 1, "a new actor without Redis"
                    come_back()
                assert get(double.remote(5)) == 10
                joined.gcs.until_ready()
    finally:
        postgres_server.drop_database(name)


@pytest.mark.logs(r"alembic_version")
def test_a_database_that_is_not_there_or_not_migrated_is_told_with_the_fix(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    def gcs(url: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "stoker_gcs", "--database-url", url, "--port", "0"],
            env={**os.environ, "STOKER_TOKEN": "t" * 20, "STOKER_SESSION_ROOT": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )

    name = postgres_server.create_database()
    try:
        empty = gcs(postgres_server.url(name))
    finally:
        postgres_server.drop_database(name)
    assert empty.returncode != 0
    assert "migrat" in empty.stderr
    assert "Traceback" not in empty.stderr
    away = gcs("postgresql+asyncpg://nobody:secret-word@127.0.0.1:1/none")
    assert away.returncode != 0
    assert "127.0.0.1:1" in away.stderr or "reach" in away.stderr
    assert "secret-word" not in away.stderr
    assert "Traceback" not in away.stderr


def test_a_driver_with_a_wrong_token_is_told_so(cluster: Apart) -> None:
    error = caught(lambda: stoker.init(cluster.gcs.url, token="wrong" * 5))
    assert isinstance(error, exceptions.StokerError)
    assert "token" in str(error)
    assert not stoker.is_initialized()
