"""The fold of the event log: a pure function from a state and the events after it to the next state.

Each event carries its entity's record as it is after the change, packed as the table has it, so that the
fold decodes nothing: the newest record of each key is the state. Records that retention removes leave by
an event that names many of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from stoker_wire.messages.events import EventKind, RemovedRecords

TABLES = ("nodes", "jobs", "actors", "placement_groups", "detached_objects", "queues", "schedules")
"""The kinds of what is rebuilt, by the names of their tables."""
TABLE_OF = {
    "node": "nodes",
    "gpu": "nodes",
    "job": "jobs",
    "actor": "actors",
    "placement_group": "placement_groups",
    "object": "detached_objects",
    "queue": "queues",
    "schedule": "schedules",
}
"""The table of an event, by the part of its kind before the dot; its subject is the key there."""
REMOVES = frozenset(
    {
        EventKind.NODE_DELETED.value,
        EventKind.JOB_DELETED.value,
        EventKind.OBJECT_FREED.value,
        EventKind.QUEUE_REMOVED.value,
        EventKind.SCHEDULE_DELETED.value,
    }
)
_removed = msgspec.msgpack.Decoder(RemovedRecords)


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """An event as the log has it: ``payload`` is packed."""

    seq: int
    at_s: float
    kind: str
    subject: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The records after the event ``seq``, packed, by table and key; ``at_s`` is the time of that event."""

    seq: int = 0
    at_s: float = 0.0
    tables: Mapping[str, Mapping[str, bytes]] = field(
        default_factory=lambda: {name: {} for name in TABLES}
    )


def fold(state: ClusterState, events: Iterable[LoggedEvent]) -> ClusterState:
    """Return the state after these events, which follow it in the order of their numbers."""
    tables = {name: dict(state.tables.get(name, {})) for name in TABLES}
    seq, at_s = state.seq, state.at_s
    for event in events:
        seq, at_s = event.seq, event.at_s
        if event.kind == EventKind.RECORDS_REMOVED:
            removed = _removed.decode(event.payload)
            for key in removed.ids:
                tables.get(removed.kind, {}).pop(key, None)
            continue
        table = TABLE_OF.get(event.kind.partition(".")[0])
        if table is None:
            continue
        if event.kind in REMOVES:
            tables[table].pop(event.subject, None)
        else:
            tables[table][event.subject] = event.payload
    return ClusterState(seq, at_s, tables)
