"""Channels to other runtimes: opened on demand, shared, and used both ways.

Called by objects, tasks and actors with the address of a peer. A channel that a peer opened to us
serves to reach it as well. The server half listens on a Unix socket, and on TCP in a cluster of
several machines. Callers that ask for a peer at the same time share one channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from aiohttp import web
from msgspec.structs import replace

from stoker.exceptions import StartError, UnavailableError
from stoker_wire.data.channel import PATH, Channel, accept, connect, usable_path
from stoker_wire.errors import ForbiddenError
from stoker_wire.http import auth
from stoker_wire.http.problems import problem_response
from stoker_wire.http.server.connections import Connections
from stoker_wire.http.server.site_guard import SiteGuard
from stoker_wire.http.server.unix_socket import private_socket
from stoker_wire.messages.common import Address
from stoker_wire.messages.control import ReviewChannel
from stoker_wire.messages.data import DataMessage
from stoker_wire.tls.contexts import check_listener, server_context
from stoker_wire.tls.listener import TlsSite

if TYPE_CHECKING:
    from stoker.runtime.net.gateway_port import GatewayPort
    from stoker.runtime.process.identity import Identity
    from stoker.runtime.process.io_thread import IoThread
    from stoker_wire.http.gateway.route import GatewayRoute
    from stoker_wire.settings import Settings
    from stoker_wire.tls.files import TlsFiles

Review = Callable[[ReviewChannel], Awaitable[bool]]
OnMessages = Callable[[Channel, list[DataMessage]], None]
OnLost = Callable[[Channel], None]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_CONNECT_S = 60.0
"""A machine that is gone does not refuse. A process that is busy in C code answers late."""


class _Job(Protocol):
    """The job that this process works for, as of now."""

    job_id: str


def _check_tls(identity: Identity, host: str, tls: TlsFiles) -> None:
    """Raise StartError if others could not trust what this process is about to listen with."""
    if tls.is_on:
        check_listener("the data path of this process", host, tls)
        return
    url = identity.node.url if identity.node is not None else identity.gcs_url
    if url.startswith("https:"):
        raise StartError(
            "this process will not listen without TLS in a cluster that has it\n"
            "set STOKER_TLS as the nodes do, STOKER_TLS_CA, and STOKER_TLS_CERT and STOKER_TLS_KEY to a "
            f"certificate of its own: stoker certs issue NAME --host {host}"
        )


class Channels:
    """All open channels of this process, by peer id."""

    def __init__(
        self,
        identity: Identity,
        io: IoThread,
        settings: Settings,
        tls: TlsFiles,
        gateway: GatewayRoute | None = None,
        port: GatewayPort | None = None,
    ) -> None:
        self._identity = identity
        self._tls = tls
        self._gateway = gateway
        self._port = port
        self._io = io
        self._site = SiteGuard(settings)
        self._site.listens_on(identity.tcp_host)
        self._tcp: socket.socket | None = None
        self.address = Address(
            identity.peer_id,
            identity.node.node_id if identity.node else "",
            identity.host_id,
            identity.socket_path,
            port.url if port is not None else "",
        )
        if identity.tcp_host is not None:
            _check_tls(identity, identity.tcp_host, tls)
            self._tcp = socket.create_server((identity.tcp_host, 0))
            scheme = "https" if tls.is_on else "http"
            url = f"{scheme}://{identity.tcp_host}:{self._tcp.getsockname()[1]}"
            self.address = replace(self.address, url=url)
        self._on_messages: OnMessages
        self._on_lost: OnLost
        self._job: _Job
        self._review: Review
        self._channels: dict[str, Channel] = {}
        self._open: set[Channel] = set()
        """All channels: both sides may have opened one to the other at the same moment."""
        self._opening: dict[str, asyncio.Future[Channel]] = {}
        self._runner: web.AppRunner | None = None
        self._connections = Connections()

    async def serve(
        self,
        job: _Job,
        review: Review,
        routes: dict[tuple[str, str], Handler],
        on_messages: OnMessages,
        on_lost: OnLost,
    ) -> None:
        """Accept channels (and requests to ``routes``) at :attr:`address` from now on.

        Of this job's processes all may open one; ``review`` says whether that of another job may.
        """
        self._job, self._review = job, review
        self._on_messages, self._on_lost = on_messages, on_lost
        socket_path = self._identity.socket_path
        app = web.Application(client_max_size=64 << 20, middlewares=[self._keep_pages_out])
        app.router.add_get(PATH, self._accept)
        for (method, path), handler in routes.items():
            app.router.add_route(method, path, self._guarded(handler))
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        self._connections.watch(self._runner.server)
        if (socket_fd := self._identity.socket_fd) >= 0:
            await web.SockSite(self._runner, socket.socket(fileno=socket_fd)).start()
        elif socket_path:
            Path(socket_path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            await web.SockSite(self._runner, private_socket(socket_path)).start()
        if self._tcp is not None:
            if self._tls.is_on:
                await TlsSite(self._runner, server_context(self._tls), sock=self._tcp).start()
            else:
                await web.SockSite(self._runner, self._tcp).start()
        if self._port is not None:
            assert self._runner.server is not None
            self._port.serve(self._runner.server)

    async def close_channels(self) -> None:
        """Close all channels, once what is posted on them has left."""
        await asyncio.gather(
            *(channel.close() for channel in list(self._open)), return_exceptions=True
        )

    async def close(self) -> None:
        """Close all channels (once what is posted on them has left) and stop listening."""
        await self.close_channels()
        if self._port is not None:
            await self._port.close()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._identity.socket_path:
            with contextlib.suppress(FileNotFoundError, PermissionError):
                os.unlink(self._identity.socket_path)

    def open_channel(self, peer_id: str) -> Channel | None:
        """Return the open channel to a peer, or None."""
        channel = self._channels.get(peer_id)
        return channel if channel is not None and not channel.closed else None

    async def channel(self, address: Address) -> Channel:
        """Return a channel to ``address``, opened if need be; concurrent callers share one."""
        existing = self.open_channel(address.peer_id)
        if existing is not None:
            return existing
        opening = self._opening.get(address.peer_id)
        if opening is None:
            opening = self._io.loop.create_future()
            self._opening[address.peer_id] = opening
            try:
                channel = await self._connect(address)
            except BaseException as error:
                if not opening.done():
                    opening.set_exception(error)
                    opening.exception()  # mark as seen: nobody else may be waiting
                raise
            else:
                opening.set_result(channel)
                return channel
            finally:
                del self._opening[address.peer_id]
        return await asyncio.shield(opening)

    async def _connect(self, address: Address) -> Channel:
        path = usable_path(address, "" if self._identity.is_foreign else self._identity.host_id)
        if not path and not address.url:
            raise UnavailableError(
                f"{address.peer_id} listens on a Unix socket of another machine only\n"
                f"its socket is {address.unix or 'none'}: is it of this cluster?"
            )
        try:
            async with asyncio.timeout(_CONNECT_S):
                channel = await connect(
                    address,
                    path=path,
                    me=self.address,
                    job_id=self._job.job_id,
                    authorization=auth.channel_authorization(self._identity.token, address.peer_id),
                    tls=self._tls,
                    gateway=self._gateway,
                )
        except TimeoutError:
            raise UnavailableError(
                f"{address.peer_id} at {path or address.url} took no channel within {_CONNECT_S:g} s"
            ) from None
        self._channels[channel.peer.peer_id] = channel
        self._start(channel)
        return channel

    def _start(self, channel: Channel) -> None:
        self._open.add(channel)
        channel.start(self._on_messages, self._on_closed, self._io.at_turn_end)

    def _on_closed(self, channel: Channel) -> None:
        self._open.discard(channel)
        if self._channels.get(channel.peer.peer_id) is channel:
            del self._channels[channel.peer.peer_id]
        self._on_lost(channel)

    @web.middleware
    async def _keep_pages_out(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._site.check(request.headers)
        except ForbiddenError as error:
            status, content_type, body = problem_response(error)
            return web.Response(status=status, content_type=content_type, body=body)
        return await handler(request)

    def _guarded(self, handler: Handler) -> Handler:
        """Return a handler for the nodelet, which has the token that it gave this process at its start."""
        token = self._identity.token

        async def guarded(request: web.Request) -> web.StreamResponse:
            if not auth.check(request.headers.get("Authorization"), token):
                raise web.HTTPUnauthorized
            self._connections.proved(request.protocol)
            return await handler(request)

        return guarded

    async def _may_open(self, header: str) -> bool:
        """Return whether a process may open a channel: one of this job, or one that the gcs admits."""
        scheme, *shown = header.split(" ")
        if scheme != auth.CHANNEL_SCHEME or len(shown) != 3:
            return False
        job_id, actor_id, proof = shown
        me = self._identity
        if hmac.compare_digest(proof.encode(), auth.channel_proof(me.token, me.peer_id).encode()):
            return True
        return await self._review(
            ReviewChannel(job_id=job_id, actor_id=actor_id, peer_id=me.peer_id, proof=proof)
        )

    async def _accept(self, request: web.Request) -> web.StreamResponse:
        if not await self._may_open(request.headers.get("Authorization", "")):
            raise web.HTTPUnauthorized
        channel = await accept(request, me=self.address, job_id=self._job.job_id)
        if channel is not None:
            if self.open_channel(channel.peer.peer_id) is None:
                self._channels[channel.peer.peer_id] = channel
            self._start(channel)
        return web.Response()  # to nobody: the connection is the channel's now
