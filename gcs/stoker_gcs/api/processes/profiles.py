"""Routes of stacks and profiles: for the owner of a program, read by the nodelet that has its process."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from stoker_gcs.api.storage.outputs import bounded_silence
from stoker_wire.errors import ConflictError, DeadlineExceededError, StokerError
from stoker_wire.http.codec import ANY, MSGPACK, encode_msgpack
from stoker_wire.http.principals import WORK
from stoker_wire.http.server.routes import Route
from stoker_wire.http.server.watch import bytes_response, while_read
from stoker_wire.messages.node_api import (
    PROFILE_FORMATS,
    PROFILE_TYPES,
    ProcessStacks,
    ProfileOptions,
    Stacks,
    StacksQuery,
    TakeProfile,
    TakeWorkerProfile,
)

if TYPE_CHECKING:
    from aiohttp import web

    from stoker_gcs.app import GcsApp
    from stoker_gcs.explain.targets import Processes, TargetProcess
    from stoker_gcs.peer_clients import PeerClients
    from stoker_wire.http.server.request import Request

MAX_PROCESSES = 64
_AT_ONCE = 16
_SLACK_S = 90.0
"""What a nodelet may take on top of the recording: it has a limit of its own, which says more."""


async def get_stacks(app: GcsApp, req: Request) -> Stacks:
    """Return the stacks of the processes of a target, read now."""
    query: StacksQuery = req.query
    found = await app.targets.find(req.principal, query.target)
    req.waiting_for(f"the stacks of {found.target}")
    chosen = found.processes[:MAX_PROCESSES]
    slots = asyncio.Semaphore(_AT_ONCE)
    async with asyncio.TaskGroup() as group:
        reading = [group.create_task(_read(app.peers, one, slots)) for one in chosen]
    stacks = tuple(one.result() for one in reading)
    if found.task_id:
        _check_runs(found, stacks[0])
    return Stacks(
        target=found.target,
        processes=stacks,
        note=found.note,
        left_out=len(found.processes) - len(chosen),
    )


async def _read(
    peers: PeerClients, process: TargetProcess, slots: asyncio.Semaphore
) -> ProcessStacks:
    path = f"/v1/workers/{process.worker_id}/stacks"
    try:
        async with slots:
            client = peers.nodelet(process.node_id)
            stacks = await client.call("GET", path, reply=ProcessStacks, retry=False)
    except StokerError as error:
        return _without(process, error.message)
    if stacks.job_id != process.job_id:
        return _without(process, "it works for another job meanwhile\nask again")
    return stacks


def _without(process: TargetProcess, why: str) -> ProcessStacks:
    return ProcessStacks(
        worker_id=process.worker_id,
        node_id=process.node_id,
        job_id=process.job_id,
        error=why,
    )


def _check_runs(found: Processes, stacks: ProcessStacks) -> None:
    """Raise ConflictError if the task that was meant has ended when its worker was looked at."""
    if stacks.task_ids is not None and found.task_id not in stacks.task_ids:
        raise ConflictError(
            f"task {found.task_id} has just ended\nsee: stoker explain {found.task_id}"
        )


async def take_profile(app: GcsApp, req: Request) -> web.StreamResponse:
    """The answer is the file, once the profile is taken; a caller that leaves ends it.

    One profile of a process at a time: another is refused with 409.
    """
    order: TakeProfile = req.body
    _, process = await app.targets.one(req.principal, order.target)
    options = {name: getattr(order, name) for name in ProfileOptions.__struct_fields__}
    body = TakeWorkerProfile(job_id=process.job_id, **options)
    client = app.peers.nodelet(process.node_id)
    path = f"/v1/workers/{process.worker_id}/profile"
    limit_s = order.seconds + _SLACK_S
    async with contextlib.AsyncExitStack() as stack:
        opening = stack.enter_async_context(
            client.open("POST", path, data=encode_msgpack(body), headers={"Content-Type": MSGPACK})
        )
        try:
            async with asyncio.timeout(limit_s):
                response = await while_read(req, opening)
        except TimeoutError:
            raise DeadlineExceededError(
                f"node {process.node_id} took no profile within {limit_s:g} s"
            ) from None
        kind = PROFILE_TYPES[order.format or PROFILE_FORMATS[order.kind][0]]
        chunks = bounded_silence(response.content.iter_any(), process.node_id)
        return await bytes_response(req, chunks, kind)


ROUTES = (
    Route(
        "GET",
        "/v1/stacks",
        get_stacks,
        query=StacksQuery,
        reply=Stacks,
        roles=WORK,
        cost="expensive",
        summary="Read stacks of processes of task, actor, worker, job or node",
    ),
    Route(
        "POST",
        "/v1/profiles",
        take_profile,
        body=TakeProfile,
        stream=True,
        media_type=ANY,
        roles=WORK,
        cost="expensive",
        summary="Take profile of process of task, actor, worker or job",
    ),
)
