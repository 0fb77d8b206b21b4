"""The store on PostgreSQL, for clusters: SQLAlchemy's async engine over asyncpg.

Several gcs processes write at once. Every transaction that appends events takes one advisory lock
first and holds it until its commit is visible, so sequence numbers become visible in their order and
a watcher that reads ``seq > last`` misses nothing; a gap is a transaction that was rolled back.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from asyncpg import InterfaceError, PostgresError
from sqlalchemy import text
from sqlalchemy.exc import (
    DataError,
    DBAPIError,
    IntegrityError,
    ProgrammingError,
    SQLAlchemyError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import create_async_engine

from stoker_gcs.state.schema import (
    REVISION,
    TASK_COUNTS,
    TASK_DURATIONS,
    TASKS,
    TRAINING_METRICS,
    TRAINING_RUNS,
    TRAINING_VALUES,
    Type,
)
from stoker_gcs.store import statements as sql
from stoker_gcs.store import training
from stoker_gcs.store.changes import WriteConflict
from stoker_gcs.store.rows import numbered
from stoker_gcs.store.sql_reads import SqlReads, compaction, not_migrated
from stoker_gcs.store.task_counts import Changed, NamesInUse, deltas, merged_with
from stoker_gcs.store.task_merge import merge_all
from stoker_wire.errors import DatabaseError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy.ext.asyncio import AsyncConnection

    from stoker_gcs.state.schema import Table
    from stoker_gcs.store.changes import Change, Row
    from stoker_wire.data.spool import TaskRow
    from stoker_wire.messages.control import Event

CONNECT_TIMEOUT_S = 5.0
COMMAND_TIMEOUT_S = 30.0
IDLE_IN_TRANSACTION_MS = 800
"""A replica that freezes within a transaction holds a lock that all others need. The server takes it back
before clients ask another replica, so what the frozen one had begun does not happen as well."""
_LOCK = "SELECT pg_advisory_xact_lock(7310577)"
_NAME = "stoker-gcs"
"""The application_name of each connection: sessions of others, as a pg_restore, are left alone."""
_END_STALLED = f"""
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = '{_NAME}' AND pid <> pg_backend_pid()
AND state = 'active' AND wait_event = 'ClientRead' AND xact_start IS NOT NULL
AND state_change < clock_timestamp() - interval '{IDLE_IN_TRANSACTION_MS} ms'
"""
"""asyncpg prepares a statement without a Sync. A replica that freezes before it executes that statement is
active for the server, not idle, and no setting ends its transaction."""

FAULTS = (OSError, TimeoutError, DBAPIError, PoolTimeout, PostgresError, InterfaceError)
"""What a statement raises; the last two are asyncpg's own, of a connection that cannot be opened."""
_SILENT = "the database {} does not answer"
_TEXTS = {
    "25006": (
        "the database {} is read-only\n"
        "name the primary in STOKER_DATABASE_URL, or wait until this one is it"
    ),
    "53100": (
        "the database {} cannot grow, as its disk is full\n"
        "nothing that was accepted is lost: make room on it, and the cluster goes on"
    ),
    "53200": "the database {} is out of memory",
    "53300": "the database {} takes no more connections\nraise its max_connections",
    "57014": "the database {} has cancelled the statement",
    "57P03": "the database {} is starting or stopping",
}
"""What to say instead, by SQLSTATE."""

_text = lru_cache(maxsize=512)(text)


