"""The store on one SQLite file, for the embedded cluster: the standard library's driver on threads.

One thread owns the writing connection, so writers queue instead of meeting ``database is locked``;
reads run on other connections and never wait for it (WAL). ``synchronous=NORMAL``: a commit survives
the death of the process, and a power cut may lose the last ones but never corrupts.

Not SQLAlchemy over aiosqlite: on the machine where this was written, importing it took 0.24 s (all
else of the service 0.28 s), and it made 450 single commits a second where this makes 5 600. The
schema is shared with migrations all the same, see :mod:`stoker_gcs.state.tables`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from stoker_gcs.state.schema import REVISION, sqlite_ddl
from stoker_gcs.store import statements as sql
from stoker_gcs.store import training
from stoker_gcs.store.changes import WriteConflict
from stoker_gcs.store.rows import numbered
from stoker_gcs.store.sql_reads import KEYS_PER_SELECT, SqlReads, compaction, not_migrated
from stoker_gcs.store.task_counts import Changed, NamesInUse, deltas, merged_with, stored
from stoker_gcs.store.task_merge import merge_all
from stoker_wire.errors import DatabaseError, StokerError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from stoker_gcs.state.schema import Table
    from stoker_gcs.store.changes import Change, Row
    from stoker_wire.data.spool import TaskRow
    from stoker_wire.messages.control import Event

T = TypeVar("T")
READERS = 2
BUSY_TIMEOUT_S = 60
_FULL_BYTES = 64 << 10


class SqliteStore(SqlReads):
    """A store on one file (:class:`stoker_gcs.store.protocol.Store`); ``path`` may be ``:memory:``."""

    shared = False

    def __init__(self, path: str, *, url: str) -> None:
        self._path = path
        self._url = url
        self._writer = ThreadPoolExecutor(1, "gcs-sqlite-write")
        in_memory = path == ":memory:"
        # A database in memory exists in one connection only, so its reads go through the writer.
        self._readers = (
            self._writer if in_memory else ThreadPoolExecutor(READERS, "gcs-sqlite-read")
        )
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._counted = NamesInUse()

    async def start(self) -> None:
        """Open the file, create it if it is new, refuse it if it has another schema."""
        await self._run(self._writer, self._open)

    async def end_stalled(self) -> None:
        """Do nothing: nobody else writes here."""

    async def stop(self) -> None:
        """Close every connection; what was committed stays."""
        loop = asyncio.get_running_loop()
        for pool in {self._readers, self._writer}:
            await loop.run_in_executor(None, pool.shutdown)
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    async def _run(self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, work)
        except sqlite3.Error as error:
            raise self._named(error) from error

    def _named(self, error: sqlite3.Error) -> StokerError:
        """Return the error of the store for one of the database: retryable if it may pass by itself."""
        name = getattr(error, "sqlite_errorname", "")
        path = self._path
        if name == "SQLITE_FULL" or _is_full(path):
            return UnavailableError(
                f"the database {path} cannot grow, as its disk is full\n"
                "nothing that was accepted is lost: make room on it, and the cluster goes on"
            )
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            return UnavailableError(
                f"the database {path} is locked by another process for more than {BUSY_TIMEOUT_S} s\n"
                "end what else uses the file: a gcs must have it alone"
            )
        if name.startswith("SQLITE_IOERR"):
            return UnavailableError(
                f"the database {path} cannot be read or written\n"
                f"{error}: look at its disk, is it there and sound?"
            )
        if name in ("SQLITE_CORRUPT", "SQLITE_NOTADB") or name.startswith("SQLITE_CORRUPT_"):
            return DatabaseError(
                f"the database {path} is damaged\n"
                f"{error}: stop the cluster, and put a copy of the file back that was made before"
            )
        if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
            return DatabaseError(
                f"the database {path} cannot be written\n"
                f"{error}: give the file and its folder to the gcs's user"
            )
        return DatabaseError(f"the database {path} failed\n{name}: {error}")

    def _connection(self, busy_timeout_s: float = BUSY_TIMEOUT_S) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = sqlite3.connect(
                self._path, isolation_level=None, check_same_thread=False, timeout=busy_timeout_s
            )
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute("PRAGMA temp_store=MEMORY")
            self._local.connection = connection
            self._connections.append(connection)
        return connection

    def _open(self) -> None:
        parent = Path(self._path).parent
        if self._path != ":memory:" and not parent.is_dir():
            raise DatabaseError(f"cannot open {self._url}\nthe directory {parent} does not exist")
        _make_private(self._path)
        try:
            connection = self._connection()
            connection.execute("BEGIN IMMEDIATE")
            tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if tables == 0:
                for statement in sqlite_ddl():
                    connection.execute(statement)
            connection.execute("COMMIT")
            versions = connection.execute("SELECT version_num FROM alembic_version").fetchall()
        except sqlite3.Error as error:
            if "no such table" in str(error):
                raise not_migrated(self._url, "none") from error
            raise DatabaseError(f"cannot use {self._url}\n{error}") from error
        revision = versions[0][0] if versions else "none"
        if revision != REVISION:
            raise not_migrated(self._url, revision)

    async def commit(self, changes: Sequence[Change]) -> list[tuple[Event, ...] | WriteConflict]:
        """Do the changes in one transaction, each under its own savepoint."""
        return await self._run(self._writer, lambda: self._commit(changes))

    def _commit(self, changes: Sequence[Change]) -> list[tuple[Event, ...] | WriteConflict]:
        with _transaction(self._connection()) as connection:
            return [self._change(connection, change) for change in changes]

    def _change(
        self, connection: sqlite3.Connection, change: Change
    ) -> tuple[Event, ...] | WriteConflict:
        connection.execute("SAVEPOINT change")
        try:
            events = self._append(connection, change) if change.stamps else ()
            for operation in change.operations:
                statement, parameters, must = sql.operate(
                    operation, events[-1].seq if events else 0
                )
                done = connection.execute(statement, parameters).rowcount
                if must and done < 1:
                    raise WriteConflict(
                        operation.table.name, "a row is there, or none is as expected"
                    )
            events = events or self._append(connection, change)
        except (WriteConflict, sqlite3.IntegrityError) as error:
            connection.execute("ROLLBACK TO change")
            connection.execute("RELEASE change")
            return (
                error
                if isinstance(error, WriteConflict)
                else WriteConflict(_table_in(error), str(error))
            )
        connection.execute("RELEASE change")
        return events

    def _append(self, connection: sqlite3.Connection, change: Change) -> tuple[Event, ...]:
        return tuple(
            numbered(event, connection.execute(sql.APPEND, sql.append(event)).fetchone()[0])
            for event in change.events
        )

    async def get(self, table: Table, key: Mapping[str, str | int]) -> Row | None:
        """Return the row with this key, or None.

        Read on the calling thread: that takes a quarter of a hand-over to another. A reader waits for
        no writer (WAL); where it would have to all the same, a thread of the pool does.
        """
        statement, parameters = sql.select(table, key, (), 1, ())
        if self._readers is self._writer:
            rows = await self.fetch(statement, parameters)
            return rows[0] if rows else None
        try:
            row = self._connection(busy_timeout_s=0).execute(statement, parameters).fetchone()
        except sqlite3.OperationalError:
            rows = await self.fetch(statement, parameters)
            return rows[0] if rows else None
        return None if row is None else dict(row)

    async def fetch(self, statement: str, parameters: Mapping[str, object]) -> list[Row]:
        """Return all rows of one statement that only reads."""

        def work() -> list[Row]:
            rows = self._connection().execute(statement, dict(parameters)).fetchall()
            return [dict(row) for row in rows]

        return await self._run(self._readers, work)

    async def compact(self, keep_after: int) -> None:
        """Forget the events up to ``keep_after``."""
        upto = min(keep_after, (await self.bounds())[1])

        def work() -> None:
            with _transaction(self._connection()) as connection:
                for statement, parameters in compaction(upto):
                    connection.execute(statement, parameters)

        await self._run(self._writer, work)

    async def put_tasks(self, rows: Sequence[TaskRow]) -> None:
        """Merge attempts into the history in one transaction."""
        await self._run(self._writer, lambda: self._put_tasks(rows))

    def _put_tasks(self, rows: Sequence[TaskRow]) -> None:
        merged = list(merge_all(rows).values())
        with _transaction(self._connection()) as connection:
            changed: list[Changed] = []
            for start in range(0, len(merged), KEYS_PER_SELECT):
                changed += _write_tasks(connection, merged[start : start + KEYS_PER_SELECT])
            self._count(connection, changed)

    def _count(self, connection: sqlite3.Connection, changed: list[Changed]) -> None:
        for job_id in self._counted.unknown(changed):
            names = connection.execute(sql.COUNTED_NAMES, {"job_id": job_id})
            self._counted.learn(job_id, [row[0] for row in names])
        counts, durations = deltas(changed, self._counted)
        connection.executemany(sql.ADD_COUNTS_BY_POSITION, counts)
        connection.executemany(sql.ADD_DURATIONS_BY_POSITION, durations)

    async def put_points(self, points: Sequence[training.Point]) -> None:
        """Store values of training in one transaction."""
        await self._run(self._writer, lambda: self._put_points(training.batch_of(points)))

    def _put_points(self, batch: training.Batch) -> None:
        with _transaction(self._connection()) as connection:
            connection.executemany(training.ADD_RUNS_BY_POSITION, batch.runs)
            connection.executemany(training.ADD_METRICS_BY_POSITION, batch.metrics)
            connection.executemany(training.ADD_VALUES_BY_POSITION, batch.values)
            connection.executemany(training.WIDEN, training.widenings(batch.values))


def _make_private(path: str) -> None:
    """Make the file, or take it away from other users: SQLite gives its own mode to those beside it."""
    if path == ":memory:":
        return
    with contextlib.suppress(OSError):  # what is wrong with it, SQLite finds next
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        # One that is there is not opened here: to close it would release the locks of this process.
        if os.stat(path).st_mode & 0o077:
            for name in (path, f"{path}-wal", f"{path}-shm"):
                with contextlib.suppress(FileNotFoundError):
                    os.chmod(name, 0o600)


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Commit what is done inside, or nothing of it."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        # On a full disk SQLite has rolled back by itself.
        with contextlib.suppress(sqlite3.Error):
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        raise


def _is_full(path: str) -> bool:
    """Return whether the disk is full: SQLite's own name for that depends on where it noticed."""
    try:
        status = os.statvfs(Path(path).parent)
    except OSError:
        return False
    return status.f_bavail * status.f_frsize < _FULL_BYTES


