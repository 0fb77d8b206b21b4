"""How the parts of the gcs read and change state: typed rows, and compare-and-swap around pure rules.

A rule is a function ``record -> Step | None`` that knows nothing of stores: it returns what follows,
None for "nothing to do", or raises the StokerError that the caller gets. :meth:`Truth.change` reads,
applies the rule, writes row and event in one transaction, and starts again if another writer was
first. The row's version and its fencing columns are in the WHERE of every write.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from stoker_gcs.state import schema
from stoker_gcs.store.changes import Append, Change, Clash, Insert, Operation, Row, Update, Value
from stoker_wire.errors import ConflictError, NotFoundError
from stoker_wire.http.paging import bad_cursor
from stoker_wire.messages.control import COUNTED, Order, Page, Sort

if TYPE_CHECKING:
    from stoker_gcs.ephemeral.protocol import HotStore
    from stoker_gcs.state.event_log import EventLog
    from stoker_gcs.state.schema import Table
    from stoker_gcs.store.changes import Condition
    from stoker_gcs.store.journal import Journal
    from stoker_gcs.store.protocol import Store
    from stoker_wire.messages.control import Event, ListQuery

R = TypeVar("R", bound=msgspec.Struct)
MAX_TRIES = 50
_encode = msgspec.msgpack.Encoder().encode
CURSOR_MARK = "\x1f"


@dataclass(frozen=True, slots=True)
class Kept(Generic[R]):
    """A record and the row it came from."""

    record: R
    row: Row

    @property
    def version(self) -> int:
        """How often the row was written."""
        return int(self.row["version"])


class Shelf(Generic[R]):
    """How records of one type lie in their table.

    ``columns`` gives the columns beside ``version`` and ``record``; those in ``fences`` must still
    have their old values when a change is written. ``label`` is the word for error messages.
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
        self._decoder = msgspec.msgpack.Decoder(record)

    def row(self, record: R, version: int) -> dict[str, Value]:
        """The row that holds a record."""
        return {**self._columns(record), "version": version, "record": _encode(record)}

    def kept(self, row: Row) -> Kept[R]:
        """Read a row."""
        return Kept(self._decoder.decode(row["record"]), row)

    def insert(self, record: R, **more: Value) -> Insert:
        """The operation that adds a record."""
        return Insert(self.table, {**self.row(record, 1), **more})

    def update(self, kept: Kept[R], record: R) -> Update:
        """The operation that replaces a record, if nobody else did since it was read."""
        key = {name: kept.row[name] for name in self.table.key}
        values = {k: v for k, v in self.row(record, kept.version + 1).items() if k not in key}
        expect = {name: kept.row[name] for name in ("version", *self.fences)}
        return Update(self.table, key, values, expect)


@dataclass(frozen=True, slots=True)
class Step(Generic[R]):
    """What a rule decides: the record that follows, the kind of its event, and further operations."""

    record: R
    kind: str
    also: tuple[Operation, ...] = ()
    events: tuple[Append, ...] = ()


