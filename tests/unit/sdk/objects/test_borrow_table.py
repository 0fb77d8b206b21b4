"""Lending and borrowing, message by message: by channel, in order, each once."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.runtime.objects.borrow_table import BorrowTable
from stoker.runtime.objects.table import Entry, ObjectTable
from stoker_wire.messages.common import Address
from stoker_wire.messages.data import Borrow, ReleaseBorrow

OWNER = Address("p_owner", "n", "h", "", "")


def new_table() -> BorrowTable:
    return BorrowTable(ObjectTable())


def test_what_is_lent_lives_until_it_is_returned() -> None:
    borrows = new_table()
    entry = borrows._table.create("o_1")
    assert borrows.lend("channel", Borrow(1, ["o_1", "o_gone"])) == ["o_gone"]
    assert borrows.drop_refs([entry]) == []
    assert borrows.release("other", ReleaseBorrow(["o_1"], 1)) == [], (
        "on the channel of the borrow only"
    )
    assert borrows.release("channel", ReleaseBorrow(["o_1", "o_gone"], 2)) == [entry]
    assert len(borrows._table) == 0


def test_a_message_that_comes_twice_is_done_once() -> None:
    borrows = new_table()
    entry = borrows._table.create("o_1")
    borrows.lend("channel", Borrow(1, ["o_1"]))
    borrows.lend("channel", Borrow(1, ["o_1"]))
    assert entry.borrowers == 1
    borrows.release("channel", ReleaseBorrow(["o_1"], 2))
    borrows.lend("channel", Borrow(3, ["o_1"]))
    borrows.release("channel", ReleaseBorrow(["o_1"], 2))
    assert entry.borrowers == 1, "the old word does not end the new borrow"
    borrows.lend("channel", Borrow(1, ["o_1"]))
    borrows.release("channel", ReleaseBorrow(["o_1"], 4))
    assert entry.borrowers == 0, "and does not begin one"


def test_a_peer_that_numbers_no_release_is_obeyed() -> None:
    borrows = new_table()
    entry = borrows._table.create("o_1")
    borrows.lend("channel", Borrow(7, ["o_1"]))
    borrows.release("channel", ReleaseBorrow(["o_1"]))
    assert entry.borrowers == 0


def test_a_lost_channel_ends_its_own_borrows_only() -> None:
    borrows = new_table()
    entries = [borrows._table.create(f"o_{i}") for i in range(3)]
    borrows.lend("a", Borrow(1, ["o_0", "o_1"]))
    borrows.lend("b", Borrow(1, ["o_1", "o_2"]))
    for entry in entries:
        entry.subscribers.extend(["a", "b"])
    assert borrows.drop_refs(entries) == []
    assert borrows.drop_borrower("a") == [entries[0]]
    assert entries[1].subscribers == ["b"], "nobody is there to be told"
    assert borrows.drop_borrower("b") == entries[1:]
    assert borrows.drop_borrower("b") == []
    assert not borrows.lent_by_channel


def test_borrowing_announces_once_and_dropping_returns_once() -> None:
    borrows = new_table()
    entry = borrows.borrow("o_1", OWNER)
    assert borrows.borrow("o_1", OWNER) is entry
    assert list(borrows.unannounced) == [entry]
    assert borrows.announce("channel", borrows.unannounced) == Borrow(1, ["o_1"])
    assert borrows.announce("channel", [entry]) is None
    assert borrows.drop_refs([entry]) == []
    assert borrows.drop_refs([entry]) == [entry]
    assert borrows.take_releases(["o_1", "o_other"]) == [("channel", ReleaseBorrow(["o_1"], 2))]
    assert borrows.take_releases(["o_1"]) == []


def test_what_was_dropped_before_it_was_announced_is_never_announced() -> None:
    borrows = new_table()
    entry = borrows.borrow("o_1", OWNER)
    borrows.drop_refs([entry])
    assert borrows.announce("channel", [entry]) is None
    assert not borrows.releasing


def test_what_is_borrowed_again_before_it_was_returned_is_kept() -> None:
    borrows = new_table()
    entry = borrows.borrow("o_1", OWNER)
    borrows.announce("channel", [entry])
    borrows.drop_refs([entry])
    again = borrows.borrow("o_1", OWNER)
    assert again is not entry
    assert borrows.take_releases(["o_1"]) == [], "the borrow goes on, without a word"
    assert borrows.drop_refs([again]) == [again]
    assert borrows.take_releases(["o_1"]) == [("channel", ReleaseBorrow(["o_1"], 2))]


def test_a_lost_lender_leaves_what_is_to_be_announced_anew() -> None:
    borrows = new_table()
    kept, dropped, elsewhere = (borrows.borrow(f"o_{i}", OWNER) for i in range(3))
    borrows.announce("channel", [kept, dropped])
    borrows.announce("other", [elsewhere])
    borrows.drop_refs([dropped])
    assert borrows.drop_lender("channel") == [kept]
    assert not borrows.releasing
    assert borrows.announce("new", [kept]) == Borrow(3, ["o_0"])
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
    borrows = new_table()
    refs: dict[str, int] = {}
    lent: dict[str, set[str]] = {}
    freed: list[Entry] = []
    for number, (what, which, who) in enumerate(steps, 1):
        object_id, channel = f"o_{which}", f"channel_{who}"
        entry = borrows._table.get(object_id)
        if what == "create" and entry is None:
            borrows._table.create(object_id)
            refs[object_id], lent[object_id] = 1, set()
        elif what == "ref" and entry is not None:
            entry.refs += 1
            refs[object_id] += 1
        elif what == "drop" and refs.get(object_id) and entry is not None:
            refs[object_id] -= 1
            freed += borrows.drop_refs([entry])
        elif what == "lend":
            gone = borrows.lend(channel, Borrow(number, [object_id]))
            assert gone == ([] if entry is not None else [object_id])
            if entry is not None:
                lent[object_id].add(channel)
        elif what == "return":
            freed += borrows.release(channel, ReleaseBorrow([object_id], number))
            lent.get(object_id, set()).discard(channel)
        elif what == "lost":
            freed += borrows.drop_borrower(channel)
            for channels in lent.values():
                channels.discard(channel)
        alive = {i for i in refs if refs[i] or lent[i]}
        assert set(borrows._table.entries) == alive
        assert {i for objects in borrows.lent_by_channel.values() for i in objects} == {
            i for i in lent if lent[i]
        }
        refs = {i: n for i, n in refs.items() if i in alive}
        lent = {i: n for i, n in lent.items() if i in alive}
    assert len(freed) == len(set(map(id, freed))), "each is freed once"
