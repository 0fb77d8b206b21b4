"""Who waits until the owners know of borrows, while channels are cut."""

from __future__ import annotations

import asyncio
from threading import Lock
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from stoker.exceptions import OwnerDiedError
from stoker.runtime.objects.borrowing import Borrowing
from stoker.runtime.objects.refs import CURRENT
from stoker.runtime.objects.table import Entry, ObjectTable
from stoker.runtime.serialization.exceptions import decode_error
from stoker_wire.data.channel import Channel
from stoker_wire.errors import UnavailableError
from stoker_wire.messages.common import Address
from stoker_wire.messages.data import Borrow, Borrowed, Failed, Location, Release, ReleaseBorrow
from stoker_wire.process.background import Background

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from stoker.runtime.objects.refs import ObjectRef

BORROWER, OWNER, HOLDER = (Address(name, "n", "h", "", "") for name in ("b", "o", "w"))
TURNS = 20
"""More turns of the loop than anything here takes."""


async def settled() -> None:
    """Let everything happen that can, without news from outside."""
    for _ in range(TURNS):
        await asyncio.sleep(0)


class FakeChannel(Channel):
    """Notes what is posted."""

    def __init__(self, peer: Address) -> None:
        self.peer = peer
        self.closed = False
        self.posted: list[Any] = []

    def post(self, message: Any) -> None:
        self.posted.append(message)


class Borrower:
    """A process that borrows from one owner; the test opens and cuts its channels, and answers."""

    def __init__(self, background: Background) -> None:
        self.lock = Lock()
        self.table = ObjectTable()
        self.owner = FakeChannel(OWNER)
        """The channel to the owner, if it is open; a new one opens when the test says so."""
        self._opened: asyncio.Future[None] | None = None
        loop = asyncio.get_running_loop()
        io: Any = SimpleNamespace(loop=loop, background=background, wake=lambda: None)
        this: Any = self
        self.borrowing = Borrowing(BORROWER, io, this, self.table, this)

    # its channels

    def open_channel(self, peer_id: str) -> FakeChannel | None:
        return None if self.owner.closed else self.owner

    async def channel(self, owner: Address) -> FakeChannel:
        self._opened = asyncio.get_running_loop().create_future()
        await self._opened
        return self.owner

    async def cut(self) -> None:
        """Cut the channel to the owner, with what is under way on it."""
        self.owner.closed = True
        self.borrowing.on_channel_closed(self.owner)
        await settled()

    async def opens(self) -> None:
        assert self._opened is not None
        self.owner = FakeChannel(OWNER)
        self._opened.set_result(None)
        await settled()

    async def does_not_open(self) -> None:
        assert self._opened is not None
        self._opened.set_exception(UnavailableError("it is gone"))
        await settled()

    async def answers(self) -> None:
        borrow = self.owner.posted[-1]
        assert isinstance(borrow, Borrow)
        self.borrowing.on_borrowed(Borrowed(borrow.number))
        await settled()

    # its objects, and refs to them

    @property
    def objects(self) -> Borrower:
        return self

    def settle(self, entry: Entry, location: Location) -> None:
        self.table.settle(entry, location)

    def drop_ref(self, entry: Entry) -> None:
        self.borrowing.borrows.drop_refs([entry])


@pytest.fixture
async def borrower(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Borrower]:
    async with Background("test") as background:
        made = Borrower(background)
        monkeypatch.setattr(CURRENT, "runtime", made)
        yield made


@pytest.fixture
def holder() -> FakeChannel:
    """The channel to a worker, which holds the refs inside a result until they are borrowed here."""
    return FakeChannel(HOLDER)


async def taken(borrower: Borrower, holder: FakeChannel) -> ObjectRef[Any]:
    """Take a ref out of a worker's result."""
    ref = borrower.borrowing.import_ref("o_1", OWNER)
    borrower.borrowing.release_pinned(holder, ["t_1"])
    await settled()
    assert [type(m) for m in borrower.owner.posted] == [Borrow]
    assert holder.posted == []
    return ref


async def test_who_passed_a_ref_on_holds_it_until_its_owner_knows_of_the_borrow(
    borrower: Borrower, holder: FakeChannel
) -> None:
    ref = await taken(borrower, holder)
    await borrower.answers()
    assert holder.posted == [Release(["t_1"])]
    assert ref.id == "o_1"


async def test_a_borrow_that_a_cut_took_is_waited_for_until_the_owner_knows_of_the_new_one(
    borrower: Borrower, holder: FakeChannel
) -> None:
    ref = await taken(borrower, holder)
    for number in (2, 3):
        await borrower.cut()
        assert holder.posted == [], "the owner may never have got the borrow"
        await borrower.opens()
        assert borrower.owner.posted == [Borrow(number, [ref.id])]
        assert holder.posted == [], "nor has it got the new one yet"
    await borrower.answers()
    assert holder.posted == [Release(["t_1"])]
    assert not borrower.borrowing.unacknowledged


async def test_what_kept_a_borrowed_ref_alive_is_not_returned_before_that_is_borrowed_anew(
    borrower: Borrower,
) -> None:
    """A value was read, which holds a ref; the value is dropped, and the ref is not."""
    value = borrower.borrowing.import_ref("o_value", OWNER)
    borrower.borrowing.flush()
    await borrower.answers()
    first, second = borrower.owner, FakeChannel(OWNER)
    borrower.owner = second
    inside = borrower.borrowing.import_ref("o_inside", OWNER)
    borrower.borrowing.flush()
    del value
    borrower.borrowing.send_releases()
    await settled()
    await borrower.cut()
    await borrower.opens()
    assert borrower.owner.posted == [Borrow(3, [inside.id])]
    assert len(first.posted) == 1
    await borrower.answers()
    assert first.posted[1:] == [ReleaseBorrow(["o_value"], 4)]


def _owner_does_not_answer(location: Location | None) -> bool:
    return isinstance(location, Failed) and isinstance(decode_error(location), OwnerDiedError)


async def test_nobody_waits_for_an_owner_that_is_gone(
    borrower: Borrower, holder: FakeChannel
) -> None:
    ref = await taken(borrower, holder)
    await borrower.cut()
    await borrower.does_not_open()
    assert holder.posted == [Release(["t_1"])]
    assert _owner_does_not_answer(ref._entry.location)
    assert not borrower.borrowing.unacknowledged


async def test_nobody_waits_for_a_borrow_that_was_dropped_before_the_cut(
    borrower: Borrower, holder: FakeChannel
) -> None:
    ref = await taken(borrower, holder)
    del ref
    await borrower.cut()
    assert holder.posted == [Release(["t_1"])]
    assert not borrower.borrowing.unacknowledged
