"""The node's membership in the cluster: registration, heartbeats, fencing, and events that end work here.

While the gcs is away the node keeps running and keeps trying. When the gcs answers that this node's
incarnation is over, the work that runs here belongs to nobody: it is killed, and the node registers anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil
from msgspec import structs

from stoker_nodelet.core.events import NodeFenced, NodeRegistered
from stoker_nodelet.core.memory import Watermarks
from stoker_nodelet.objects.detached import DetachedCopies
from stoker_nodelet.workers.workers import Workers
from stoker_wire.constraints.conditions import ConditionKind, NodeCondition
from stoker_wire.errors import (
    CompactedError,
    ConflictError,
    FencedError,
    NotFoundError,
    ProtocolError,
    StokerError,
)
from stoker_wire.http.client.client import Client
from stoker_wire.messages.cluster import (
    Device,
    Heartbeat,
    Node,
    RegisteredNode,
    RegisterNode,
)
from stoker_wire.messages.control import Event, Page
from stoker_wire.messages.events import EventKind
from stoker_wire.messages.work import Job

_LEAVE_S = 2.0
_KILLED_S = 5.0
_READMISSION_S = 10.0
"""For so long it is no error that the URL is in use: a node that was killed and started again must
wait until its former incarnation was silent for ``suspect_after_s``."""
_SAY_AGAIN_S = 1.0
_SAY_AGAIN_MAX_S = 10.0
_KINDS = ",".join(
    (
        EventKind.JOB_FINISHED,
        EventKind.JOB_DELETED,
        EventKind.ACTOR_DIED,
        EventKind.WORKER_EXITED,
        EventKind.OBJECT_FREED,
    )
)

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Complaint:
    """A condition that lasts: to be logged when it begins or changes, then ever more rarely."""

    _text: str = ""
    _due_s: float = 0.0
    _pause_s: float = 0.0

    def is_due(self, text: str, now_s: float) -> bool:
        """Return whether to log it now."""
        if text != self._text:
            self._text, self._pause_s = text, _SAY_AGAIN_S
        elif now_s < self._due_s:
            return False
        else:
            self._pause_s = min(2 * self._pause_s, _SAY_AGAIN_MAX_S)
        self._due_s = now_s + self._pause_s
        return True

    def end(self) -> None:
        """Note that it is over."""
        self._text = ""


@dataclass(slots=True)
class Membership:
    """One node's membership. ``on_member`` is called with True when it begins, with False when it is lost."""

    registration: RegisterNode
    gcs: Client
    workers: Workers
    detached: DetachedCopies
    on_member: Callable[[bool], None]
    heartbeat_s: float = 1.0
    watermarks: Watermarks = field(default_factory=lambda: Watermarks(0.0, 0))
    joined: asyncio.Event = field(default_factory=asyncio.Event)
    leaving: bool = False
    _refusal: Complaint = field(default_factory=Complaint)

    @property
    def incarnation(self) -> int:
        return self.workers.state.incarnation

    async def run(self) -> None:
        """Register, then send heartbeats; again after every fencing, until this node leaves."""
        while True:
            await self._register()
            with contextlib.suppress(FencedError, NotFoundError):
                await self._send_heartbeats()
            if self.leaving:
                return
            _log.warning("the cluster gave this node up; killing its workers and registering anew")
            self.on_member(False)
            await self._abandon_work()

    async def _register(self) -> None:
        warm = self.workers.kernels.warm
        self.registration = structs.replace(
            self.registration,
            warm_kernels=warm,
            devices=self._devices(),
            conditions=self._conditions(),
            last_incarnation=self.incarnation,
        )
        answer: RegisteredNode | None = None
        began_s = time.monotonic()
        while answer is None:
            try:
                answer = await self.gcs.call(
                    "POST", "/v1/nodes", self.registration, reply=RegisteredNode
                )
            except StokerError as error:
                if error.status >= 500:
                    _log.warning("the gcs does not answer yet: %s", error)
                elif (
                    isinstance(error, ConflictError)
                    and not isinstance(error, ProtocolError)
                    and time.monotonic() - began_s < _READMISSION_S
                ):
                    _log.info("this node waits to be admitted: %s", error)
                else:
                    self._refused(error)
                await asyncio.sleep(self.heartbeat_s)
        self._refusal.end()
        self.heartbeat_s = answer.heartbeat_s
        self.workers.dispatch(NodeRegistered(incarnation=answer.incarnation, epoch=answer.epoch))
        self.joined.set()
        self.on_member(True)

    def _refused(self, error: StokerError) -> None:
        if self._refusal.is_due(str(error), time.monotonic()):
            _log.error("the gcs refused this node, which goes on trying: %s", error)

    async def _send_heartbeats(self) -> None:
        path = f"/v1/nodes/{self.registration.node_id}/heartbeat"
        psutil.cpu_percent()  # the first call only starts the measurement
        while True:
            await self._wait_for_heartbeat()
            if self.leaving:
                return
            warm, devices = self.workers.kernels.warm, self._devices()
            conditions = self._conditions()
            changed = warm if warm != self.registration.warm_kernels else None
            new_devices = devices if devices != self.registration.devices else None
            is_new = conditions != self.registration.conditions
            heartbeat = Heartbeat(
                incarnation=self.incarnation,
                usage=self.usage(),
                warm_kernels=changed,
                devices=new_devices,
                conditions=conditions if is_new else None,
            )
            try:
                # A late heartbeat is worthless: the next one follows.
                await self.gcs.call(
                    "POST", path, heartbeat, timeout_s=max(1.0, self.heartbeat_s), retry=False
                )
            except (FencedError, NotFoundError):
                raise
            except ProtocolError as error:
                self._refused(error)
                continue
            except StokerError as error:
                _log.warning("heartbeat: %s", error)
                continue
            self._refusal.end()
            self.registration = structs.replace(
                self.registration, warm_kernels=warm, devices=devices, conditions=conditions
            )

    async def _wait_for_heartbeat(self) -> None:
        """Wait until the next heartbeat is due, or until GPUs or conditions are to be reported."""
        to_report = self.workers.gpus.to_report
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.heartbeat_s):
                await to_report.wait()
        to_report.clear()

    def _devices(self) -> tuple[Device, ...]:
        """Return the GPUs as they are to be reported: with what the lease machine says of each."""
        known = self.workers.state.gpus
        return tuple(
            structs.replace(one, quarantine=known[one.index].quarantine)
            if one.index in known
            else one
            for one in self.registration.devices
        )

    def _conditions(self) -> tuple[NodeCondition, ...]:
        """Return why the node takes no new work, if that is so."""
        marks = self.watermarks
        found = (
            (ConditionKind.MEMORY_PRESSURE, marks.memory),
            (ConditionKind.DISK_PRESSURE, marks.disk),
        )
        return tuple(NodeCondition(kind=kind, reason=why) for kind, why in found if why)

    async def _abandon_work(self) -> None:
        exits = [process.exited for process in self.workers.processes.living.values()]
        self.workers.dispatch(NodeFenced(at_s=time.monotonic()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KILLED_S):
                for exited in exits:
                    await exited.wait()

    def usage(self) -> dict[str, float]:
        """Return the measurements for a heartbeat."""
        state = self.workers.state
        memory = psutil.virtual_memory()
        environments = [one.environments.retention for one in self.workers.users.all()]
        measured = {
            "cpu_percent": psutil.cpu_percent(),
            "memory_bytes": float(memory.total - memory.available),
            "load1": os.getloadavg()[0],
            "workers": float(len(state.workers)),
            "leases": float(len(state.leases)),
            "objects": float(len(self.workers.objects)),
            "object_bytes": float(self.workers.objects.nbytes),
            "spilled_bytes": float(self.workers.objects.spilled_bytes),
            "arena_bytes": float(self.workers.objects.arena.quota.used_bytes),
            "arena_limit_bytes": float(self.workers.objects.arena.quota.limit_bytes),
            "log_files": float(self.workers.logs.count),
            "log_bytes": float(self.workers.logs.nbytes),
            "environments": float(sum(one.count for one in environments)),
            "environment_bytes": float(sum(one.nbytes for one in environments)),
            **self.workers.gpus.usage,
        }
        for index, share in sorted(state.gpu_use().items()):
            measured[f"gpu{index}_held"] = share
        return measured

    async def leave(self) -> None:
        """Deregister; a gcs that cannot be reached will notice the missing heartbeats."""
        self.leaving = True
        path = f"/v1/nodes/{self.registration.node_id}/leave"
        body = {"incarnation": self.incarnation}
        with contextlib.suppress(StokerError):
            await self.gcs.call("POST", path, body, timeout_s=_LEAVE_S, retry=False)

    async def watch(self) -> None:
        """Follow, for ever, the events of the cluster that end work here."""
        await self.joined.wait()
        while True:
            try:
                page = await self.gcs.call("GET", "/v1/nodes", reply=Page[Node], query={"limit": 1})
                await self._check_jobs()
                await self.detached.report()
                async for event in self.gcs.watch("/v1/events", page.seq, {"kind": _KINDS}):
                    self._on_event(event)
            except CompactedError:
                continue
            except StokerError as error:
                if isinstance(error, ProtocolError):
                    self._refused(error)
                else:
                    _log.warning("watching the cluster: %s", error)
                await asyncio.sleep(self.heartbeat_s)

    async def _check_jobs(self) -> None:
        """Ask for the state of every job that has something here: the event of its end may be missed."""
        workers = self.workers.state.workers.values()
        here = {worker.job_id for worker in workers} | self.workers.objects.job_ids()
        for folders in self.workers.users.all():
            here |= folders.jobs.job_ids()
        for job_id in sorted(here - {""}):
            with contextlib.suppress(NotFoundError):
                job = await self.gcs.call("GET", f"/v1/jobs/{job_id}", reply=Job)
                if job.state.terminal:
                    self.workers.finish_job(job_id)

    def _on_event(self, event: Event) -> None:
        self.detached.on_event(event)
        match event.kind:
            case EventKind.JOB_FINISHED:
                self.workers.finish_job(event.subject)
            case EventKind.JOB_DELETED:
                self.workers.forget_job(event.subject)
            case EventKind.ACTOR_DIED:
                self._end_actor(event.subject)
            case EventKind.WORKER_EXITED:
                worker_id = event.payload.get("worker_id", event.subject)
                self.workers.objects.free_owner(worker_id)

    def _end_actor(self, actor_id: str) -> None:
        """Kill the worker of a dead actor, if the order to kill it was lost: normally it is gone."""
        for worker in list(self.workers.state.workers.values()):
            if worker.actor_id == actor_id:
                self.workers.kill(worker.worker_id, f"{actor_id} is dead", in_order=True)
