"""The pure parts of transfers: who may move bytes now, who pulls from whom, which chunks are there."""

from __future__ import annotations

import asyncio
import mmap
from contextlib import AsyncExitStack

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stoker_nodelet.transfer.broadcast_tree import BroadcastTree
from stoker_nodelet.transfer.chunk_map import ChunkMap, span_of
from stoker_nodelet.transfer.fair_limiter import SMALL_NBYTES, FairLimiter
from stoker_wire.data.range_reader import CHUNK_NBYTES
from stoker_wire.messages.work import ObjectSource

LARGE = 4 * SMALL_NBYTES
HOME = ObjectSource(node_id="n_home", url="http://home")


def source(name: str) -> ObjectSource:
    return ObjectSource(node_id=f"n_{name}", url=f"http://{name}")


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


def test_pullers_beyond_the_fan_out_are_sent_to_those_before_them() -> None:
    tree = BroadcastTree()
    upstream = [tree.assign("o_1", HOME, source(f"{i}"), (), 0.0)[0].node_id for i in range(7)]
    assert upstream == ["n_home", "n_home", "n_0", "n_0", "n_1", "n_1", "n_2"]
    assert tree.assign("o_2", HOME, source("9"), (), 0.0)[0] == HOME


def test_who_has_a_whole_copy_is_a_source_and_no_load() -> None:
    tree = BroadcastTree()
    for name in ("0", "1"):
        tree.assign("o_1", HOME, source(name), (), 0.0)
        tree.end_pull("o_1", f"n_{name}", whole=True, now_s=0.0)
    found = tree.assign("o_1", HOME, source("2"), (), 1000.0)
    assert [one.node_id for one in found] == ["n_home", "n_0", "n_1"]
    assert tree.forget(["o_1", "o_unknown"]) == {
        "http://0": ["o_1"], "http://1": ["o_1"], "http://2": ["o_1"]
    }  # fmt: skip
    assert tree.forget(["o_1"]) == {}


def test_who_failed_or_fell_silent_is_no_source_and_no_load() -> None:
    tree = BroadcastTree()
    for name in ("0", "1", "2"):
        tree.assign("o_1", HOME, source(name), (), 0.0)
    again = tree.assign("o_1", HOME, source("2"), ("n_0",), 1.0)
    assert "n_0" not in [one.node_id for one in again]
    tree.end_pull("o_1", "n_1", whole=False, now_s=2.0)
    late = tree.assign("o_1", HOME, source("3"), (), 1000.0)
    assert [one.node_id for one in late] == ["n_home"]


@given(st.lists(st.tuples(st.integers(0, 6), st.sets(st.integers(0, 6)), st.booleans())))
@example(
    [(1, set(), 0), (0, set(), 0), (2, {0, 1}, 0), (3, set(), 1), (3, set(), 0), (1, {0, 1, 2}, 0)]
)
def test_nobody_ever_waits_for_itself(
    asks: list[tuple[int, set[int], bool]],
) -> None:
    tree = BroadcastTree()
    upstream: dict[str, str] = {}
    for at, (number, failed, ends) in enumerate(asks):
        node_id = f"n_{number}"
        found = tree.assign("o_1", HOME, source(f"{number}"), [f"n_{i}" for i in failed], float(at))
        ids = [one.node_id for one in found]
        assert node_id not in ids and "n_home" in ids and len(ids) == len(set(ids))
        upstream[node_id] = ids[0]
        if ends:
            tree.end_pull("o_1", node_id, whole=True, now_s=float(at))
            upstream[node_id] = "n_home"
        for begin in upstream:
            seen, one = set(), begin
            while one != "n_home":
                assert one not in seen, f"{begin} waits for itself: {upstream}"
                seen.add(one)
                one = upstream.get(one, "n_home")


async def test_chunks_are_ready_in_order_and_waiters_wake_for_theirs() -> None:
    chunks = ChunkMap(2 * CHUNK_NBYTES + 5, mmap.mmap(-1, 1))
    assert [span_of(i, chunks.nbytes) for i in range(3)] == [
        (0, CHUNK_NBYTES), (CHUNK_NBYTES, CHUNK_NBYTES), (2 * CHUNK_NBYTES, 5)
    ]  # fmt: skip
    assert [chunks.claim(), chunks.claim()] == [0, 1]
    waiting = asyncio.ensure_future(chunks.wait_for(1, 40.0))
    chunks.add(1, 11)
    assert chunks.ready == 0
    chunks.give_back(0)
    assert [chunks.claim(), chunks.claim(), chunks.claim()] == [0, 2, None]
    await asyncio.sleep(0)
    assert not waiting.done()
    chunks.add(0, 10)
    await asyncio.wait_for(waiting, 30)
    assert (chunks.ready, chunks.whole) == (2, False)
    chunks.add(2, 12)
    assert chunks.whole and chunks.arrived_nbytes == chunks.nbytes
    await chunks.wait_for(7, 0.01)  # past the end: the wait is bounded
