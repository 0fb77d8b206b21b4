"""The gateway as a service: its port, and what each kind of first request leads to.

``CONNECT`` and the paths of :mod:`stoker_wire.http.gateway.protocol` are the gateway's own. On any other
connection each request goes, as it is, to the gcs, which checks tokens and answers, or to the caller of its
token (:mod:`stoker.gateway.calls`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from stoker.gateway.admission import Admission
from stoker.gateway.calls.processes import Callers
from stoker.gateway.door import Door
from stoker.gateway.exchange import Destination, Exchange
from stoker.gateway.listeners import Listeners
from stoker.gateway.port import Port
from stoker.gateway.relay import Held, Joint
from stoker.gateway.replicas import GcsReplicas
from stoker_wire.data.keep_alive import keep_alive
from stoker_wire.errors import (
    BadRequestError,
    ForbiddenError,
    InternalError,
    StokerError,
    UnavailableError,
)
from stoker_wire.http.auth import is_loopback
from stoker_wire.http.client.port_owner import check_port_owner
from stoker_wire.http.gateway.calls import is_call
from stoker_wire.http.gateway.protocol import (
    ACCEPT_PATH,
    DIAL_S,
    GATEWAY_PATH,
    LISTEN_PATH,
    METRICS_PATH,
    UPGRADE,
    URL_HEADER,
    GatewayInfo,
    RequestHead,
)
from stoker_wire.http.server.connections import Connections
from stoker_wire.http.server.request_guard import outward_address
from stoker_wire.ids import Prefix, is_id
from stoker_wire.process.background import Background
from stoker_wire.process.metrics import Metrics
from stoker_wire.tls.contexts import context_for, tls_error
from stoker_wire.tls.files import files_of
from stoker_wire.version import VERSION

if TYPE_CHECKING:
    import socket

    from stoker.gateway.admission import Holder, Open, Pass
    from stoker_wire.settings import Settings
    from stoker_wire.tls.files import TlsFiles

DEFAULT_PORT = 7601
_log = logging.getLogger(__name__)
_PORT_DIGITS = 5
_SWITCH = {"Connection": "Upgrade", "Upgrade": UPGRADE}


class Gateway:
    """The gateway of the cluster whose gcs is at ``gcs_url`` (several replicas with commas between)."""

    def __init__(self, settings: Settings, *, gcs_url: str) -> None:
        self._settings = settings
        self._tls = files_of(settings)
        self._reached_as = settings.advertise_host or settings.host
        if self._reached_as in ("0.0.0.0", "::", ""):
            self._reached_as = outward_address()
        self._gcs = GcsReplicas(settings, gcs_url, self._dial)
        self._admission = Admission(settings, gcs_url)
        self._listeners = Listeners(settings.host, self._reached_as, self._tls)
        self._connections = Connections(settings.unproven_connections, settings.unproven_s)
        self._background = Background("gateway")
        self._metrics = Metrics("gateway")
        self._self = _Itself()
        self._joints: set[Joint | Exchange] = set()
        self._callers = Callers(gcs_url, self._reached_as, self._came_back)
        self._port = Port(
            "the gateway", lambda: Door(self._connections, self._on_request), self._tls
        )
        self._metrics.show("stoker_gateway_connections", lambda: len(self._joints))
        self._metrics.show("stoker_gateway_callers", lambda: self._callers.count)

    @property
    def url(self) -> str:
        """The URL that people outside use, by the name that the cluster knows."""
        return _url_of(self._tls, self._reached_as, self._port.number)

    async def start(self, host: str, port: int) -> None:
        """Listen. PortInUseError and StartError name the fix."""
        await self._port.listen(host, port, self._reached_as)
        self._metrics.lag.start()
        self._background.spawn(self._admission.run(), name="tokens")
        self._background.spawn(self._gcs.run(), name="replicas")
        _log.info("listening", extra={"url": self.url})

    async def stop(self) -> None:
        """Close the port, and all connections."""
        await self._port.close()
        self._metrics.lag.stop()
        await self._background.close()
        await self._listeners.close()
        await self._callers.close()
        await self._admission.close()
        await self._gcs.close()
        for joint in list(self._joints):
            joint.abort()

    # Requests

    def _on_request(self, door: Door, request: RequestHead) -> None:
        self._background.spawn(self._serve(door, request), name=request.method)

    async def _serve(self, door: Door, request: RequestHead) -> None:
        began_s, status = time.perf_counter(), 200
        try:
            await self._answer(door, request)
        except StokerError as error:
            status = error.status
            door.refuse(error)
        except Exception as error:
            _log.exception("a request failed")
            status = InternalError.status
            door.refuse(InternalError(f"the gateway failed\n{error!r}"))
        if route := _own_route(request):
            took_s = time.perf_counter() - began_s
            self._metrics.answered(request.method, route, status, took_s)

    async def _answer(self, door: Door, request: RequestHead) -> None:
        if request.method == "CONNECT":
            await self._connect(door, request)
        elif request.path == LISTEN_PATH:
            _check_upgrade(request)
            await self._listen(door, request)
        elif request.path == ACCEPT_PATH:
            _check_upgrade(request)
            await self._accept(door, request)
        elif request.path == GATEWAY_PATH:
            info = GatewayInfo(version=VERSION, has_drivers=not is_loopback(self._reached_as))
            _reply(door, "application/json", msgspec.json.encode(info))
        elif request.path == METRICS_PATH and request.method == "GET":
            if not is_loopback(self._reached_as):
                await self._admission.recognize(request.token)
            _reply(door, self._metrics.content_type, self._metrics.render())
        elif is_call(request.path) and not self._tls.is_on:
            admitted = await self._admission.admit(request.token)
            door.proved()
            await self._callers.hand_over(request.token, admitted, door)
        else:
            self._forward(door)

    def _came_back(self, connection: socket.socket, came: bytes) -> None:
        """Begin anew with a connection that a caller gave back."""

        def door() -> Door:
            return Door(self._connections, self._on_request, came)

        connect = asyncio.get_running_loop().connect_accepted_socket
        self._background.spawn(connect(door, connection), name="connection")

    def _forward(self, door: Door) -> None:
        """Have the requests of a connection answered by whom each is for."""
        exchange = Exchange(
            _destination_of,
            partial(self._dial_for, door),
            partial(self._background.spawn, name="request"),
            self._joints.discard,
        )
        self._joints.add(exchange)
        exchange.begin(door.transport, door.data)

    async def _dial_for(self, door: Door, request: RequestHead) -> Destination:
        """Return a connection to who answers a request: a caller, or the gcs, which checks tokens itself."""
        if request.path == METRICS_PATH:
            return Destination(await self._dial(self.url), self._self)
        if not is_call(request.path):
            transport, replica = await self._gcs.connect()
            door.proved()  # the gcs counts it from here on
            return Destination(transport, replica)
        admitted = await self._admission.admit(request.token)
        door.proved()
        return Destination(await self._callers.connect(request.token, admitted), admitted)

    async def _connect(self, door: Door, request: RequestHead) -> None:
        host, port = _place(request.target)
        admitted = await self._admission.admit(request.token)
        door.proved()
        if not self._listeners.is_one(host, port):
            await self._admission.check_target(admitted, host, port)
        target = await self._dial(_url_of(self._tls, host, port))
        self._join(admitted, door, target, "200 Connection established", {})

    async def _accept(self, door: Door, request: RequestHead) -> None:
        admitted = await self._admission.admit(request.token)
        door.proved()
        held = self._listeners.take(request.query.get("id", ""))
        self._join(admitted, door, held.transport, "101 Switching Protocols", _SWITCH, held.data)

    def _join(
        self,
        admitted: Pass,
        door: Door,
        other: asyncio.Transport,
        status: str,
        headers: dict[str, str],
        came: bytes = b"",
    ) -> None:
        door.answer(status, headers, came)
        if door.behind:
            other.write(door.behind)
        self._joint(admitted).join(door.transport, other)

    def _joint(self, by: Holder) -> Joint:
        """Return a joint that is open ``by`` something until it ends."""

        def ended(joint: Joint) -> None:
            self._joints.discard(joint)
            by.open.discard(joint)

        joint = Joint(ended)
        self._joints.add(joint)
        by.open.add(joint)
        return joint

    async def _dial(self, url: str) -> asyncio.Transport:
        """Return a connection to a URL, with TLS where the cluster has it; UnavailableError says why not."""
        host, port = urlsplit(url).hostname or "", urlsplit(url).port or 80
        context = context_for(url, self._tls)
        try:
            async with asyncio.timeout(DIAL_S):
                transport, _ = await asyncio.get_running_loop().create_connection(
                    Held, host, port, ssl=context, server_hostname=host if context else None
                )
        except (OSError, TimeoutError) as error:
            if isinstance(error, StokerError):
                raise
            why = "it does not answer" if isinstance(error, TimeoutError) else error
            raise tls_error(error, "the gateway", url) or UnavailableError(
                f"the gateway cannot reach {url}\n{why}"
            ) from None
        line = transport.get_extra_info("socket")
        keep_alive(line)
        try:
            if context is None:
                check_port_owner(line)
        except StokerError:
            transport.abort()
            raise
        return transport

    async def _listen(self, door: Door, request: RequestHead) -> None:
        peer_id, port = request.query.get("peer_id", ""), request.query.get("port", "0")
        if not is_id(peer_id, Prefix.PEER):
            raise BadRequestError(
                f"peer_id: {peer_id[:100]!r} is no id of a driver", field="peer_id"
            )
        if not port.isdecimal() or len(port) > _PORT_DIGITS or int(port) > 0xFFFF:
            raise BadRequestError(f"port: {port[:100]!r} is no number of a port", field="port")
        admitted = await self._admission.admit(request.token)
        door.proved()
        listener = await self._listeners.open(peer_id, admitted.sender.name, int(port))
        where = door.transport.get_extra_info("peername")
        _log.info("%s of %s comes from %s", peer_id, admitted.owner, where[0] if where else "?")
        grace_s = self._settings.driver_unreachable_s
        line = _Line(
            door.transport,
            admitted,
            lambda kept: self._listeners.line_lost(peer_id, door.transport, kept * grace_s),
        )
        headers = {**_SWITCH, URL_HEADER: self._listeners.url_of(listener)}
        door.answer("101 Switching Protocols", headers)
        admitted.open.add(line)
        door.transport.set_protocol(line)
        listener.attach(door.transport)
        door.transport.resume_reading()


def _url_of(tls: TlsFiles, host: str, port: int) -> str:
    scheme = "https" if tls.is_on else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _destination_of(request: RequestHead) -> str:
    """Return what tells the requests of one destination from others: the token for a caller's."""
    if request.path == METRICS_PATH:
        return METRICS_PATH
    return request.token if is_call(request.path) else ""


