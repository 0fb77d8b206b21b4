"""Routes of what jobs wrote into their output folders: where it lies, and the files as a tar archive."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from stoker_gcs.api.queries import OutputQuery
from stoker_gcs.registry.jobs.rules import JOBS
from stoker_wire.errors import NotFoundError, StokerError, UnavailableError
from stoker_wire.http.server import bytes_response
from stoker_wire.messages.work import Job, JobOutput, NodeOutput

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp import web

    from stoker_gcs.app import Parts
    from stoker_wire.http.client import Client
    from stoker_wire.http.server import Request, Service
    from stoker_wire.messages.cluster import Node

SILENCE_S = 30.0


def add_routes(service: Service, parts: Parts) -> None:
    """Add the routes."""
    truth, links = parts.truth, parts.links

    async def output_of(job: Job) -> JobOutput:
        async def ask(_: Node, client: Client) -> NodeOutput | None:
            path = f"/v1/jobs/{job.job_id}/output"
            try:
                return await client.call("GET", path, reply=NodeOutput, retry=False)
            except NotFoundError:
                return None

        found = await links.every_nodelet(ask)
        nodes = [node for node in found.values() if node is not None and node.files]
        nodes.sort(key=lambda node: (node.node_id != job.node_id, node.node_id))
        # What all nodes share is there once, and with every node.
        if shared := [node for node in nodes if node.shared]:
            nodes = shared[:1]
        lost = "" if shared or not job.node_id or job.node_id in found else _lost(parts, job)
        return JobOutput(job_id=job.job_id, nodes=tuple(nodes), lost=lost)

    async def output(req: Request) -> JobOutput:
        return await output_of(await truth.get(JOBS, req.path["job_id"]))

    async def archive(req: Request) -> web.StreamResponse:
        job = await truth.get(JOBS, req.path["job_id"])
        node_id = req.query.node_id
        if not node_id:
            found = await output_of(job)
            if not found.nodes:
                raise NotFoundError(
                    found.lost
                    or f"{job.job_id} wrote nothing into STOKER_JOB_OUTPUT_DIR, or that is gone"
                )
            node_id = found.nodes[0].node_id
        path = f"/v1/jobs/{job.job_id}/output.tar"
        async with links.nodelet(node_id).open("GET", path) as response:
            chunks = response.content.iter_any()
            return await bytes_response(req, _heard(chunks, node_id), "application/x-tar")

    path = "/v1/jobs/{job_id}/output"
    service.route(
        "GET", path, output, reply=JobOutput, summary="Where the files that a job wrote lie"
    )
    service.route(
        "GET",
        path + ".tar",
        archive,
        query=OutputQuery,
        stream=True,
        summary="The files that a job wrote on one node (default: its driver's), as a tar archive",
    )


def _lost(parts: Parts, job: Job) -> str:
    try:
        parts.links.nodelet(job.node_id)
    except StokerError as error:
        return (
            f"what {job.job_id} wrote on its driver's node is gone with it\n{error.message}\n"
            "let jobs write to storage that all nodes share (STOKER_JOB_OUTPUT_ROOT) to keep it"
        )
    return f"node {job.node_id}, where the driver of {job.job_id} ran, does not answer now"


async def _heard(chunks: AsyncIterator[bytes], node_id: str) -> AsyncIterator[bytes]:
    while True:
        try:
            async with asyncio.timeout(SILENCE_S):
                chunk = await anext(chunks, None)
        except TimeoutError:
            raise UnavailableError(f"node {node_id} was silent for {SILENCE_S:g} s") from None
        if chunk is None:
            return
        yield chunk
