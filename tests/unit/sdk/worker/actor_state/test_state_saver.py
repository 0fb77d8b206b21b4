"""The saves of an actor's state: one at a time, shared by the calls that end meanwhile."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from stoker.runtime.worker.actor_state.state_saver import StateSaver
from stoker_wire.errors import FencedError, UnavailableError
from tests.services import until

WAIT_S = 20.0


class Saved:
    """Stands for the stored state; a store waits for ``gate`` and raises ``error``."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.began = 0
        self.stored: list[Any] = []
        self.error: Exception | None = None
        self.failures: list[BaseException] = []
        self.insisted: list[bool] = []

    def store(self, state: Any, *, insists: bool) -> None:
        self.began += 1
        self.insisted.append(insists)
        assert self.gate.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        self.stored.append(state)

    def failed(self, error: BaseException) -> None:
        self.failures.append(error)


def saver_of(saved: Saved, interval_s: float | None = 0.0, take: Any = None) -> StateSaver:
    return StateSaver(saved, take or (lambda: saved.began), interval_s)  # type: ignore[arg-type]


def test_threads_that_come_during_a_save_share_the_next_one() -> None:
    saved = Saved()
    saved.gate.clear()
    saver = saver_of(saved)
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(saver.save)
        until(lambda: saved.began == 1, WAIT_S, "the first save stores")
        others = [pool.submit(saver.save) for _ in range(8)]
        assert not any(one.done() for one in (first, *others))
        saved.gate.set()
        assert first.result(WAIT_S) and all(one.result(WAIT_S) for one in others)
    assert 2 <= saved.began <= 3, "one that began later than a save waits for the next"


def test_coroutines_share_saves_and_a_cancelled_one_leaves_the_save_alone() -> None:
    saved = Saved()
    saved.gate.clear()
    saver = saver_of(saved)

    async def call() -> None:
        await asyncio.wait([asyncio.wrap_future(saver.request())])

    async def main() -> None:
        serving = asyncio.create_task(saver.serve())
        async with asyncio.timeout(WAIT_S):
            first = asyncio.create_task(call())
            await asyncio.to_thread(until, lambda: saved.began == 1, WAIT_S, "it stores")
            others = [asyncio.create_task(call()) for _ in range(50)]
            await asyncio.sleep(0)
            first.cancel()
            others[0].cancel()
            await asyncio.wait([first, others[0]])
            assert not any(one.done() for one in others[1:])
            saved.gate.set()
            await asyncio.wait(others)
        serving.cancel()

    asyncio.run(main())
    assert saved.stored == [0, 1], "in order, and the others by one save"


def test_a_request_is_served_that_came_before_the_loop() -> None:
    saved = Saved()
    saver = saver_of(saved)
    early = saver.request()

    async def main() -> None:
        serving = asyncio.create_task(saver.serve())
        async with asyncio.timeout(WAIT_S):
            await asyncio.wrap_future(early)
        serving.cancel()

    asyncio.run(main())
    assert saved.stored == [0]


def test_a_hook_that_raises_is_reported_and_the_calls_are_answered() -> None:
    def take() -> Any:
        raise ValueError("not now")

    saved = Saved()
    assert saver_of(saved, take=take).save()
    assert [str(one) for one in saved.failures] == ["not now"]

    async def take_async() -> Any:
        raise asyncio.CancelledError

    async def main() -> None:
        saver = saver_of(saved, take=take_async)
        serving = asyncio.create_task(saver.serve())
        async with asyncio.timeout(WAIT_S):
            for _ in range(2):
                await asyncio.wrap_future(saver.request())
        serving.cancel()

    asyncio.run(main())
    assert len(saved.failures) == 3


def test_a_worker_of_the_past_saves_no_more_and_answers_no_more() -> None:
    saved = Saved()
    saved.error = FencedError("a later incarnation lives")
    saver = saver_of(saved, interval_s=1000.0)
    assert not saver.is_due
    assert not saver.save() and saver.is_due and not saver.save()
    assert (saved.began, saved.failures) == (1, [])


def test_the_interval_says_when_a_save_is_due() -> None:
    saved = Saved()
    assert saver_of(saved, 0.0).is_due and saver_of(saved, 1e-9).is_due
    never = saver_of(saved, None)
    assert not never.is_due and not saver_of(saved, 1000.0).is_due
    never.after_each_call = True
    assert never.is_due, "the actor is moved"


@pytest.mark.parametrize("interval_s", [0.0, 10.0])
def test_pauses_grow_while_the_gcs_is_away_and_a_durable_call_waits_for_it(
    interval_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(
        "stoker.runtime.worker.actor_state.state_saver.time.monotonic", lambda: now_s
    )
    saved = Saved()
    saver = saver_of(saved, interval_s)
    if not interval_s:
        assert saver.save() and saved.insisted == [True] and saver.is_due
        return
    saved.error = UnavailableError("gone")
    pauses = []
    for _ in range(8):
        now_s = saver._next_s
        assert saver.is_due and saver.save() and not saver.is_due
        pauses.append(saver._next_s - now_s)
    assert pauses == [30.0, 60.0, 120.0, 240.0, 480.0, 600.0, 600.0, 600.0]
    saved.error = None
    now_s = saver._next_s
    assert saver.save()
    assert saver._next_s - now_s == interval_s and saved.insisted == [False] * 9