def _own_route(request: RequestHead) -> str:
    """Return the route of a request that the gateway answers itself; empty if it is another's to answer."""
    if request.method == "CONNECT":
        return "CONNECT"
    own = (LISTEN_PATH, ACCEPT_PATH, GATEWAY_PATH, METRICS_PATH)
    return request.path if request.path in own else ""


def _reply(door: Door, content_type: str, body: bytes) -> None:
    """Send a whole answer, and close."""
    headers = {"Content-Type": content_type, "Content-Length": str(len(body))}
    door.answer("200 OK", {**headers, "Connection": "close"}, body)
    door.transport.close()


def _check_upgrade(request: RequestHead) -> None:
    if request.headers.get("upgrade", "").lower() != UPGRADE:
        raise BadRequestError(f"{request.path} upgrades a connection\nsend 'Upgrade: {UPGRADE}'")
    if "origin" in request.headers:
        raise ForbiddenError("pages of the web have no connections to processes", field="Origin")


def _place(target: str) -> tuple[str, int]:
    """Return host and port of a CONNECT."""
    try:
        parts = urlsplit(f"//{target}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise BadRequestError(f"{target[:100]!r} is no place\nwrite it like CONNECT host:port")
    return host, port


class _Itself:
    """The gateway as whom a connection leads to."""

    def __init__(self) -> None:
        self.open: set[Open] = set()


class _Line(asyncio.Protocol):
    """The connection on which a process is told who has come to its port."""

    def __init__(
        self, transport: asyncio.Transport, by: Holder, on_lost: Callable[[bool], object]
    ) -> None:
        self._transport = transport
        self._by = by
        self._on_lost = on_lost
        self._kept = True

    def abort(self) -> None:
        """End it, and the port with it: its token is not valid any more."""
        self._kept = False
        self._transport.abort()

    def eof_received(self) -> None:
        """End: the process has closed it, or is gone. A network that fails says nothing so clear."""
        self._kept = False

    def connection_lost(self, exc: Exception | None) -> None:
        """Say whether the port is kept for a while: its process may come back."""
        self._by.open.discard(self)
        self._on_lost(self._kept)
