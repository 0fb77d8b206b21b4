"""Objects between nodes: what arrives is what was sent, once, over lines that break and lie."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from stoker_wire.data.range_reader import CHUNK_NBYTES
from stoker_wire.errors import ObjectLostError, UnavailableError
from stoker_wire.messages.node_api import TakenOver
from stoker_wire.messages.objects import FreeObjects, ObjectSource, PullObject
from stoker_wire.messages.queries import ActivityQuery
from tests.unit.nodelet.transfer.transfer_support import Line, nodes, until

if TYPE_CHECKING:
    from pathlib import Path


THREE_CHUNKS = 2 * CHUNK_NBYTES + 12_345


async def test_an_object_comes_whole_and_is_listed_as_a_copy(tmp_path: Path) -> None:
    async with nodes(tmp_path, "a", "b") as (_, a, b):
        for nbytes in (1, 200_000, CHUNK_NBYTES, THREE_CHUNKS):
            made = a.put(nbytes)
            copy = await b.pull(made, a)
            assert (copy.node_id, copy.copy_of) == ("n_b", "n_a")
            assert (copy.job_id, copy.owner_id, copy.nbytes) == ("job_1", "w_1", made.nbytes)
            assert b.objects.get(made.object_id).copy_of == "n_a"
            assert b.bytes_of(made.object_id) == a.bytes_of(made.object_id)
            entry = b.evictor.activity.page(ActivityQuery()).items[-1]
            assert (entry.kind, entry.name, entry.peer) == ("transfer", made.object_id, "n_a")
            assert (entry.nbytes, entry.job_id) == (made.nbytes, "job_1")
            assert entry.began_at_s <= entry.ended_at_s


async def test_many_who_wait_cause_one_transfer_and_one_who_leaves_ends_nothing(
    tmp_path: Path,
) -> None:
    async with nodes(tmp_path, "a", "b") as (_, a, b), Line(a.url) as line:
        a.endpoint.listens_at(line.url)
        made = a.put(THREE_CHUNKS)
        line.hold_after(CHUNK_NBYTES)
        first = asyncio.ensure_future(b.pull(made, a, line.url))
        others = [asyncio.ensure_future(b.pull(made, a, line.url)) for _ in range(10)]
        await until(lambda: line.holds, "the first chunk is on its way")
        first.cancel()
        line.hold_at = None
        copies = await asyncio.gather(*others)
        assert {copy.object_id for copy in copies} == {made.object_id}
        # The sender counts a chunk a moment after the receiver has it.
        await until(lambda: a.transfer.server.sent_nbytes >= made.nbytes, "all is counted")
        assert a.transfer.server.sent_nbytes == made.nbytes
        assert b.bytes_of(made.object_id) == a.bytes_of(made.object_id)


async def test_a_corrupt_chunk_is_fetched_again_and_only_that(tmp_path: Path) -> None:
    async with nodes(tmp_path, "a", "b") as (_, a, b), Line(a.url) as line:
        a.endpoint.listens_at(line.url)
        made = a.put(THREE_CHUNKS)
        line.flip_at = CHUNK_NBYTES + 5_000_000
        await b.pull(made, a, line.url)
        assert line.flips == 1
        assert b.bytes_of(made.object_id) == a.bytes_of(made.object_id)
        await until(lambda: a.transfer.server.sent_nbytes > made.nbytes, "all is counted")
        assert a.transfer.server.sent_nbytes <= made.nbytes + 2 * CHUNK_NBYTES


async def test_a_broken_line_costs_no_chunk_that_had_come(tmp_path: Path) -> None:
    async with nodes(tmp_path, "a", "b") as (_, a, b), Line(a.url) as line:
        a.endpoint.listens_at(line.url)
        made = a.put(8 * CHUNK_NBYTES)
        line.cut_at = 5 * CHUNK_NBYTES
        await b.pull(made, a, line.url)
        assert line.cuts == 1
        assert b.bytes_of(made.object_id) == a.bytes_of(made.object_id)
        # Two streams lose at most the chunk that each was at.
        assert line.forwarded < made.nbytes + 2 * CHUNK_NBYTES + 1_000_000


async def test_a_pull_goes_on_from_another_node_when_its_source_dies(tmp_path: Path) -> None:
    async with nodes(tmp_path, "a", "b", "c") as (gcs, a, b, c), Line(a.url) as line:
        a.endpoint.listens_at(line.url)
        made = a.put(6 * CHUNK_NBYTES)
        await b.pull(made, a)
        expected = a.bytes_of(made.object_id)
        line.hold_after(3 * CHUNK_NBYTES)
        pulling = asyncio.ensure_future(c.pull(made, a, line.url))
        await until(lambda: line.holds, "half of it is on its way")
        gcs.dead.add("n_a")
        await a.service.stop(0.0)
        await line.__aexit__()
        line.hold_at = None
        await pulling
        assert c.bytes_of(made.object_id) == expected
        assert 0 < b.transfer.server.sent_nbytes < made.nbytes


async def test_an_object_that_cannot_be_had_says_why(tmp_path: Path) -> None:
    async with nodes(tmp_path, "a", "b") as (gcs, a, b):
        made = a.put(100_000)
        gcs.dead.add("n_a")
        await a.service.stop(0.0)
        with pytest.raises(
            ObjectLostError, match=r"node n_a is not of this cluster\n0 of \d+ bytes"
        ):
            await b.pull(made, a)
        assert not list(b.arena.path.glob("*.tmp"))


async def test_an_object_that_was_freed_is_lost_at_once(tmp_path: Path) -> None:
    async with nodes(tmp_path, "a", "b") as (_, a, b):
        made = a.put(100_000)
        a.objects.free([made.object_id])
        with pytest.raises(ObjectLostError, match="no longer on node n_a"):
            await b.pull(made, a)


async def test_a_pull_waits_for_the_report_of_what_was_just_written(tmp_path: Path) -> None:
    async with nodes(tmp_path, "a", "b") as (_, a, b):
        made = a.put(100_000, seal=False)
        pulling = asyncio.ensure_future(b.pull(made, a))
        await until(lambda: made.object_id in b.transfer._pulls, "the pull has begun")
        a.objects.seal([made])
        await pulling
        assert b.bytes_of(made.object_id) == a.bytes_of(made.object_id)


async def test_to_free_an_object_frees_its_copies_and_stops_its_pulls(tmp_path: Path) -> None:
    async with nodes(tmp_path, "a", "b", "c") as (_, a, b, c), Line(a.url) as line:
        a.endpoint.listens_at(line.url)
        made = a.put(THREE_CHUNKS)
        await b.pull(made, a)
        line.hold_after(CHUNK_NBYTES // 2)
        pulling = asyncio.ensure_future(c.pull(made, a, line.url))
        await until(lambda: line.holds, "the second pull has begun")
        await a.client.call("POST", "/v1/objects/free", FreeObjects(object_ids=(made.object_id,)))
        with pytest.raises(ObjectLostError, match="freed while it was pulled"):
            await pulling
        await until(lambda: made.object_id not in b.objects, "the copy is freed")
        assert not list(c.arena.path.glob("*.tmp"))
        assert made.object_id not in c.objects


async def test_a_node_that_leaves_hands_its_objects_over(tmp_path: Path) -> None:
    async with nodes(tmp_path, "a", "b", "c") as (_, a, b, c):
        made = [a.put(nbytes) for nbytes in (1, 200_000, CHUNK_NBYTES)]
        copy = await a.pull(foreign := c.put(1000), c)
        await b.pull(made[0], a)
        freed = a.put(1000)
        a.arena.recycle(freed.object_id)  # by its owner, whose report comes later
        assert not a.transfer.closing
        heir = ObjectSource(node_id=b.node_id, url=b.url)
        taken = await a.client.call("POST", "/v1/objects/hand-over", heir, reply=TakenOver)
        assert taken.left == 0 and a.transfer.closing
        for one in made:
            assert b.objects.get(one.object_id).copy_of == "", "this is its home now"
            assert b.bytes_of(one.object_id) == a.bytes_of(one.object_id)
        assert copy.copy_of == "n_c" and foreign.object_id not in b.objects, "that has another home"
        late = a.put(1000)
        assert (await a.transfer.hand_over_rest()).left == 0
        ids = (made[0].object_id, late.object_id)
        await a.client.call("POST", "/v1/objects/free", FreeObjects(object_ids=ids))
        await until(lambda: not {*ids} & {*b.objects._index}, "what is freed here is freed there")


async def test_an_heir_that_is_gone_is_asked_once_as_another_may_be_chosen(tmp_path: Path) -> None:
    async with nodes(tmp_path, "a", "b", "c") as (_, a, b, c):
        made = a.put(1000)
        await b.service.stop(0.0)
        gone, other = (ObjectSource(node_id=one.node_id, url=one.url) for one in (b, c))
        taken = await a.client.call("POST", "/v1/objects/hand-over", gone, reply=TakenOver)
        assert taken.left == 1
        assert a.transfer._clients.client(b.url).retries == 0
        taken = await a.client.call("POST", "/v1/objects/hand-over", other, reply=TakenOver)
        assert taken.left == 0
        assert c.bytes_of(made.object_id) == a.bytes_of(made.object_id)


async def test_a_node_that_stops_says_that_it_pulls_no_more(tmp_path: Path) -> None:
    async with nodes(tmp_path, "a", "b") as (_, a, b):
        made = a.put(1000)
        await b.background.close()
        with pytest.raises(UnavailableError, match="n_b stops"):
            await b.transfer.bring(
                made.object_id, PullObject(node_id="n_a", url=a.url, nbytes=made.nbytes)
            )


async def test_further_pullers_get_it_from_those_who_are_getting_it(tmp_path: Path) -> None:
    async with nodes(tmp_path, "a", "b", "c", "d", "e") as (_, a, *others):
        made = a.put(6 * CHUNK_NBYTES)
        await asyncio.gather(*(node.pull(made, a) for node in others))
        for node in others:
            assert node.bytes_of(made.object_id) == a.bytes_of(made.object_id)
        served = [a, *others]
        await until(
            lambda: sum(n.transfer.server.sent_nbytes for n in served) >= 4 * made.nbytes,
            "all is counted",
        )
        assert a.transfer.server.sent_nbytes == 2 * made.nbytes
        assert sum(n.transfer.server.sent_nbytes for n in others) == 2 * made.nbytes


async def test_a_small_object_does_not_wait_behind_large_ones(tmp_path: Path) -> None:
    async with nodes(tmp_path, "a", "b") as (_, a, b), Line(a.url) as line:
        a.endpoint.listens_at(line.url)
        line.hold_after(8_000_000)
        large = [a.put(2 * CHUNK_NBYTES) for _ in range(4)]
        pulls = [asyncio.ensure_future(b.pull(one, a, line.url)) for one in large]
        await until(lambda: b.transfer._receiving.nbytes_moving >= 4 * CHUNK_NBYTES, "all is taken")
        small = a.put(1_000)
        a.endpoint.listens_at(a.url)
        await asyncio.wait_for(b.pull(small, a), 40)
        assert not any(pull.done() for pull in pulls)
        line.hold_at = None
        await asyncio.gather(*pulls)


async def test_copies_are_dropped_when_room_is_needed(tmp_path: Path) -> None:
    limit_bytes = 3 * CHUNK_NBYTES
    async with nodes(tmp_path, "a", "b", limit_bytes=limit_bytes) as (_, a, b):
        first, second = a.put(CHUNK_NBYTES + 1000), a.put(CHUNK_NBYTES + 1000)
        own = b.put(CHUNK_NBYTES + 1000)
        await b.pull(first, a)
        await b.pull(second, a)
        assert first.object_id not in b.objects
        assert own.object_id in b.objects and not b.objects.get(own.object_id).spilled
        assert b.bytes_of(second.object_id) == a.bytes_of(second.object_id)
