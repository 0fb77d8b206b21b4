"""Decoding of rows of the event log and the task history, shared by all stores and their readers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from stoker_gcs.state.schema import TASKS
from stoker_gcs.store.task_merge import is_array
from stoker_wire.data.spool import record_of
from stoker_wire.errors import DatabaseError
from stoker_wire.http.tolerant import convert_known
from stoker_wire.messages.control import Author, Event

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stoker_gcs.store.changes import Append
    from stoker_wire.messages.work import TaskRecord


class TaskTimes(msgspec.Struct, array_like=True, frozen=True):
    """The first of the facts of an attempt (:class:`stoker_wire.data.spool.TaskFacts`)."""

    parent_task_id: str = ""
    submitted_at_s: float | None = None
    started_at_s: float | None = None
    ended_at_s: float | None = None
    worker_id: str = ""


class _TimesInMap(msgspec.Struct, frozen=True):
    """The same of a row that the first version wrote."""

    submitted_at_s: float | None = None
    started_at_s: float | None = None
    ended_at_s: float | None = None
    worker_id: str = ""


_times = msgspec.msgpack.Decoder(TaskTimes).decode
_times_in_map = msgspec.msgpack.Decoder(_TimesInMap).decode
TASK_ROW = TASKS.names[:9]
"""The columns of ``tasks`` that travel (:data:`stoker_wire.data.spool.TaskRow`); the others repeat what
``record`` says, for queries."""
_BY = "@by"
_payload = msgspec.msgpack.Decoder(dict[str, Any])


def numbered(event: Append, seq: int) -> Event:
    """Return the event of an operation, with its sequence number."""
    payload, by = _parts_of(event.payload)
    return Event(
        seq=seq,
        at_s=event.at_s,
        kind=event.kind,
        subject=event.subject,
        payload=payload,
        by=by,
    )


def with_author(payload: bytes, author: Author) -> bytes:
    """Return a payload that says whose request made the event: by a key that no record has."""
    return msgspec.msgpack.encode({**_payload.decode(payload), _BY: author})


def _parts_of(packed: bytes) -> tuple[dict[str, Any], Author | None]:
    payload = _payload.decode(packed)
    by = payload.pop(_BY, None)
    return payload, None if by is None else convert_known(by, Author)


def event_of(row: Mapping[str, Any]) -> Event:
    """Return the event of a row of ``events``; DatabaseError if it is damaged."""
    try:
        payload, by = _parts_of(row["payload"])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DatabaseError(
            f"event {row['seq']} cannot be read\n{error}\n"
            "its row in the table events is damaged: restore a backup, or delete the row"
        ) from None
    return Event(
        seq=row["seq"],
        at_s=row["at_s"],
        kind=row["kind"],
        subject=row["subject"],
        payload=payload,
        by=by,
    )


def task_of(row: Mapping[str, Any]) -> TaskRecord:
    """Return the record of a row of ``tasks``."""
    return record_of([row[name] for name in TASK_ROW])


def times_of(row: Mapping[str, Any]) -> TaskTimes:
    """Return when an attempt was submitted, began and ended: all that is decoded of its row."""
    return times_in(row["record"])


def times_in(packed: bytes) -> TaskTimes:
    """Return the times in the facts of an attempt, and its worker."""
    try:
        return _times(packed)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        if is_array(packed):
            return TaskTimes()  # a damaged row
    try:
        old = _times_in_map(packed)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return TaskTimes()
    return TaskTimes("", old.submitted_at_s, old.started_at_s, old.ended_at_s, old.worker_id)
