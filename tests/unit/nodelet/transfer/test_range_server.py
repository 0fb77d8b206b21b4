"""The range server: the bytes of an object as asked, with their checksum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import xxhash

from stoker_wire.data.range_reader import CHECKSUM_HEADER
from stoker_wire.errors import NotFoundError
from stoker_wire.messages.objects import ObjectInfo
from tests.unit.nodelet.transfer.transfer_support import Node, nodes

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("asked", "status", "span"),
    [
        (None, 200, (0, 300_000)),
        ("bytes=0-", 206, (0, 300_000)),
        ("bytes=100-199", 206, (100, 200)),
        ("bytes=-100", 206, (299_900, 300_000)),
        ("bytes=299999-400000", 206, (299_999, 300_000)),
    ],
)
async def test_ranges_are_served_as_asked(
    tmp_path: Path, asked: str | None, status: int, span: tuple[int, int]
) -> None:
    async with nodes(tmp_path, "a") as (_, a):
        info = _trimmed(a, a.put(400_000), 300_000)
        headers = {"Range": asked} if asked else {}
        path = f"/v1/objects/{info.object_id}"
        for _ in range(2):  # the connection is kept, and stays in step
            async with a.client.open("GET", path, headers=headers) as response:
                got = await response.read()
                assert response.status == status
                assert int(response.headers[CHECKSUM_HEADER], 16) == xxhash.xxh3_64_intdigest(got)
        whole = (a.arena.path / info.object_id).read_bytes()
        assert got == whole[slice(*span)]


async def test_a_range_outside_is_a_problem_and_so_is_an_unknown_object(tmp_path: Path) -> None:
    async with nodes(tmp_path, "a") as (_, a):
        info = a.put(1000)
        path = f"/v1/objects/{info.object_id}"
        for asked in ("bytes=9999999-", "bytes=x-y"):
            with pytest.raises(Exception, match="Range"):
                async with a.client.open("GET", path, headers={"Range": asked}):
                    pass
        with pytest.raises(NotFoundError):
            await a.client.call("GET", "/v1/objects/o_none", raw=True)


def _trimmed(node: Node, info: ObjectInfo, nbytes: int) -> ObjectInfo:
    """The same object, said to be shorter than its file, as recycled extents make it."""
    node.objects.free([])
    index: dict[str, Any] = node.objects._index
    index[info.object_id] = ObjectInfo(object_id=info.object_id, nbytes=nbytes)
    return index[info.object_id]
