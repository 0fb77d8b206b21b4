"""The store on one SQLite file, for the embedded cluster: the standard library's driver on threads.

One thread owns the writing connection, so writers queue instead of meeting ``database is locked``;
reads run on other connections and never wait for it (WAL). ``synchronous=NORMAL``: a commit survives
the death of the process, and a power cut may lose the last ones but never corrupts.

Not SQLAlchemy over aiosqlite: on the machine where this was written, importing it took 0.24 s (all
else of the service 0.28 s), and it made 450 single commits a second where this makes 5 600. The
schema is shared with it all the same, see ``tables.py``.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from stoker_gcs.registry.tasks.merge import merge_all, merge_rows
from stoker_gcs.state.schema import META, REVISION, sqlite_ddl
from stoker_gcs.store import statements as sql
from stoker_gcs.store.changes import Clash, Upsert
from stoker_gcs.store.rows import event_of, numbered
from stoker_wire.errors import DatabaseError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stoker_gcs.state.schema import Table
    from stoker_gcs.store.changes import Change, Condition, Row
    from stoker_wire.data.spool import TaskRow
    from stoker_wire.messages.control import Event

T = TypeVar("T")
READERS = 2
BUSY_TIMEOUT_S = 60
_KEYS_PER_SELECT = 500


class SqliteStore:
    """See :class:`stoker_gcs.store.protocol.Store`. ``path`` may be ``:memory:``."""

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

    async def start(self) -> None:
        """Open the file, create it if it is new, refuse it if it has another schema."""
        await self._run(self._writer, self._open)

    async def stop(self) -> None:
        """Close every connection; what was committed stays."""
        loop = asyncio.get_running_loop()
        for pool in {self._readers, self._writer}:
            await loop.run_in_executor(None, pool.shutdown)
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    async def _run(self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def _connection(self, busy_timeout_s: float = BUSY_TIMEOUT_S) -> sqlite3.Connection:
        found: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if found is None:
            found = sqlite3.connect(
                self._path, isolation_level=None, check_same_thread=False, timeout=busy_timeout_s
            )
            found.row_factory = sqlite3.Row
            found.execute("PRAGMA journal_mode=WAL")
            found.execute("PRAGMA synchronous=NORMAL")
            found.execute("PRAGMA temp_store=MEMORY")
            self._local.connection = found
            self._connections.append(found)
        return found

    def _open(self) -> None:
        parent = Path(self._path).parent
        if self._path != ":memory:" and not parent.is_dir():
            raise DatabaseError(f"cannot open {self._url}\nthe directory {parent} does not exist")
        try:
            connection = self._connection()
            connection.execute("BEGIN IMMEDIATE")
            tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if tables == 0:
                for statement in sqlite_ddl():
                    connection.execute(statement)
            connection.execute("COMMIT")
            found = connection.execute("SELECT version_num FROM alembic_version").fetchall()
        except sqlite3.Error as error:
            if "no such table" in str(error):
                raise not_migrated(self._url, "none") from error
            raise DatabaseError(f"cannot use {self._url}\n{error}") from error
        revision = found[0][0] if found else "none"
        if revision != REVISION:
            raise not_migrated(self._url, revision)

    async def commit(self, changes: Sequence[Change]) -> list[tuple[Event, ...] | Clash]:
        """Do the changes in one transaction, each under its own savepoint."""
        return await self._run(self._writer, lambda: self._commit(changes))

    def _commit(self, changes: Sequence[Change]) -> list[tuple[Event, ...] | Clash]:
        connection = self._connection()
        connection.execute("BEGIN IMMEDIATE")
        try:
            results = [self._change(connection, change) for change in changes]
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        return results

    def _change(self, connection: sqlite3.Connection, change: Change) -> tuple[Event, ...] | Clash:
        connection.execute("SAVEPOINT one")
        try:
            for operation in change.operations:
                statement, parameters, must = sql.operate(operation)
                done = connection.execute(statement, parameters).rowcount
                if must and done < 1:
                    raise Clash(operation.table.name, "a row is there, or none is as expected")
            events = tuple(
                numbered(
                    event,
                    connection.execute(
                        sql.APPEND,
                        {
                            "at_s": event.at_s,
                            "kind": event.kind,
                            "subject": event.subject,
                            "payload": event.payload,
                        },
                    ).fetchone()[0],
                )
                for event in change.events
            )
        except (Clash, sqlite3.IntegrityError) as error:
            connection.execute("ROLLBACK TO one")
            connection.execute("RELEASE one")
            return error if isinstance(error, Clash) else Clash(_table_in(error), str(error))
        connection.execute("RELEASE one")
        return events

    async def get(self, table: Table, key: Mapping[str, str | int]) -> Row | None:
        """The row with this key, or None.

        Read on the calling thread: it takes a quarter of what handing it to another costs. A reader
        waits for nobody (WAL); where it would have to all the same, a thread does.
        """
        statement, parameters = sql.select(table, key, (), 1, ())
        if self._readers is self._writer:
            found = await self._fetch(statement, parameters)
            return found[0] if found else None
        try:
            row = self._connection(busy_timeout_s=0).execute(statement, parameters).fetchone()
        except sqlite3.OperationalError:
            found = await self._fetch(statement, parameters)
            return found[0] if found else None
        return None if row is None else dict(row)

    async def select(
        self,
        table: Table,
        where: Mapping[str, Condition] | None = None,
        *,
        after: Sequence[str | int] = (),
        limit: int = 1000,
        columns: Sequence[str] = (),
        arrival: bool = False,
        descending: bool = False,
    ) -> list[Row]:
        """Rows that match, in key order or as they came."""
        return await self._fetch(
            *sql.select(table, where or {}, after, limit, columns, arrival, descending)
        )

    async def count(
        self, table: Table, where: Mapping[str, Condition] | None = None, *, most: int = 10_000
    ) -> int:
        """How many rows match, up to ``most``."""
        found = await self._fetch(*sql.count(table, where or {}, most))
        return int(found[0]["n"])

    async def _fetch(self, statement: str, parameters: Mapping[str, object]) -> list[Row]:
        def work() -> list[Row]:
            rows = self._connection().execute(statement, dict(parameters)).fetchall()
            return [dict(row) for row in rows]

        return await self._run(self._readers, work)

    async def events(self, after: int, limit: int = 1000) -> list[Event]:
        """Events with ``seq > after``."""
        rows = await self._fetch(sql.EVENTS_AFTER, {"after": after, "limit": limit})
        return [event_of(row) for row in rows]

    async def events_back(self, before: int, limit: int = 1000) -> list[Event]:
        """Events with ``seq < before``, newest first."""
        rows = await self._fetch(sql.EVENTS_BEFORE, {"before": before, "limit": limit})
        return [event_of(row) for row in rows]

    async def bounds(self) -> tuple[int, int]:
        """``(compacted, last)``."""
        mark = await self.get(META, {"name": sql.COMPACTED})
        compacted = int(mark["value"]) if mark else 0
        last = (await self._fetch(sql.LAST_SEQ, {}))[0]["seq"]
        return compacted, max(compacted, last or 0)

    async def compact(self, keep_after: int) -> None:
        """Forget the events up to ``keep_after``."""
        upto = min(keep_after, (await self.bounds())[1])

        def work() -> None:
            connection = self._connection()
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(sql.FORGET, {"seq": upto})
            mark = Upsert(META, {"name": sql.COMPACTED, "value": str(upto)})
            connection.execute(*sql.operate(mark)[:2])
            connection.execute("COMMIT")

        await self._run(self._writer, work)

    async def put_tasks(self, rows: Sequence[TaskRow]) -> None:
        """Merge attempts into the history in one transaction."""
        await self._run(self._writer, lambda: self._put_tasks(rows))

    def _put_tasks(self, rows: Sequence[TaskRow]) -> None:
        merged = list(merge_all(rows).values())
        connection = self._connection()
        connection.execute("BEGIN IMMEDIATE")
        try:
            for start in range(0, len(merged), _KEYS_PER_SELECT):
                some = merged[start : start + _KEYS_PER_SELECT]
                added = connection.executemany(sql.ADD_TASKS_BY_POSITION, some).rowcount
                if added < len(some):
                    # Rare: most attempts are told of once, when they have ended.
                    again = _merged_with_known(connection, some)
                    connection.executemany(sql.UPSERT_TASKS_BY_POSITION, again)
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise


def _merged_with_known(connection: sqlite3.Connection, rows: Sequence[TaskRow]) -> list[TaskRow]:
    """Return what the rows that are stored in another form become."""
    new = {(row[0], row[1]): row for row in rows}
    found = connection.execute(*sql.known_tasks(list(new)))
    stored = [(tuple(row), new[row[0], row[1]]) for row in found if (row[0], row[1]) in new]
    return [merge_rows(old, row) for old, row in stored if old != row]


def not_migrated(url: str, revision: str) -> DatabaseError:
    """The error of a database whose schema is not the one this version needs."""
    return DatabaseError(
        f"the database {url} has schema {revision}, this version needs {REVISION}\n"
        f"run: python -m stoker_migrations upgrade --database-url {url}"
    )


def _table_in(error: sqlite3.IntegrityError) -> str:
    return str(error).rpartition(": ")[2].partition(".")[0]
