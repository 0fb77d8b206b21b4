"""The object table: an entry lives while a ref or a borrower holds it, and settles once."""

from __future__ import annotations

from stoker.runtime.objects.table import ObjectTable
from stoker_wire.messages.data import Inline

LOCATION = Inline(b"value")


class Waiting:
    def __init__(self) -> None:
        self.count = 0

    def settled(self) -> None:
        self.count += 1


def test_an_entry_settles_once_and_tells_everybody_once() -> None:
    table = ObjectTable()
    entry = table.create("o_1")
    waiter = Waiting()
    entry.waiters.extend([waiter, waiter])
    entry.subscribers.append("channel")
    entry.task = object()
    waiters, subscribers = table.settle(entry, LOCATION)
    assert (waiters, subscribers) == ([waiter, waiter], ["channel"])
    assert (entry.location, entry.task, entry.waiters, entry.subscribers) == (
        LOCATION,
        None,
        [],
        [],
    )
    assert table.settle(entry, Inline(b"other")) == ([], [])
    assert entry.location is LOCATION


def test_a_dropped_entry_goes_with_its_last_ref_once() -> None:
    table = ObjectTable()
    entry = table.create("o_1")
    entry.refs += 1
    assert table.drop_refs([entry]) == [], "another ref was made since"
    assert table.drop_refs([entry]) == [entry]
    assert len(table) == 0
    assert not table.remove(entry), "it is freed once"


def test_a_lent_entry_stays() -> None:
    table = ObjectTable()
    entry = table.create("o_1")
    entry.borrowers = 1
    assert table.drop_refs([entry]) == []
    assert table.get("o_1") is entry


def test_an_old_entry_never_removes_a_new_one_of_the_same_id() -> None:
    table = ObjectTable()
    old = table.create("o_1")
    new = table.create("o_1")
    assert table.drop_refs([old]) == []
    assert table.get("o_1") is new
