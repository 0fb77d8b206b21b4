"""Operations as SQL text that SQLite and PostgreSQL both read, with ``:name`` parameters.

Identifiers come from :mod:`stoker_gcs.state.schema`, all values are parameters. Two tables have
statements of their own below, since their rows are written in ways of their own: ``events`` (appended,
numbered by the store) and ``tasks`` (merged).
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from stoker_gcs.state.schema import (
    ARRIVAL,
    EVENTS,
    TASK_COUNTS,
    TASK_DURATIONS,
    TASKS,
    Table,
    Type,
)
from stoker_gcs.store.changes import (
    Between,
    Expired,
    Insert,
    Prefix,
    Unexpired,
    Update,
    Upsert,
    Value,
    stamped,
)
from stoker_gcs.store.rows import TASK_ROW

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stoker_gcs.store.changes import Append, Condition, Operation

Statement = tuple[str, dict[str, Value]]

_EVENT = ", ".join(EVENTS.names)
_APPENDED = tuple(name for name in EVENTS.names if name not in EVENTS.key)
APPEND = (
    f"INSERT INTO {EVENTS.name} ({', '.join(_APPENDED)}) "
    f"VALUES ({', '.join(':' + name for name in _APPENDED)}) RETURNING seq"
)
EVENTS_AFTER = f"SELECT {_EVENT} FROM {EVENTS.name} WHERE seq > :after ORDER BY seq LIMIT :limit"
EVENTS_BEFORE = (
    f"SELECT {_EVENT} FROM {EVENTS.name} WHERE seq < :before ORDER BY seq DESC LIMIT :limit"
)
LAST_SEQ = f"SELECT MAX(seq) AS seq FROM {EVENTS.name}"
FORGET = f"DELETE FROM {EVENTS.name} WHERE seq <= :seq"
COMPACTED = "compacted"
"""The row of ``meta`` that holds the newest sequence number that was forgotten."""


@lru_cache(maxsize=64)
def _insert(table: Table, names: tuple[str, ...], replace: bool) -> str:
    sql = (
        f"INSERT INTO {table.name} ({', '.join(names)}) "
        f"VALUES ({', '.join(':' + name for name in names)})"
    )
    if not replace:
        # No row instead of an error: PostgreSQL would write each one into its log.
        return f"{sql} ON CONFLICT DO NOTHING"
    others = [name for name in names if name not in table.key]
    if not others:
        return f"{sql} ON CONFLICT DO NOTHING"
    changed = ", ".join(f"{name} = excluded.{name}" for name in others)
    return f"{sql} ON CONFLICT ({', '.join(table.key)}) DO UPDATE SET {changed}"


UPSERT_TASKS = _insert(TASKS, TASKS.names, True) + f" WHERE excluded.rank >= {TASKS.name}.rank"
ADD_TASKS = _insert(TASKS, TASKS.names, False)
UPSERT_TASKS_BY_POSITION = re.sub(r":\w+", "?", UPSERT_TASKS)
ADD_TASKS_BY_POSITION = re.sub(r":\w+", "?", ADD_TASKS)
_ARRAYS = {
    Type.TEXT: "text[]",
    Type.INT: "bigint[]",
    Type.BYTES: "bytea[]",
    Type.FLOAT: "double precision[]",
}


def by_column(statement: str, table: Table = TASKS) -> str:
    """Return the statement of PostgreSQL that writes many rows, given as an array for each column."""
    arrays = ", ".join(f"CAST(:{one.name} AS {_ARRAYS[one.type]})" for one in table.columns)
    before, _, after = statement.partition("VALUES")
    return f"{before}SELECT * FROM unnest({arrays}){after.partition(')')[2]}"


def _increment(table: Table) -> str:
    """Return the statement that adds to the numbers of a row, which is made if it is not there."""
    names = ", ".join(table.names)
    marks = ", ".join(f":{name}" for name in table.names)
    sums = ", ".join(
        f"{name} = {table.name}.{name} + excluded.{name}"
        for name in table.names
        if name not in table.key
    )
    key = ", ".join(table.key)
    return f"INSERT INTO {table.name} ({names}) VALUES ({marks}) ON CONFLICT ({key}) DO UPDATE SET {sums}"


UPSERT_TASKS_BY_COLUMN = by_column(UPSERT_TASKS)
KNOWN_TASKS_BY_COLUMN = (
    f"SELECT {', '.join(TASK_ROW)} FROM {TASKS.name} "
    "WHERE task_id = ANY(CAST(:task_id AS text[])) ORDER BY task_id, attempt FOR UPDATE"
)
ADD_TASKS_BY_COLUMN = f"{by_column(ADD_TASKS)} RETURNING task_id, attempt"
ADD_COUNTS = _increment(TASK_COUNTS)
ADD_DURATIONS = _increment(TASK_DURATIONS)
ADD_COUNTS_BY_POSITION = re.sub(r":\w+", "?", ADD_COUNTS)
ADD_DURATIONS_BY_POSITION = re.sub(r":\w+", "?", ADD_DURATIONS)
ADD_COUNTS_BY_COLUMN = by_column(ADD_COUNTS, TASK_COUNTS)
ADD_DURATIONS_BY_COLUMN = by_column(ADD_DURATIONS, TASK_DURATIONS)
COUNTED_NAMES = f"SELECT DISTINCT name FROM {TASK_COUNTS.name} WHERE job_id = :job_id"


def append(event: Append) -> dict[str, Value]:
    """Return the parameters of :data:`APPEND`."""
    return {
        "at_s": event.at_s,
        "kind": event.kind,
        "subject": event.subject,
        "payload": event.payload,
    }


def operate(operation: Operation, seq: int = 0) -> tuple[str, dict[str, Value], bool]:
    """Return the statement of an operation, and whether no affected row means a conflict.

    ``seq`` is the number of the last event of its change, for an operation that stamps.
    """
    if isinstance(operation, Insert | Upsert):
        replace = isinstance(operation, Upsert)
        values = stamped(operation, seq)
        return _insert(operation.table, tuple(values), replace), values, not replace
    if isinstance(operation, Update):
        values = stamped(operation, seq)
        parameters: dict[str, Value] = {f"v_{name}": v for name, v in values.items()}
        changed = ", ".join(f"{name} = :v_{name}" for name in values)
        matched = {**operation.key, **operation.expect}
        where = _where(matched, parameters)
        return (
            f"UPDATE {operation.table.name} SET {changed}{where}",
            parameters,
            operation.must_exist,
        )
    parameters = {}
    where = _where(operation.where, parameters)
    name = operation.table.name
    if operation.most:
        parameters["most"] = operation.most
        where = f" WHERE {ARRIVAL} IN (SELECT {ARRIVAL} FROM {name}{where} LIMIT :most)"
    return f"DELETE FROM {name}{where}", parameters, operation.must_exist


def select(
    table: Table,
    where: Mapping[str, Condition],
    after: Sequence[str | int],
    limit: int,
    columns: Sequence[str],
    arrival: bool = False,
    descending: bool = False,
    any_order: bool = False,
) -> Statement:
    """Return the query of rows that match, ordered by key, ``arrival`` or not, behind ``after``."""
    parameters: dict[str, Value] = {"limit": limit}
    shown = columns or table.names
    order: tuple[str, ...] = table.key
    if arrival:
        order = (ARRIVAL,)
        shown = (*shown, f"{ARRIVAL} AS {ARRIVAL}")
    text = f"SELECT {', '.join(shown)} FROM {table.name}"
    parts = _conditions(where, parameters)
    if after:
        names = [f"k_{i}" for i in range(len(after))]
        parameters.update(zip(names, after, strict=True))
        marks = ", ".join(f":{name}" for name in names)
        parts.append(f"({', '.join(order)}) {'<' if descending else '>'} ({marks})")
    direction = " DESC" if descending else ""
    by = ", ".join(f"{name}{direction}" for name in order)
    ordered = "" if any_order else f" ORDER BY {by}"
    return f"{text}{_joined(parts)}{ordered} LIMIT :limit", parameters


def count(table: Table, where: Mapping[str, Condition], most: int) -> Statement:
    """Return the query of how many rows match, as ``n``; counting stops at ``most``."""
    parameters: dict[str, Value] = {"most": most}
    inner = f"SELECT 1 FROM {table.name}{_where(where, parameters)} LIMIT :most"
    return f"SELECT count(*) AS n FROM ({inner}) AS found", parameters


def summed(table: Table, column: str, where: Mapping[str, Condition]) -> Statement:
    """Return the query of how many rows match, as ``n``, and of the sum of a column, as ``total``."""
    parameters: dict[str, Value] = {}
    chosen = f"count(*) AS n, COALESCE(sum({column}), 0) AS total"
    return f"SELECT {chosen} FROM {table.name}{_where(where, parameters)}", parameters


def grouped(
    table: Table, by: Sequence[str], sums: Sequence[str], where: Mapping[str, Condition]
) -> Statement:
    """Return the query of how many rows match for each of the values of ``by``, as ``n``, and of sums."""
    parameters: dict[str, Value] = {}
    columns = ", ".join(by)
    chosen = ", ".join((columns, *(f"SUM({name}) AS {name}" for name in sums), "count(*) AS n"))
    text = f"SELECT {chosen} FROM {table.name}{_where(where, parameters)}"
    return f"{text} GROUP BY {columns} ORDER BY {columns}", parameters


def busy(where: Mapping[str, Condition], first_s: float, bucket_s: float, whole: str) -> Statement:
    """Return the query of what short attempts add to each bucket of time of each worker.

    ``whole`` is how the database says which integer is below a number: ``FLOOR({})``.
    """
    parameters: dict[str, Value] = {"first": first_s, "width": bucket_s}
    # A worker is on one node, and has one actor or none: sorting by one column takes half of the time.
    lane = "worker_id, MAX(node_id) AS node_id, MAX(actor_id) AS actor_id"
    bucket = f"CAST({whole.format('(started_at_s - :first) / :width')} AS INTEGER)"
    sums = "count(*) AS n, SUM(ended_at_s - started_at_s) AS busy_s"
    text = f"SELECT {lane}, {bucket} AS bucket, {sums} FROM {TASKS.name}{_where(where, parameters)}"
    short = "ended_at_s - started_at_s <= :width"
    return f"{text} AND {short} GROUP BY worker_id, {bucket}", parameters


def long_attempts(
    where: Mapping[str, Condition], longer_s: float, columns: Sequence[str], limit: int
) -> Statement:
    """Return the query of attempts that ran longer, or run, those that began first."""
    parameters: dict[str, Value] = {"longer": longer_s, "limit": limit}
    text = f"SELECT {', '.join(columns)} FROM {TASKS.name}{_where(where, parameters)}"
    long = "(ended_at_s IS NULL OR ended_at_s - started_at_s > :longer)"
    return f"{text} AND {long} ORDER BY started_at_s LIMIT :limit", parameters


def first_start(where: Mapping[str, Condition]) -> Statement:
    """Return the query of when the first attempt began."""
    parameters: dict[str, Value] = {}
    text = f"SELECT MIN(started_at_s) AS first FROM {TASKS.name}{_where(where, parameters)}"
    return text, parameters


def distinct(table: Table, column: str, where: Mapping[str, Condition]) -> Statement:
    """Return the query of the values of a column of the rows that match, each once."""
    parameters: dict[str, Value] = {}
    return f"SELECT DISTINCT {column} FROM {table.name}{_where(where, parameters)}", parameters


def known_tasks(keys: Sequence[tuple[str, int]]) -> Statement:
    """Return the query of the rows of these attempts (and perhaps others of the same tasks)."""
    parameters: dict[str, Value] = {f"t{i}": key[0] for i, key in enumerate(keys)}
    marks = ", ".join(f":{name}" for name in parameters)
    names = ", ".join(TASK_ROW)
    return f"SELECT {names} FROM {TASKS.name} WHERE task_id IN ({marks})", parameters


def _where(matched: Mapping[str, Condition], parameters: dict[str, Value]) -> str:
    return _joined(_conditions(matched, parameters))


def _joined(parts: Sequence[str]) -> str:
    return f" WHERE {' AND '.join(parts)}" if parts else ""


def _conditions(matched: Mapping[str, Condition], parameters: dict[str, Value]) -> list[str]:
    parts = []
    for name, wanted in matched.items():
        if isinstance(wanted, Prefix):
            # A range, so that an index serves it: these columns compare as bytes in every store.
            parameters[f"w_{name}"] = wanted.text
            parts.append(f"{name} >= :w_{name}")
            if beyond := wanted.beyond:
                parameters[f"w_{name}_end"] = beyond
                parts.append(f"{name} < :w_{name}_end")
        elif isinstance(wanted, tuple):
            marks = {f"w_{name}_{i}": value for i, value in enumerate(wanted)}
            parameters.update(marks)
            parts.append(
                f"{name} IN ({', '.join(f':{mark}' for mark in marks)})" if marks else "1 = 0"
            )
        elif isinstance(wanted, Expired):
            parameters[f"w_{name}"] = wanted.now_s
            parts.append(f"{name} <= :w_{name}")
        elif isinstance(wanted, Unexpired):
            parameters[f"w_{name}"] = wanted.now_s
            parts.append(f"({name} IS NULL OR {name} > :w_{name})")
        elif isinstance(wanted, Between):
            parameters[f"w_{name}_first"], parameters[f"w_{name}_last"] = wanted.first, wanted.last
            parts.append(f"{name} BETWEEN :w_{name}_first AND :w_{name}_last")
        elif wanted is None:
            parts.append(f"{name} IS NULL")
        else:
            parameters[f"w_{name}"] = wanted
            parts.append(f"{name} = :w_{name}")
    return parts
