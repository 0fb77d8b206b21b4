"""A TCP port whose connections get protocols of our own; with STOKER_TLS it speaks TLS."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web

from stoker_wire.http.server.service import listen_error
from stoker_wire.tls.contexts import check_listener, server_context
from stoker_wire.tls.listener import TlsSite

if TYPE_CHECKING:
    from stoker_wire.tls.files import TlsFiles

_BACKLOG = 1024


class Port:
    """A listener that calls ``make`` for the protocol of each connection."""

    def __init__(self, name: str, make: Callable[[], asyncio.Protocol], tls: TlsFiles) -> None:
        self._name = name
        self._make = make
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._runner = _Runner(make)
        self.number = 0

    async def listen(self, host: str, port: int, reached_as: str) -> None:
        """Listen on ``host``:``port`` (0: a free one). PortInUseError and StartError name the fix."""
        try:
            if self._tls.is_on:
                check_listener(self._name, reached_as, self._tls)
                await self._runner.setup()
                site = TlsSite(
                    cast("Any", self._runner),
                    server_context(self._tls),
                    host=host,
                    port=port,
                    backlog=_BACKLOG,
                )
                await site.start()
                self.number = site.port
                return
            self._server = await asyncio.get_running_loop().create_server(
                self._make, host, port, backlog=_BACKLOG, reuse_address=True
            )
        except OSError as error:
            raise listen_error(self._name, host, port, error) from None
        self.number = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Listen no more. The connections are their protocols' to close."""
        if self._server is not None:
            self._server.close()
        for site in list(self._runner.sites):
            await site.stop()


class _Runner(web.BaseRunner):
    """A runner of aiohttp's whose connections have the protocols of others."""

    def __init__(self, make: Callable[[], asyncio.Protocol]) -> None:
        super().__init__()
        self._make = make

    async def shutdown(self) -> None:
        """There is nothing to shut down."""

    async def _make_server(self) -> Any:
        return self._make

    async def _cleanup_server(self) -> None:
        pass
