"""The chunks of a pull: which are there, and who waits for which."""

from __future__ import annotations

import asyncio
import mmap

from stoker_nodelet.transfer.chunk_map import ChunkMap, span_of
from stoker_wire.data.range_reader import CHUNK_NBYTES


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
