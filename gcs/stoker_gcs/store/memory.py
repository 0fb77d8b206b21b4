"""The store in a few dicts: the executable specification that the SQL stores are tested against.

``database_url="memory://"`` selects it. Nothing survives the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from stoker_gcs.state.schema import (
    ARRIVAL,
    EVENTS,
    TABLES,
    TASK_COUNTS,
    TASK_DURATIONS,
    TASKS,
    TRAINING_METRICS,
    TRAINING_RUNS,
    TRAINING_VALUES,
    Table,
)
from stoker_gcs.store.changes import (
    Between,
    Delete,
    Expired,
    Insert,
    Prefix,
    Unexpired,
    Update,
    Upsert,
    WriteConflict,
    stamped,
)
from stoker_gcs.store.rows import TASK_ROW, numbered
from stoker_gcs.store.task_counts import NamesInUse, deltas, merged_with
from stoker_gcs.store.task_merge import merge_all
from stoker_gcs.store.training import batch_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stoker_gcs.store.changes import Change, Condition, Operation, Row, Value
    from stoker_gcs.store.training import Point
    from stoker_wire.data.spool import TaskRow
    from stoker_wire.messages.control import Event

Key = tuple[str | int, ...]


class MemoryStore:
    """A store of one process that keeps nothing (:class:`stoker_gcs.store.protocol.Store`)."""

    shared = False
    kind = "memory"

    def __init__(self) -> None:
        self._tables: dict[str, dict[Key, Row]] = {table.name: {} for table in TABLES}
        self._arrivals: dict[str, dict[Key, int]] = {table.name: {} for table in TABLES}
        self._events: list[Event] = []
        self._last = 0
        self._compacted = 0
        self._counted = NamesInUse()

    async def start(self) -> None:
        """Do nothing: there is nothing to connect to."""

    async def stop(self) -> None:
        """Do nothing: there is nothing to close."""

    async def nbytes(self) -> int | None:
        """Return None: nobody counts what it has in memory."""
        return None

    async def end_stalled(self) -> None:
        """Do nothing: nobody else writes here."""

    async def commit(self, changes: Sequence[Change]) -> list[tuple[Event, ...] | WriteConflict]:
        """Do the changes one after the other; a conflict restores what its change had done."""
        return [self._change(change) for change in changes]

    def _change(self, change: Change) -> tuple[Event, ...] | WriteConflict:
        before = {op.table.name: dict(self._tables[op.table.name]) for op in change.operations}
        try:
            for operation in change.operations:
                self._operate(operation, self._last + len(change.events))
        except WriteConflict as conflict:
            self._tables.update(before)
            return conflict
        events = tuple(numbered(e, self._last + i) for i, e in enumerate(change.events, 1))
        self._last += len(events)
        self._events.extend(events)
        return events

    def _operate(self, operation: Operation, seq: int) -> None:
        table = operation.table
        rows = self._tables[table.name]
        if isinstance(operation, Insert):
            row = stamped(operation, seq)
            if _key(table, row) in rows:
                raise WriteConflict(table.name, "the key is taken")
            self._check_unique(table, row)
            rows[_key(table, row)] = row
        elif isinstance(operation, Upsert):
            row = stamped(operation, seq)
            rows[_key(table, row)] = row
        elif isinstance(operation, Update):
            current = rows.get(_key(table, dict(operation.key)))
            if current is None or not _matches(current, operation.expect):
                if not operation.must_exist:
                    return
                raise WriteConflict(table.name, "no row is as expected")
            row = {**current, **stamped(operation, seq)}
            self._check_unique(table, row)
            rows[_key(table, row)] = row
        else:
            assert isinstance(operation, Delete)
            gone = [key for key, row in rows.items() if _matches(row, operation.where)]
            if operation.must_exist and not gone:
                raise WriteConflict(table.name, "no row is as expected")
            for key in gone[: operation.most or None]:
                del rows[key]

    def _check_unique(self, table: Table, row: Row) -> None:
        for names in table.unique:
            for key, other in self._tables[table.name].items():
                values = [row[name] for name in names]
                taken = None not in values and values == [other[name] for name in names]
                if taken and key != _key(table, row):
                    raise WriteConflict(table.name, f"{names[0]} is taken")

    async def get(self, table: Table, key: Mapping[str, str | int]) -> Row | None:
        """Return the row with this key, or None."""
        row = self._tables[table.name].get(tuple(key[name] for name in table.key))
        return dict(row) if row is not None else None

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
        rows = self._rows(table)
        numbers = self._numbers(table) if arrival else {}
        last = tuple(after)
        ranked = [((numbers[key],) if arrival else key, row) for key, row in rows.items()]
        matching = [
            {**row, ARRIVAL: rank[0]} if arrival else row
            for rank, row in sorted(ranked, key=lambda one: one[0], reverse=descending)
            if (not last or (rank < last if descending else rank > last))
            and _matches(row, where or {})
        ]
        wanted = (*(columns or table.names), *([ARRIVAL] if arrival else []))
        return [{name: row[name] for name in wanted} for row in matching[:limit]]

    def _rows(self, table: Table) -> dict[Key, Row]:
        if table is not EVENTS:
            return self._tables[table.name]
        return {
            (event.seq,): {
                **{name: getattr(event, name) for name in EVENTS.names},
                "payload": msgspec.msgpack.encode(event.payload),
            }
            for event in self._events
        }

    def _numbers(self, table: Table) -> dict[Key, int]:
        """Number the rows in the order in which they were added; dicts keep it."""
        rows, known = self._tables[table.name], self._arrivals[table.name]
        numbers = {key: known[key] for key in rows if key in known}
        last = max(numbers.values(), default=0)
        numbers |= {key: last + i for i, key in enumerate((k for k in rows if k not in numbers), 1)}
        self._arrivals[table.name] = numbers
        return numbers

    async def count(
        self, table: Table, where: Mapping[str, Condition] | None = None, *, most: int = 10_000
    ) -> int:
        """Return how many rows match, up to ``most``."""
        return min(most, sum(_matches(r, where or {}) for r in self._rows(table).values()))

    async def summed(
        self, table: Table, column: str, where: Mapping[str, Condition] | None = None
    ) -> tuple[int, int]:
        """Return how many rows match, and the sum of a column of theirs."""
        rows = [row for row in self._rows(table).values() if _matches(row, where or {})]
        return len(rows), sum(row[column] for row in rows)

    async def grouped(
        self,
        table: Table,
        by: Sequence[str],
        sums: Sequence[str],
        where: Mapping[str, Condition] | None = None,
    ) -> list[Row]:
        """Return how many rows match for each of the values of ``by``, as ``n``, and sums of columns."""
        groups: dict[Key, Row] = {}
        for row in self._tables[table.name].values():
            if _matches(row, where or {}):
                key = tuple(row[name] for name in by)
                none = {**dict(zip(by, key, strict=True)), **dict.fromkeys((*sums, "n"), 0)}
                group = groups.setdefault(key, none)
                group["n"] += 1
                for name in sums:
                    group[name] += row[name]
        return [groups[key] for key in sorted(groups)]

    async def first_start(self, where: Mapping[str, Condition]) -> float | None:
        """Return when the first of the attempts that match began; None if none has."""
        rows = [row for row in self._tables[TASKS.name].values() if _matches(row, where)]
        starts = [row["started_at_s"] for row in rows if row["started_at_s"] is not None]
        return min(starts, default=None)

    async def busy(
        self, where: Mapping[str, Condition], first_s: float, bucket_s: float
    ) -> list[Row]:
        """Return what attempts of up to a bucket add to each bucket of time of each worker."""
        cells: dict[Key, Row] = {}
        for row in self._tables[TASKS.name].values():
            if not _matches(row, where) or row["ended_at_s"] is None:
                continue
            run_s = row["ended_at_s"] - row["started_at_s"]
            if run_s <= bucket_s:
                lane = {name: row[name] for name in ("node_id", "worker_id", "actor_id")}
                bucket = int((row["started_at_s"] - first_s) / bucket_s)
                none = {**lane, "bucket": bucket, "n": 0, "busy_s": 0.0}
                cell = cells.setdefault((row["worker_id"], bucket), none)
                cell["n"] += 1
                cell["busy_s"] += run_s
        return list(cells.values())

    async def long_attempts(
        self, where: Mapping[str, Condition], longer_s: float, columns: Sequence[str], *, limit: int
    ) -> list[Row]:
        """Return attempts that match and ran longer, or run, those that began first."""
        rows = [
            row
            for row in self._tables[TASKS.name].values()
            if _matches(row, where)
            and (row["ended_at_s"] is None or row["ended_at_s"] - row["started_at_s"] > longer_s)
        ]
        rows.sort(key=lambda row: row["started_at_s"])
        return [{name: row[name] for name in columns} for row in rows[:limit]]

    async def distinct(
        self, table: Table, column: str, where: Mapping[str, Condition] | None = None
    ) -> list[Value]:
        """Return the values of a column of the rows that match, each once."""
        rows = self._rows(table).values()
        return list(dict.fromkeys(row[column] for row in rows if _matches(row, where or {})))

    async def events(self, after: int, limit: int = 1000) -> list[Event]:
        """Return events with ``seq > after``."""
        return [event for event in self._events if event.seq > after][:limit]

    async def events_back(self, before: int, limit: int = 1000) -> list[Event]:
        """Return events with ``seq < before``, newest first."""
        return [event for event in reversed(self._events) if event.seq < before][:limit]

    async def bounds(self) -> tuple[int, int]:
        """Return ``(compacted, last)``."""
        return self._compacted, self._last

    async def compact(self, keep_after: int) -> None:
        """Forget the events up to ``keep_after``."""
        self._compacted = max(self._compacted, min(keep_after, self._last))
        self._events = [event for event in self._events if event.seq > self._compacted]

    async def put_tasks(self, rows: Sequence[TaskRow]) -> None:
        """Merge attempts into the history."""
        table = self._tables[TASKS.name]
        new = merge_all(rows)
        known = {key: tuple(table[key][name] for name in TASK_ROW) for key in new if key in table}
        changed = merged_with(known, new)
        for _, now in changed:
            table[now[0], now[1]] = dict(zip(TASKS.names, now, strict=True))
        counts, durations = deltas(changed, self._counted)
        self._increment(TASK_COUNTS, counts)
        self._increment(TASK_DURATIONS, durations)

    async def put_points(self, points: Sequence[Point]) -> None:
        """Store values of training: by step alone, for a curve adds them up."""
        batch = batch_of(points)
        runs, values = self._tables[TRAINING_RUNS.name], self._tables[TRAINING_VALUES.name]
        for key in batch.runs:
            runs.setdefault(key[:2], dict(zip(TRAINING_RUNS.names, key, strict=True)))
        for one in batch.metrics:
            self._add_metric(dict(zip(TRAINING_METRICS.names, one, strict=True)))
        for value in batch.values:
            known = values.get(value[:3])
            if known is None or known["at_s"] <= value[-1]:
                values[value[:3]] = dict(zip(TRAINING_VALUES.names, value, strict=True))

    def _add_metric(self, new: Row) -> None:
        row = self._tables[TRAINING_METRICS.name].setdefault(_key(TRAINING_METRICS, new), new)
        if row is new:
            return
        row["count"] += new["count"]
        for name, choose in (("first_step", min), ("last_step", max), ("first_at_s", min)):
            row[name] = choose(row[name], new[name])
        if new["newest_at_s"] >= row["newest_at_s"]:
            row |= {name: new[name] for name in new if name.startswith("newest_")}

    async def curve(self, series: int, first: int, last: int, size: int) -> list[Row]:
        """Return what the values of a series are in each range of ``size`` steps, from ``first`` on."""
        ranges: dict[int, list[Row]] = {}
        for (one, _, step), row in sorted(self._tables[TRAINING_VALUES.name].items()):
            if one == series and first <= int(step) <= last:
                ranges.setdefault((int(step) - first) // size, []).append(row)
        return [
            {
                "step": rows[0]["step"],
                **{name: sum(row[name] for row in rows) for name in ("count", "total", "nans")},
                "low": min((r["low"] for r in rows if r["low"] is not None), default=None),
                "high": max((r["high"] for r in rows if r["high"] is not None), default=None),
                "at_s": max(row["at_s"] for row in rows),
            }
            for rows in ranges.values()
        ]

    def _increment(self, table: Table, added: Sequence[tuple[Any, ...]]) -> None:
        for values in added:
            new = dict(zip(table.names, values, strict=True))
            row = self._tables[table.name].setdefault(_key(table, new), new)
            if row is not new:
                for name in table.names[len(table.key) :]:
                    row[name] += new[name]


def _key(table: Table, row: Row) -> Key:
    return tuple(row[name] for name in table.key)


def _matches(row: Row, where: Mapping[str, Condition]) -> bool:
    for name, wanted in where.items():
        value = row[name]
        if isinstance(wanted, Prefix):
            fits = value.startswith(wanted.text)
        elif isinstance(wanted, tuple):
            fits = value in wanted
        elif isinstance(wanted, Expired):
            fits = value is not None and value <= wanted.now_s
        elif isinstance(wanted, Unexpired):
            fits = value is None or value > wanted.now_s
        elif isinstance(wanted, Between):
            fits = value is not None and wanted.first <= value <= wanted.last
        else:
            fits = value == wanted
        if not fits:
            return False
    return True
