"""The transfer of objects between nodes: the state of all pulls, the copies of others, and the routes.

The routes answer a runtime that wants an object here, and other nodelets. A pulled object is added to
the index of objects, marked as a copy: copies are dropped, not spilled, when room is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stoker_nodelet.transfer.broadcast_tree import BroadcastTree
from stoker_nodelet.transfer.fair_limiter import FairLimiter
from stoker_nodelet.transfer.io_pool import IoPool
from stoker_nodelet.transfer.pull import Pull, PullContext
from stoker_nodelet.transfer.range_server import RangeServer
from stoker_wire.data.range_reader import CHUNK_NBYTES
from stoker_wire.errors import NotFoundError, ObjectLostError, StokerError, UnavailableError
from stoker_wire.http.client.pool import ClientPool
from stoker_wire.http.principals import GCS, JOBS, NODES
from stoker_wire.http.server.routes import Route
from stoker_wire.ids import Prefix, check_id, id_pattern
from stoker_wire.messages.cluster import Node, NodeState
from stoker_wire.messages.common import Empty
from stoker_wire.messages.node_api import ActivityKind, ChunksQuery, TakenOver
from stoker_wire.messages.objects import (
    AdoptedObjects,
    AdoptObjects,
    FindSources,
    FreeObjects,
    ObjectInfo,
    ObjectSource,
    ObjectSources,
    PullObject,
    ReadyChunks,
    ReportCopy,
)
from stoker_wire.process.metrics import START_BOUNDS, Distribution
from stoker_wire.tls.files import files_of

if TYPE_CHECKING:
    from aiohttp import web

    from stoker_nodelet.identity import Endpoint
    from stoker_nodelet.objects.eviction import ArenaEvictor
    from stoker_nodelet.transfer.chunk_map import ChunkMap
    from stoker_wire.http.auth import Credential
    from stoker_wire.http.client.client import Client
    from stoker_wire.http.server.service import Request
    from stoker_wire.process.background import Background
    from stoker_wire.settings import Settings

_SLOTS = 6
"""Chunks that are received at once, and as many that are sent; as many small ones besides."""
_NOTIFY_S = 10.0
_ASK_GCS_S = 5.0
_COPY_S = 20.0
_CLOSING_S = 10.0
"""So long nobody writes here after the order to hand over; it is repeated while the drain goes on."""
_COPIES = 1000
"""So many objects are taken over at once; the order is repeated while there are more."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class PullCounts:
    """The outcomes of pulls of other nodes' objects since the start."""

    outcomes: dict[str, int] = field(default_factory=lambda: {"ok": 0, "failed": 0, "freed": 0})
    seconds: Distribution = field(default_factory=lambda: Distribution(START_BOUNDS))
    """Of those that brought their object."""
    nbytes: int = 0
    """What arrived by pulls that have ended."""