class PostgresStore(SqlReads):
    """A store that several replicas share (:class:`stoker_gcs.store.protocol.Store`)."""

    shared = True
    kind = "postgresql"
    size = "SELECT pg_database_size(current_database()) AS n"
    whole = "FLOOR({})"

    def __init__(self, url: str) -> None:
        self._url = url
        self._engine = create_async_engine(
            url,
            pool_size=8,
            max_overflow=8,
            pool_timeout=CONNECT_TIMEOUT_S,
            pool_pre_ping=True,
            connect_args={
                "timeout": CONNECT_TIMEOUT_S,
                "command_timeout": COMMAND_TIMEOUT_S,
                "server_settings": {
                    "application_name": _NAME,
                    "idle_in_transaction_session_timeout": str(IDLE_IN_TRANSACTION_MS),
                },
            },
        )
        # A read is one statement, so a transaction around it would only cost round trips.
        self._reading = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        self._counted = NamesInUse()
        self._shown = self._engine.url.render_as_string(hide_password=True)

    async def start(self) -> None:
        """Connect and check the schema; the wait for a server that is not there is bounded."""
        try:
            async with asyncio.timeout(2 * CONNECT_TIMEOUT_S), self._engine.connect() as connection:
                versions = (
                    await connection.execute(_text("SELECT version_num FROM alembic_version"))
                ).all()
        except (OSError, TimeoutError) as error:
            await self._engine.dispose()
            raise self._unreachable(error) from error
        except SQLAlchemyError as error:
            await self._engine.dispose()
            if '"alembic_version" does not exist' in str(error):
                raise not_migrated(self._shown, "none") from error
            raise self._unreachable(error) from error
        except Exception as error:  # asyncpg raises its own errors while it connects
            await self._engine.dispose()
            raise self._unreachable(error) from error
        revision = versions[0][0] if versions else "none"
        if revision != REVISION:
            await self._engine.dispose()
            raise not_migrated(self._shown, revision)

    def _unreachable(self, error: BaseException) -> DatabaseError:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        return DatabaseError(
            f"cannot reach the database {self._shown}\n"
            f"{why}\n"
            "start the server or correct STOKER_DATABASE_URL, then run: python -m "
            f"stoker_migrations check --database-url {self._shown}"
        )

    async def end_stalled(self) -> None:
        """End the transactions of replicas that froze after they had prepared a statement."""
        await self.fetch(_END_STALLED, {})

    async def stop(self) -> None:
        """Close the pool."""
        await self._engine.dispose()

    async def commit(self, changes: Sequence[Change]) -> list[tuple[Event, ...] | WriteConflict]:
        """Do the changes in one transaction, each under its own savepoint."""
        try:
            async with self._engine.begin() as connection:
                if any(change.events for change in changes):
                    await connection.execute(_text(_LOCK))
                return [await self._change(connection, change) for change in changes]
        except FAULTS as error:
            raise self._translate(error) from error

    def _translate(self, error: Exception) -> Exception:
        """Return the error for the caller: retry later, unless the statement itself is wrong."""
        if isinstance(error, ProgrammingError | DataError):
            return error
        cause = error.orig if isinstance(error, DBAPIError) else error
        why = str(cause) or type(error).__name__
        text = _TEXTS.get(getattr(cause, "sqlstate", None) or "", _SILENT)
        return UnavailableError(text.format(self._shown) + f"\n{why.splitlines()[0]}")

    async def _change(
        self, connection: AsyncConnection, change: Change
    ) -> tuple[Event, ...] | WriteConflict:
        savepoint = await connection.begin_nested()
        try:
            events = await self._append(connection, change) if change.stamps else ()
            for operation in change.operations:
                statement, parameters, must = sql.operate(
                    operation, events[-1].seq if events else 0
                )
                done = (await connection.execute(_text(statement), _clean(parameters))).rowcount
                if must and done < 1:
                    raise WriteConflict(
                        operation.table.name, "a row is there, or none is as expected"
                    )
            events = events or await self._append(connection, change)
        except (WriteConflict, IntegrityError) as error:
            await savepoint.rollback()
            return error if isinstance(error, WriteConflict) else _conflict(change, error)
        await savepoint.commit()
        return events

    async def _append(self, connection: AsyncConnection, change: Change) -> tuple[Event, ...]:
        events = []
        for event in change.events:
            row = _clean(sql.append(event))
            seq = (await connection.execute(_text(sql.APPEND), row)).scalar_one()
            events.append(numbered(event, seq))
        return tuple(events)

    async def fetch(self, statement: str, parameters: Mapping[str, object]) -> list[Row]:
        """Return all rows of one statement that only reads."""
        try:
            async with self._reading.connect() as connection:
                rows = await connection.execute(_text(statement), _clean(parameters))
                return [dict(row) for row in rows.mappings()]
        except FAULTS as error:
            raise self._translate(error) from error

    async def compact(self, keep_after: int) -> None:
        """Forget the events up to ``keep_after``."""
        upto = min(keep_after, (await self.bounds())[1])
        try:
            async with self._engine.begin() as connection:
                for statement, parameters in compaction(upto):
                    await connection.execute(_text(statement), parameters)
        except FAULTS as error:
            raise self._translate(error) from error

    async def put_tasks(self, rows: Sequence[TaskRow]) -> None:
        """Merge attempts into the history in one transaction."""
        merged = merge_all(map(_storable, rows))
        if not merged:
            return
        try:
            async with self._engine.begin() as connection:
                await self._put(connection, merged)
        except FAULTS as error:
            raise self._translate(error) from error

    async def _put(
        self, connection: AsyncConnection, merged: Mapping[tuple[str, int], TaskRow]
    ) -> None:
        """Add the attempts that are new, merge the others, and count them: each row is written once.

        No COPY, though it costs less: a replica that freezes within one keeps its locks, for the server
        takes it for active (see ``IDLE_IN_TRANSACTION_MS``).
        """
        wanted = {"task_id": list({task_id for task_id, _ in merged})}

        async def compare(rows: Mapping[tuple[str, int], TaskRow]) -> list[Changed]:
            known = await connection.execute(_text(sql.KNOWN_TASKS_BY_COLUMN), wanted)
            return merged_with({(row[0], row[1]): tuple(row) for row in known}, rows)

        # One order for all replicas, so that two of them never wait for each other's rows.
        changed = await compare({key: merged[key] for key in sorted(merged)})
        if new := [one for one in changed if one.before is None]:
            rows = await connection.execute(
                _text(sql.ADD_TASKS_BY_COLUMN), _columns(TASKS, [now for _, now in new])
            )
            added = {(row[0], row[1]) for row in rows}
            if len(added) < len(new):  # another replica has added some of them just now
                others = [one.now[:2] for one in new if one.now[:2] not in added]
                again = await compare({key: merged[key] for key in others})
                changed = [one for one in changed if one.now[:2] not in set(others)] + again
        if old := [one for one in changed if one.before is not None]:
            await connection.execute(
                _text(sql.UPSERT_TASKS_BY_COLUMN), _columns(TASKS, [now for _, now in old])
            )
        await self._count(connection, changed)

    async def _count(self, connection: AsyncConnection, changed: list[Changed]) -> None:
        for job_id in self._counted.unknown(changed):
            names = await connection.execute(_text(sql.COUNTED_NAMES), {"job_id": job_id})
            self._counted.learn(job_id, [row[0] for row in names])
        counts, durations = deltas(changed, self._counted)
        if counts:
            await connection.execute(_text(sql.ADD_COUNTS_BY_COLUMN), _columns(TASK_COUNTS, counts))
        if durations:
            await connection.execute(
                _text(sql.ADD_DURATIONS_BY_COLUMN), _columns(TASK_DURATIONS, durations)
            )

    async def put_points(self, points: Sequence[training.Point]) -> None:
        """Store values of training in one transaction.

        The rows of metrics come first: they are locked then, so that no other replica adds values of the
        same metric before the wider rows of these are made.
        """
        batch = training.batch_of(points)
        if not batch.values:
            return
        try:
            async with self._engine.begin() as connection:
                for table, statement, rows in (
                    (TRAINING_METRICS, _ADD_METRICS, batch.metrics),
                    (TRAINING_RUNS, _ADD_RUNS, batch.runs),
                    (TRAINING_VALUES, _ADD_VALUES, batch.values),
                ):
                    await connection.execute(_text(statement), _columns(table, rows))
                await connection.execute(_text(training.WIDEN), training.widenings(batch.values))
        except FAULTS as error:
            raise self._translate(error) from error


