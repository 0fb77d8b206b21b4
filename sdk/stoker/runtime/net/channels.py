"""Lines to other runtimes: opened on demand, shared, and used both ways.

Called by objects, tasks and actors with the address of a peer. A line that a peer opened to us
serves to reach it as well. The server half listens on a Unix socket, and on TCP in a cluster of
several machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web

from stoker.exceptions import UnavailableError
from stoker_wire.data import channel
from stoker_wire.data.channel import Channel
from stoker_wire.http import auth
from stoker_wire.messages.data import DataMessage

if TYPE_CHECKING:
    from stoker.runtime.runtime import Runtime
    from stoker_wire.messages.common import Address

OnMessages = Callable[[Channel, list[DataMessage]], None]
OnLost = Callable[[Channel], None]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_CONNECT_S = 60.0
"""A machine that is gone does not refuse. A process that is busy in C code answers late."""


class Peers:
    """All open lines of this process, by peer id."""

    def __init__(self, runtime: Runtime, on_messages: OnMessages, on_lost: OnLost) -> None:
        self._runtime = runtime
        self._on_messages = on_messages
        self._on_lost = on_lost
        self._lines: dict[str, Channel] = {}
        self._opening: dict[str, asyncio.Future[Channel]] = {}
        self._runner: web.AppRunner | None = None

    async def listen(
        self, socket_path: str, tcp_host: str | None, routes: dict[tuple[str, str], Handler]
    ) -> int:
        """Serve lines (and ``routes``) on the Unix socket, and on TCP if a host is given.

        Returns the TCP port, or 0.
        """
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get(channel.PATH, self._accept)
        for (method, path), handler in routes.items():
            app.router.add_route(method, path, self._guarded(handler))
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        if socket_path:
            Path(socket_path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(socket_path)
            await web.UnixSite(self._runner, socket_path).start()
        if tcp_host is None:
            return 0
        await web.TCPSite(self._runner, tcp_host, 0).start()
        return next(int(a[1]) for a in self._runner.addresses if isinstance(a, tuple))

    async def close_lines(self) -> None:
        """Close all lines, after what is posted on them left."""
        await asyncio.gather(
            *(x.close() for x in list(self._lines.values())), return_exceptions=True
        )

    async def close(self) -> None:
        """Close all lines (after what is posted on them left) and stop listening."""
        await self.close_lines()
        if self._runner is not None:
            await self._runner.cleanup()

    def open_line(self, peer_id: str) -> Channel | None:
        """Return the line to a peer if there is one."""
        line = self._lines.get(peer_id)
        return line if line is not None and not line.closed else None

    async def line(self, address: Address) -> Channel:
        """Return a line to ``address``, opened if need be; concurrent callers share one."""
        found = self.open_line(address.peer_id)
        if found is not None:
            return found
        opening = self._opening.get(address.peer_id)
        if opening is None:
            opening = self._runtime.loop.create_future()
            self._opening[address.peer_id] = opening
            try:
                line = await self._connect(address)
            except BaseException as error:
                if not opening.done():
                    opening.set_exception(error)
                    opening.exception()  # mark as seen: nobody else may be waiting
                raise
            else:
                opening.set_result(line)
                return line
            finally:
                del self._opening[address.peer_id]
        return await asyncio.shield(opening)

    async def _connect(self, address: Address) -> Channel:
        path = channel.usable_path(address, self._runtime.address.host_id)
        if not path and not address.url:
            raise UnavailableError(
                f"{address.peer_id} listens on a Unix socket of another machine only\n"
                f"its socket is {address.unix or 'none'}: is it of this cluster?"
            )
        connector: aiohttp.BaseConnector = (
            aiohttp.UnixConnector(path) if path else aiohttp.TCPConnector()
        )
        session = aiohttp.ClientSession(connector=connector)
        try:
            async with asyncio.timeout(_CONNECT_S):
                line = await channel.connect(
                    session,
                    "http://localhost" if path else address.url,
                    me=self._runtime.address,
                    job_id=self._runtime.job_id,
                    token=self._runtime.token,
                    over_tcp=not path,
                )
        except TimeoutError:
            await session.close()
            raise UnavailableError(
                f"{address.peer_id} at {path or address.url} took no line within {_CONNECT_S:g} s"
            ) from None
        except BaseException:
            await session.close()
            raise
        self._lines[line.peer.peer_id] = line
        self._runtime.background.spawn(self._carry(line, session), name="line")
        return line

    async def _carry(self, line: Channel, session: aiohttp.ClientSession | None) -> None:
        try:
            await line.run(self._on_messages)
        finally:
            if self._lines.get(line.peer.peer_id) is line:
                del self._lines[line.peer.peer_id]
            self._on_lost(line)
            if session is not None:
                await session.close()

    def _allowed(self, request: web.Request) -> bool:
        return auth.check(request.headers.get("Authorization"), self._runtime.token)

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: web.Request) -> web.StreamResponse:
            if not self._allowed(request):
                raise web.HTTPUnauthorized
            return await handler(request)

        return guarded

    async def _accept(self, request: web.Request) -> web.StreamResponse:
        if not self._allowed(request):
            raise web.HTTPUnauthorized
        runtime = self._runtime
        socket, line = await channel.accept(request, me=runtime.address, job_id=runtime.job_id)
        if line is not None:
            if self.open_line(line.peer.peer_id) is None:
                self._lines[line.peer.peer_id] = line
            await self._carry(line, None)
        return socket
