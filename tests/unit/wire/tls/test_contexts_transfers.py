"""Ranges of objects over TLS, read by a thread: whole, refused, and aborted by another thread."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import xxhash
from aiohttp import web

from stoker_wire.data.range_reader import CHECKSUM_HEADER, RangeReader
from stoker_wire.errors import TlsError, UnavailableError
from stoker_wire.http.principals import READERS
from stoker_wire.http.server.routes import Route

if TYPE_CHECKING:
    from stoker_wire.http.server.service import Request, Service
    from tests.unit.wire.conftest import Cluster
    from tests.unit.wire.tls.conftest import Certs

DATA = bytes(range(256)) * 4000


class Objects:
    """A nodelet's route for ranges, which can stop in the middle."""

    def __init__(self) -> None:
        self.stalls = False
        self.stalled = asyncio.Event()
        self.over = asyncio.Event()

    async def send(self, req: Request) -> web.StreamResponse:
        headers = {CHECKSUM_HEADER: f"{xxhash.xxh3_64_intdigest(DATA):016x}"}
        response = web.StreamResponse(status=206, headers=headers)
        response.content_length = len(DATA)
        await response.prepare(req.http)
        await response.write(DATA[: len(DATA) // 2])
        if self.stalls:
            self.stalled.set()
            await self.over.wait()
        await response.write(DATA[len(DATA) // 2 :])
        await response.write_eof()
        return response


async def started(cluster: Cluster, certs: Certs, objects: Objects) -> Service:
    service = cluster.service(**certs.settings("mutual"))
    route = Route(
        "GET", "/v1/objects/{id}", Objects.send, roles=READERS, summary="Get an object", stream=True
    )
    service.add_routes([route], objects)
    return await cluster.start(service)


async def test_a_range_arrives_over_mutual_tls(cluster: Cluster, certs: Certs) -> None:
    service = await started(cluster, certs, Objects())
    reader = RangeReader(service.url, token="correct-horse", peer="me", tls=certs.files("mutual"))
    for _ in range(2):
        into = bytearray(len(DATA))
        await asyncio.to_thread(reader.read, "o_1", 0, memoryview(into))
        assert into == DATA
    reader.close()


async def test_an_abort_by_another_thread_ends_a_read_over_tls_at_once(
    cluster: Cluster, certs: Certs
) -> None:
    objects = Objects()
    objects.stalls = True
    service = await started(cluster, certs, objects)
    reader = RangeReader(service.url, token="correct-horse", peer="me", tls=certs.files("mutual"))
    read = asyncio.create_task(
        asyncio.to_thread(reader.read, "o_1", 0, memoryview(bytearray(len(DATA))))
    )
    await objects.stalled.wait()
    reader.abort()
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(read, 5)
    objects.over.set()


@pytest.mark.logs("TLS: a client")
async def test_a_reader_without_a_certificate_is_told_so(cluster: Cluster, certs: Certs) -> None:
    service = await started(cluster, certs, Objects())
    reader = RangeReader(service.url, token="correct-horse", peer="me", tls=certs.trusting())
    with pytest.raises(TlsError, match="STOKER_TLS_CERT"):
        await asyncio.to_thread(reader.read, "o_1", 0, memoryview(bytearray(len(DATA))))
    reader = RangeReader(
        service.url.replace("https", "http"), token="t", peer="me", tls=certs.files("mutual")
    )
    with pytest.raises(TlsError, match="https://"):
        await asyncio.to_thread(reader.read, "o_1", 0, memoryview(bytearray(len(DATA))))
