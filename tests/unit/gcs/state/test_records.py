"""Rows as records: one that is damaged is an error that names it."""

from __future__ import annotations

import msgspec
import pytest

from stoker_gcs.registry.queues.rules import QUEUES
from stoker_gcs.store.rows import event_of
from stoker_wire.errors import DatabaseError
from stoker_wire.messages.queues import Queue

DAMAGED = (b"", b"\xc1", b"\x81\xa4name\xa1\xff", b"\x81\xa1a" + b"\x91" * 100_000, b"\x01")


@pytest.mark.parametrize("record", DAMAGED)
def test_a_damaged_row_is_named(record: bytes) -> None:
    with pytest.raises(DatabaseError, match="queue team cannot be read"):
        QUEUES.decode({"name": "team", "version": 1, "record": record})
    row = {"seq": 7, "at_s": 1.0, "kind": "k", "subject": "s", "payload": record}
    with pytest.raises(DatabaseError, match="event 7 cannot be read"):
        event_of(row)


def test_a_whole_one_is_read() -> None:
    record = msgspec.msgpack.encode(Queue(name="team"))
    assert QUEUES.decode({"name": "team", "version": 1, "record": record}).record.name == "team"
