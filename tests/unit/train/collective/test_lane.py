"""The lane: order, failure at any moment, and headers, over a channel that is only pretended."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from stoker.exceptions import BadRequestError
from stoker_train.collective import headers
from stoker_train.collective.channel import TransportError
from stoker_train.collective.errors import CollectiveError, Failure, MemberLostError, MismatchError
from stoker_train.collective.headers import Call
from stoker_train.collective.lane import Inline, Lane, Peers
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WAIT_S = 40.0
LOST = Failure(code="collective_member_lost", text="rank 1 died", ranks=(1,))


class Channel:
    """Two members that do the same; ``change`` alters the header of the second."""

    def __init__(self) -> None:
        self.aborted = False
        self.change: Callable[[torch.Tensor], None] = lambda header: None

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        other = tensor.clone()
        self.change(other)
        return torch.stack([tensor, other])

    def abort(self) -> None:
        self.aborted = True


class Listener:
    def __init__(self) -> None:
        self.said: list[str] = []
        self.heard = threading.Event()

    def lost(self, lane: Lane, text: str) -> None:
        self.said.append(text)
        self.heard.set()


class Made:
    """A lane with what it is made of."""

    def __init__(self, *, check: bool = True) -> None:
        self.channel = Channel()
        self.listener = Listener()
        connect: Any = lambda: self.channel  # noqa: E731
        self.lane = Lane("", (0, 1), connect, self.listener, timeout_s=WAIT_S, check=check)


@pytest.fixture
def made() -> Iterator[Made]:
    found = Made()
    yield found
    found.lane.close()
    found.lane.join(WAIT_S)


def test_operations_run_in_order_and_each_has_its_result(made: Made) -> None:
    ran: list[int] = []

    def operation(number: int) -> Callable[[Any], int]:
        def run(_: Any) -> int:
            ran.append(number)
            return number * number

        return run

    handles = [made.lane.submit(Call("op"), operation(number)) for number in range(50)]
    assert [handle.wait(WAIT_S) for handle in handles] == [n * n for n in range(50)]
    assert ran == list(range(50))
    assert (made.lane.sequence, made.lane.current) == (50, None)


def test_an_error_of_an_operation_is_its_callers_and_the_group_is_over(made: Made) -> None:
    def fail(_: Any) -> None:
        raise KeyError("mine")

    failed = made.lane.submit(Call("op"), fail)
    with pytest.raises(KeyError, match="mine"):
        failed.wait(WAIT_S)
    until(lambda: made.listener.said, WAIT_S, "the group is told")
    assert "KeyError" in made.lane.broken


def test_what_does_not_match_is_not_exchanged(made: Made) -> None:
    made.channel.change = lambda sent: sent[headers.NBYTES - 1].fill_(1)
    ran: list[int] = []
    unlike = made.lane.submit(Call("all_reduce", name="grad"), lambda _: ran.append(1))
    with pytest.raises(MismatchError, match="rank 1 at #1: all_reduce 'grad'"):
        unlike.wait(WAIT_S)
    made.channel.change = lambda header: None
    made.lane.submit(Call("all_reduce"), lambda _: ran.append(2)).wait(WAIT_S)
    assert ran == [2]


@pytest.mark.parametrize("check", [True, False])
def test_few_values_travel_with_the_header_if_there_is_one(*, check: bool) -> None:
    made = Made(check=check)
    values = torch.arange(6, dtype=torch.float64).view(2, 3)
    made.channel.change = lambda sent: sent[headers.NBYTES :].zero_()
    handle = made.lane.submit(
        Call("op"), lambda _: None, Inline(values, lambda table: table.clone())
    )
    found = handle.wait(WAIT_S)
    assert (found is not None) == check
    if found is not None:
        assert torch.equal(found, torch.stack([values, torch.zeros(2, 3)]).to(torch.float64))
    made.lane.close()
    made.lane.join(WAIT_S)


def test_a_failure_ends_what_runs_and_what_waits_at_once(made: Made) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def stuck(_: Any) -> None:
        begun.set()
        go_on.wait(WAIT_S)

    handles = [made.lane.submit(Call("op"), stuck) for _ in range(3)]
    assert begun.wait(WAIT_S)
    made.lane.fail(LOST)
    for handle in handles:
        with pytest.raises(MemberLostError, match="rank 1 died"):
            handle.wait(WAIT_S)
    with pytest.raises(MemberLostError):
        made.lane.submit(Call("op"), stuck)
    assert made.channel.aborted
    go_on.set()
    made.lane.join(WAIT_S)


def test_a_broken_connection_is_told_and_its_caller_waits_for_the_reason(made: Made) -> None:
    def broken(_: Any) -> None:
        raise TransportError("Connection closed by peer")

    handle = made.lane.submit(Call("op"), broken)
    behind = made.lane.submit(Call("op"), lambda _: 1)
    assert made.listener.heard.wait(WAIT_S)
    assert made.listener.said == ["Connection closed by peer"]
    assert not handle.done()
    assert made.lane.current is not None
    made.lane.fail(LOST)
    for one in (handle, behind):
        with pytest.raises(MemberLostError):
            one.wait(WAIT_S)


def test_a_lane_that_was_closed_ends_what_was_queued_and_takes_no_more() -> None:
    made = Made(check=False)
    handle = made.lane.submit(Call("op"), lambda _: 1)
    assert handle.wait(WAIT_S) == 1
    made.lane.close()
    made.lane.join(WAIT_S)
    with pytest.raises(CollectiveError, match="has left the group"):
        made.lane.submit(Call("op"), lambda _: 1)


@pytest.mark.parametrize("unlike", [True, False])
def test_an_error_that_is_kept_does_not_keep_the_connections(*, unlike: bool) -> None:
    alive: list[weakref.ref[Channel]] = []

    def connect() -> Any:
        channel = Channel()
        if unlike:
            channel.change = lambda sent: sent[headers.NBYTES - 1].fill_(1)
        alive.append(weakref.ref(channel))
        return channel

    def fail(channel: Any) -> None:
        raise KeyError(repr(channel))

    lane = Lane("", (0, 1), connect, Listener(), timeout_s=WAIT_S, check=True)
    handle = lane.submit(Call("op"), fail)
    with pytest.raises(MismatchError if unlike else KeyError) as kept:
        handle.wait(WAIT_S)
    if unlike:
        lane.close()
    else:  # as the supervisor does with a lane that is broken
        lane.fail(Failure(code="collective_failed", text="broken"))
    lane.join(WAIT_S)
    assert kept.value is not None
    assert alive[0]() is None


def test_a_wait_has_its_own_deadline(made: Made) -> None:
    go_on = threading.Event()
    handle = made.lane.submit(Call("op", name="late"), lambda _: go_on.wait(WAIT_S))
    with pytest.raises(CollectiveError, match=r"op 'late' did not end within 0\.05 s"):
        handle.wait(0.05)
    go_on.set()
    assert handle.wait(WAIT_S) is True


def test_a_pair_of_members_has_one_lane_for_each_direction() -> None:
    asked: list[tuple[str, tuple[int, ...]]] = []

    def make(label: str, ranks: tuple[int, ...]) -> Any:
        asked.append((label, ranks))
        return object()

    peers = Peers(make)
    assert peers.lane(0, 2) is peers.lane(0, 2)
    assert peers.lane(2, 0) is not peers.lane(0, 2)
    assert asked == [("0->2", (0, 2)), ("2->0", (2, 0))]
    with pytest.raises(BadRequestError, match="cannot send to itself"):
        peers.lane(1, 1)
