"""Routes of job output folders: on which nodes they are, and the files as a tar archive."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from stoker_gcs.registry.jobs.rules import JOBS
from stoker_wire.errors import NotFoundError, StokerError, UnavailableError
from stoker_wire.http.codec import TAR
from stoker_wire.http.principals import WORK
from stoker_wire.http.server.routes import Route
from stoker_wire.http.server.watch import bytes_response
from stoker_wire.messages.queries import OutputQuery
from stoker_wire.messages.work import Job, JobOutput, NodeOutput

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp import web

    from stoker_gcs.app import GcsApp
    from stoker_gcs.peer_clients import PeerClients
    from stoker_wire.http.client.client import Client
    from stoker_wire.http.server.request import Request
    from stoker_wire.messages.cluster import Node

SILENCE_S = 30.0


async def get_job_output(app: GcsApp, req: Request) -> JobOutput:
    return await _locate(app.peers, await app.state.get(JOBS, req.path["job_id"]))


async def download_job_output(app: GcsApp, req: Request) -> web.StreamResponse:
    job = await app.state.get(JOBS, req.path["job_id"])
    node_id: str = req.query.node_id
    if not node_id:
        output = await _locate(app.peers, job)
        if not output.nodes:
            raise NotFoundError(
                output.lost
                or f"{job.job_id} wrote nothing into STOKER_JOB_OUTPUT_DIR, or that is gone"
            )
        node_id = output.nodes[0].node_id
    path = f"/v1/jobs/{job.job_id}/output.tar"
    async with app.peers.nodelet(node_id).open("GET", path) as response:
        chunks = bounded_silence(response.content.iter_any(), node_id)
        return await bytes_response(req, chunks, TAR)


async def _locate(peers: PeerClients, job: Job) -> JobOutput:
    async def ask(_: Node, client: Client) -> NodeOutput | None:
        path = f"/v1/jobs/{job.job_id}/output"
        try:
            return await client.call("GET", path, reply=NodeOutput, retry=False)
        except NotFoundError:
            return None

    replies = await peers.ask_nodelets(ask)
    nodes = [node for node in replies.values() if node is not None and node.files]
    nodes.sort(key=lambda node: (node.node_id != job.node_id, node.node_id))
    # Shared storage is one copy, which every node can serve.
    if shared := [node for node in nodes if node.shared]:
        nodes = shared[:1]
    lost = "" if shared or not job.node_id or job.node_id in replies else _lost(peers, job)
    return JobOutput(job_id=job.job_id, nodes=tuple(nodes), lost=lost)


def _lost(peers: PeerClients, job: Job) -> str:
    try:
        peers.nodelet(job.node_id)
    except StokerError as error:
        return (
            f"what {job.job_id} wrote on its driver's node is gone with it\n{error.message}\n"
            "let jobs write to storage that all nodes share (STOKER_JOB_OUTPUT_ROOT) to keep it"
        )
    return f"node {job.node_id}, where the driver of {job.job_id} ran, does not answer now"


async def bounded_silence(chunks: AsyncIterator[bytes], node_id: str) -> AsyncIterator[bytes]:
    while True:
        try:
            async with asyncio.timeout(SILENCE_S):
                chunk = await anext(chunks, None)
        except TimeoutError:
            raise UnavailableError(f"node {node_id} was silent for {SILENCE_S:g} s") from None
        if chunk is None:
            return
        yield chunk


ROUTES = (
    Route(
        "GET",
        "/v1/jobs/{job_id}/output",
        get_job_output,
        reply=JobOutput,
        roles=WORK,
        summary="Locate output files of job",
    ),
    Route(
        "GET",
        "/v1/jobs/{job_id}/output.tar",
        download_job_output,
        query=OutputQuery,
        stream=True,
        media_type=TAR,
        roles=WORK,
        summary="Download output files of job from one node (default: its driver's), as a tar archive",
    ),
)
