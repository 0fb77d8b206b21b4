"""The fair limiter: who may move bytes now."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from stoker_nodelet.transfer.fair_limiter import SMALL_NBYTES, FairLimiter

LARGE = 4 * SMALL_NBYTES


async def test_flows_take_turns_however_many_chunks_one_has_waiting() -> None:
    limiter = FairLimiter(slots=1, nbytes=LARGE)
    order: list[str] = []

    async def move(key: str) -> None:
        async with limiter.slot(key, LARGE):
            order.append(key)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for key in ("a", "a", "a", "a", "b", "c", "b"):
            group.create_task(move(key))
    assert order == ["a", "a", "b", "c", "a", "b", "a"]


async def test_a_small_chunk_has_a_place_while_large_ones_hold_all_theirs() -> None:
    limiter = FairLimiter(slots=2, nbytes=2 * LARGE)
    async with limiter.slot("a", LARGE), limiter.slot("b", LARGE):
        await asyncio.wait_for(_enter(limiter, "c", SMALL_NBYTES), 30)
        assert limiter.nbytes_moving == 2 * LARGE
    assert limiter.nbytes_moving == 0


async def test_bytes_are_bounded_and_one_chunk_always_fits() -> None:
    limiter = FairLimiter(slots=8, nbytes=LARGE)
    async with limiter.slot("a", 10 * LARGE):
        waiting = asyncio.ensure_future(_enter(limiter, "b", LARGE))
        await asyncio.sleep(0)
        assert not waiting.done()
    await asyncio.wait_for(waiting, 30)


@pytest.mark.parametrize("given_in_the_same_moment", [False, True])
async def test_a_cancelled_wait_leaves_no_place_taken(given_in_the_same_moment: bool) -> None:
    limiter = FairLimiter(slots=1, nbytes=LARGE)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(limiter.slot("a", LARGE))
        waiting = asyncio.ensure_future(_enter(limiter, "b", LARGE))
        await asyncio.sleep(0)
        if given_in_the_same_moment:
            await stack.aclose()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await asyncio.wait_for(_enter(limiter, "c", LARGE), 30)
    assert limiter.nbytes_moving == 0


async def _enter(limiter: FairLimiter, key: str, nbytes: int) -> None:
    async with limiter.slot(key, nbytes):
        pass
