"""The object table: an entry lives while a ref or a borrower holds it, and settles once."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.core.objects import Entry, ObjectTable
from stoker_wire.messages.common import Address
from stoker_wire.messages.data import Inline, Stored

PLACE = Inline(b"value")


class Ref:
    """Stands for an ObjectRef."""


class Waiting:
    def __init__(self) -> None:
        self.count = 0

    def settled(self) -> None:
        self.count += 1


def held(table: ObjectTable, object_id: str) -> tuple[Entry, Ref]:
    entry, ref = table.create(object_id), Ref()
    entry.ref = weakref.ref(ref)
    return entry, ref


def test_an_entry_settles_once_and_tells_everybody_once() -> None:
    table = ObjectTable()
    entry, _ref = held(table, "o_1")
    waiter = Waiting()
    entry.waiters += [waiter, waiter]
    entry.subscribers.append("line")
    entry.task = object()
    waiters, subscribers = table.settle(entry, PLACE)
    assert (waiters, subscribers) == ([waiter, waiter], ["line"])
    assert (entry.place, entry.task, entry.waiters, entry.subscribers) == (PLACE, None, [], [])
    assert table.settle(entry, Inline(b"other")) == ([], [])
    assert entry.place is PLACE


def test_a_dropped_entry_goes_unless_a_borrower_holds_it() -> None:
    table = ObjectTable()
    entry, ref = held(table, "o_1")
    assert table.dropped([entry]) == [], "a ref was made anew since"
    assert table.borrow(["o_1", "o_gone"], "p_b") == ["o_gone"]
    del ref
    gc.collect()
    assert table.dropped([entry]) == []
    assert table.unborrow(["o_1", "o_gone"], "p_other") == []
    assert table.unborrow(["o_1"], "p_b") == [entry]
    assert len(table) == 0
    assert table.unborrow(["o_1"], "p_b") == []
    assert table.dropped([entry]) == [], "it is freed once"


def test_a_borrower_that_is_gone_lets_go_of_everything() -> None:
    table = ObjectTable()
    entries = [table.create(f"o_{i}") for i in range(3)]
    table.borrow(["o_0", "o_1"], "p_a")
    table.borrow(["o_1", "o_2"], "p_b")
    assert table.borrower_gone("p_a") == [entries[0]]
    assert table.borrower_gone("p_b") == entries[1:]
    assert table.borrower_gone("p_b") == []


def test_an_old_entry_never_removes_a_new_one_of_the_same_id() -> None:
    table = ObjectTable()
    old = table.create("o_1")
    new, _ref = held(table, "o_1")
    assert table.dropped([old]) == []
    assert table.get("o_1") is new


def test_stored_here_names_what_this_process_owns_on_a_node() -> None:
    table = ObjectTable()
    here = table.create("o_1")
    table.create("o_2").place = PLACE
    table.create("o_3").place = Stored(1, "n_other", "http://x")
    borrowed = table.create("o_4", Address("p", "n", "h", "", ""))
    here.place = borrowed.place = Stored(1, "n_here", "http://x")
    assert table.stored_here("n_here") == [here]


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["create", "drop", "borrow", "unborrow", "gone", "settle"]),
        st.integers(0, 4),
        st.integers(0, 2),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(EVENTS)
def test_entries_live_exactly_as_long_as_something_holds_them(events: list[Any]) -> None:
    table = ObjectTable()
    refs: dict[str, Ref] = {}
    borrowers: dict[str, set[str]] = {}
    for what, number, who in events:
        object_id, borrower = f"o_{number}", f"p_{who}"
        entry = table.get(object_id)
        if what == "create" and entry is None:
            entry = table.create(object_id)
            refs[object_id] = Ref()
            entry.ref = weakref.ref(refs[object_id])
            borrowers[object_id] = set()
        elif what == "drop" and object_id in refs and entry is not None:
            del refs[object_id]
            assert table.dropped([entry]) == ([] if borrowers[object_id] else [entry])
        elif what == "borrow":
            gone = table.borrow([object_id], borrower)
            assert gone == ([] if entry is not None else [object_id])
            if entry is not None:
                borrowers[object_id].add(borrower)
        elif what == "unborrow":
            table.unborrow([object_id], borrower)
            if object_id in borrowers:
                borrowers[object_id].discard(borrower)
        elif what == "gone":
            table.borrower_gone(borrower)
            for those in borrowers.values():
                those.discard(borrower)
        elif what == "settle" and entry is not None:
            table.settle(entry, PLACE)
        alive = {i for i in borrowers if i in refs or borrowers[i]}
        assert set(table.entries) == alive
        borrowers = {i: b for i, b in borrowers.items() if i in alive}
