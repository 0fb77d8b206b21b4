"""The group commit: what callers of a queue may rely on."""

from __future__ import annotations

import asyncio

import pytest

from stoker_gcs.store.group_commit import BatchQueue
from stoker_wire.errors import UnavailableError
from stoker_wire.process.background import Background


async def test_what_arrives_during_a_write_shares_the_next_one() -> None:
    batches: list[list[int]] = []
    gate, began = asyncio.Event(), asyncio.Event()

    async def write(items: list[int]) -> list[int]:
        batches.append(items)
        began.set()
        await gate.wait()
        return [item * 2 for item in items]

    queue: BatchQueue[int, int] = BatchQueue(write, max_batch=100)
    async with Background("test") as background:
        background.spawn(queue.run(), name="queue")
        first = asyncio.ensure_future(queue.put(1))
        await began.wait()
        others = [asyncio.ensure_future(queue.put(i)) for i in range(2, 6)]
        await asyncio.sleep(0)
        gate.set()
        assert await asyncio.gather(first, *others) == [2, 4, 6, 8, 10]
    assert batches == [[1], [2, 3, 4, 5]]


async def test_a_failed_write_fails_its_callers_and_no_others() -> None:
    failing = True

    async def write(items: list[int]) -> list[int]:
        if failing:
            raise UnavailableError("the database is away")
        return items

    queue: BatchQueue[int, int] = BatchQueue(write, max_batch=100)
    async with Background("test") as background:
        background.spawn(queue.run(), name="queue")
        with pytest.raises(UnavailableError, match="away"):
            await queue.put(1)
        failing = False
        assert await queue.put(2) == 2


async def test_closing_writes_what_was_taken_and_refuses_the_rest() -> None:
    written: list[int] = []

    async def write(items: list[int]) -> list[int]:
        await asyncio.sleep(0.01)
        written.extend(items)
        return items

    queue: BatchQueue[int, int] = BatchQueue(write, max_batch=2)
    async with Background("test") as background:
        background.spawn(queue.run(), name="queue")
        puts = [asyncio.ensure_future(queue.put(i)) for i in range(5)]
        await asyncio.sleep(0)
        await queue.close()
        assert written == list(range(5))
        assert await asyncio.gather(*puts) == list(range(5))
        with pytest.raises(UnavailableError, match="stopping"):
            await queue.put(9)