_ADD_METRICS = sql.by_column(training.ADD_METRICS, TRAINING_METRICS)
_ADD_RUNS = sql.by_column(training.ADD_RUNS, TRAINING_RUNS)
_ADD_VALUES = sql.by_column(training.ADD_VALUES, TRAINING_VALUES)


def _clean(parameters: Mapping[str, object]) -> dict[str, object]:
    """Replace NUL characters, which PostgreSQL cannot store: a task may be named so."""
    return {
        name: value.replace("\0", "\ufffd") if isinstance(value, str) and "\0" in value else value
        for name, value in parameters.items()
    }


def _storable(row: TaskRow) -> TaskRow:
    """Replace NUL characters, before the row is compared with what is stored of its attempt."""
    if "\0" not in "".join((row[0], row[2], *row[3:7])):
        return row
    clean = (one.replace("\0", "\ufffd") if isinstance(one, str) else one for one in row)
    return tuple(clean)  # type: ignore[return-value]


def _columns(table: Table, rows: Sequence[tuple[Any, ...]]) -> dict[str, list[object]]:
    """Return rows as an array for each column: one statement for all, where each takes 0.1 ms."""
    columns = {}
    for column, values in zip(table.columns, zip(*rows, strict=True), strict=True):
        if column.type is Type.TEXT and "\0" in "".join(values):
            values = tuple(value.replace("\0", "\ufffd") for value in values)
        columns[column.name] = list(values)
    return columns


def _conflict(change: Change, error: IntegrityError) -> WriteConflict:
    words = str(error.orig)
    tables = [op.table.name for op in change.operations]
    named = next(
        (name for name in tables if f"_{name}_" in words or f'"{name}' in words), tables[0]
    )
    return WriteConflict(named, words.splitlines()[0])
