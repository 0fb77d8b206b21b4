"""Snapshots of the state in SQL, so that a fold need not begin at the first event.

The leading gcs takes one every so many events, from the tables: they change while they are read, so the
events of that time are folded into what was read, which is then the state after the last of them. Its head
is written after its parts, so that one without a head is none. It stays as long as the events after it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.history.fold import TABLES, ClusterState, LoggedEvent, fold
from stoker_gcs.state import schema
from stoker_gcs.store.changes import Change, Delete, Insert, Upsert
from stoker_wire.errors import StokerError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from stoker_gcs.state.records import StateStore
    from stoker_gcs.store.changes import Row
    from stoker_wire.settings import Settings

_log = logging.getLogger(__name__)
EVERY_S = 5.0
"""How often the leader looks whether the next one is due."""
READ = 1000
PART_NBYTES = 256 << 10
"""The size of a part before its compression: others have the loop between two of them."""
_LEVEL = 1
_SHARE = 4
"""Of the events that are kept: so many may be older than the oldest snapshot, and then cannot be folded."""
_SOURCES = {
    "nodes": schema.NODES,
    "jobs": schema.JOBS,
    "actors": schema.ACTORS,
    "placement_groups": schema.PLACEMENT_GROUPS,
    "detached_objects": schema.DETACHED_OBJECTS,
    "queues": schema.QUEUES,
    "schedules": schema.SCHEDULES,
}
_Part = list[tuple[str, str, bytes]]
_pack = msgspec.msgpack.Encoder().encode
_part = msgspec.msgpack.Decoder(_Part)


class _Facts(msgspec.Struct, frozen=True):
    """The value of a head: how many parts and records follow, and the time of the event ``seq``."""

    parts: int
    records: int
    event_at_s: float


_facts = msgspec.msgpack.Decoder(_Facts)


@dataclass(frozen=True, slots=True)
class Head:
    """A snapshot of the state after the event ``seq``; no event until then is later than ``at_s``."""

    seq: int
    at_s: float


class Snapshots:
    """The snapshots of a database: taken by the leader, read by all replicas."""

    def __init__(self, state: StateStore, settings: Settings) -> None:
        self._state = state
        self._every = settings.snapshot_events
        self._most = max(1, settings.keep_events // _SHARE) if settings.keep_events else math.inf

    async def run(self) -> None:
        """Take what is due and forget what no event follows, until cancelled; runs on the leading replica."""
        looked_at, waits = -1, False
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                if self._state.log.last != looked_at:
                    looked_at = self._state.log.last
                    await self.keep_up()
                waits = False
            except StokerError as error:
                if not waits:
                    _log.warning("snapshots wait: %s", error.one_line)
                waits = True

    async def keep_up(self) -> None:
        """Take a snapshot if the newest is far behind the log, and remove those that are of no use."""
        compacted, last = await self._state.store.bounds()
        heads = await self.heads()
        newest = heads[-1] if heads else None
        if newest is None or newest.seq < compacted or last - newest.seq >= await self._due(newest):
            await self.take()
        old = tuple(head.seq for head in heads if head.seq < compacted)
        if old:
            await self._state.writer.apply(Change((Delete(schema.SNAPSHOTS, {"seq": old}),)))

    async def _due(self, newest: Head) -> float:
        """Return after how many events the next one comes: so many that it costs no more than they did."""
        row = await self._state.store.get(schema.SNAPSHOTS, {"seq": newest.seq, "part": 0})
        records = 0 if row is None else _facts.decode(row["value"]).records
        return min(max(self._every, records), self._most)

    async def heads(self) -> list[Head]:
        """Return the snapshots that are whole, in order."""
        rows = await self._state.store.select(
            schema.SNAPSHOTS, {"part": 0}, limit=READ, columns=("seq", "at_s")
        )
        return [Head(row["seq"], row["at_s"]) for row in rows]

    async def take(self) -> Head:
        """Take a snapshot of now."""
        store = self._state.store
        _, begun = await store.bounds()
        tables: dict[str, dict[str, bytes]] = {}
        for name in TABLES:
            tables[name] = await self._read_table(name)
        _, ended = await store.bounds()
        state = ClusterState(begun, 0.0, tables)
        async for events in self.events(begun, ended):
            state = fold(state, events)
        before = await store.events_back(ended + 1, 1)
        event_at_s = before[0].at_s if before else 0.0
        head = Head(ended, max(self._state.now(), event_at_s))
        await self._write(head, state, event_at_s)
        return head

    async def _read_table(self, name: str) -> dict[str, bytes]:
        table = _SOURCES[name]
        (key,) = table.key
        records: dict[str, bytes] = {}
        after: tuple[str, ...] = ()
        while True:
            rows = await self._state.store.select(
                table, after=after, limit=READ, columns=(key, "record")
            )
            records |= {row[key]: bytes(row["record"]) for row in rows}
            if len(rows) < READ:
                return records
            after = (rows[-1][key],)

    async def _write(self, head: Head, state: ClusterState, event_at_s: float) -> None:
        # Parts of one that was interrupted may be there.
        await self._apply(Delete(schema.SNAPSHOTS, {"seq": head.seq}))
        count = records = nbytes = 0
        part: _Part = []
        for name, table in state.tables.items():
            for key, record in table.items():
                part.append((name, key, record))
                records += 1
                nbytes += len(record)
                if nbytes >= PART_NBYTES:
                    count += 1
                    await self._write_part(head, count, part)
                    part, nbytes = [], 0
        if part:
            count += 1
            await self._write_part(head, count, part)
        facts = _Facts(parts=count, records=records, event_at_s=event_at_s)
        await self._apply(Upsert(schema.SNAPSHOTS, _row(head, 0, _pack(facts))))

    async def _write_part(self, head: Head, number: int, part: _Part) -> None:
        value = zlib.compress(_pack(part), _LEVEL)
        await self._apply(Insert(schema.SNAPSHOTS, _row(head, number, value)))

    async def _apply(self, operation: Delete | Insert | Upsert) -> None:
        await self._state.writer.apply(Change((operation,)))

    async def load(self, head: Head) -> ClusterState | None:
        """Return the state of a snapshot; None if it has been removed."""
        tables: dict[str, dict[str, bytes]] = {name: {} for name in TABLES}
        row = await self._state.store.get(schema.SNAPSHOTS, {"seq": head.seq, "part": 0})
        if row is None:
            return None
        facts = _facts.decode(row["value"])
        for number in range(1, facts.parts + 1):
            row = await self._state.store.get(schema.SNAPSHOTS, {"seq": head.seq, "part": number})
            if row is None:
                return None
            for name, key, record in _part.decode(zlib.decompress(row["value"])):
                tables.setdefault(name, {})[key] = record
        return ClusterState(head.seq, facts.event_at_s, tables)

    async def events(self, after: int, upto: int) -> AsyncIterator[Sequence[LoggedEvent]]:
        """Yield the events with ``after < seq <= upto`` in order, as SQL has them."""
        while after < upto:
            rows = await self._state.store.select(schema.EVENTS, after=(after,), limit=READ)
            events = [_event(row) for row in rows if row["seq"] <= upto]
            if not events:
                return
            yield events
            after = events[-1].seq


def _row(head: Head, part: int, value: bytes) -> dict[str, int | float | bytes]:
    return {"seq": head.seq, "part": part, "at_s": head.at_s, "value": value}


def _event(row: Row) -> LoggedEvent:
    return LoggedEvent(
        seq=row["seq"],
        at_s=row["at_s"],
        kind=row["kind"],
        subject=row["subject"],
        payload=bytes(row["payload"]),
    )