class Transfer:
    """Pulls of other nodes' objects, and of this node's objects by others."""

    def __init__(
        self,
        node_id: str,
        endpoint: Endpoint,
        evictor: ArenaEvictor,
        *,
        credential: Credential,
        settings: Settings,
        gcs: Client,
        background: Background,
    ) -> None:
        self._node_id = node_id
        self._endpoint = endpoint
        self._objects = objects = evictor.objects
        self._evictor = evictor
        self._credential = credential
        self._tls = files_of(settings)
        self._gcs = gcs
        self._background = background
        self._clients = ClientPool(token=credential, peer=f"nodelet {node_id}", settings=settings)
        self._pulls: dict[str, Pull] = {}
        self._tasks: dict[str, asyncio.Task[ObjectInfo]] = {}
        self._taken_over: set[str] = set()
        """Objects that have another home now, as this node is drained."""
        self._heir: ObjectSource | None = None
        """The node that takes the objects over."""
        self._closing_until_s = 0.0
        self.leaving = False
        """Whether this node has been told to leave: what is still written here is taken over at once."""
        self.counts = PullCounts()
        self._freed: set[str] = set()
        """Objects whose pulls are being cancelled because they were freed."""
        self._io_pool = IoPool(4 * _SLOTS, "transfer")
        self._receiving = FairLimiter(_SLOTS, _SLOTS * CHUNK_NBYTES)
        self._tree = BroadcastTree()
        self.server = RangeServer(
            objects, self._arriving, FairLimiter(_SLOTS, _SLOTS * CHUNK_NBYTES), self._io_pool
        )

    @property
    def _here(self) -> ObjectSource:
        """This node as a source of objects."""
        return ObjectSource(node_id=self._node_id, url=self._endpoint.url)

    @property
    def active(self) -> int:
        """The number of pulls that go on."""
        return len(self._pulls)

    @property
    def received_nbytes(self) -> int:
        """The bytes of objects that have arrived, those of pulls that go on included."""
        return self.counts.nbytes + sum(pull.arrived_nbytes for pull in self._pulls.values())

    async def close(self) -> None:
        """Close threads and connections; the pulls end with the nodelet's background tasks."""
        self._io_pool.close()
        await self._clients.close()

    # -- pulls to here --------------------------------------------------------------------------

    async def pull(self, req: Request) -> ObjectInfo:
        object_id = check_id(req.path["id"], Prefix.OBJECT, field="id")
        req.waiting_for(f"the {req.body.nbytes} bytes of {object_id} to come from {req.body.url}")
        return await self.bring(object_id, req.body)

    async def bring(self, object_id: str, wanted: PullObject) -> ObjectInfo:
        """Return an object's entry, after its pull if need be; a caller that leaves does not stop it."""
        if object_id in self._objects:
            return self._objects.get(object_id)
        task = self._tasks.get(object_id)
        if task is None:
            try:
                task = self._background.spawn(
                    self._pull(object_id, wanted), name=f"pull-{object_id}", report=False
                )
            except RuntimeError:
                raise UnavailableError(
                    f"node {self._node_id} stops, and pulls nothing more"
                ) from None
            self._tasks[object_id] = task
            task.add_done_callback(lambda task: self._on_pull_done(object_id, task))
        return await asyncio.shield(task)

    async def _pull(self, object_id: str, wanted: PullObject) -> ObjectInfo:
        context = PullContext(
            me=self._here,
            credential=self._credential,
            tls=self._tls,
            arena=self._objects.arena,
            make_room=self._evictor.make_room,
            death_of=self._death_of,
            client_of=self._clients.client,
            limiter=self._receiving,
            io_pool=self._io_pool,
        )
        pull = self._pulls[object_id] = Pull(context, object_id, wanted)
        began_at_s, began_s, outcome = time.time(), _now_s(), "failed"
        try:
            info = await pull.run()
            outcome = "ok"
            self.counts.seconds.observe(_now_s() - began_s)
            self._objects.seal([info])
            self._evictor.activity.add(
                ActivityKind.TRANSFER,
                began_at_s,
                name=object_id,
                job_id=info.job_id,
                peer=wanted.node_id,
                nbytes=info.nbytes,
            )
            if pull.chunks is not None:
                self.server.remember(object_id, pull.chunks)
        except asyncio.CancelledError:
            if object_id not in self._freed:
                raise  # the nodelet stops
            outcome = "freed"
            raise ObjectLostError(f"{object_id} was freed while it was pulled") from None
        except StokerError:
            self._report(object_id, wanted, whole=False)
            raise
        finally:
            del self._pulls[object_id]
            self.counts.outcomes[outcome] += 1
            self.counts.nbytes += pull.arrived_nbytes
        self._report(object_id, wanted, whole=object_id in self._objects)
        return info

    def _report(self, object_id: str, wanted: PullObject, *, whole: bool) -> None:
        report = ReportCopy(node_id=self._node_id, whole=whole)
        self._notify(wanted.url, f"/v1/objects/{object_id}/copies", report)

    def _on_pull_done(self, object_id: str, task: asyncio.Task[ObjectInfo]) -> None:
        self._tasks.pop(object_id, None)
        self._freed.discard(object_id)
        if not task.cancelled() and task.exception() is not None:
            # Those who want an object get the error that it is lost or freed; it is none of this node.
            ours = not isinstance(task.exception(), ObjectLostError)
            _log.log(logging.WARNING if ours else logging.INFO, "%s", task.exception())

    async def _death_of(self, node_id: str) -> str:
        """Return how a node died, if the gcs knows; nothing while the gcs is away: then nobody is dead."""
        try:
            node = await self._gcs.call(
                "GET", f"/v1/nodes/{node_id}", reply=Node, timeout_s=_ASK_GCS_S, retry=False
            )
        except NotFoundError:
            return f"node {node_id} is not of this cluster"
        except StokerError:
            return ""
        return node.death if node.state is NodeState.DEAD else ""

    # -- pulls from here ------------------------------------------------------------------------

    async def send(self, req: Request) -> web.StreamResponse:
        return await self.server.send(req)

    async def find_sources(self, req: Request) -> ObjectSources:
        object_id, body = req.path["id"], req.body
        info = self._objects.get(object_id)
        puller = ObjectSource(node_id=body.node_id, url=body.url)
        sources = self._tree.assign(object_id, self._here, puller, body.failed, _now_s())
        return ObjectSources(object=info, sources=sources)

    async def report_copy(self, req: Request) -> Empty:
        object_id, body = req.path["id"], req.body
        self._tree.end_pull(object_id, body.node_id, whole=body.whole, now_s=_now_s())
        return Empty()

    async def count_chunks(self, req: Request) -> ReadyChunks:
        object_id, query = req.path["id"], req.query
        chunks = self._arriving(object_id)
        if chunks is not None:
            req.waiting_for(f"chunk {query.chunk} of {object_id} to arrive here")
            await chunks.wait_for(query.chunk, min(query.wait_s, max(0.0, req.deadline_s - 0.5)))
            return ReadyChunks(chunks=chunks.ready)
        ready = self.server.ready_chunks(object_id)
        if ready is not None:
            return ReadyChunks(chunks=ready)
        if object_id in self._tasks:
            return ReadyChunks(chunks=0)
        raise NotFoundError(f"{object_id} is neither on this node nor on its way to it")

    def _arriving(self, object_id: str) -> ChunkMap | None:
        pull = self._pulls.get(object_id)
        return None if pull is None else pull.chunks

    # -- the end of this node --------------------------------------------------------------------

    def to_hand_over(self) -> list[ObjectInfo]:
        """Return the objects whose home is here and that no other node has taken over."""
        homes = self._objects.homes()
        self._taken_over &= {one.object_id for one in homes}
        return [one for one in homes if one.object_id not in self._taken_over]

    @property
    def closing(self) -> bool:
        """Whether the objects are being taken over, so that nobody should make new ones here."""
        return self.leaving or _now_s() < self._closing_until_s

    async def hand_over(self, req: Request) -> TakenOver:
        """Have another node become the home of this node's objects, as many as the time permits.

        It pulls them as copies, and adopts what it has; their owners find them there (see the recovery of
        objects), and until then what they free here is freed there too.
        """
        req.waiting_for(f"node {req.body.node_id} to take over the objects of this one")
        self._heir, self._closing_until_s = req.body, _now_s() + _CLOSING_S
        return await self.hand_over_rest()

    async def hand_over_rest(self) -> TakenOver:
        """Have the node that takes over have what it has not yet."""
        if self._heir is None:
            return TakenOver(left=len(self.to_hand_over()))
        client, slots = self._clients.client(self._heir.url), asyncio.Semaphore(_SLOTS)
        # Whoever gave the order repeats it, and to a node that is dead by then with another heir.
        again = self.leaving
        refused: list[StokerError] = []
        copied: list[str] = []

        async def copy(one: ObjectInfo) -> None:
            wanted = PullObject(node_id=self._node_id, url=self._endpoint.url, nbytes=one.nbytes)
            path = f"/v1/objects/{one.object_id}/pull"
            async with slots:
                if one.object_id not in self._objects:
                    return  # it was freed meanwhile
                try:
                    await client.call(
                        "POST", path, wanted, reply=ObjectInfo, timeout_s=_COPY_S, retry=again
                    )
                    copied.append(one.object_id)
                except StokerError as error:
                    if one.object_id in self._objects:
                        refused.append(error)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_COPY_S), asyncio.TaskGroup() as group:
                for one in self.to_hand_over()[:_COPIES]:
                    group.create_task(copy(one))
        if copied:
            adopted = await client.call(
                "POST",
                "/v1/objects/adopt",
                AdoptObjects(object_ids=tuple(copied)),
                reply=AdoptedObjects,
                timeout_s=_NOTIFY_S,
                retry=again,
            )
            self._taken_over.update(one.object_id for one in adopted.objects)
        left = len(self.to_hand_over())
        if refused and left:
            _log.info("%d objects were not taken over: %s", left, refused[0])
        return TakenOver(left=left)

    # -- the end of objects ----------------------------------------------------------------------

    def on_freed(self, object_ids: Iterable[str]) -> None:
        """Cancel the pulls of objects that were freed here, and have the nodes with copies free them."""
        object_ids = tuple(object_ids)
        for object_id in object_ids:
            task = self._tasks.get(object_id)
            if task is not None:
                self._freed.add(object_id)
                task.cancel()
        for url, of_url in self._tree.forget(object_ids).items():
            self._notify(url, "/v1/objects/free", FreeObjects(object_ids=tuple(of_url)))

    def _notify(self, url: str, path: str, body: object) -> None:
        async def notify() -> None:
            try:
                await self._clients.client(url).call("POST", path, body, timeout_s=_NOTIFY_S)
            except StokerError as error:
                # Only a hint is lost: copies also end with their job, with their owner, or for room.
                _log.info("%s%s: %s", url, path, error)

        with contextlib.suppress(RuntimeError):  # the nodelet stops, and hints do not matter
            self._background.spawn(notify(), name="notify")