def _write_tasks(connection: sqlite3.Connection, rows: Sequence[TaskRow]) -> list[Changed]:
    """Write attempts, and return which rows that has changed."""
    new = [Changed(None, stored(row)) for row in rows]
    connection.execute("SAVEPOINT tasks")
    added = connection.executemany(sql.ADD_TASKS_BY_POSITION, [now for _, now in new]).rowcount
    if added < len(rows):  # rare: most attempts are reported once, when they have ended
        connection.execute("ROLLBACK TO tasks")
        merged = _merged_with_known(connection, rows)
        new = [one for one in merged if one.before is None]
        old = [one for one in merged if one.before is not None]
        connection.executemany(sql.ADD_TASKS_BY_POSITION, [now for _, now in new])
        connection.executemany(sql.UPSERT_TASKS_BY_POSITION, [now for _, now in old])
        new += old
    connection.execute("RELEASE tasks")
    return new


def _merged_with_known(connection: sqlite3.Connection, rows: Sequence[TaskRow]) -> list[Changed]:
    """Return those rows that are not stored yet, or in another form, merged with what is."""
    new = {(row[0], row[1]): row for row in rows}
    known: dict[tuple[str, int], TaskRow] = {
        (row[0], row[1]): tuple(row) for row in connection.execute(*sql.known_tasks(list(new)))
    }
    return merged_with(known, new)


def _table_in(error: sqlite3.IntegrityError) -> str:
    return str(error).rpartition(": ")[2].partition(".")[0]
