"""One pull: the transfer of another node's object into this node's arena, once, whoever waits for it.

The home of the object says where to get it. A source that fails is left for another, and the pull
goes on with the chunks that are missing; it gives up when nothing has arrived for a while, or when
the object or its home is gone for good, and its error names what was tried.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from stoker_nodelet.transfer.chunk_map import ChunkMap, span_of
from stoker_nodelet.transfer.fair_limiter import FairLimiter
from stoker_nodelet.transfer.io_pool import IoPool
from stoker_wire.arena import Arena, Extent
from stoker_wire.data.range_reader import CHUNK_NBYTES, RangeReader
from stoker_wire.errors import (
    ArenaFullError,
    NotFoundError,
    ObjectLostError,
    ObjectNodeDiedError,
    StokerError,
)
from stoker_wire.http.auth import Credential
from stoker_wire.http.client.client import Client
from stoker_wire.messages.objects import (
    FindSources,
    ObjectInfo,
    ObjectSource,
    ObjectSources,
    PullObject,
    ReadyChunks,
)
from stoker_wire.tls.files import TlsFiles

STREAMS = 2
"""Connections per pull: while the chunk of one is verified, that of the other arrives."""

_SOURCES_S = 5.0
_UNSEALED_S = 2.0
"""The report that an object was written may arrive after its ref; so long that is waited for."""
_UNSEALED_AGAIN_S = 0.05
_GIVE_UP_S = 60.0
_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_UPSTREAM_WAIT_S = 5.0
_UPSTREAM_STALL_S = 15.0


@dataclass(frozen=True, slots=True)
class PullContext:
    """The node's parts that all of its pulls share."""

    me: ObjectSource
    credential: Credential
    tls: TlsFiles
    arena: Arena
    make_room: Callable[[int], Awaitable[None]]
    death_of: Callable[[str], Awaitable[str]]
    client_of: Callable[[str], Client]
    limiter: FairLimiter
    io_pool: IoPool
    give_up_s: float = _GIVE_UP_S


