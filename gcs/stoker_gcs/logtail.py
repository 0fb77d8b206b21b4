"""Log lines from the nodes where they lie: of one driver, or merged from all workers of a job.

Called by the log routes. Lines of one process stay in order; those of several are as they come. A
nodelet that cannot be reached is tried again, and no line is given twice.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from stoker_gcs.jobs.rules import JOBS
from stoker_wire.errors import StokerError, UnavailableError
from stoker_wire.messages.control import LogLine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from stoker_gcs.links import Links
    from stoker_gcs.truth import Truth
    from stoker_wire.messages.cluster import Node

QUEUE_SIZE = 4096
RETRY_S = 0.5
NEW_NODES_S = 0.5
LAST_LINES_S = 1.0
QUIET_S = 0.25
"""After a job's end its log is read until nothing came for so long (nodelets look every 0.1 s)."""


async def of_driver(
    truth: Truth, links: Links, job_id: str, *, follow: bool, since: int, tail: int
) -> AsyncIterator[LogLine]:
    """Lines of a submitted job's driver; with ``follow``, until it has ended."""
    job = await truth.get(JOBS, job_id)
    while follow and job.submitted and not job.node_id and not job.state.terminal:
        job = await truth.wait_for(
            JOBS, job_id, lambda found: bool(found.node_id) or found.state.terminal, 30.0
        )
    if not job.node_id:
        return
    query = {"job_id": job_id, "kind": "driver", "follow": follow, "since": since, "tail": tail}
    source = links.nodelet(job.node_id).stream("/v1/logs", item=LogLine, query=query)
    if not follow:
        async for line in source:
            yield line
        return
    # A follow of a job's files has no end of its own: the job's end is it.
    async for line in _until_end(truth, job_id, source):
        yield line


async def of_workers(
    truth: Truth, links: Links, job_id: str, *, follow: bool, worker_id: str, tail: int
) -> AsyncIterator[LogLine]:
    """Lines of all workers of a job on all nodes; with ``follow``, until the job has ended."""
    await truth.get(JOBS, job_id)
    query = {"job_id": job_id, "kind": "worker", "follow": follow, "tail": tail}
    if worker_id:
        query["worker_id"] = worker_id
    merged = _merge(links, query, follow=follow)
    if not follow:
        async for line in merged:
            yield line
        return
    async for line in _until_end(truth, job_id, merged):
        yield line


async def of_worker(
    links: Links, node_id: str, worker_id: str, *, follow: bool, since: int, tail: int
) -> AsyncIterator[LogLine]:
    """Lines of one worker."""
    query = {"worker_id": worker_id, "follow": follow, "since": since, "tail": tail}
    async for line in links.nodelet(node_id).stream("/v1/logs", item=LogLine, query=query):
        yield line


async def _until_end(
    truth: Truth, job_id: str, source: AsyncIterator[LogLine]
) -> AsyncIterator[LogLine]:
    """Lines of ``source`` until the job has ended and its last lines have come."""
    lines: asyncio.Queue[LogLine | None] = asyncio.Queue(QUEUE_SIZE)
    broken: list[StokerError] = []
    came = asyncio.Event()

    async def pump() -> None:
        try:
            async for line in source:
                came.set()
                await lines.put(line)
        except StokerError as error:
            broken.append(error)
        await lines.put(None)

    async def end() -> None:
        ended = False
        while not ended:
            job = await truth.wait_for(JOBS, job_id, lambda found: found.state.terminal, 30.0)
            ended = job.state.terminal
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_LINES_S):
                while True:
                    came.clear()
                    await asyncio.wait_for(came.wait(), QUIET_S)
        await lines.put(None)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(pump()), group.create_task(end())]
        try:
            while (line := await lines.get()) is not None:
                yield line
        finally:
            for task in tasks:
                task.cancel()
    if broken:
        raise broken[0]


async def _merge(
    links: Links, query: Mapping[str, object], *, follow: bool
) -> AsyncIterator[LogLine]:
    lines: asyncio.Queue[LogLine] = asyncio.Queue(QUEUE_SIZE)
    seen: dict[str, int] = {}
    pumps: dict[str, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as group:
        try:
            while True:
                for node in links.living():
                    if node.node_id not in pumps:
                        pumps[node.node_id] = group.create_task(
                            _pump(links, node, query, lines, seen, follow=follow)
                        )
                try:
                    async with asyncio.timeout(NEW_NODES_S):
                        yield await lines.get()
                except TimeoutError:
                    pass
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
    links: Links,
    node: Node,
    query: Mapping[str, object],
    lines: asyncio.Queue[LogLine],
    seen: dict[str, int],
    *,
    follow: bool,
) -> None:
    while True:
        try:
            client = links.nodelet(node.node_id)
            async for line in client.stream("/v1/logs", item=LogLine, query=query):
                if line.cursor > seen.get(line.worker_id, -1):
                    seen[line.worker_id] = line.cursor
                    await lines.put(line)
        except UnavailableError:
            if not any(living.node_id == node.node_id for living in links.living()):
                return
        except StokerError:
            return
        if not follow:
            return
        await asyncio.sleep(RETRY_S)
