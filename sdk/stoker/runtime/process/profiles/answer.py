"""The answer to an order to record this process: its report, as long as somebody waits for it."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from pathlib import Path

import msgspec
from aiohttp import web

from stoker.runtime.process.profiles.recording import record
from stoker_wire.errors import StokerError
from stoker_wire.http.problems import problem_response
from stoker_wire.messages.node_api import MAX_PROFILE_NBYTES, RecordProfile

_LOOK_S = 0.2


async def profile_response(request: web.Request) -> web.StreamResponse:
    """Record for as long as the order says, and return the file, or a problem."""
    order = msgspec.msgpack.decode(await request.read(), type=RecordProfile)
    folder = Path(tempfile.mkdtemp(prefix="stoker-profile-"))
    stop = threading.Event()
    loop = asyncio.get_running_loop()
    recording = loop.run_in_executor(None, record, order.kind, order.seconds, folder, stop)
    try:
        while not recording.done():
            await asyncio.wait({recording}, timeout=_LOOK_S)
            if request.transport is None or request.transport.is_closing():
                stop.set()  # the profiler is to be stopped where it was started
        path = recording.result()
        # One byte more than is taken tells the reader that there is too much.
        body = await asyncio.to_thread(_read, path, MAX_PROFILE_NBYTES + 1)
        return web.Response(body=body)
    except StokerError as error:
        status, content_type, body = problem_response(error)
        return web.Response(body=body, status=status, content_type=content_type)
    finally:
        stop.set()
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _read(path: Path, limit: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(limit)
