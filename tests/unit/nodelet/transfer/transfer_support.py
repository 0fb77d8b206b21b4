"""The transfer of two and more nodes in one process, over real HTTP, and lines between them that fail."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from stoker_nodelet.identity import Endpoint
from stoker_nodelet.objects.eviction import create_arena
from stoker_nodelet.transfer import ROUTES, Transfer
from stoker_wire.arena import ObjectHead
from stoker_wire.data.range_reader import CHUNK_NBYTES
from stoker_wire.errors import NotFoundError, UnavailableError
from stoker_wire.http.auth import Credential
from stoker_wire.http.client.client import Client
from stoker_wire.http.server.service import Request, Service
from stoker_wire.ids import Prefix, new_id
from stoker_wire.messages.objects import (
    AdoptedObjects,
    AdoptObjects,
    FreeObjects,
    ObjectInfo,
    PullObject,
)
from stoker_wire.process.background import Background
from stoker_wire.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

TOKEN = "a-token-for-tests"
LIMIT_BYTES = 64 * CHUNK_NBYTES


async def until(condition: Callable[[], Any], what: str, timeout_s: float = 40.0) -> Any:
    """Return the first true value of ``condition``."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        await asyncio.sleep(0.005)
    return value


class Node:
    """A nodelet's arena, objects and transfer, behind a service of their own."""

    def __init__(self, folder: Path, name: str, limit_bytes: int = LIMIT_BYTES) -> None:
        arena_dir = folder / name
        arena_dir.mkdir(mode=0o700)
        self.node_id = f"n_{name}"
        self.evictor = create_arena(
            arena_dir,
            self.node_id,
            Settings(arena_warm_bytes=limit_bytes),
            spill_dir=folder / f"{name}-spill",
            limit_bytes=limit_bytes,
            has_ended=lambda job_id, owner_id: False,
        )
        self.objects = self.evictor.objects
        self.arena = self.objects.arena
        self.background = Background(name)
        self.service = Service("nodelet", Settings(), token=TOKEN)
        self.requests: list[str] = []

    async def start(self, gcs_url: str) -> None:
        self.gcs = Client(gcs_url, token=TOKEN, peer=self.node_id)
        self.endpoint = Endpoint()
        self.transfer = Transfer(
            self.node_id,
            self.endpoint,
            self.evictor,
            credential=Credential(TOKEN),
            settings=Settings(),
            gcs=self.gcs,
            background=self.background,
        )
        self.service.add_routes(ROUTES, self.transfer)
        self.service.route(
            "POST", "/v1/objects/free", self.free, body=FreeObjects, summary="Delete objects"
        )
        self.service.route(
            "POST",
            "/v1/objects/adopt",
            self.adopt,
            body=AdoptObjects,
            reply=AdoptedObjects,
            summary="Become the home of copies",
        )
        await self.service.start("127.0.0.1")
        self.service.ready()
        self.url = self.service.url
        self.endpoint.listens_at(self.url)
        self.client = Client(self.url, token=TOKEN, peer="test")

    async def stop(self) -> None:
        await self.background.close()
        await self.service.stop(0.2)
        await self.transfer.close()
        await self.client.close()
        await self.gcs.close()
        self.arena.close()

    async def free(self, req: Request) -> None:
        self.objects.free(req.body.object_ids)
        self.transfer.on_freed(req.body.object_ids)

    async def adopt(self, req: Request) -> AdoptedObjects:
        return AdoptedObjects(objects=self.objects.adopt(req.body.object_ids))

    def put(self, nbytes: int, *, seal: bool = True) -> ObjectInfo:
        """Store an object of random bytes, as a runtime does."""
        object_id = new_id(Prefix.OBJECT)
        head = ObjectHead("job_1", "w_1", 0.0, 0, (nbytes,))
        total = self.arena.write(object_id, head, b"", [memoryview(os.urandom(nbytes))])
        info = ObjectInfo(object_id=object_id, nbytes=total, job_id="job_1", owner_id="w_1")
        if seal:
            self.objects.seal([info])
        return info

    def bytes_of(self, object_id: str) -> bytes:
        """An object's buffer as a local reader sees it."""
        return bytes(self.arena.read(object_id)[1][0])

    async def pull(self, info: ObjectInfo, home: Node, url: str = "") -> ObjectInfo:
        """Bring an object of ``home`` here, by ``url`` if it shall be reached another way."""
        wanted = PullObject(node_id=home.node_id, url=url or home.url, nbytes=info.nbytes)
        path = f"/v1/objects/{info.object_id}/pull"
        return await self.client.call("POST", path, wanted, reply=ObjectInfo, timeout_s=30)


class Gcs:
    """Says that every node is known and none is dead, unless told otherwise."""

    def __init__(self) -> None:
        self.dead: set[str] = set()
        self.service = Service("gcs", Settings(), token=TOKEN)
        self.service.route("GET", "/v1/nodes/{id}", self.node, summary="A node")

    async def node(self, req: Request) -> None:
        if req.path["id"] in self.dead:
            raise NotFoundError("gone")
        raise UnavailableError("this gcs cannot say")


@asynccontextmanager
async def nodes(folder: Path, *names: str, **options: Any) -> AsyncIterator[list[Any]]:
    """The gcs and so many nodes, listening."""
    gcs = Gcs()
    await gcs.service.start("127.0.0.1")
    gcs.service.ready()
    made = [Node(folder, name, **options) for name in names]
    for node in made:
        await node.start(gcs.service.url)
    try:
        yield [gcs, *made]
    finally:
        for node in made:
            await node.stop()
        await gcs.service.stop(0.2)


class Line:
    """A TCP proxy to a node that can cut connections, and flip a byte on its way."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._to = (parts.hostname, parts.port)
        self._writers: list[asyncio.StreamWriter] = []
        self.forwarded = 0
        """Bytes that came from the node."""
        self.flip_at: int | None = None
        self.cut_at: int | None = None
        self.hold_at: int | None = None
        self.cuts = self.flips = 0

    async def __aenter__(self) -> Line:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        self.cut()

    def hold_after(self, nbytes: int) -> None:
        """Let so many more bytes of the node pass."""
        self.hold_at = self.forwarded + nbytes

    @property
    def holds(self) -> bool:
        """Whether it does not let more pass."""
        return self.hold_at is not None and self.forwarded >= self.hold_at

    def cut(self) -> None:
        """Break all connections."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_reader, to_writer = await asyncio.open_connection(*self._to)
        except OSError:
            writer.transport.abort()
            return
        self._writers += [writer, to_writer]
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward(reader, to_writer, None))
                group.create_task(self._forward(to_reader, writer, self._fault))
        except* OSError:
            pass
        finally:
            for one in (writer, to_writer):
                one.transport.abort()

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        fault: Callable[[bytearray], None] | None,
    ) -> None:
        while part := await reader.read(1 << 18):
            data = bytearray(part)
            if fault is not None:
                await until(lambda: not self.holds, "the line is let go", timeout_s=60.0)
                fault(data)
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError

    def _fault(self, data: bytearray) -> None:
        self.forwarded += len(data)
        if self.flip_at is not None and self.forwarded > self.flip_at and len(data) > 4096:
            data[-1] ^= 0x01
            self.flip_at = None
            self.flips += 1
        if self.cut_at is not None and self.forwarded > self.cut_at:
            self.cut_at = None
            self.cuts += 1
            self.cut()