class Pull:
    """The pull of ``object_id``; ``chunks`` shows how far it is, once it has begun."""

    def __init__(self, context: PullContext, object_id: str, wanted: PullObject) -> None:
        self._context = context
        self._object_id = object_id
        self._home = ObjectSource(node_id=wanted.node_id, url=wanted.url)
        self._nbytes = wanted.nbytes
        self._failed: dict[str, str] = {}
        """Node id -> its last failure."""
        self.chunks: ChunkMap | None = None

    async def run(self) -> ObjectInfo:
        """Bring the object into the arena; return its index entry. Raises ObjectLostError."""
        answer = await self._first_sources()
        self._nbytes = answer.object.nbytes
        extent = await self._extent()
        try:
            memory = extent.mapping or mmap.mmap(extent.fd, self._nbytes)
            self.chunks = ChunkMap(self._nbytes, memory)
            await self._fill(self.chunks, answer.sources)
            extent.seal(self._object_id)
        except BaseException:
            extent.discard()
            raise
        return msgspec.structs.replace(
            answer.object,
            node_id=self._context.me.node_id,
            copy_of=self._home.node_id,
            spilled=False,
        )

    # -- where from ------------------------------------------------------------------------------

    async def _sources(self) -> ObjectSources:
        me = self._context.me
        return await self._context.client_of(self._home.url).call(
            "POST",
            f"/v1/objects/{self._object_id}/sources",
            FindSources(node_id=me.node_id, url=me.url, failed=tuple(self._failed)),
            reply=ObjectSources,
            timeout_s=_SOURCES_S,
            retry=False,
        )

    async def _first_sources(self) -> ObjectSources:
        loop = asyncio.get_running_loop()
        began_s, pause_s = loop.time(), _PAUSE_S
        while True:
            try:
                return await self._sources()
            except NotFoundError as error:
                if loop.time() > began_s + _UNSEALED_S:
                    raise ObjectLostError(
                        f"{self._object_id} is no longer on node {self._home.node_id}\n{error}"
                    ) from None
                await asyncio.sleep(_UNSEALED_AGAIN_S)
            except StokerError as error:
                self._failed[self._home.node_id] = f"{self._home.url}: {error}"
                late = loop.time() > began_s + self._context.give_up_s
                death = await self._context.death_of(self._home.node_id)
                if late or death or not error.retryable:
                    raise self._lost(death) from None
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _next_sources(self, known: tuple[ObjectSource, ...]) -> tuple[ObjectSource, ...]:
        """Return the sources to try after the first of ``known`` failed, best first."""
        try:
            return (await self._sources()).sources
        except NotFoundError:
            raise ObjectLostError(
                f"{self._object_id} was freed on its node {self._home.node_id} while it was pulled\n"
                f"{self._progress()}"
            ) from None
        except StokerError as error:
            self._failed[self._home.node_id] = f"{self._home.url}: {error}"
            rest = known[1:]
            death = await self._context.death_of(self._home.node_id)
            if not death:
                return (*rest, known[0])
            rest = tuple(one for one in rest if one.node_id != self._home.node_id)
            if not rest:
                raise self._lost(death) from None
            return rest

    # -- the bytes -------------------------------------------------------------------------------

    async def _extent(self) -> Extent:
        arena, io_pool, nbytes = self._context.arena, self._context.io_pool, self._nbytes

        made: list[Extent] = []

        async def create() -> Extent:
            # Fresh memory is slow to fault in: many at once would hold all threads.
            async with self._context.limiter.slot(self._object_id, min(nbytes, CHUNK_NBYTES)):
                try:
                    await io_pool.run(lambda: made.append(arena.create(nbytes)))
                except asyncio.CancelledError:
                    for extent in made:
                        extent.discard()
                    raise
            return made.pop()

        try:
            return await create()
        except ArenaFullError:
            await self._context.make_room(nbytes)
            return await create()

    async def _fill(self, chunks: ChunkMap, sources: tuple[ObjectSource, ...]) -> None:
        loop = asyncio.get_running_loop()
        moved_s, pause_s = loop.time(), _PAUSE_S
        while not chunks.whole:
            before = chunks.arrived_nbytes
            try:
                await self._pull_from(sources[0], chunks)
            except StokerError as error:
                self._failed[sources[0].node_id] = f"{sources[0].url}: {error}"
                if chunks.arrived_nbytes > before:
                    moved_s, pause_s = loop.time(), _PAUSE_S
                if loop.time() > moved_s + self._context.give_up_s:
                    raise self._lost() from None
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                sources = await self._next_sources(sources)

    async def _pull_from(self, source: ObjectSource, chunks: ChunkMap) -> None:
        """Fetch all missing chunks. After a failure no other chunk is begun; those begun may arrive."""
        streams = min(STREAMS, len(chunks.checksums) - chunks.ready)
        failures: list[StokerError] = []
        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(self._stream(source, chunks, failures))
        if failures:
            raise failures[0]

    async def _stream(
        self, source: ObjectSource, chunks: ChunkMap, failures: list[StokerError]
    ) -> None:
        reader = RangeReader(
            source.url,
            token=self._context.credential,
            peer=f"nodelet {self._context.me.node_id}",
            tls=self._context.tls,
        )
        available = len(chunks.checksums) if source.node_id == self._home.node_id else 0
        try:
            while not failures and (chunk := chunks.claim()) is not None:
                try:
                    if chunk >= available:
                        available = await self._wait_for_chunk(source, chunk)
                    chunks.add(chunk, await self._receive(reader, chunks, chunk))
                except BaseException:
                    chunks.give_back(chunk)
                    raise
        except StokerError as error:
            failures.append(error)
        finally:
            reader.close()

    async def _receive(self, reader: RangeReader, chunks: ChunkMap, chunk: int) -> int:
        begin, nbytes = span_of(chunk, chunks.nbytes)

        def receive() -> int:
            with memoryview(chunks.memory) as whole, whole[begin : begin + nbytes] as part:
                return reader.read(self._object_id, begin, part)

        async with self._context.limiter.slot(self._object_id, nbytes):
            return await self._context.io_pool.run(receive, abort=reader.abort)

    async def _wait_for_chunk(self, source: ObjectSource, chunk: int) -> int:
        """Wait until a node that is getting the object has ``chunk``; return how many it has."""
        loop = asyncio.get_running_loop()
        ready, moved_s = 0, loop.time()
        while True:
            answer = await self._context.client_of(source.url).call(
                "GET",
                f"/v1/objects/{self._object_id}/chunks",
                reply=ReadyChunks,
                query={"chunk": chunk, "wait_s": _UPSTREAM_WAIT_S},
                timeout_s=2 * _UPSTREAM_WAIT_S,
                retry=False,
            )
            if answer.chunks > chunk:
                return answer.chunks
            if answer.chunks > ready:
                ready, moved_s = answer.chunks, loop.time()
            elif loop.time() > moved_s + _UPSTREAM_STALL_S:
                raise ObjectLostError(
                    f"{source.node_id} has waited {_UPSTREAM_STALL_S:g} s itself for chunk {ready}"
                )

    # -- errors ---------------------------------------------------------------------------------

    @property
    def arrived_nbytes(self) -> int:
        """The bytes of the object that are here."""
        return 0 if self.chunks is None else self.chunks.arrived_nbytes

    def _progress(self) -> str:
        return f"{self.arrived_nbytes} of {self._nbytes} bytes have arrived"

    def _lost(self, death: str = "") -> ObjectLostError:
        if death:
            return ObjectNodeDiedError(
                f"{self._object_id} is lost with its node\n{death}\n{self._progress()}"
            )
        tried = "; ".join(f"{node_id}: {how}" for node_id, how in self._failed.items())
        return ObjectLostError(
            f"{self._object_id} of node {self._home.node_id} cannot be had\n"
            f"{self._progress()}\n"
            f"tried {tried or 'nobody'}"
        )
