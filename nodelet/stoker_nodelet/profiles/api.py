"""Routes of stacks and profiles of one process, for the gcs, which checks whose it is."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker_nodelet.profiles.recordings import Recordings
from stoker_nodelet.profiles.stacks import StackReader
from stoker_wire.http.codec import ANY
from stoker_wire.http.principals import GCS
from stoker_wire.http.server.routes import Route
from stoker_wire.http.server.watch import bytes_response, while_read
from stoker_wire.messages.node_api import (
    PROFILE_FORMATS,
    PROFILE_TYPES,
    ProcessStacks,
    TakeWorkerProfile,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from aiohttp import web

    from stoker_nodelet.workers.workers import Workers
    from stoker_wire.http.server.request import Request
    from stoker_wire.settings import Settings

_CHUNK_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Profiles:
    """The handlers, and the parts that they call."""

    stacks: StackReader
    recordings: Recordings

    @classmethod
    def of(cls, workers: Workers, settings: Settings) -> Profiles:
        """Return the stacks and profiles of the workers of a node."""
        recordings = Recordings(workers, settings.py_spy)
        stacks = StackReader(workers, settings.py_spy, settings.stack_timeout_s, recordings.traces)
        return cls(stacks, recordings)

    async def get_stacks(self, req: Request) -> ProcessStacks:
        req.waiting_for(f"the stacks of {req.path['id']}")
        return await self.stacks.read(req.path["id"])

    async def take_profile(self, req: Request) -> web.StreamResponse:
        order: TakeWorkerProfile = req.body
        kind = PROFILE_TYPES[order.format or PROFILE_FORMATS[order.kind][0]]
        async with contextlib.AsyncExitStack() as stack:
            taking = stack.enter_async_context(self.recordings.take(req.path["id"], order))
            path = await while_read(req, taking)
            return await bytes_response(req, _chunks(path), kind)


async def _chunks(path: Path) -> AsyncIterator[bytes]:
    file = await asyncio.to_thread(open, path, "rb")
    with file:
        while chunk := await asyncio.to_thread(file.read, _CHUNK_NBYTES):
            yield chunk


ROUTES = (
    Route(
        "GET",
        "/v1/workers/{id}/stacks",
        Profiles.get_stacks,
        reply=ProcessStacks,
        roles=GCS,
        summary="Read the stacks of a worker",
    ),
    Route(
        "POST",
        "/v1/workers/{id}/profile",
        Profiles.take_profile,
        body=TakeWorkerProfile,
        stream=True,
        media_type=ANY,
        roles=GCS,
        summary="Take a profile of a worker",
    ),
)
