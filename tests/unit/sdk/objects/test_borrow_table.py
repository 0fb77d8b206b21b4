"""Lending and borrowing, message by message: by line, in order, each once."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.runtime.objects.borrow_table import BorrowTable
from stoker.runtime.objects.table import Entry, ObjectTable
from stoker_wire.messages.common import Address
from stoker_wire.messages.data import Borrow, ReleaseBorrow

OWNER = Address("p_owner", "n", "h", "", "")


def borrows() -> BorrowTable:
    return BorrowTable(ObjectTable())


def test_what_is_lent_lives_until_it_is_returned() -> None:
    mine = borrows()
    entry = mine._table.create("o_1")
    assert mine.lend("line", Borrow(1, ["o_1", "o_gone"])) == ["o_gone"]
    assert mine.drop_refs([entry]) == []
    assert mine.release("other", ReleaseBorrow(["o_1"], 1)) == [], "on the line of the loan only"
    assert mine.release("line", ReleaseBorrow(["o_1", "o_gone"], 2)) == [entry]
    assert len(mine._table) == 0


def test_a_message_that_comes_twice_is_done_once() -> None:
    mine = borrows()
    entry = mine._table.create("o_1")
    mine.lend("line", Borrow(1, ["o_1"]))
    mine.lend("line", Borrow(1, ["o_1"]))
    assert entry.borrowers == 1
    mine.release("line", ReleaseBorrow(["o_1"], 2))
    mine.lend("line", Borrow(3, ["o_1"]))
    mine.release("line", ReleaseBorrow(["o_1"], 2))
    assert entry.borrowers == 1, "the old word does not end the new loan"
    mine.lend("line", Borrow(1, ["o_1"]))
    mine.release("line", ReleaseBorrow(["o_1"], 4))
    assert entry.borrowers == 0, "and does not begin one"


def test_a_peer_that_numbers_no_unborrow_is_heard() -> None:
    mine = borrows()
    entry = mine._table.create("o_1")
    mine.lend("line", Borrow(7, ["o_1"]))
    mine.release("line", ReleaseBorrow(["o_1"]))
    assert entry.borrowers == 0


def test_a_lost_line_ends_its_own_loans_only() -> None:
    mine = borrows()
    entries = [mine._table.create(f"o_{i}") for i in range(3)]
    mine.lend("a", Borrow(1, ["o_0", "o_1"]))
    mine.lend("b", Borrow(1, ["o_1", "o_2"]))
    for entry in entries:
        entry.subscribers.extend(["a", "b"])
    assert mine.drop_refs(entries) == []
    assert mine.drop_borrower("a") == [entries[0]]
    assert entries[1].subscribers == ["b"], "nobody is there to be told"
    assert mine.drop_borrower("b") == entries[1:]
    assert mine.drop_borrower("b") == []
    assert not mine.lent_by_channel


def test_adopting_announces_once_and_dropping_returns_once() -> None:
    mine = borrows()
    entry = mine.adopt("o_1", OWNER)
    assert mine.adopt("o_1", OWNER) is entry
    assert list(mine.unannounced) == [entry]
    assert mine.announce("line", mine.unannounced) == Borrow(1, ["o_1"])
    assert mine.announce("line", [entry]) is None
    assert mine.drop_refs([entry]) == []
    assert mine.drop_refs([entry]) == [entry]
    assert mine.take_releases(["o_1", "o_other"]) == [("line", ReleaseBorrow(["o_1"], 2))]
    assert mine.take_releases(["o_1"]) == []


def test_what_was_dropped_before_it_was_announced_is_nobodys_business() -> None:
    mine = borrows()
    entry = mine.adopt("o_1", OWNER)
    mine.drop_refs([entry])
    assert mine.announce("line", [entry]) is None
    assert not mine.releasing


def test_what_is_adopted_again_before_it_was_returned_is_kept() -> None:
    mine = borrows()
    entry = mine.adopt("o_1", OWNER)
    mine.announce("line", [entry])
    mine.drop_refs([entry])
    again = mine.adopt("o_1", OWNER)
    assert again is not entry
    assert mine.take_releases(["o_1"]) == [], "the loan goes on, without a word"
    assert mine.drop_refs([again]) == [again]
    assert mine.take_releases(["o_1"]) == [("line", ReleaseBorrow(["o_1"], 2))]


def test_a_lost_lender_leaves_what_is_to_be_announced_anew() -> None:
    mine = borrows()
    kept, dropped, elsewhere = (mine.adopt(f"o_{i}", OWNER) for i in range(3))
    mine.announce("line", [kept, dropped])
    mine.announce("other", [elsewhere])
    mine.drop_refs([dropped])
    assert mine.drop_lender("line") == [kept]
    assert not mine.releasing
    assert mine.announce("new", [kept]) == Borrow(3, ["o_0"])
    assert elsewhere.channel == "other"


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["create", "drop", "lend", "return", "lost", "ref"]),
        st.integers(0, 4),
        st.integers(0, 2),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_entries_live_exactly_as_long_as_something_holds_them(steps: list[Any]) -> None:
    mine = borrows()
    refs: dict[str, int] = {}
    lent: dict[str, set[str]] = {}
    freed: list[Entry] = []
    for number, (what, which, who) in enumerate(steps, 1):
        object_id, line = f"o_{which}", f"line_{who}"
        entry = mine._table.get(object_id)
        if what == "create" and entry is None:
            mine._table.create(object_id)
            refs[object_id], lent[object_id] = 1, set()
        elif what == "ref" and entry is not None:
            entry.refs += 1
            refs[object_id] += 1
        elif what == "drop" and refs.get(object_id) and entry is not None:
            refs[object_id] -= 1
            freed += mine.drop_refs([entry])
        elif what == "lend":
            gone = mine.lend(line, Borrow(number, [object_id]))
            assert gone == ([] if entry is not None else [object_id])
            if entry is not None:
                lent[object_id].add(line)
        elif what == "return":
            freed += mine.release(line, ReleaseBorrow([object_id], number))
            lent.get(object_id, set()).discard(line)
        elif what == "lost":
            freed += mine.drop_borrower(line)
            for lines in lent.values():
                lines.discard(line)
        alive = {i for i in refs if refs[i] or lent[i]}
        assert set(mine._table.entries) == alive
        assert {i for theirs in mine.lent_by_channel.values() for i in theirs} == {
            i for i in lent if lent[i]
        }
        refs = {i: n for i, n in refs.items() if i in alive}
        lent = {i: n for i, n in lent.items() if i in alive}
    assert len(freed) == len(set(map(id, freed))), "each is freed once"
