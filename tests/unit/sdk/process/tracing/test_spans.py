"""Bounds of spans, and what of attributes is recorded."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import stoker
from stoker.exceptions import WrongTypeError
from stoker.runtime.process.current_task import TaskInfo, current_task
from stoker.runtime.process.tracing import spans as spans_module
from stoker.runtime.process.tracing.spans import MAX_NBYTES, MAX_SPANS, MAX_TEXT, SPANS, Spans

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def task() -> Iterator[str]:
    """The id of a task in which the test runs."""
    token = current_task.set(TaskInfo("t_1", "work", 0))
    yield "t_1"
    current_task.reset(token)
    SPANS.take("t_1")


def taken() -> Any:
    return SPANS.take("t_1")


def test_spans_nest_and_say_how_they_ended(task: str) -> None:
    with pytest.raises(ZeroDivisionError), stoker.profile("outer", rows=3), stoker.profile("inner"):
        raise ZeroDivisionError
    inner, outer = taken().items
    assert (inner.name, outer.name, outer.attributes) == ("inner", "outer", {"rows": 3})
    assert inner.error == outer.error == "ZeroDivisionError"
    assert outer.started_at_s <= inner.started_at_s <= inner.ended_at_s <= outer.ended_at_s
    assert SPANS.take(task) is None


def test_functions_are_decorated_also_async_ones(task: str) -> None:
    @stoker.profile("plain", kind="a")
    def plain(x: int) -> int:
        return x + 1

    @stoker.profile("async")
    async def later(x: int) -> int:
        await asyncio.sleep(0)
        return plain(x)

    assert plain(1) == 2 and plain.__name__ == "plain"
    assert asyncio.run(later(2)) == 3
    assert [one.name for one in taken().items] == ["plain", "plain", "async"]


def test_what_cannot_be_timed_is_refused() -> None:
    def values() -> Iterator[int]:
        yield 1

    with pytest.raises(WrongTypeError, match="decorates no generator"):
        stoker.profile("values")(values)
    with pytest.raises(WrongTypeError, match="takes a name"):
        stoker.profile(values)  # type: ignore[arg-type]


def test_the_number_of_spans_is_bounded_and_the_rest_counted(task: str) -> None:
    for _ in range(MAX_SPANS + 7):
        with stoker.profile("x"):
            pass
    record = taken()
    assert (len(record.items), record.left_out) == (MAX_SPANS, 7)


def test_their_text_is_bounded(task: str) -> None:
    with stoker.profile("n" * 1000, **{"k" * 500: "v" * 5000}, **{f"a{i}": i for i in range(40)}):
        pass
    for _ in range(200):
        with stoker.profile("x" * MAX_TEXT, a="y" * MAX_TEXT, b="z" * MAX_TEXT):
            pass
    record = taken()
    first = record.items[0]
    assert len(first.name) == MAX_TEXT and len(first.attributes) == spans_module.MAX_ATTRIBUTES
    assert first.attributes["k" * MAX_TEXT] == "v" * MAX_TEXT
    assert record.left_out > 0
    assert len(msgspec.msgpack.encode(record)) < 4 * MAX_NBYTES


def test_attributes_are_what_they_were_and_can_be_recorded(task: str) -> None:
    class Broken:
        def __str__(self) -> str:
            raise ValueError

    changing = [1]
    with stoker.profile("x", a=changing, b=2**70, c=float("nan"), d=Broken(), e=None, f=True):
        pass
    changing.append(2)
    (span,) = taken().items
    assert span.attributes == {
        "a": "[1]", "b": str(2**70), "c": "nan", "d": "<Broken>", "e": "None", "f": True
    }  # fmt: skip
    assert msgspec.json.decode(msgspec.json.encode(span), type=type(span)) == span


def test_spans_outside_of_tasks_are_bounded_for_the_whole_process() -> None:
    spans = Spans()
    recorded = 0
    for _ in range(spans_module.MAX_OWN_SPANS // 100 + 2):
        for _ in range(100):
            spans.add("x", 1.0, 2.0, {}, "")
        if (own := spans.take_own()) is not None:
            recorded += len(own.items)
    assert recorded == spans_module.MAX_OWN_SPANS


def test_spans_of_attempts_that_nobody_takes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans_module, "_MAX_ATTEMPTS", 10)
    spans = Spans()
    for number in range(50):
        token = current_task.set(TaskInfo(f"t_{number}", "work", 0))
        spans.add("late", 1.0, 2.0, {}, "")
        current_task.reset(token)
    assert len(spans.by_task) == 10
