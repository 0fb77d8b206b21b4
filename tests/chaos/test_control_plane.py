"""The control plane on real processes: a restore under what still runs, and leaders under load and faults."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker import kv
from stoker.exceptions import CompactedError
from stoker_migrations.command import upgrade
from stoker_wire.settings import Settings
from tests.chaos._load import GET_S, Load
from tests.chaos._services import FAST, Apart, apart
from tests.e2e._cluster import session_root
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.chaos._services import Service

# What is broken here on purpose is warned of; errors and tracebacks stay unexpected.
pytestmark = pytest.mark.logs(r'"level": "warning"', r"^this process: stoker[._]")

ENOUGH = {"task": 50, "log": 20, "actor": 1}
COMMAND_S = 90.0


@stoker.remote(num_cpus=0.1)
def double(number: int) -> int:
    return 2 * number


@stoker.remote(num_cpus=0)
class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self) -> int:
        self.count += 1
        return self.count


def get(ref: Any) -> Any:
    return stoker.get(ref, timeout=GET_S)


def _revision(key: str) -> int:
    entry = kv.entry(key)
    assert entry is not None
    return entry.revision


def _load(**more: Any) -> Load:
    def task(number: int) -> None:
        assert get(double.remote(number)) == 2 * number

    def log(number: int) -> None:
        kv.put(f"log/{number}", str(number))

    def actor(_: int) -> None:
        made = Counter.remote()
        assert get(made.add.remote()) == 1
        stoker.kill(made)

    return Load(ENOUGH, task=task, log=log, actor=actor, **more)


def _command(cluster: Apart, database_url: str, *words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stoker.cli", *words],
        env={**os.environ, "STOKER_DATABASE_URL": database_url},
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def _joined(folder: Path, **given: Any) -> Iterator[Apart]:
    with session_root(folder / "s"), apart(folder, **given) as cluster:
        stoker.init(cluster.address, token=cluster.token, log_to_driver=False, namespace="n")
        try:
            yield cluster
        finally:
            stoker.shutdown()


def test_a_cluster_that_runs_goes_on_when_its_sqlite_is_restored(tmp_path: Path) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path / 'gcs.sqlite3'}"
    with _joined(tmp_path, database_url=url) as cluster:
        _restore_under_load(cluster, url)


def test_a_cluster_that_runs_goes_on_when_its_postgresql_is_restored(
    tmp_path: Path, postgres_url: str
) -> None:
    upgrade(postgres_url)
    with _joined(tmp_path, database_url=postgres_url) as cluster:
        _restore_under_load(cluster, postgres_url)


def _restore_under_load(cluster: Apart, database: str) -> None:
    file = cluster.folder / "cluster.stoker"
    counter, named = Counter.remote(), Counter.options(name="kept").remote()
    assert get([counter.add.remote(), named.add.remote()]) == [1, 1]
    kv.put("before", b"kept")
    with _load() as load:
        load.goes_on()
        _command(cluster, database, "backup", str(file))
        load.goes_on()
    assert load.failures == []
    for _ in range(2):
        cluster.scheduler.kill()
        cluster.scheduler.start()
        assert get(double.options(num_cpus=0.2).remote(1)) == 2
    kv.put("before", b"lost")
    lost = _revision("before")
    late = stoker.remote(lambda: "late")
    assert get(late.remote()) == "late"
    changes = kv.watch("after/", timeout=GET_S, since=lost)
    cluster.gcs.stop()
    _command(cluster, database, "restore", "--force", str(file))
    cluster.gcs.start()

    assert kv.get("before") == b"kept"
    with pytest.raises(CompactedError, match="restored"):
        next(changes)
    with kv.watch("after/", timeout=GET_S) as changes:
        kv.put("after/1", b"new")
        change = next(changes)
        assert change.value == b"new" and change.revision > lost
    assert get([counter.add.remote(), named.add.remote()]) == [2, 2]
    assert get(stoker.get_actor("kept").add.remote()) == 3
    assert get(double.options(num_cpus=0.3).remote(2)) == 4, "a class that no lease is held for"
    assert get(Counter.remote().add.remote()) == 1
    added = cluster.add_nodelet(cpus=4)
    assert get(double.options(num_cpus=4).remote(3)) == 6, "on the node that has come since"
    assert get(late.options(num_cpus=3).remote()) == "late", "by a worker that has not run it"
    assert {node["state"] for node in cluster.nodes().values()} == {"ALIVE"}
    added.kill()
    until(lambda: cluster.nodes()["n1"]["state"] == "DEAD", GET_S, "its death is noticed")
    job_id = stoker.get_runtime_context().job_id
    job = cluster.client.call("GET", f"/v1/jobs/{job_id}", reply=dict[str, Any])
    assert job["state"] == "RUNNING"


DEFAULTS = {name: str(getattr(Settings(), name.removeprefix("STOKER_").lower())) for name in FAST}
BUSY_S = 12.0


def _elections(cluster: Apart, name: str) -> int:
    query = {"kind": "leader.elected", "subject": name, "limit": 100}
    page = cluster.client.call("GET", "/v1/events", reply=dict[str, Any], query=query)
    return len(page["items"])


@contextlib.contextmanager
def _busy_cores() -> Iterator[None]:
    """Each core has a loop that never ends."""
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def test_a_busy_machine_changes_no_leader(tmp_path: Path, postgres_url: str) -> None:
    upgrade(postgres_url)
    with _joined(tmp_path, database_url=postgres_url, replicas=2, cpus=4, **DEFAULTS) as cluster:
        cluster.add_scheduler()
        until(lambda: _elections(cluster, "gcs") == 1, GET_S, "a gcs leads")
        with _load(pause_s=0.1) as load:
            load.goes_on()
            with _busy_cores():
                calm_at_s = time.monotonic() + BUSY_S
                while time.monotonic() < calm_at_s:
                    load.goes_on()
        assert load.failures == []
        assert {name: _elections(cluster, name) for name in ("gcs", "scheduler")} == {
            "gcs": 1,
            "scheduler": 1,
        }
        query = {"kind": "node.", "limit": 100}
        page = cluster.client.call("GET", "/v1/events", reply=dict[str, Any], query=query)
        assert {event["kind"] for event in page["items"]} <= {"node.registered", "node.warmed"}


def test_no_call_is_hurt_when_a_scheduler_is_killed_or_freezes_and_wakes(tmp_path: Path) -> None:
    with _joined(tmp_path, cpus=4, **DEFAULTS) as cluster:
        first, second = cluster.scheduler, cluster.add_scheduler()

        def is_replaced(by: Service, cpus: float) -> None:
            # How soon that is benchmarks/failover.py measures.
            assert get(double.options(num_cpus=cpus).remote(1)) == 2, "a class without a lease"
            by.until_ready()
            load.goes_on()

        with _load() as load:
            load.goes_on()
            first.kill()
            is_replaced(second, 0.2)
            first.start(ready=False)
            until(lambda: first.answers("/healthz"), GET_S, "it stands by")
            second.send(signal.SIGSTOP)
            try:
                is_replaced(first, 0.3)
            finally:
                second.send(signal.SIGCONT)
            load.goes_on()
            assert not second.answers("/readyz"), "it knows that it leads no more"
        assert load.failures == []
