"""Log lines fetched from the nodes: of one driver, or merged from all workers of a job.

Called by the log routes. Lines of one process stay in order; those of several are as they come. A
nodelet that cannot be reached is tried again, and no line is sent twice. The end of output is never
guessed from silence: a driver's log ends with its process, and what is left of the workers' at the
job's end is read from the last line sent to the end of each file.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing
from typing import TYPE_CHECKING

from stoker_gcs.registry.jobs.rules import JOBS
from stoker_wire.errors import StokerError, UnavailableError
from stoker_wire.messages.control import LogCursors, LogLine, LogStream
from stoker_wire.process.background import GeneratorTasks

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from stoker_gcs.peer_clients import PeerClients
    from stoker_gcs.state.records import StateStore
    from stoker_wire.messages.cluster import Node
    from stoker_wire.messages.work import Job

QUEUE_SIZE = 4096
RETRY_S = 0.5
NEW_NODES_S = 0.5
DRIVER_END_S = 5.0
"""A driver that is told to stop may print for 3 s more, until it is killed."""
REST_S = 10.0
"""How long a node may be silent while it sends the last lines of its workers."""


async def driver_lines(
    state: StateStore,
    peers: PeerClients,
    job: Job,
    attempt: int,
    *,
    follow: bool,
    since: int,
    tail: int,
) -> AsyncGenerator[LogLine, None]:
    """Yield lines of the driver of a submitted job's attempt; with ``follow``, until it has ended."""
    job_id = job.job_id

    def has_begun(job: Job) -> bool:
        return bool(node_of_attempt(job, attempt)) or _has_ended(job, attempt)

    while follow and job.submitted and not has_begun(job):
        job = await state.wait_for(JOBS, job_id, has_begun, 30.0)
    node_id = node_of_attempt(job, attempt)
    if not node_id:
        return
    query: dict[str, object] = {"job_id": job_id, "kind": "driver", "attempt": attempt}
    query |= {"follow": follow, "since": since, "tail": tail}
    source = peers.nodelet(node_id).stream("/v1/logs", item=LogLine, query=query)
    # A nodelet that has started no driver waits for one: the attempt's end is the end then.
    lines = _until_end(state, job_id, source, DRIVER_END_S, attempt) if follow else source
    async with aclosing(lines):
        async for line in lines:
            yield line


def node_of_attempt(job: Job, attempt: int) -> str:
    """Return the node on which an attempt of a job runs or ran; empty if it has not started."""
    if attempt == job.attempt:
        return job.node_id
    return next((one.node_id for one in job.attempts if one.attempt == attempt), "")


def _has_ended(job: Job, attempt: float) -> bool:
    return job.state.terminal or job.attempt > attempt


async def job_worker_lines(
    state: StateStore, peers: PeerClients, job_id: str, *, follow: bool, worker_id: str, tail: int
) -> AsyncGenerator[LogLine, None]:
    """Yield lines of all workers of a job on all nodes; with ``follow``, until the job has ended."""
    await state.get(JOBS, job_id)
    query: dict[str, object] = {"job_id": job_id, "kind": "worker", "tail": tail}
    query |= {"follow": follow} | ({"worker_id": worker_id} if worker_id else {})
    merged = _merge(peers, query, follow=follow)
    lines = _until_end(state, job_id, merged, 0.0) if follow else merged
    cursors: dict[str, int] = {}
    async with aclosing(lines):
        async for line in lines:
            cursors[line.worker_id] = line.cursor
            yield line
    if follow:
        seen = LogCursors(cursors=cursors, tail=tail, worker_id=worker_id)
        async for line in remaining_worker_lines(peers, job_id, seen):
            yield line