class Truth:
    """Everything that handlers and loops share: the store, its writer, the log, the hot store."""

    def __init__(self, store: Store, journal: Journal, log: EventLog, hot: HotStore) -> None:
        self.store = store
        self.journal = journal
        self.log = log
        self.hot = hot

    def now(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def event(self, kind: str, subject: str, record: object) -> Append:
        """An event that carries the record as it is after the change."""
        return Append(kind, subject, _encode(record), self.now())

    async def find(self, shelf: Shelf[R], key: str) -> Kept[R] | None:
        """The record with this key, or None."""
        row = await self.store.get(shelf.table, {shelf.table.key[0]: key})
        return None if row is None else shelf.kept(row)

    async def get(self, shelf: Shelf[R], key: str) -> R:
        """The record with this key; NotFoundError if there is none."""
        return (await self._get(shelf, key)).record

    async def _get(self, shelf: Shelf[R], key: str) -> Kept[R]:
        found = await self.find(shelf, key)
        if found is None:
            raise NotFoundError(f"there is no {shelf.label} {key!r}")
        return found

    async def all(self, shelf: Shelf[R], where: Mapping[str, Condition] | None = None) -> list[R]:
        """All records that match, in key order."""
        found: list[R] = []
        after: Sequence[str | int] = ()
        while True:
            rows = await self.store.select(shelf.table, where, after=after)
            found += [shelf.kept(row).record for row in rows]
            if len(rows) < 1000:
                return found
            after = [rows[-1][name] for name in shelf.table.key]

    async def page(
        self, shelf: Shelf[R], query: ListQuery, where: Mapping[str, Condition]
    ) -> Page[R]:
        """One page of the records that match; ``seq`` is where to watch from."""
        seq = self.log.last
        given = {name: value for name, value in where.items() if value not in ("", ())}
        rows, cursor = await self.rows(shelf.table, query, given)
        items = tuple(shelf.kept(row).record for row in rows)
        total, exact = await self.total(shelf.table, query, given)
        return Page(items=items, next_cursor=cursor, seq=seq, total=total, total_exact=exact)

    async def rows(
        self, table: Table, query: ListQuery, where: Mapping[str, Condition]
    ) -> tuple[list[Row], str]:
        """One page of rows, and the cursor of the next."""
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
        """How many rows match, if the query asks, and whether that is exact."""
        if not query.count:
            return None, True
        found = await self.store.count(table, where, most=COUNTED + 1)
        return min(found, COUNTED), found <= COUNTED

    async def change(self, shelf: Shelf[R], key: str, rule: Callable[[R], Step[R] | None]) -> R:
        """Apply ``rule`` to the record and return what it is then; durable on return."""
        for attempt in range(MAX_TRIES):
            kept = await self._get(shelf, key)
            step = rule(kept.record)
            if step is None:
                return kept.record
            try:
                await self.write(shelf, kept, key, step)
            except Clash:
                await asyncio.sleep(0.001 * attempt)
                continue
            return step.record
        raise ConflictError(f"{shelf.label} {key} is changed by too many at once\ntry again")

    async def write(
        self, shelf: Shelf[R], kept: Kept[R], key: str, step: Step[R]
    ) -> tuple[Event, ...]:
        """Write one step; Clash if the row was changed since ``kept`` was read."""
        operations = (shelf.update(kept, step.record), *step.also)
        events = (self.event(step.kind, key, step.record), *step.events)
        return await self.journal.apply(Change(operations, events))

    async def wait_for(
        self,
        shelf: Shelf[R],
        key: str,
        done: Callable[[R], bool],
        wait_s: float,
    ) -> R:
        """The record once it is ``done``, or as it is when ``wait_s`` passed."""
        with self.log.signal(key) as signal:
            deadline = asyncio.get_running_loop().time() + wait_s
            while True:
                signal.clear()
                record = await self.get(shelf, key)
                left = deadline - asyncio.get_running_loop().time()
                if done(record) or left <= 0:
                    return record
                try:
                    await asyncio.wait_for(signal.wait(), left)
                except TimeoutError:
                    return await self.get(shelf, key)


def _parse_cursor(table: Table, key: tuple[str, ...], cursor: str) -> tuple[str | int, ...]:
    if not cursor:
        return ()
    kinds = {column.name: column.type for column in table.columns}
    kinds[schema.ARRIVAL] = schema.Type.INT
    parts = cursor.split(CURSOR_MARK)
    if len(parts) != len(key):
        raise bad_cursor(cursor)
    found: list[str | int] = []
    for name, part in zip(key, parts, strict=True):
        if kinds[name] is schema.Type.INT:
            if not (part.isascii() and part.isdecimal() and len(part) < 19):
                raise bad_cursor(cursor)
            found.append(int(part))
        else:
            found.append(part)
    return tuple(found)
