"""One pull: an object of another node comes into this node's arena, once, whoever waits for it.

The home of the object says where to get it. A source that fails is left for another, and the pull
goes on with the chunks that are missing; it gives up when nothing has come for a while, or when the
object or its home is gone for good, and says what it tried.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from stoker_nodelet.transfer.chunk_map import Incoming, span_of
from stoker_nodelet.transfer.fair_limiter import Turns
from stoker_nodelet.transfer.io_pool import TransferThreads
from stoker_wire.arena import Arena, Extent
from stoker_wire.data.range_reader import CHUNK_NBYTES, RangeReader
from stoker_wire.errors import (
    ArenaFullError,
    NotFoundError,
    ObjectLostError,
    ObjectNodeDiedError,
    StokerError,
)
from stoker_wire.http.client import Client
from stoker_wire.messages.work import (
    FindSources,
    ObjectInfo,
    ObjectSource,
    ObjectSources,
    PullObject,
    ReadyChunks,
)

STREAMS = 2
"""Connections per pull: while the chunk of one is verified, the other's comes."""

_ASK_S = 5.0
_UNSEALED_S = 2.0
"""The report that an object was written may arrive after its ref."""
_UNSEALED_AGAIN_S = 0.05
_PATIENCE_S = 60.0
_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_UPSTREAM_S = 5.0
_UPSTREAM_STALL_S = 15.0


@dataclass(frozen=True, slots=True)
class Means:
    """What every pull of a node works with."""

    me: ObjectSource
    token: str
    arena: Arena
    make_room: Callable[[int], Awaitable[None]]
    death_of: Callable[[str], Awaitable[str]]
    client_of: Callable[[str], Client]
    turns: Turns
    threads: TransferThreads
    patience_s: float = _PATIENCE_S


class Pull:
    """The pull of ``object_id``; ``incoming`` shows how far it is, once it has begun."""

    def __init__(self, means: Means, object_id: str, wanted: PullObject) -> None:
        self._means = means
        self._object_id = object_id
        self._home = ObjectSource(node_id=wanted.node_id, url=wanted.url)
        self._nbytes = wanted.nbytes
        self._failed: dict[str, str] = {}
        """Node id -> how it failed last."""
        self.incoming: Incoming | None = None

    async def run(self) -> ObjectInfo:
        """Bring the object into the arena; return what is known of it. Raises ObjectLostError."""
        found = await self._first_sources()
        self._nbytes = found.object.nbytes
        extent = await self._extent()
        try:
            memory = extent.mapping or mmap.mmap(extent.fd, self._nbytes)
            self.incoming = Incoming(self._nbytes, extent.fd)
            await self._fill(self.incoming, found.sources, memory)
            extent.seal(self._object_id)
        except BaseException:
            extent.discard()
            raise
        return msgspec.structs.replace(
            found.object, node_id=self._means.me.node_id, copy_of=self._home.node_id, spilled=False
        )

    # -- where from ------------------------------------------------------------------------------

    async def _sources(self) -> ObjectSources:
        me = self._means.me
        return await self._means.client_of(self._home.url).call(
            "POST",
            f"/v1/objects/{self._object_id}/sources",
            FindSources(node_id=me.node_id, url=me.url, failed=tuple(self._failed)),
            reply=ObjectSources,
            timeout_s=_ASK_S,
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
                late = loop.time() > began_s + self._means.patience_s
                death = await self._means.death_of(self._home.node_id)
                if late or death or not error.retryable:
                    raise self._given_up(death) from None
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
            death = await self._means.death_of(self._home.node_id)
            if not death:
                return (*rest, known[0])
            rest = tuple(one for one in rest if one.node_id != self._home.node_id)
            if not rest:
                raise self._given_up(death) from None
            return rest

    # -- the bytes -------------------------------------------------------------------------------

    async def _extent(self) -> Extent:
        arena, threads, nbytes = self._means.arena, self._means.threads, self._nbytes

        made: list[Extent] = []

        async def create() -> Extent:
            # Fresh memory takes its time: many at once would hold all threads.
            async with self._means.turns.turn(self._object_id, min(nbytes, CHUNK_NBYTES)):
                try:
                    await threads.run(lambda: made.append(arena.create(nbytes)))
                except asyncio.CancelledError:
                    for extent in made:
                        extent.discard()
                    raise
            return made.pop()

        try:
            return await create()
        except ArenaFullError:
            await self._means.make_room(nbytes)
            return await create()

    async def _fill(
        self, incoming: Incoming, sources: tuple[ObjectSource, ...], memory: mmap.mmap
    ) -> None:
        loop = asyncio.get_running_loop()
        moved_s, pause_s = loop.time(), _PAUSE_S
        while not incoming.whole:
            before = incoming.arrived_nbytes
            try:
                await self._pull_from(sources[0], incoming, memory)
            except StokerError as error:
                self._failed[sources[0].node_id] = f"{sources[0].url}: {error}"
                if incoming.arrived_nbytes > before:
                    moved_s, pause_s = loop.time(), _PAUSE_S
                if loop.time() > moved_s + self._means.patience_s:
                    raise self._given_up() from None
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                sources = await self._next_sources(sources)

    async def _pull_from(self, source: ObjectSource, incoming: Incoming, memory: mmap.mmap) -> None:
        """Fetch all missing chunks. After a failure no other chunk is begun, those begun may come."""
        streams = min(STREAMS, len(incoming.checksums) - incoming.ready)
        failures: list[StokerError] = []
        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(self._stream(source, incoming, memory, failures))
        if failures:
            raise failures[0]

    async def _stream(
        self,
        source: ObjectSource,
        incoming: Incoming,
        memory: mmap.mmap,
        failures: list[StokerError],
    ) -> None:
        reader = RangeReader(
            source.url, token=self._means.token, peer=f"nodelet {self._means.me.node_id}"
        )
        there = len(incoming.checksums) if source.node_id == self._home.node_id else 0
        try:
            while not failures and (chunk := incoming.claim()) is not None:
                try:
                    if chunk >= there:
                        there = await self._upstream(source, chunk)
                    incoming.arrived(chunk, await self._receive(reader, incoming, memory, chunk))
                except BaseException:
                    incoming.unclaim(chunk)
                    raise
        except StokerError as error:
            failures.append(error)
        finally:
            reader.close()

    async def _receive(
        self, reader: RangeReader, incoming: Incoming, memory: mmap.mmap, chunk: int
    ) -> int:
        begin, nbytes = span_of(chunk, incoming.nbytes)

        def receive() -> int:
            with memoryview(memory) as whole, whole[begin : begin + nbytes] as part:
                return reader.read(self._object_id, begin, part)

        async with self._means.turns.turn(self._object_id, nbytes):
            return await self._means.threads.run(receive, abort=reader.abort)

    async def _upstream(self, source: ObjectSource, chunk: int) -> int:
        """Wait until a node that is getting the object has ``chunk``; return how many it has."""
        loop = asyncio.get_running_loop()
        ready, moved_s = 0, loop.time()
        while True:
            answer = await self._means.client_of(source.url).call(
                "GET",
                f"/v1/objects/{self._object_id}/chunks",
                reply=ReadyChunks,
                query={"chunk": chunk, "wait_s": _UPSTREAM_S},
                timeout_s=2 * _UPSTREAM_S,
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

    # -- what is told ----------------------------------------------------------------------------

    def _progress(self) -> str:
        arrived = 0 if self.incoming is None else self.incoming.arrived_nbytes
        return f"{arrived} of {self._nbytes} bytes have come"

    def _given_up(self, death: str = "") -> ObjectLostError:
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
