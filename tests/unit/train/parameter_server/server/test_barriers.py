"""The waits for workers: for whom, the order in which what came is applied, and what a restart changes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stoker_train.parameter_server.errors import WorkerTimeoutError
from stoker_train.parameter_server.server.barriers import StalenessGate, StepBarrier

LONG_S = 30.0


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_step_is_applied_once_all_have_come_in_the_order_of_ranks() -> None:
    barrier: Any = StepBarrier("ps")
    applied: list[Any] = []

    def push(rank: int, order: int, part: Any) -> Any:
        return barrier.push(rank, 3, order, [part], applied.append, LONG_S)

    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(push(rank, 1, rank)) for rank in (2, 0)]
        await settle()
        assert not applied
        assert await push(1, 1, 1) is True
    assert [one.result() for one in waiting] == [True, True]
    assert applied == [[[0], [1], [2]]]
    assert await push(1, 1, "again") is True
    assert len(applied) == 1


async def test_who_does_not_come_is_named_and_what_came_is_taken_back() -> None:
    barrier: Any = StepBarrier("ps")
    applied: list[Any] = []
    late = [barrier.push(rank, 4, 1, [rank], applied.append, 0.05) for rank in (0, 2)]
    for error in await asyncio.gather(*late, return_exceptions=True):
        assert isinstance(error, WorkerTimeoutError)
        assert 1 in error.extra["ranks"] and 3 in error.extra["ranks"]
        assert (
            "rank 1, 3" in str(error)
            or "rank 1, 2, 3" in str(error)
            or "rank 0, 1, 3" in str(error)
        )
    assert not applied
    async with asyncio.TaskGroup() as group:
        for rank in range(4):
            group.create_task(barrier.push(rank, 4, 1, [rank], applied.append, LONG_S))
    assert applied == [[[0], [1], [2], [3]]]


async def test_a_worker_that_has_ended_is_not_waited_for() -> None:
    barrier: Any = StepBarrier("ps")
    applied: list[Any] = []
    async with asyncio.TaskGroup() as group:
        group.create_task(barrier.push(0, 2, 1, ["a"], applied.append, LONG_S))
        await settle()
        barrier.leave(1, 2, applied.append)
    assert applied == [[["a"]]]
    assert await barrier.push(0, 2, 2, ["b"], applied.append, LONG_S) is True


async def test_a_step_that_others_are_past_was_lost_with_the_server_before() -> None:
    """Rank 0 was told that step 7 is applied; the server restarted without it, and rank 1 sends it again."""
    barrier: Any = StepBarrier("ps")
    applied: list[Any] = []
    barrier.applied = {0: 5, 1: 5}
    async with asyncio.TaskGroup() as group:
        again = group.create_task(barrier.push(1, 2, 7, ["lost"], applied.append, LONG_S))
        await settle()
        ahead = group.create_task(barrier.push(0, 2, 8, ["a"], applied.append, LONG_S))
        await settle()
        assert again.result() is False
        assert await barrier.push(1, 2, 8, ["b"], applied.append, LONG_S) is True
    assert ahead.result() is True
    assert applied == [[["a"], ["b"]]]


async def test_an_error_in_applying_reaches_all_who_wait() -> None:
    barrier = StepBarrier("ps")

    def fail(_: Any) -> None:
        raise ValueError("no")

    first = asyncio.ensure_future(barrier.push(0, 2, 1, [], fail, LONG_S))
    await settle()
    with pytest.raises(ValueError, match="no"):
        await barrier.push(1, 2, 1, [], fail, LONG_S)
    with pytest.raises(ValueError, match="no"):
        await first


async def test_those_who_wait_are_told_that_rows_have_moved() -> None:
    barrier, gate = StepBarrier("ps"), StalenessGate("ps")
    async with asyncio.TaskGroup() as group:
        step = group.create_task(barrier.push(0, 2, 1, [], lambda _: None, LONG_S))
        clock = group.create_task(gate.advance(0, 2, 5, 1, LONG_S))
        await settle()
        barrier.move()
        await gate.move()
    assert step.result() is None and clock.result() is None


async def test_nobody_is_further_ahead_than_the_bound() -> None:
    gate = StalenessGate("ps")
    for step in (1, 2):
        assert await gate.advance(0, 2, step, 2, LONG_S) == step
    async with asyncio.TaskGroup() as group:
        third = group.create_task(gate.advance(0, 2, 3, 2, LONG_S))
        await settle()
        assert not third.done()
        assert await gate.advance(1, 2, 1, 2, LONG_S) == 0
    assert third.result() == 2
    assert gate.histogram == {0: 1, 1: 1, 2: 2}
    with pytest.raises(WorkerTimeoutError, match=r"rank 1: more than 2 steps behind rank 0"):
        await gate.advance(0, 2, 4, 2, 0.05)
    await gate.leave(1)
    assert await gate.advance(0, 2, 9, 2, LONG_S) == 0


async def test_a_step_that_comes_behind_a_later_one_was_lost_as_well() -> None:
    """After a restart rank 0 may be first with step 8: who repeats step 7 must not wait for it."""
    barrier: Any = StepBarrier("ps")
    applied: list[Any] = []
    barrier.applied = {0: 5, 1: 5}
    async with asyncio.TaskGroup() as group:
        ahead = group.create_task(barrier.push(0, 2, 8, ["a"], applied.append, LONG_S))
        await settle()
        assert await barrier.push(1, 2, 7, ["lost"], applied.append, LONG_S) is False
        assert await barrier.push(1, 2, 8, ["b"], applied.append, LONG_S) is True
    assert ahead.result() is True
    assert applied == [[["a"], ["b"]]]


async def test_a_worker_that_ended_at_a_step_takes_nothing_of_the_one_in_its_place() -> None:
    barrier: Any = StepBarrier("ps")
    applied: list[Any] = []
    async with asyncio.TaskGroup() as group:
        dead = asyncio.ensure_future(barrier.push(0, 2, 1, ["dead"], applied.append, 0.05))
        await settle()
        group.create_task(barrier.push(0, 2, 1, ["again"], applied.append, LONG_S))
        with pytest.raises(WorkerTimeoutError):
            await dead
        assert await barrier.push(1, 2, 1, ["b"], applied.append, LONG_S) is True
    assert applied == [[["again"], ["b"]]]


async def test_a_step_that_all_gave_up_does_not_hold_up_another_number_of_workers() -> None:
    barrier: Any = StepBarrier("ps")
    applied: list[Any] = []
    with pytest.raises(WorkerTimeoutError):
        await barrier.push(0, 2, 3, ["a"], applied.append, 0.01)
    assert await barrier.push(0, 1, 3, ["b"], applied.append, LONG_S) is True
    assert await barrier.push(0, 1, 2, ["c"], applied.append, LONG_S) is True
    assert applied == [[["b"]]]
