"""This process's port inside the cluster, which the gateway holds for it: how others reach a driver outside.

The gateway tells on one line who has come there, and each is taken by a connection of its own, which is from
then on as one that this process has accepted itself. A line that breaks is made again, with the same port
if that is still free: peers know it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from stoker.exceptions import StokerError
from stoker_wire.process.background import Background

if TYPE_CHECKING:
    from stoker_wire.http.gateway.route import GatewayRoute

_AGAIN_S = 0.5
_LOOK_S = 1.0
_WAITING = 64
"""Connections that may come before this process serves."""
_log = logging.getLogger(__name__)


class GatewayPort:
    """The port of ``peer_id`` at its gateway. For one event loop."""

    def __init__(self, route: GatewayRoute, peer_id: str) -> None:
        self._route = route
        self._peer_id = peer_id
        self._background = Background("gateway-port")
        self._make: Callable[[], asyncio.Protocol] | None = None
        self._early: list[str] = []
        self._line: asyncio.Transport | None = None
        self.url = ""

    async def open(self) -> str:
        """Return the URL by which the cluster reaches this process from now on."""
        await self._listen()
        return self.url

    def serve(self, make: Callable[[], asyncio.Protocol]) -> None:
        """Have each connection, of those too that have come already, served by what ``make`` makes."""
        self._make = make
        early, self._early = self._early, []
        for connection_id in early:
            self._arrived(connection_id)

    async def close(self) -> None:
        """Give the port back."""
        await self._background.close()
        if self._line is not None:
            self._line.close()

    async def _listen(self) -> None:
        port = urlsplit(self.url).port or 0
        transport, line, url = await self._route.listen(
            lambda: _Line(self._arrived), self._peer_id, port
        )
        if self.url and url != self.url:
            _log.warning("the gateway has another port for this process: %s, not %s", url, self.url)
        self._line, self.url = transport, url
        self._background.spawn(self._keep(line, self._route.token), name="line")

    async def _keep(self, line: _Line, token: str) -> None:
        """Listen again when the line is lost, or when this process has got another token."""
        while not line.lost.done() and token == self._route.token:
            await asyncio.wait((line.lost,), timeout=_LOOK_S)
        while True:
            try:
                await self._listen()
            except StokerError as error:
                _log.info("no port at the gateway yet: %s", error)
                await asyncio.sleep(_AGAIN_S)
            else:
                return

    def _arrived(self, connection_id: str) -> None:
        if self._make is not None:
            self._background.spawn(self._take(connection_id, self._make), name="take")
        elif len(self._early) < _WAITING:
            self._early.append(connection_id)

    async def _take(self, connection_id: str, make: Callable[[], asyncio.Protocol]) -> None:
        try:
            await self._route.accept(make, connection_id)
        except StokerError as error:
            _log.info("a connection from the gateway was not taken: %s", error)


class _Line(asyncio.Protocol):
    """The line on which ids of connections come, each with a line feed behind it."""

    def __init__(self, on_id: Callable[[str], object]) -> None:
        self._on_id = on_id
        self._data = b""
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        """Hand over the ids that are whole."""
        *ids, self._data = (self._data + data).split(b"\n")
        for connection_id in ids:
            self._on_id(connection_id.decode("ascii", "replace"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Say so."""
        if not self.lost.done():
            self.lost.set_result(None)