async def remaining_worker_lines(
    peers: PeerClients, job_id: str, seen: LogCursors
) -> AsyncGenerator[LogLine, None]:
    """Yield lines of a job's workers behind those seen, up to now; name a node that does not answer."""
    lines: asyncio.Queue[LogLine | None] = asyncio.Queue(QUEUE_SIZE)

    async def read(node: Node) -> None:
        query = {"job_id": job_id, "kind": "worker"}
        try:
            source = peers.client(node.url).stream(
                "/v1/logs", item=LogLine, query=query, body=seen, silence_s=REST_S
            )
            async with aclosing(source):
                async for line in source:
                    await lines.put(line)
        except StokerError as error:
            text = f"the last output of node {node.node_id} is missing: {error}"
            await lines.put(_notice(node, text))

    async def read_all() -> None:
        async with asyncio.TaskGroup() as group:
            for node in peers.live_nodes():
                group.create_task(read(node))
        await lines.put(None)

    async with GeneratorTasks() as group:
        reading = group.create_task(read_all())
        try:
            while (line := await lines.get()) is not None:
                yield line
        finally:
            reading.cancel()


def _notice(node: Node, text: str) -> LogLine:
    return LogLine(
        node_id=node.node_id, worker_id="", pid=0, name="stoker", text=text, stream=LogStream.STDERR
    )


async def worker_lines(
    peers: PeerClients, node_id: str, worker_id: str, *, follow: bool, since: int, tail: int
) -> AsyncGenerator[LogLine, None]:
    """Yield lines of one worker."""
    query = {"worker_id": worker_id, "follow": follow, "since": since, "tail": tail}
    source = peers.nodelet(node_id).stream("/v1/logs", item=LogLine, query=query)
    async with aclosing(source):
        async for line in source:
            yield line


async def _until_end(
    state: StateStore,
    job_id: str,
    source: AsyncGenerator[LogLine, None],
    grace_s: float,
    attempt: float = math.inf,
) -> AsyncGenerator[LogLine, None]:
    """Yield lines of ``source`` until it ends, or ``grace_s`` after the job, or this attempt, has ended."""
    lines: asyncio.Queue[LogLine | None] = asyncio.Queue(QUEUE_SIZE)
    failures: list[StokerError] = []

    async def pump() -> None:
        try:
            async with aclosing(source):
                async for line in source:
                    await lines.put(line)
        except StokerError as error:
            failures.append(error)
        await lines.put(None)

    async def end() -> None:
        ended = False
        while not ended:
            job = await state.wait_for(JOBS, job_id, lambda job: _has_ended(job, attempt), 30.0)
            ended = _has_ended(job, attempt)
        await asyncio.sleep(grace_s)
        await lines.put(None)

    async with GeneratorTasks() as group:
        tasks = [group.create_task(pump()), group.create_task(end())]
        try:
            while (line := await lines.get()) is not None:
                yield line
        finally:
            for task in tasks:
                task.cancel()
    if failures:
        raise failures[0]


async def _merge(
    peers: PeerClients, query: Mapping[str, object], *, follow: bool
) -> AsyncGenerator[LogLine, None]:
    lines: asyncio.Queue[LogLine] = asyncio.Queue(QUEUE_SIZE)
    seen: dict[str, int] = {}
    pumps: dict[str, asyncio.Task[None]] = {}
    async with GeneratorTasks() as group:
        try:
            while True:
                for node in peers.live_nodes():
                    if node.node_id not in pumps:
                        pumps[node.node_id] = group.create_task(
                            _pump(peers, node, query, lines, seen, follow=follow)
                        )
                try:
                    async with asyncio.timeout(NEW_NODES_S):
                        line = await lines.get()
                except TimeoutError:
                    pass
                else:
                    yield line
                while not lines.empty():
                    yield lines.get_nowait()
                if not follow and all(pump.done() for pump in pumps.values()):
                    while not lines.empty():
                        yield lines.get_nowait()
                    return
        finally:
            for pump in pumps.values():
                pump.cancel()


async def _pump(
    peers: PeerClients,
    node: Node,
    query: Mapping[str, object],
    lines: asyncio.Queue[LogLine],
    seen: dict[str, int],
    *,
    follow: bool,
) -> None:
    while True:
        try:
            client = peers.nodelet(node.node_id)
            source = client.stream("/v1/logs", item=LogLine, query=query)
            async with aclosing(source):
                async for line in source:
                    if line.cursor > seen.get(line.worker_id, -1):
                        seen[line.worker_id] = line.cursor
                        await lines.put(line)
        except UnavailableError:
            if not any(live.node_id == node.node_id for live in peers.live_nodes()):
                return
        except StokerError:
            return
        if not follow:
            return
        await asyncio.sleep(RETRY_S)
