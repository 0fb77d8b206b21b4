"""The nodelet's routes: decode, ask the part that knows, encode. No decisions here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec

from stoker_nodelet.objects.eviction import Space
from stoker_nodelet.objects.index import Objects
from stoker_nodelet.telemetry.exits import Exits
from stoker_nodelet.telemetry.logs import LogFilter, Logs
from stoker_nodelet.telemetry.task_spool import Spool
from stoker_nodelet.transfer import Transfer
from stoker_nodelet.workers.workers import Workers
from stoker_wire.errors import DeadlineExceededError, NotFoundError, UnavailableError
from stoker_wire.http.paging import page_of
from stoker_wire.http.server import Request, Service, bytes_response, stream_response
from stoker_wire.messages.cluster import (
    HeldLeases,
    RegisterWorker,
    ReleaseLeases,
    StartedLease,
    StartLease,
    Worker,
    WorkerExit,
    WorkerSetup,
)
from stoker_wire.messages.common import Empty, Message, Record
from stoker_wire.messages.control import ListQuery, LogCursors, LogLine, Page, Position
from stoker_wire.messages.work import (
    FreeObjects,
    MakeRoom,
    NodeOutput,
    ObjectInfo,
    SealObjects,
    TaskHistoryStatus,
)

if TYPE_CHECKING:
    from aiohttp import web

_LARGEST = 10


class WorkersQuery(ListQuery):
    """Which workers; empty means all."""

    job_id: str = ""


class ExitQuery(Message):
    """How long to wait for the exit of a worker that lives."""

    wait_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0


class KillWorker(Message):
    """Why a worker shall die."""

    reason: str = "killed over the API"


class ObjectsQuery(ListQuery):
    """Which objects; empty means all."""

    job_id: str = ""
    owner_id: str = ""


class LogsQuery(Message):
    """Which lines. ``kind`` is ``worker``, ``driver`` or empty (both).

    ``since`` is the cursor of the last line seen, with a ``worker_id``; ``tail`` starts so many
    lines before the end.
    """

    job_id: str = ""
    worker_id: str = ""
    kind: str = ""
    follow: bool = False
    since: Position = 0
    tail: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0


class ArenaUsage(Record):
    """How full the node's shared memory is, and with what.

    ``used_bytes`` of ``limit_bytes`` are taken: by objects (``object_bytes``), by extents that wait
    to be used again (``recycled_bytes``), and by the rounding of both.
    """

    arena_dir: str
    limit_bytes: int
    used_bytes: int
    free_bytes: int
    object_bytes: int
    recycled_bytes: int
    spilled_bytes: int
    objects: int
    largest: tuple[ObjectInfo, ...] = ()


class Freed(Record):
    """How many of the objects were here."""

    freed: int


@dataclass(frozen=True, slots=True)
class Api:
    """The parts that the routes lead to."""

    workers: Workers
    exits: Exits
    objects: Objects
    logs: Logs
    spool: Spool
    space: Space
    transfer: Transfer

    def add_to(self, service: Service) -> None:
        """Register all routes."""
        add = service.route
        add(
            "POST", "/v1/leases", self.start_lease, before_ready=True,
            body=StartLease, reply=StartedLease, summary="Give a worker to a lease",
        )  # fmt: skip
        add(
            "GET", "/v1/leases", self.list_leases, before_ready=True,
            reply=HeldLeases, summary="All leases held here",
        )  # fmt: skip
        add(
            "POST", "/v1/leases/release", self.release, before_ready=True,
            body=ReleaseLeases, reply=Empty, summary="Take leases back",
        )  # fmt: skip
        add(
            "POST", "/v1/workers/register", self.register, before_ready=True,
            body=RegisterWorker, reply=WorkerSetup, summary="A worker is up",
        )  # fmt: skip
        add(
            "GET", "/v1/workers", self.list_workers,
            query=WorkersQuery, reply=Page[Worker], summary="The workers of this node",
        )  # fmt: skip
        add("GET", "/v1/workers/{id}", self.get_worker, reply=Worker, summary="One worker")
        add(
            "GET", "/v1/workers/{id}/exit", self.get_exit,
            query=ExitQuery, reply=WorkerExit, summary="How a worker ended; may wait for it",
        )  # fmt: skip
        add(
            "POST", "/v1/workers/{id}/kill", self.kill_worker,
            body=KillWorker, reply=Empty, summary="End a worker and all that it started",
        )  # fmt: skip
        add(
            "POST", "/v1/workers/{id}/spent", self.worker_spent,
            reply=Empty, summary="A worker takes no more calls: it leaves when its lease ends",
        )  # fmt: skip
        add(
            "POST", "/v1/objects", self.seal, before_ready=True,
            body=SealObjects, reply=Empty, summary="Objects were written to the arena",
        )  # fmt: skip
        add(
            "POST", "/v1/objects/free", self.free, before_ready=True,
            body=FreeObjects, reply=Freed, summary="Delete objects",
        )  # fmt: skip
        add(
            "GET", "/v1/objects", self.list_objects,
            query=ObjectsQuery, reply=Page[ObjectInfo], summary="The objects in the arena",
        )  # fmt: skip
        self.transfer.add_to(service)
        add(
            "POST", "/v1/arena/room", self.make_room, before_ready=True,
            body=MakeRoom, reply=Empty, summary="Spill objects until so many bytes are free",
        )  # fmt: skip
        add("GET", "/v1/arena", self.arena, reply=ArenaUsage, summary="How full the arena is")
        add(
            "GET", "/v1/logs", self.read_logs, stream=True,
            query=LogsQuery, reply=LogLine, summary="Lines of output, as NDJSON; may follow",
        )  # fmt: skip
        add(
            "GET", "/v1/jobs/{job_id}/output", self.job_output,
            reply=NodeOutput, summary="How much a job wrote into its output folder here",
        )  # fmt: skip
        add(
            "GET", "/v1/jobs/{job_id}/output.tar", self.job_archive, stream=True,
            summary="What a job wrote into its output folder here, as a tar archive",
        )  # fmt: skip
        add(
            "POST", "/v1/logs", self.read_rest, stream=True,
            query=LogsQuery, body=LogCursors, reply=LogLine,
            summary="Lines of output behind those seen, up to now",
        )  # fmt: skip
        add(
            "POST", "/v1/tasks/flush", self.flush_tasks,
            reply=TaskHistoryStatus, summary="Forward the task history of this node now",
        )  # fmt: skip

    async def start_lease(self, req: Request) -> StartedLease:
        req.waiting_for(f"the worker of {req.body.lease.lease_id} to start")
        return await self.workers.start_lease(req.body)

    async def list_leases(self, req: Request) -> HeldLeases:
        req.waiting_for("the gcs to register this node")
        await self.workers.member.wait()
        return self.workers.held()

    async def release(self, req: Request) -> Empty:
        await self.workers.release(req.body)
        return Empty()

    async def register(self, req: Request) -> WorkerSetup:
        return self.workers.register(req.body)

    async def list_workers(self, req: Request) -> Page[Worker]:
        chosen = (
            self.workers.describe(worker)
            for worker in self.workers.state.workers.values()
            if req.query.job_id in ("", worker.job_id)
        )
        return page_of(chosen, req.query, key=lambda worker: worker.worker_id)

    async def get_worker(self, req: Request) -> Worker:
        worker = self.workers.state.workers.get(req.path["id"])
        if worker is None:
            raise NotFoundError(f"{req.path['id']} is not a worker of this node")
        return self.workers.describe(worker)

    async def get_exit(self, req: Request) -> WorkerExit:
        worker_id = req.path["id"]
        if worker_id not in self.workers.state.workers and self.exits.get(worker_id) is None:
            raise NotFoundError(f"{worker_id} was not a worker of this node, or long ago")
        wait_s = min(req.query.wait_s, max(0.0, req.deadline_s - 0.5))
        one = await self.exits.wait(worker_id, wait_s)
        if one is None:
            raise DeadlineExceededError(f"{worker_id} still runs after {wait_s:g} s")
        return one

    async def kill_worker(self, req: Request) -> Empty:
        self.workers.kill(req.path["id"], req.body.reason)
        return Empty()

    async def worker_spent(self, req: Request) -> Empty:
        self.workers.spent(req.path["id"])
        return Empty()

    async def seal(self, req: Request) -> Empty:
        self.objects.seal(req.body.objects)
        return Empty()

    async def free(self, req: Request) -> Freed:
        freed = self.objects.free(req.body.object_ids)
        self.transfer.freed(req.body.object_ids)
        return Freed(freed=freed)

    async def list_objects(self, req: Request) -> Page[ObjectInfo]:
        query = req.query
        items = self.objects.page(
            query.cursor, query.limit + 1, job_id=query.job_id, owner_id=query.owner_id
        )
        more = len(items) > query.limit
        shown = items[: query.limit]
        return Page(items=tuple(shown), next_cursor=shown[-1].object_id if more else "")

    async def arena(self, _: Request) -> ArenaUsage:
        quota = self.objects.arena.quota
        used, limit = quota.used_bytes, quota.limit_bytes
        return ArenaUsage(
            arena_dir=str(self.objects.arena.path),
            limit_bytes=limit,
            used_bytes=used,
            free_bytes=max(0, limit - used),
            object_bytes=self.objects.nbytes,
            recycled_bytes=sum(nbytes for _, nbytes, _ in self.space.recycled()),
            spilled_bytes=self.objects.spilled_bytes,
            objects=len(self.objects),
            largest=self.objects.largest(_LARGEST),
        )

    async def make_room(self, req: Request) -> Empty:
        req.waiting_for(f"room for {req.body.nbytes} bytes in shared memory")
        await self.space.make_room(req.body.nbytes)
        return Empty()

    async def read_logs(self, req: Request) -> web.StreamResponse:
        return await stream_response(req, self._lines(req.query))

    async def read_rest(self, req: Request) -> web.StreamResponse:
        query = LogFilter(req.query.job_id, req.body.worker_id, req.query.kind)

        async def lines() -> AsyncIterator[LogLine]:
            async for batch in self.logs.read(query, cursors=req.body.cursors, last=req.body.tail):
                for line in batch:
                    yield line

        return await stream_response(req, lines())

    async def _lines(self, query: LogsQuery) -> AsyncIterator[LogLine]:
        chosen = LogFilter(query.job_id, query.worker_id, query.kind)
        async for batch in self.logs.read(
            chosen, since=query.since, follow=query.follow, last=query.tail
        ):
            for line in batch:
                yield line

    async def job_output(self, req: Request) -> NodeOutput:
        node_id = self.workers.processes.identity.node_id
        return await asyncio.to_thread(self.workers.folders.summary, req.path["job_id"], node_id)

    async def job_archive(self, req: Request) -> web.StreamResponse:
        parts = await self.workers.folders.archive(req.path["job_id"])
        return await bytes_response(req, parts, "application/x-tar")

    async def flush_tasks(self, _: Request) -> TaskHistoryStatus:
        if not await self.spool.flush():
            raise UnavailableError("the gcs does not take the task history now: it waits on disk")
        return TaskHistoryStatus(accepted=self.spool.forwarded, dropped=self.spool.dropped)
