"""Reads and changes of state: typed rows, and compare-and-swap around pure rules.

A rule is a function ``record -> Transition | None`` that knows nothing of stores: it returns what
follows, None for "nothing to do", or raises the StokerError that the caller gets.
:meth:`StateStore.change` reads, applies the rule, writes row and event in one transaction, and starts
again if another writer was first. The row's version and its fencing columns are in the WHERE of
every write.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from stoker_gcs.state import schema
from stoker_gcs.store.changes import (
    Append,
    Change,
    Insert,
    Operation,
    Row,
    Update,
    Value,
    WriteConflict,
)
from stoker_gcs.store.rows import with_author
from stoker_wire.errors import ConflictError, DatabaseError, NotFoundError
from stoker_wire.http.paging import bad_cursor
from stoker_wire.http.principals import AUTHOR
from stoker_wire.http.tolerant import TolerantDecoder
from stoker_wire.messages.control import COUNTED, Order, Page, Sort
from stoker_wire.messages.events import EventKind, RemovedRecords

if TYPE_CHECKING:
    from stoker_gcs.ephemeral.protocol import EphemeralStore
    from stoker_gcs.state.event_log import EventLog
    from stoker_gcs.state.schema import Table
    from stoker_gcs.store.changes import Condition
    from stoker_gcs.store.group_commit import GroupCommitWriter
    from stoker_gcs.store.protocol import Store
    from stoker_wire.messages.control import Author, Event, ListQuery

R = TypeVar("R", bound=msgspec.Struct)
MAX_TRIES = 50
_READ_SIZE = 1000
_encode = msgspec.msgpack.Encoder().encode
CURSOR_MARK = "\x1f"


@dataclass(frozen=True, slots=True)
class Versioned(Generic[R]):
    """A record and the row it came from."""

    record: R
    row: Row

    @property
    def version(self) -> int:
        """The number of times that the row was written."""
        return int(self.row["version"])


class RecordTable(Generic[R]):
    """The mapping of one type of records to its table.

    ``columns`` returns the columns beside ``version`` and ``record``; those in ``fences`` must still
    have their old values when a change is written. ``label`` names the type in error messages.
    """

    def __init__(
        self,
        table: Table,
        record: type[R],
        columns: Callable[[R], Mapping[str, Value]],
        *,
        label: str,
        fences: tuple[str, ...] = (),
    ) -> None:
        self.table = table
        self.label = label
        self.fences = fences
        self._columns = columns
        self._decoder = TolerantDecoder(record)

    def encode(self, record: R, version: int) -> dict[str, Value]:
        """Return the row of a record."""
        return {**self._columns(record), "version": version, "record": _encode(record)}

    def decode(self, row: Row) -> Versioned[R]:
        """Return the record of a row; DatabaseError if it is damaged."""
        try:
            return Versioned(self._decoder.decode(row["record"]), row)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            key = ", ".join(str(row.get(name, "")) for name in self.table.key)
            raise DatabaseError(
                f"the record of {self.label} {key} cannot be read\n{error}\n"
                f"its row in the table {self.table.name} is damaged: restore a backup, or delete the row"
            ) from None

    def insert(self, record: R, **more: Value) -> Insert:
        """Return the operation that adds a record."""
        return Insert(self.table, {**self.encode(record, 1), **more})

    def update(self, current: Versioned[R], record: R) -> Update:
        """Return the operation that replaces a record, unless another write came after ``current``."""
        key = {name: current.row[name] for name in self.table.key}
        values = {k: v for k, v in self.encode(record, current.version + 1).items() if k not in key}
        expect = {name: current.row[name] for name in ("version", *self.fences)}
        return Update(self.table, key, values, expect)


@dataclass(frozen=True, slots=True)
class Transition(Generic[R]):
    """The decision of a rule: the next record, the kind of its event, and further writes with it."""

    record: R
    kind: EventKind
    operations: tuple[Operation, ...] = ()


class StateStore:
    """The state that handlers and loops share: the store, its writer, the log, the ephemeral store."""

    def __init__(
        self, store: Store, writer: GroupCommitWriter, log: EventLog, ephemeral: EphemeralStore
    ) -> None:
        self.store = store
        self.writer = writer
        self.log = log
        self.ephemeral = ephemeral

    def now(self) -> float:
        """Return seconds since the epoch."""
        return time.time()

    def event(
        self, kind: EventKind, subject: str, record: object, *, by: Author | None = None
    ) -> Append:
        """Return an event that carries the record as it is after the change.

        It is ``by`` this person, or by the one whose request is being answered, if it is a person's.
        """
        payload, author = _encode(record), by or AUTHOR.get()
        if author is not None:
            payload = with_author(payload, author)
        return Append(kind.value, subject, payload, self.now())

    def removal(self, table: Table, ids: Sequence[str]) -> Append:
        """Return the event of records that have ended and leave together."""
        removed = RemovedRecords(kind=table.name, ids=tuple(ids))
        return self.event(EventKind.RECORDS_REMOVED, table.name, removed)

    async def find(self, records: RecordTable[R], key: str) -> Versioned[R] | None:
        """Return the record with this key, or None."""
        row = await self.store.get(records.table, {records.table.key[0]: key})
        return None if row is None else records.decode(row)

    async def get(self, records: RecordTable[R], key: str) -> R:
        """Return the record with this key; NotFoundError if there is none."""
        return (await self._get(records, key)).record

    async def _get(self, records: RecordTable[R], key: str) -> Versioned[R]:
        current = await self.find(records, key)
        if current is None:
            raise NotFoundError(f"there is no {records.label} {key!r}")
        return current

    async def all(
        self, records: RecordTable[R], where: Mapping[str, Condition] | None = None
    ) -> list[R]:
        """Return all records that match, in key order."""
        all_records: list[R] = []
        after: Sequence[str | int] = ()
        while True:
            rows = await self.store.select(records.table, where, after=after, limit=_READ_SIZE)
            all_records += [records.decode(row).record for row in rows]
            if len(rows) < _READ_SIZE:
                return all_records
            after = [rows[-1][name] for name in records.table.key]

    async def page(
        self, records: RecordTable[R], query: ListQuery, where: Mapping[str, Condition]
    ) -> Page[R]:
        """Return a page of the records that match; ``seq`` is where to watch from."""
        seq = self.log.last
        given = {name: value for name, value in where.items() if value not in ("", ())}
        rows, cursor = await self.rows(records.table, query, given)
        items = tuple(records.decode(row).record for row in rows)
        total, exact = await self.total(records.table, query, given)
        return Page(items=items, next_cursor=cursor, seq=seq, total=total, total_exact=exact)

    async def rows(
        self, table: Table, query: ListQuery, where: Mapping[str, Condition]
    ) -> tuple[list[Row], str]:
        """Return a page of rows, and the cursor of the next one."""
        arrival = query.sort is Sort.CREATED and table.listed
        key = (schema.ARRIVAL,) if arrival else table.key
        rows = await self.store.select(
            table,
            where,
            after=_parse_cursor(table, key, query.cursor),
            limit=query.limit + 1,
            arrival=arrival,
            descending=query.order is Order.DESC,
        )
        if len(rows) <= query.limit:
            return rows, ""
        rows = rows[: query.limit]
        return rows, CURSOR_MARK.join(str(rows[-1][name]) for name in key)

    async def total(
        self, table: Table, query: ListQuery, where: Mapping[str, Condition]
    ) -> tuple[int | None, bool]:
        """Return how many rows match, if the query asks, and whether that is exact."""
        if not query.count:
            return None, True
        count = await self.store.count(table, where, most=COUNTED + 1)
        return min(count, COUNTED), count <= COUNTED

    async def change(
        self, records: RecordTable[R], key: str, rule: Callable[[R], Transition[R] | None]
    ) -> R:
        """Apply ``rule`` to the record and return the result; durable on return."""
        for attempt in range(MAX_TRIES):
            current = await self._get(records, key)
            transition = rule(current.record)
            if transition is None:
                return current.record
            try:
                await self._write(records, current, key, transition)
            except WriteConflict:
                await asyncio.sleep(0.001 * attempt)
                continue
            return transition.record
        raise ConflictError(f"{records.label} {key} is changed by too many at once\ntry again")

    async def _write(
        self, records: RecordTable[R], current: Versioned[R], key: str, transition: Transition[R]
    ) -> tuple[Event, ...]:
        """Write one transition; WriteConflict if the row was changed since ``current`` was read."""
        operations = (records.update(current, transition.record), *transition.operations)
        event = self.event(transition.kind, key, transition.record)
        return await self.writer.apply(Change(operations, (event,)))

    async def wait_for(
        self,
        records: RecordTable[R],
        key: str,
        done: Callable[[R], bool],
        wait_s: float,
    ) -> R:
        """Return the record once it is ``done``, or as it is when ``wait_s`` has passed."""
        with self.log.signal(key) as signal:
            deadline = asyncio.get_running_loop().time() + wait_s
            while True:
                signal.clear()
                record = await self.get(records, key)
                left = deadline - asyncio.get_running_loop().time()
                if done(record) or left <= 0:
                    return record
                try:
                    await asyncio.wait_for(signal.wait(), left)
                except TimeoutError:
                    return await self.get(records, key)


def _parse_cursor(table: Table, key: tuple[str, ...], cursor: str) -> tuple[str | int, ...]:
    if not cursor:
        return ()
    kinds = {column.name: column.type for column in table.columns}
    kinds[schema.ARRIVAL] = schema.Type.INT
    parts = cursor.split(CURSOR_MARK)
    if len(parts) != len(key):
        raise bad_cursor(cursor)
    values: list[str | int] = []
    for name, part in zip(key, parts, strict=True):
        if kinds[name] is schema.Type.INT:
            if not (part.isascii() and part.isdecimal() and len(part) < 19):
                raise bad_cursor(cursor)
            values.append(int(part))
        else:
            values.append(part)
    return tuple(values)
