"""The transfer of objects as the nodelet's API shows it: pulls in, bytes out, copies known and freed.

Its routes answer a runtime that wants an object here, and other nodelets. It adds what it pulled to
the index of objects, marked as a copy: those are dropped, not spilled, when room is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import msgspec

from stoker_nodelet.transfer.broadcast_tree import Spreading
from stoker_nodelet.transfer.fair_limiter import Turns
from stoker_nodelet.transfer.io_pool import TransferThreads
from stoker_nodelet.transfer.pull import Means, Pull
from stoker_nodelet.transfer.serving import Serving
from stoker_wire.data.range_reader import CHUNK_NBYTES
from stoker_wire.errors import NotFoundError, ObjectLostError, StokerError
from stoker_wire.http.client import Client
from stoker_wire.ids import Prefix, check_id
from stoker_wire.messages.cluster import Node, NodeState
from stoker_wire.messages.common import Empty, Message
from stoker_wire.messages.work import (
    FindSources,
    FreeObjects,
    ObjectInfo,
    ObjectSource,
    ObjectSources,
    PullObject,
    ReadyChunks,
    ReportCopy,
)

if TYPE_CHECKING:
    from stoker_nodelet.objects.eviction import Space
    from stoker_nodelet.transfer.chunk_map import Incoming
    from stoker_wire.http.server import Request, Service
    from stoker_wire.process.background import Background
    from stoker_wire.settings import Settings

_PLACES = 6
"""Chunks that are received, and as many that are sent, at once; as many small ones besides."""
_TELL_S = 10.0
_ASK_GCS_S = 5.0

_log = logging.getLogger("stoker.nodelet.transfer")


class ChunksQuery(Message):
    """Wait until ``chunk`` is there, at most ``wait_s``."""

    chunk: Annotated[int, msgspec.Meta(ge=0)] = 0
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=20)] = 0.0


class Transfer:
    """Objects of this node that others get, and objects of others that this node gets."""

    def __init__(
        self,
        node_id: str,
        space: Space,
        *,
        token: str,
        settings: Settings,
        gcs: Client,
        background: Background,
    ) -> None:
        self._objects = objects = space.objects
        self._space = space
        self._token = token
        self._settings = settings
        self._gcs = gcs
        self._background = background
        self._clients: dict[str, Client] = {}
        self._pulls: dict[str, Pull] = {}
        self._tasks: dict[str, asyncio.Task[ObjectInfo]] = {}
        self._freed: set[str] = set()
        """Objects whose pulls are being stopped because they were freed."""
        self._threads = TransferThreads(4 * _PLACES, "transfer")
        self._receiving = Turns(_PLACES, _PLACES * CHUNK_NBYTES)
        self.spreading = Spreading(ObjectSource(node_id=node_id, url=""))
        self.serving = Serving(
            objects, self._incoming_of, Turns(_PLACES, _PLACES * CHUNK_NBYTES), self._threads
        )

    def listens_at(self, url: str) -> None:
        """The service listens: now others can be told where this node is."""
        self.spreading.home = ObjectSource(node_id=self.spreading.home.node_id, url=url)

    async def close(self) -> None:
        """Let go of threads and connections; the pulls end with the nodelet's background tasks."""
        self._threads.close()
        for client in self._clients.values():
            await client.close()

    def add_to(self, service: Service) -> None:
        """Register the routes."""
        add = service.route
        add(
            "GET", "/v1/objects/{id}", self.serving.send, before_ready=True, stream=True,
            summary="An object's bytes; takes Range, and tells the XXH3 of ranges up to a chunk",
        )  # fmt: skip
        add(
            "POST", "/v1/objects/{id}/pull", self.pull, before_ready=True,
            body=PullObject, reply=ObjectInfo,
            summary="Bring another node's object into this arena, once however many ask",
        )  # fmt: skip
        add(
            "POST", "/v1/objects/{id}/sources", self.sources, before_ready=True,
            body=FindSources, reply=ObjectSources,
            summary="Where a nodelet may pull this node's object from",
        )  # fmt: skip
        add(
            "POST", "/v1/objects/{id}/copies", self.report_copy, before_ready=True,
            body=ReportCopy, reply=Empty, summary="How a nodelet's pull of this object ended",
        )  # fmt: skip
        add(
            "GET", "/v1/objects/{id}/chunks", self.chunks, before_ready=True,
            query=ChunksQuery, reply=ReadyChunks,
            summary="How much of an object is here; may wait for a chunk",
        )  # fmt: skip

    # -- this node gets --------------------------------------------------------------------------

    async def pull(self, req: Request) -> ObjectInfo:
        object_id = check_id(req.path["id"], Prefix.OBJECT, field="id")
        req.waiting_for(f"the {req.body.nbytes} bytes of {object_id} to come from {req.body.url}")
        return await self.bring(object_id, req.body)

    async def bring(self, object_id: str, wanted: PullObject) -> ObjectInfo:
        """Have an object here, pulled if need be; a caller that leaves does not stop the pull."""
        if object_id in self._objects:
            return self._objects.get(object_id)
        task = self._tasks.get(object_id)
        if task is None:
            task = self._background.spawn(
                self._pull(object_id, wanted), name=f"pull-{object_id}", report=False
            )
            self._tasks[object_id] = task
            task.add_done_callback(lambda ended: self._ended(object_id, ended))
        return await asyncio.shield(task)

    async def _pull(self, object_id: str, wanted: PullObject) -> ObjectInfo:
        means = Means(
            me=self.spreading.home,
            token=self._token,
            arena=self._objects.arena,
            make_room=self._space.make_room,
            death_of=self._death_of,
            client_of=self._client_of,
            turns=self._receiving,
            threads=self._threads,
        )
        pull = self._pulls[object_id] = Pull(means, object_id, wanted)
        try:
            info = await pull.run()
            self._objects.seal([info])
            if pull.incoming is not None:
                self.serving.remember(object_id, pull.incoming)
        except asyncio.CancelledError:
            if object_id not in self._freed:
                raise  # the nodelet stops
            raise ObjectLostError(f"{object_id} was freed while it was pulled") from None
        except StokerError:
            self._report(object_id, wanted, whole=False)
            raise
        finally:
            del self._pulls[object_id]
        self._report(object_id, wanted, whole=object_id in self._objects)
        return info

    def _report(self, object_id: str, wanted: PullObject, *, whole: bool) -> None:
        report = ReportCopy(node_id=self.spreading.home.node_id, whole=whole)
        self._tell(wanted.url, f"/v1/objects/{object_id}/copies", report)

    def _ended(self, object_id: str, task: asyncio.Task[ObjectInfo]) -> None:
        self._tasks.pop(object_id, None)
        self._freed.discard(object_id)
        if not task.cancelled() and task.exception() is not None:
            # An object that is lost or freed is the concern of who wants it, and they are told.
            ours = not isinstance(task.exception(), ObjectLostError)
            _log.log(logging.WARNING if ours else logging.INFO, "%s", task.exception())

    async def _death_of(self, node_id: str) -> str:
        """Say that a node is gone, if the gcs knows; empty while the gcs is away: nobody is dead."""
        try:
            node = await self._gcs.call(
                "GET", f"/v1/nodes/{node_id}", reply=Node, timeout_s=_ASK_GCS_S, retry=False
            )
        except NotFoundError:
            return f"node {node_id} is not of this cluster"
        except StokerError:
            return ""
        return node.death if node.state is NodeState.DEAD else ""

    # -- others get ------------------------------------------------------------------------------

    async def sources(self, req: Request) -> ObjectSources:
        object_id, body = req.path["id"], req.body
        info = self._objects.get(object_id)
        puller = ObjectSource(node_id=body.node_id, url=body.url)
        found = self.spreading.assign(object_id, puller, body.failed, _now_s())
        return ObjectSources(object=info, sources=found)

    async def report_copy(self, req: Request) -> Empty:
        object_id, body = req.path["id"], req.body
        self.spreading.ended(object_id, body.node_id, whole=body.whole, now_s=_now_s())
        return Empty()

    async def chunks(self, req: Request) -> ReadyChunks:
        object_id, query = req.path["id"], req.query
        coming = self._incoming_of(object_id)
        if coming is not None:
            req.waiting_for(f"chunk {query.chunk} of {object_id} to come here")
            await coming.wait_for(query.chunk, min(query.wait_s, max(0.0, req.deadline_s - 0.5)))
            return ReadyChunks(chunks=coming.ready)
        ready = self.serving.ready_chunks(object_id)
        if ready is not None:
            return ReadyChunks(chunks=ready)
        if object_id in self._tasks:
            return ReadyChunks(chunks=0)
        raise NotFoundError(f"{object_id} is neither on this node nor on its way to it")

    def _incoming_of(self, object_id: str) -> Incoming | None:
        pull = self._pulls.get(object_id)
        return None if pull is None else pull.incoming

    # -- the end of objects ----------------------------------------------------------------------

    def freed(self, object_ids: Iterable[str]) -> None:
        """Objects were freed here: stop their pulls, and have the nodes with copies free them."""
        object_ids = tuple(object_ids)
        for object_id in object_ids:
            task = self._tasks.get(object_id)
            if task is not None:
                self._freed.add(object_id)
                task.cancel()
        for url, of_url in self.spreading.freed(object_ids).items():
            self._tell(url, "/v1/objects/free", FreeObjects(object_ids=tuple(of_url)))

    def _tell(self, url: str, path: str, body: object) -> None:
        async def tell() -> None:
            try:
                await self._client_of(url).call("POST", path, body, timeout_s=_TELL_S)
            except StokerError as error:
                # What is lost is a hint: copies also end with their job, their owner, or for room.
                _log.info("%s%s: %s", url, path, error)

        with contextlib.suppress(RuntimeError):  # the nodelet stops, and hints do not matter
            self._background.spawn(tell(), name="tell")

    def _client_of(self, url: str) -> Client:
        client = self._clients.get(url)
        if client is None:
            client = self._clients[url] = Client(
                url,
                token=self._token,
                peer=f"nodelet {self.spreading.home.node_id}",
                settings=self._settings,
            )
        return client


def _now_s() -> float:
    return asyncio.get_running_loop().time()
