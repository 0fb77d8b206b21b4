"""Merge of the reports about one attempt: pure, commutative where it matters, idempotent.

Several processes report the same attempt, late, twice and out of order. The further state wins, a
terminal one absorbs, and a field that only one report has (node, start time, demand) stays.
An end that the gcs only inferred ("its job ended") yields to one that a process reports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stoker_wire.data.spool import RANKS, TaskFacts, rank, record_of, row_of
from stoker_wire.messages.common import ErrorInfo
from stoker_wire.messages.work import TaskRecord, TaskState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker_wire.data.spool import TaskRow

_DEFAULTS = {
    "actor_id": "",
    "parent_task_id": "",
    "submitted_at_s": None,
    "started_at_s": None,
    "ended_at_s": None,
    "node_id": "",
    "worker_id": "",
    "args_nbytes": 0,
    "result_nbytes": 0,
    "demand": None,
    "name": "",
    "owner_id": "",
    "reconstructs": "",
    "reconstructions": 0,
    "lineage_depth": 0,
    "spans": None,
    "cpus": 0.0,
    "gpus": 0.0,
    "group_id": "",
}
_FACTS: list[object] = list(TaskFacts.__struct_defaults__)
_KEPT = frozenset(
    index for index, name in enumerate(TaskFacts.__struct_fields__) if name in _DEFAULTS
)
_KEPT_COLUMNS = (4, 5, 6)
"""The columns name, node_id and actor_id."""
_untyped = msgspec.msgpack.Decoder(list[object]).decode
_pack = msgspec.msgpack.Encoder().encode


def merge(old: TaskRecord, new: TaskRecord) -> TaskRecord:
    """Return the record after the report ``new``, given the record ``old``."""
    if rank(old) >= RANKS[TaskState.FINISHED] or rank(new) < rank(old):
        winner, other = old, new
    else:
        winner, other = new, old
    missing = {
        name: getattr(other, name)
        for name, default in _DEFAULTS.items()
        if getattr(winner, name) == default and getattr(other, name) != default
    }
    return msgspec.structs.replace(winner, **missing) if missing else winner


def merge_rows(old: TaskRow, new: TaskRow) -> TaskRow:
    """Merge rows, like :func:`merge` but in a third of its time: no record is made of them."""
    if not is_array(old[8]) or not is_array(new[8]):
        return row_of(merge(record_of(old), record_of(new)))
    ended = RANKS[TaskState.FINISHED]
    winner, other = (old, new) if old[7] >= ended or new[7] < old[7] else (new, old)
    facts, others = _facts(winner[8]), _facts(other[8])
    packed = winner[8]
    if others != facts:
        facts += _FACTS[len(facts) :]
        # Facts that only a newer version knows follow those known here, and stay.
        unknown = others[len(facts) :]
        facts += unknown
        found = bool(unknown)
        for index, value in enumerate(others[: len(_FACTS)]):
            if facts[index] == _FACTS[index] != value and index in _KEPT:
                facts[index], found = value, True
        packed = _pack(facts) if found else packed
    named = (winner[at] or other[at] for at in _KEPT_COLUMNS)
    return (*winner[:4], *named, winner[7], packed)  # type: ignore[return-value]


def is_array(packed: bytes) -> bool:
    """Return whether a row has its facts as this version writes them: the first one wrote a map."""
    return packed[:1] >= b"\x90" and (packed[0] & 0xF0 == 0x90 or packed[0] == 0xDC)


def _facts(packed: bytes) -> list[object]:
    """Return the facts of a row, as far as it is not damaged."""
    try:
        return _untyped(packed)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []


def merge_all(rows: Iterable[TaskRow]) -> dict[tuple[str, int], TaskRow]:
    """Fold reports by (task_id, attempt)."""
    merged: dict[tuple[str, int], TaskRow] = {}
    for row in rows:
        key = (row[0], row[1])
        known = merged.setdefault(key, row)
        if known is not row:
            merged[key] = merge_rows(known, row)
    return merged


def inferred_end(record: TaskRecord, reason: str, at_s: float) -> TaskRecord:
    """Return the end of an attempt that no process can report: running FAILED, waiting CANCELLED."""
    ran = record.state is TaskState.RUNNING
    return msgspec.structs.replace(
        record,
        state=TaskState.FAILED if ran else TaskState.CANCELLED,
        ended_at_s=at_s,
        waiting_for="",
        error=ErrorInfo(
            code="worker_died" if ran else "task_cancelled",
            message=reason,
            extra={"inferred": True},
        ),
    )
