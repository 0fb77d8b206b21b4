"""What leaves a worker, and in which order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

from stoker.runtime.worker.call import CallTable, Outcome, ReceivedCall
from stoker.runtime.worker.execute import CallExecutor
from stoker_wire.messages.common import Address
from stoker_wire.messages.data import Call, Done, Inline, Item, Result, Template


class Line:
    job_id = "j_1"

    def __init__(self) -> None:
        self.posted: list[Any] = []

    def post(self, message: Any) -> None:
        self.posted.append(message)


def outcome(line: Line, task_id: str) -> Outcome:
    received = ReceivedCall(cast("Any", line), Call(task_id, 1, Inline(b"")), Template(1, "f", "f"))
    return Outcome(received, Result(task_id, 0, ()), 0.0)


def test_items_leave_before_the_end_of_their_call() -> None:
    """Also where a call before it ended in the same moment, and its result has not left."""
    woken: list[Any] = []
    loop = SimpleNamespace(call_soon_threadsafe=woken.append)
    io: Any = SimpleNamespace(loop=loop, visit=lambda work: False)
    objects: Any = MagicMock()
    objects.borrowing.would_overtake_borrow = lambda line: False
    address = Address("w_1", "n_1", "h", "", "")
    other, job = MagicMock(), SimpleNamespace(lease=None, job_id="j_1", held=(1.0, 0.0, ""))
    executor = CallExecutor(
        other,
        address,
        io,
        other,
        other,
        other,
        cast("Any", job),
        objects,
        other,
        CallTable(),
        other,
    )
    line = Line()
    first, second = outcome(line, "t_1"), outcome(line, "t_2")
    executor.report(first)
    item = Item("t_2", 0, 0, Inline(b""))
    executor.send_item(second.received, item, ["ref"])
    executor.report(second)
    (flush,) = woken
    flush()
    assert line.posted == [item, Done([first.result, second.result])]
    assert list(executor.pinned.values()) == [(line, ["ref"])]
    executor.send_item(second.received, item, [])
    assert len(woken) == 2, "the next moment wakes the loop again"


def test_a_call_is_not_taken_for_its_later_attempt() -> None:
    """The first came over a channel that was cut while it waited, and its caller sent it again."""
    calls = CallTable()
    first, second = (outcome(Line(), "t_1").received for _ in range(2))
    calls.queued["t_1"] = second
    assert not calls.take(first)
    assert calls.take(second)
    assert not calls.take(second)
    assert (calls.queued, calls.running) == ({}, {"t_1": second})
