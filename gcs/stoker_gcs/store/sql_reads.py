"""Reads that SQLite and PostgreSQL share: the same statements, over the driver's own ``fetch``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from stoker_gcs.state.schema import META, REVISION
from stoker_gcs.store import statements as sql
from stoker_gcs.store.changes import Upsert
from stoker_gcs.store.rows import event_of
from stoker_gcs.store.training import CURVE, width_for
from stoker_wire.errors import DatabaseError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stoker_gcs.state.schema import Table
    from stoker_gcs.store.changes import Condition, Row, Value
    from stoker_wire.messages.control import Event

KEYS_PER_SELECT = 500
"""Attempts whose stored rows are read by one statement: databases bound its parameters."""


class SqlReads(ABC):
    """The reading half of a SQL store (:class:`stoker_gcs.store.protocol.Store`)."""

    kind = "sqlite"
    size = "SELECT page_count * page_size AS n FROM pragma_page_count(), pragma_page_size()"
    """The query of the bytes of the database."""
    whole = "{}"
    """How the database says which integer is below a number: SQLite's cast does so by itself."""

    @abstractmethod
    async def fetch(self, statement: str, parameters: Mapping[str, object]) -> list[Row]:
        """Return all rows of one statement that only reads."""

    async def nbytes(self) -> int | None:
        """Return the size of the database."""
        (row,) = await self.fetch(self.size, {})
        return int(row["n"])

    async def get(self, table: Table, key: Mapping[str, str | int]) -> Row | None:
        """Return the row with this key, or None."""
        rows = await self.select(table, key, limit=1)
        return rows[0] if rows else None

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
        any_order: bool = False,
    ) -> list[Row]:
        """Return rows that match, in key order or in that of their arrival."""
        return await self.fetch(
            *sql.select(table, where or {}, after, limit, columns, arrival, descending, any_order)
        )

    async def count(
        self, table: Table, where: Mapping[str, Condition] | None = None, *, most: int = 10_000
    ) -> int:
        """Return how many rows match, up to ``most``."""
        rows = await self.fetch(*sql.count(table, where or {}, most))
        return int(rows[0]["n"])

    async def summed(
        self, table: Table, column: str, where: Mapping[str, Condition] | None = None
    ) -> tuple[int, int]:
        """Return how many rows match, and the sum of a column of theirs."""
        (row,) = await self.fetch(*sql.summed(table, column, where or {}))
        return int(row["n"]), int(row["total"])

    async def grouped(
        self,
        table: Table,
        by: Sequence[str],
        sums: Sequence[str],
        where: Mapping[str, Condition] | None = None,
    ) -> list[Row]:
        """Return how many rows match for each of the values of ``by``, as ``n``, and sums of columns."""
        return await self.fetch(*sql.grouped(table, by, sums, where or {}))

    async def first_start(self, where: Mapping[str, Condition]) -> float | None:
        """Return when the first of the attempts that match began; None if none has."""
        (row,) = await self.fetch(*sql.first_start(where))
        first_s: float | None = row["first"]
        return first_s

    async def busy(
        self, where: Mapping[str, Condition], first_s: float, bucket_s: float
    ) -> list[Row]:
        """Return what attempts of up to a bucket add to each bucket of time of each worker."""
        return await self.fetch(*sql.busy(where, first_s, bucket_s, self.whole))

    async def long_attempts(
        self, where: Mapping[str, Condition], longer_s: float, columns: Sequence[str], *, limit: int
    ) -> list[Row]:
        """Return attempts that match and ran longer, or run, those that began first."""
        return await self.fetch(*sql.long_attempts(where, longer_s, columns, limit))

    async def curve(self, series: int, first: int, last: int, size: int) -> list[Row]:
        """Return what the values of a series are in each range of ``size`` steps, from ``first`` on."""
        given = {"series": series, "width": width_for(size), "first": first, "last": last}
        return await self.fetch(CURVE, {**given, "size": size})

    async def distinct(
        self, table: Table, column: str, where: Mapping[str, Condition] | None = None
    ) -> list[Value]:
        """Return the values of a column of the rows that match, each once."""
        return [row[column] for row in await self.fetch(*sql.distinct(table, column, where or {}))]

    async def events(self, after: int, limit: int = 1000) -> list[Event]:
        """Return events with ``seq > after``."""
        rows = await self.fetch(sql.EVENTS_AFTER, {"after": after, "limit": limit})
        return [event_of(row) for row in rows]

    async def events_back(self, before: int, limit: int = 1000) -> list[Event]:
        """Return events with ``seq < before``, newest first."""
        rows = await self.fetch(sql.EVENTS_BEFORE, {"before": before, "limit": limit})
        return [event_of(row) for row in rows]

    async def bounds(self) -> tuple[int, int]:
        """Return ``(compacted, last)``."""
        mark = await self.get(META, {"name": sql.COMPACTED})
        compacted = int(mark["value"]) if mark else 0
        last = (await self.fetch(sql.LAST_SEQ, {}))[0]["seq"]
        return compacted, max(compacted, last or 0)


def compaction(upto: int) -> tuple[sql.Statement, sql.Statement]:
    """Return the statements that forget the events up to ``upto`` and record that."""
    mark = Upsert(META, {"name": sql.COMPACTED, "value": str(upto)})
    statement, parameters, _ = sql.operate(mark)
    return (sql.FORGET, {"seq": upto}), (statement, parameters)


def not_migrated(url: str, revision: str) -> DatabaseError:
    """Return the error of a database whose schema is not the one this version needs."""
    return DatabaseError(
        f"the database {url} has schema {revision}, this version needs {REVISION}\n"
        f"run: python -m stoker_migrations upgrade --database-url {url}"
    )
