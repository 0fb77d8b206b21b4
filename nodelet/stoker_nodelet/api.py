"""The nodelet's HTTP API: handlers that decode, call one part and encode, and the table of their routes.

The routes of objects between nodes are in :mod:`stoker_nodelet.transfer.service`. No decisions here.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from stoker_nodelet.objects.detached import DetachedCopies
from stoker_nodelet.objects.eviction import ArenaEvictor
from stoker_nodelet.objects.index import ObjectIndex
from stoker_nodelet.telemetry.activity import ActivityLog
from stoker_nodelet.telemetry.exits import Exits
from stoker_nodelet.telemetry.logs import LogFilter, Logs
from stoker_nodelet.telemetry.program_metrics import ProgramMetrics
from stoker_nodelet.telemetry.task_spool import TaskSpool
from stoker_nodelet.transfer import Transfer
from stoker_nodelet.workers.workers import Workers
from stoker_wire.errors import (
    BadRequestError,
    ConflictError,
    DeadlineExceededError,
    FencedError,
    ForbiddenError,
    NotFoundError,
    UnavailableError,
)
from stoker_wire.http.codec import TAR
from stoker_wire.http.paging import page_of
from stoker_wire.http.principals import ADMINS, GCS, JOBS, NODES, SCHEDULERS
from stoker_wire.http.server.routes import Route
from stoker_wire.http.server.service import Request, bytes_response, stream_response
from stoker_wire.ids import Prefix, check_id
from stoker_wire.messages.cluster import (
    GPU_INDEX,
    HeldLeases,
    ReleaseLeases,
    StartedLease,
    StartLease,
    StopLeases,
    Worker,
    WorkerExit,
)
from stoker_wire.messages.common import Empty
from stoker_wire.messages.control import LogCursors, LogLine, Page
from stoker_wire.messages.groups import CommitBundles, CommittedBundles, HoldBundles
from stoker_wire.messages.node_api import (
    ActivityKind,
    ArenaUsage,
    DrainOrder,
    Freed,
    HeldWork,
    KillWorker,
    LeaveOrder,
    LogsQuery,
    MoveWorker,
    NodeActivity,
    ObjectsQuery,
    Process,
    RegisterWorker,
    ReportMetrics,
    WorkerExitQuery,
    WorkerSetup,
    WorkersQuery,
)
from stoker_wire.messages.objects import (
    AdoptedObjects,
    AdoptObjects,
    FreeObjects,
    MakeRoom,
    ObjectInfo,
    SealedObjects,
    SealObjects,
)
from stoker_wire.messages.queries import ActivityQuery
from stoker_wire.messages.work import EndAttempt, NodeOutput, TaskHistoryStatus
from stoker_wire.process.host_identity import pid_namespace, start_time

if TYPE_CHECKING:
    from aiohttp import web

_LARGEST = 10
_PID_DIGITS = 10


@dataclass(frozen=True, slots=True)
class Api:
    """The handlers, and the parts that they call."""

    workers: Workers
    exits: Exits
    objects: ObjectIndex
    logs: Logs
    spool: TaskSpool
    evictor: ArenaEvictor
    transfer: Transfer
    detached: DetachedCopies
    metrics: ProgramMetrics
    activity: ActivityLog
    end: Callable[[], None]
    """Ends this nodelet in order, after the answer to the request that asked for it."""

    async def start_lease(self, req: Request) -> StartedLease:
        req.waiting_for(f"the worker of {req.body.lease.lease_id} to start")
        began_at_s, lease = time.time(), req.body.lease
        check_id(lease.job_id, Prefix.JOB, field="lease.job_id")  # names a folder
        started = await self.workers.start_lease(req.body)
        self.activity.add(
            ActivityKind.LEASE, began_at_s, name=started.worker_id, job_id=lease.job_id
        )
        return started

    async def list_activity(self, req: Request) -> Page[NodeActivity]:
        return self.activity.page(req.query)

    async def list_leases(self, req: Request) -> HeldLeases:
        req.waiting_for("the gcs to register this node")
        await self.workers.member.wait()
        return self.workers.held_leases()

    async def release_leases(self, req: Request) -> Empty:
        await self.workers.release(req.body)
        return Empty()

    async def stop_leases(self, req: Request) -> Empty:
        self.workers.stop_leases(req.body)
        return Empty()

    async def hold_bundles(self, req: Request) -> Empty:
        req.waiting_for("the gcs to register this node")
        await self.workers.hold_bundles(req.body)
        return Empty()

    async def commit_bundles(self, req: Request) -> CommittedBundles:
        return self.workers.commit_bundles(req.body)

    async def register_worker(self, req: Request) -> WorkerSetup:
        principal, worker_id = req.principal, req.body.worker_id
        if not principal.owns_all and principal.worker_id != worker_id:
            raise ForbiddenError(f"{principal} is not {worker_id}", field="worker_id")
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
        worker_exit = await self.exits.wait(worker_id, wait_s)
        if worker_exit is None:
            raise DeadlineExceededError(f"{worker_id} still runs after {wait_s:g} s")
        return worker_exit

    async def get_process(self, req: Request) -> Process:
        text = req.path["pid"]
        known = text.isascii() and text.isdigit() and len(text) <= _PID_DIGITS
        started = start_time(int(text)) if known else 0
        if not started:
            raise NotFoundError(
                f"there is no process {text[:_PID_DIGITS]!r}",
                extra={"pid_namespace": pid_namespace()},
            )
        return Process(pid=int(text), started=started, pid_namespace=pid_namespace())

    async def drain(self, _: Request) -> HeldWork:
        held = self.workers.drained()
        return msgspec.structs.replace(held, objects=len(self.transfer.to_hand_over()))

    async def leave(self, req: Request) -> Empty:
        here = self.workers.state.incarnation
        if req.body.incarnation != here:
            raise FencedError(f"this node is at incarnation {here}, not {req.body.incarnation}")
        if self.transfer.leaving:
            return Empty()  # a second signal would have it end at once
        left = len(self.transfer.to_hand_over())
        if left:
            raise ConflictError(f"{left} objects are still to be taken over by another node")
        self.end()
        self.transfer.leaving = True
        return Empty()

    async def move_worker(self, req: Request) -> Empty:
        await self.workers.move(req.path["id"], req.body.reason)
        return Empty()

    def _check_own(self, req: Request) -> None:
        """Raise ForbiddenError if the worker that a request names is of another job than its sender."""
        worker = self.workers.state.workers.get(req.path["id"])
        if worker is None or req.principal.owns_all or worker.job_id == req.principal.job_id:
            return
        raise ForbiddenError(f"{worker.worker_id} is not {req.principal}'s", field="id")

    async def kill_worker(self, req: Request) -> Empty:
        self._check_own(req)
        worker = self.workers.state.workers.get(req.path["id"])
        if worker is None or req.body.lease_id in ("", worker.lease_id):
            self.workers.kill(req.path["id"], req.body.reason)
        return Empty()

    async def mark_worker_spent(self, req: Request) -> Empty:
        self._check_own(req)
        self.workers.mark_spent(req.path["id"])
        return Empty()

    async def mark_stop_callbacks(self, req: Request) -> Empty:
        self._check_own(req)
        self.workers.mark_callbacks(req.path["id"])
        return Empty()

    async def release_gpu(self, req: Request) -> Empty:
        index = req.path["index"]
        if not re.fullmatch(GPU_INDEX, index):
            raise BadRequestError(f"index: {index[:40]!r} is no number of a GPU", field="index")
        self.workers.release_gpu(int(index))
        return Empty()

    async def report_objects(self, req: Request) -> SealedObjects:
        self.objects.seal(req.body.objects)
        if self.transfer.leaving:
            await self.transfer.hand_over_rest()
        return SealedObjects(closed=self.transfer.closing)

    async def free_objects(self, req: Request) -> Freed:
        if (
            self.transfer.leaving
        ):  # it might be gone before the node with the objects has heard of it
            raise UnavailableError("this node leaves: free them where its objects are now")
        freed = self.objects.free(req.body.object_ids)
        self.transfer.on_freed(req.body.object_ids)
        return Freed(freed=freed)

    async def adopt_objects(self, req: Request) -> AdoptedObjects:
        adopted = self.objects.adopt(req.body.object_ids)
        if req.body.disk:
            req.waiting_for("the objects to be written to disk")
            await self.detached.keep(one.object_id for one in adopted)
        return AdoptedObjects(objects=adopted)

    async def list_objects(self, req: Request) -> Page[ObjectInfo]:
        query = req.query
        items = self.objects.page(
            query.cursor, query.limit + 1, job_id=query.job_id, owner_id=query.owner_id
        )
        more = len(items) > query.limit
        shown = items[: query.limit]
        return Page(items=tuple(shown), next_cursor=shown[-1].object_id if more else "")

    async def get_arena_usage(self, _: Request) -> ArenaUsage:
        quota = self.objects.arena.quota
        used, limit = quota.used_bytes, quota.limit_bytes
        return ArenaUsage(
            arena_dir=str(self.objects.arena.path),
            limit_bytes=limit,
            used_bytes=used,
            free_bytes=max(0, limit - used),
            object_bytes=self.objects.nbytes,
            recycled_bytes=sum(nbytes for _, nbytes, _ in self.evictor.recycled()),
            spilled_bytes=self.objects.spilled_bytes,
            objects=len(self.objects),
            largest=self.objects.largest(_LARGEST),
        )

    async def make_room(self, req: Request) -> Empty:
        req.waiting_for(f"room for {req.body.nbytes} bytes in shared memory")
        await self.evictor.make_room(req.body.nbytes)
        return Empty()

    async def read_logs(self, req: Request) -> web.StreamResponse:
        return await stream_response(req, self._lines(req.query))

    async def read_remaining_logs(self, req: Request) -> web.StreamResponse:
        query = LogFilter(req.query.job_id, req.body.worker_id, req.query.kind)

        async def lines() -> AsyncIterator[LogLine]:
            async for batch in self.logs.read(query, cursors=req.body.cursors, last=req.body.tail):
                for line in batch:
                    yield line

        return await stream_response(req, lines())

    async def _lines(self, query: LogsQuery) -> AsyncIterator[LogLine]:
        chosen = LogFilter(query.job_id, query.worker_id, query.kind, query.attempt)
        async for batch in self.logs.read(
            chosen, since=query.since, follow=query.follow, last=query.tail
        ):
            for line in batch:
                yield line

    async def end_attempt(self, req: Request) -> Empty:
        self.workers.end_attempt(req.path["job_id"], req.body.attempt)
        return Empty()

    async def get_job_output(self, req: Request) -> NodeOutput:
        node_id, job_id = self.workers.identity.node_id, req.path["job_id"]
        folders = self.workers.users.jobs_of(job_id)
        return await asyncio.to_thread(folders.summary, job_id, node_id)

    async def download_job_output(self, req: Request) -> web.StreamResponse:
        job_id = req.path["job_id"]
        parts = await self.workers.users.jobs_of(job_id).archive(job_id)
        return await bytes_response(req, parts, TAR)

    async def report_metrics(self, req: Request) -> Empty:
        principal = req.principal
        job_id = principal.job_id or principal.origin_job_id
        if not job_id and principal.owns_all:
            job_id = req.body.job_id
        self.metrics.report(job_id or principal.actor_id, req.body)
        return Empty()

    async def flush_tasks(self, _: Request) -> TaskHistoryStatus:
        if not await self.spool.flush():
            raise UnavailableError("the gcs does not take the task history now: it waits on disk")
        return TaskHistoryStatus(accepted=self.spool.forwarded, dropped=self.spool.dropped)


ROUTES = (
    Route(
        "POST", "/v1/leases", Api.start_lease, before_ready=True,
        body=StartLease, reply=StartedLease, roles=SCHEDULERS,
        summary="Start a worker for a lease",
    ),
    Route(
        "GET", "/v1/leases", Api.list_leases, before_ready=True,
        reply=HeldLeases, roles=SCHEDULERS | GCS | ADMINS,
        summary="List the leases that this node holds",
    ),
    Route(
        "POST", "/v1/leases/release", Api.release_leases, before_ready=True,
        body=ReleaseLeases, reply=Empty, roles=SCHEDULERS, summary="Release leases",
    ),
    Route(
        "POST", "/v1/leases/stop", Api.stop_leases, before_ready=True,
        body=StopLeases, reply=Empty, roles=SCHEDULERS,
        summary="Preempt leases: notice, then the end of their workers",
    ),
    Route(
        "POST", "/v1/bundles", Api.hold_bundles, before_ready=True,
        body=HoldBundles, reply=Empty, roles=SCHEDULERS,
        summary="Hold bundles of a placement group",
    ),
    Route(
        "POST", "/v1/bundles/commit", Api.commit_bundles, before_ready=True,
        body=CommitBundles, reply=CommittedBundles,
        roles=SCHEDULERS, summary="Hold prepared bundles until they are released",
    ),
    Route(
        "POST", "/v1/workers/register", Api.register_worker, before_ready=True,
        body=RegisterWorker, reply=WorkerSetup, roles=JOBS,
        summary="Register a worker that is up",
    ),
    Route(
        "GET", "/v1/workers", Api.list_workers,
        query=WorkersQuery, reply=Page[Worker], roles=GCS | ADMINS,
        summary="List the workers of this node",
    ),
    Route("GET", "/v1/workers/{id}", Api.get_worker, reply=Worker, roles=GCS | JOBS | ADMINS,
        summary="Get a worker"),
    Route(
        "GET", "/v1/workers/{id}/exit", Api.get_exit,
        query=WorkerExitQuery, reply=WorkerExit, roles=GCS | JOBS | ADMINS,
        summary="Get how a worker ended; may wait for it",
    ),
    Route(
        "GET", "/v1/processes/{pid}", Api.get_process,
        reply=Process, roles=GCS, summary="Get whether a process runs here",
    ),
    Route(
        "POST", "/v1/drain", Api.drain, body=DrainOrder, reply=HeldWork,
        roles=GCS,
        summary="Keep no idle workers, for a while, and list what is still on this node",
    ),
    Route(
        "POST", "/v1/leave", Api.leave, body=LeaveOrder, reply=Empty,
        roles=GCS, summary="Leave the cluster, and end this nodelet",
    ),
    Route(
        "POST", "/v1/workers/{id}/move", Api.move_worker, body=MoveWorker, reply=Empty,
        roles=GCS,
        summary="Have an actor end once its running calls have, to be started elsewhere",
    ),
    Route(
        "POST", "/v1/workers/{id}/kill", Api.kill_worker,
        body=KillWorker, reply=Empty, roles=GCS | JOBS,
        summary="Kill a worker and all that it started",
    ),
    Route(
        "POST", "/v1/workers/{id}/spent", Api.mark_worker_spent,
        reply=Empty, roles=JOBS,
        summary="Mark a worker as taking no more calls: it leaves after its lease",
    ),
    Route(
        "POST", "/v1/workers/{id}/stop-callbacks", Api.mark_stop_callbacks,
        reply=Empty, roles=JOBS,
        summary="Give a worker notice before its end: its code has something to save",
    ),
    Route(
        "POST", "/v1/gpus/{index}/release", Api.release_gpu, parts={"index": GPU_INDEX},
        reply=Empty, roles=GCS | ADMINS, summary="Put a quarantined GPU back to use",
    ),
    Route(
        "POST", "/v1/objects", Api.report_objects, before_ready=True,
        body=SealObjects, reply=SealedObjects, roles=JOBS,
        summary="Report objects that were written to the arena",
    ),
    Route(
        "POST", "/v1/objects/free", Api.free_objects, before_ready=True,
        body=FreeObjects, reply=Freed, roles=GCS | NODES | JOBS, summary="Free objects",
    ),
    Route(
        "POST", "/v1/objects/adopt", Api.adopt_objects, before_ready=True,
        body=AdoptObjects, reply=AdoptedObjects,
        roles=GCS | NODES | JOBS,
        summary="Make this node the home of objects of which it has copies",
    ),
    Route(
        "GET", "/v1/objects", Api.list_objects,
        query=ObjectsQuery, reply=Page[ObjectInfo], roles=GCS | ADMINS,
        summary="List the objects in the arena",
    ),
    Route(
        "POST", "/v1/arena/room", Api.make_room, before_ready=True,
        body=MakeRoom, reply=Empty, roles=JOBS,
        summary="Spill objects until so many bytes are free",
    ),
    Route(
        "GET", "/v1/arena", Api.get_arena_usage,
        reply=ArenaUsage, roles=GCS | JOBS | ADMINS, summary="Get how full the arena is",
    ),
    Route(
        "GET", "/v1/logs", Api.read_logs, stream=True,
        query=LogsQuery, reply=LogLine, roles=GCS,
        summary="Read lines of output, as NDJSON; may follow",
    ),
    Route(
        "POST", "/v1/jobs/{job_id}/end-attempt", Api.end_attempt, before_ready=True,
        body=EndAttempt, reply=Empty,
        roles=GCS,
        summary="End what an attempt of a job has left here, before the next one starts",
    ),
    Route(
        "GET", "/v1/jobs/{job_id}/output", Api.get_job_output,
        reply=NodeOutput, roles=GCS,
        summary="Get how much a job wrote into its output folder here",
    ),
    Route(
        "GET", "/v1/jobs/{job_id}/output.tar", Api.download_job_output, stream=True,
        media_type=TAR,
        roles=GCS,
        summary="Download what a job wrote into its output folder here, as a tar archive",
    ),
    Route(
        "POST", "/v1/logs", Api.read_remaining_logs, stream=True,
        query=LogsQuery, body=LogCursors, reply=LogLine,
        roles=GCS, summary="Read the lines of output behind those seen, up to now",
    ),
    Route(
        "POST", "/v1/metrics", Api.report_metrics,
        body=ReportMetrics, reply=Empty, roles=JOBS,
        summary="Report metrics that a program counts, for /metrics of this node",
    ),
    Route(
        "GET", "/v1/activity", Api.list_activity,
        query=ActivityQuery, reply=Page[NodeActivity], roles=GCS | ADMINS,
        summary="List what this node did beside running calls: transfers, spills, starts of workers",
    ),
    Route(
        "POST", "/v1/tasks/flush", Api.flush_tasks,
        reply=TaskHistoryStatus, roles=GCS | JOBS,
        summary="Forward the task history of this node now",
    ),
)  # fmt: skip
