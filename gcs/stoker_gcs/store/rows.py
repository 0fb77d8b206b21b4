"""Decoding of rows of the event log and the task history, shared by all stores and their readers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from stoker_gcs.state.schema import TASKS
from stoker_wire.data.spool import record_of
from stoker_wire.messages.control import Event

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stoker_gcs.store.changes import Append
    from stoker_wire.messages.work import TaskRecord

_payload = msgspec.msgpack.Decoder(dict[str, Any])


def numbered(event: Append, seq: int) -> Event:
    """Return the event of an operation, with its sequence number."""
    payload = _payload.decode(event.payload)
    return Event(seq=seq, at_s=event.at_s, kind=event.kind, subject=event.subject, payload=payload)


def event_of(row: Mapping[str, Any]) -> Event:
    """Return the event of a row of ``events``."""
    return Event(
        seq=row["seq"],
        at_s=row["at_s"],
        kind=row["kind"],
        subject=row["subject"],
        payload=_payload.decode(row["payload"]),
    )


def task_of(row: Mapping[str, Any]) -> TaskRecord:
    """Return the record of a row of ``tasks``."""
    return record_of([row[name] for name in TASKS.names])
