"""The gcs with a long history: ``python -m benchmarks.control_plane``, on SQLite and on PostgreSQL.

Sends the records of a million tasks, as nodelets do, to a gcs in a process of its own; kills it with SIGKILL,
starts it again, and measures until ``/readyz`` is true and a read and a write are served. The rate is
what tasks may run at without the history falling behind. PostgreSQL is started here, as for the tests.

``lag`` runs as many real tasks on a cluster with PostgreSQL, and measures how long after the last result
the last record is there. ``idle`` starts ``--nodelets`` real nodelets without work, and measures the CPU time
of the gcs and of the scheduler. ``at`` asks a gcs on SQLite, with ``--events`` events about
``--actors`` actors and ``--tasks`` tasks, for the state at several times.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.history import cpu_seconds
from stoker_gcs.app import build_app
from stoker_gcs.ephemeral.memory import MemoryEphemeralStore
from stoker_gcs.registry.actors.rules import ACTORS
from stoker_gcs.store.changes import Change, Upsert
from stoker_gcs.store.opening import open_store
from stoker_wire.data.spool import RANKS, TaskFacts, TaskRow, frames_of, pack_facts
from stoker_wire.http.client.client import Client
from stoker_wire.http.server.tokens import TokenSigner
from stoker_wire.messages.control import Page
from stoker_wire.messages.events import EventKind, PastState
from stoker_wire.messages.work import Actor, ActorState, TaskRecord, TaskState
from stoker_wire.process.background import Background
from stoker_wire.settings import Settings
from tests.chaos._services import apart
from tests.services import PostgresServer, ReservedPort

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKEN = secrets.token_hex(8)
PER_BODY = 6000
"""About as many records as one request of a nodelet has: a megabyte."""
NODES = 8
STOP_S = 60.0
PER_BATCH = 10_000
SETTLE_S = 10.0
PER_COMMIT = 500
ASKED = 5
PARTS = ("sqlite", "postgres", "lag", "idle", "at")


def bodies(count: int) -> Iterator[bytes]:
    """Yield the records of so many tasks, as they come from the spools of several workers."""
    stems = [f"t_{secrets.token_hex(8)}" for _ in range(NODES)]
    now = time.time()
    for start in range(0, count, PER_BODY):
        rows: list[TaskRow] = []
        for number in range(start, min(start + PER_BODY, count)):
            node = number % NODES
            facts = TaskFacts("", now, now, now + 0.01, f"w_{node:016x}", 30, 20, owner_id="p_1")
            rows.append(
                (
                    f"{stems[node]}{number:x}", 0, "job_bench", TaskState.FINISHED.value, "step",
                    f"n_{node:016x}", "", RANKS[TaskState.FINISHED], pack_facts(facts),
                )
            )  # fmt: skip
        yield frames_of(rows)


class Gcs:
    """A gcs in a process of its own, which can be killed and started again on its port."""

    def __init__(self, database_url: str, log: Path) -> None:
        self._database_url = database_url
        self._log = log
        self._port = ReservedPort()
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; return at once."""
        command = [sys.executable, "-m", "stoker_gcs", "--port", str(self._port)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--database-url", self._database_url],
                env={**os.environ, "STOKER_TOKEN": TOKEN},
                stdout=log,
                stderr=log,
            )

    def until_ready(self) -> None:
        """Return once /readyz is true."""
        request = urllib.request.Request(
            f"{self.url}/readyz", headers={"Authorization": f"Bearer {TOKEN}"}
        )
        while True:
            try:
                with urllib.request.urlopen(request, timeout=10):
                    return
            except urllib.error.HTTPError as error:
                error.close()
            except OSError:
                pass
            time.sleep(0.01)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it by a signal; return once it is gone."""
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(STOP_S)


async def fill(url: str, count: int) -> float:
    """Send the records of so many tasks; return how long it took until all were durable."""
    prepared = list(bodies(count))
    async with Client(url, token=TOKEN, peer="benchmark") as client:
        began_s = time.perf_counter()
        for body in prepared:
            await client.call("POST", "/v1/tasks/spooled", body, timeout_s=60.0)
        return time.perf_counter() - began_s


async def serve_both(url: str) -> None:
    """Read and write once."""
    async with Client(url, token=TOKEN, peer="benchmark") as client:
        query: dict[str, Any] = {"limit": 1, "sort": "created", "order": "desc"}
        page = await client.call("GET", "/v1/tasks", reply=Page[TaskRecord], query=query)
        assert page.items
        await client.call("PUT", "/v1/kv/benchmark/key", b"value")


def measure(name: str, database_url: str, count: int, restarts: int, log: Path) -> None:
    """Measure one store, and print it."""
    gcs = Gcs(database_url, log)
    gcs.start()
    gcs.until_ready()
    took_s = asyncio.run(fill(gcs.url, count))
    print(
        f"{name:10} {count:,} tasks durable in {took_s:.1f} s: {count / took_s:,.0f}/s", flush=True
    )
    ready, served = [], []
    for _ in range(restarts):
        gcs.stop(signal.SIGKILL)
        began_s = time.perf_counter()
        gcs.start()
        gcs.until_ready()
        ready.append(time.perf_counter() - began_s)
        asyncio.run(serve_both(gcs.url))
        served.append(time.perf_counter() - began_s)
    gcs.stop()
    print(
        f"{name:10} SIGKILL -> ready {statistics.median(ready):.2f} s, read and written "
        f"{statistics.median(served):.2f} s ({min(served):.2f}-{max(served):.2f}, {restarts} times)",
        flush=True,
    )


def lag(database: PostgresServer, count: int, folder: Path) -> None:
    """Run real tasks; print how long after the last result their history is whole."""
    import asyncpg

    import stoker

    name = database.create_database()
    url = migrated(database.url(name))

    async def recorded() -> int:
        connection = await asyncpg.connect(database.url(name, driver="postgresql"))
        try:
            found = await connection.fetchval("SELECT count(*) FROM tasks WHERE rank >= 4")
        finally:
            await connection.close()
        return int(found)

    with apart(folder, database_url=url) as cluster:
        stoker.init(cluster.address, token=cluster.token, log_to_driver=False)
        noop = stoker.remote(_noop)
        began_s = time.perf_counter()
        for _ in range(0, count, PER_BATCH):
            stoker.get([noop.remote() for _ in range(PER_BATCH)])
        took_s = time.perf_counter() - began_s
        while asyncio.run(recorded()) < count:
            time.sleep(0.2)
        late_s = time.perf_counter() - began_s - took_s
        stoker.shutdown()
    print(
        f"postgres   {count:,} tasks ran at {count / took_s:,.0f}/s; the last record came "
        f"{late_s:.1f} s after the last result",
        flush=True,
    )


def _noop() -> None:
    """Do nothing."""


def idle(nodelets: int, seconds: float, folder: Path) -> None:
    """Print the CPU time that gcs and scheduler take while nodelets have nothing to do."""
    defaults = Settings()
    settings = {
        "STOKER_HEARTBEAT_S": str(defaults.heartbeat_s),
        "STOKER_SUSPECT_AFTER_S": str(defaults.suspect_after_s),
        "STOKER_DEAD_AFTER_S": str(defaults.dead_after_s),
        "STOKER_LEADER_TTL_S": str(defaults.leader_ttl_s),
        "STOKER_PRESTART_WORKERS": "0",
    }
    with apart(folder, nodelets=nodelets, cpus=1, **settings) as cluster:
        time.sleep(SETTLE_S)
        pids = {"gcs": cluster.gcs.pid, "scheduler": cluster.scheduler.pid}
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        time.sleep(seconds)
        for name, pid in pids.items():
            share = (cpu_seconds(pid) - before[name]) / seconds
            print(f"{nodelets} idle nodelets: {name} takes {share:.1%} of a core", flush=True)


async def add_events(url: str, count: int, actors: int) -> None:
    """Add so many events about so many actors to a database, with the snapshots that a gcs takes."""
    settings = Settings()
    store = open_store(url)
    await store.start()
    async with Background("work") as work, Background("writers") as writers:
        app = build_app(store, MemoryEphemeralStore(), settings, TokenSigner(TOKEN), work)
        writers.spawn(app.state.writer.changes.run(), name="changes")
        await app.load()
        for start in range(0, count, PER_COMMIT):
            now_s = app.state.now()
            operations, events = [], []
            for number in range(start, min(start + PER_COMMIT, count)):
                turn, index = divmod(number, actors)
                record = Actor(
                    actor_id=f"a_{index:016x}",
                    job_id="job_bench",
                    class_name="Counter",
                    state=ActorState.DEAD,
                    incarnation=turn,
                    node_id=f"n_{index % NODES:016x}",
                    worker_id=f"w_{number:016x}",
                    resources={"CPU": 1.0},
                    created_at_s=now_s,
                    ended_at_s=now_s,
                )
                row = {**ACTORS.insert(record, spec=b"").values, "version": number}
                operations.append(Upsert(ACTORS.table, row))
                kind = EventKind.ACTOR_RESTARTING if turn else EventKind.ACTOR_CREATED
                events.append(app.state.event(kind, record.actor_id, record))
            await app.state.writer.apply(Change(tuple(operations), tuple(events)))
            if start % settings.snapshot_events == 0:
                await app.snapshots.keep_up()
    await store.stop()


async def ask(url: str, what: str, **query: object) -> PastState:
    """Print how long it takes to get a state; return it."""
    took: list[float] = []
    async with Client(url, token=TOKEN, peer="benchmark") as client:
        for _ in range(ASKED):
            began_s = time.perf_counter()
            found = await client.call("GET", "/v1/state", reply=PastState, query=query)
            took.append(time.perf_counter() - began_s)
    print(
        f"state {what:44} {statistics.median(took) * 1e3:7.0f} ms "
        f"({min(took) * 1e3:.0f}-{max(took) * 1e3:.0f}, {ASKED} times)",
        flush=True,
    )
    return found


def at(database_url: str, tasks: int, events: int, actors: int, log: Path) -> None:
    """Fill a history, and ask for the state at several times of it."""
    gcs = Gcs(database_url, log)
    gcs.start()
    gcs.until_ready()
    asyncio.run(fill(gcs.url, tasks))
    gcs.stop()
    asyncio.run(add_events(database_url, events, actors))
    gcs.start()
    gcs.until_ready()
    print(f"{events:,} events, {actors:,} actors, {tasks:,} tasks", flush=True)

    async def ask_all() -> None:
        newest = (await ask(gcs.url, "now")).seq
        middle = str(newest // 2)
        await ask(gcs.url, "at the newest event", at=str(newest))
        await ask(gcs.url, "in the middle", at=middle)
        await ask(gcs.url, "in the middle, a page of actors", at=middle, kind="actors")
        await ask(gcs.url, "in the middle, a page of tasks", at=middle, kind="tasks")
        none = {"kind": "tasks", "state": TaskState.RUNNING.value}
        await ask(gcs.url, "in the middle, a page of tasks, none matches", at=middle, **none)
        await ask(gcs.url, "in the middle, with counts of tasks", at=middle, count=True)

    asyncio.run(ask_all())
    gcs.stop()


def migrated(url: str) -> str:
    """Give a database the tables; return its URL."""
    command = [sys.executable, "-m", "stoker_migrations", "upgrade", "--database-url", url]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return url


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control_plane", description=__doc__)
    parser.add_argument("--tasks", type=int, default=1_000_000, help="default 1,000,000")
    parser.add_argument("--restarts", type=int, default=5, help="default 5")
    parser.add_argument("--nodelets", type=int, default=100, help="default 100")
    parser.add_argument("--events", type=int, default=199_000, help="default 199,000")
    parser.add_argument("--actors", type=int, default=10_000, help="default 10,000")
    parser.add_argument("--seconds", type=float, default=30.0, help="of idling (default 30)")
    parser.add_argument("what", nargs="*", help=f"any of {', '.join(PARTS)} (default: all)")
    options = parser.parse_args()
    what = options.what or PARTS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "sqlite" in what:
            url = f"sqlite:///{folder / 'gcs.sqlite3'}"
            measure("sqlite", url, options.tasks, options.restarts, folder / "gcs.log")
        if "postgres" in what or "lag" in what:
            server = PostgresServer()
            server.start()
            try:
                if "postgres" in what:
                    url = migrated(server.url(server.create_database()))
                    measure("postgres", url, options.tasks, options.restarts, folder / "gcs.log")
                if "lag" in what:
                    lag(server, options.tasks, folder)
            finally:
                server.stop()
                server.remove()
        if "idle" in what:
            idle(options.nodelets, options.seconds, folder)
        if "at" in what:
            url = f"sqlite:///{folder / 'past.sqlite3'}"
            at(url, options.tasks, options.events, options.actors, folder / "gcs.log")
    return 0


if __name__ == "__main__":
    sys.exit(main())