def _now_s() -> float:
    return asyncio.get_running_loop().time()


ROUTES = (
    Route(
        "POST", "/v1/objects/hand-over", Transfer.hand_over,
        body=ObjectSource, reply=TakenOver,
        roles=GCS, summary="Have another node take over this node's objects",
    ),
    Route(
        "GET", "/v1/objects/{id}", Transfer.send, before_ready=True, stream=True,
        roles=NODES | JOBS,
        summary="Read an object's bytes; takes Range, with the XXH3 of ranges up to a chunk",
    ),
    Route(
        "POST", "/v1/objects/{id}/pull", Transfer.pull, before_ready=True,
        parts={"id": id_pattern(Prefix.OBJECT)},
        body=PullObject, reply=ObjectInfo,
        roles=GCS | NODES | JOBS,
        summary="Pull another node's object into this arena, once however many ask",
    ),
    Route(
        "POST", "/v1/objects/{id}/sources", Transfer.find_sources, before_ready=True,
        body=FindSources, reply=ObjectSources,
        roles=NODES, summary="Find the nodes from which a nodelet may pull this node's object",
    ),
    Route(
        "POST", "/v1/objects/{id}/copies", Transfer.report_copy, before_ready=True,
        body=ReportCopy, reply=Empty, roles=NODES,
        summary="Report how a nodelet's pull of this object ended",
    ),
    Route(
        "GET", "/v1/objects/{id}/chunks", Transfer.count_chunks, before_ready=True,
        query=ChunksQuery, reply=ReadyChunks,
        roles=NODES, summary="Get how much of an object is here; may wait for a chunk",
    ),
)  # fmt: skip
