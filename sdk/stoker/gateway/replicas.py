"""The replicas of the gcs that the gateway passes connections on to: the one in use is ready, if any is.

A client of several replicas moves by itself; one that comes through the gateway knows one address. So when
the replica in use is not ready and another is, what is joined with the first ends, and comes again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from stoker_wire.errors import StokerError, UnavailableError
from stoker_wire.http.client.client import Client
from stoker_wire.http.client.endpoints import PROBE_S, READY_PATH, STEADY_S, Endpoints

if TYPE_CHECKING:
    from stoker.gateway.admission import Holder, Open
    from stoker_wire.settings import Settings

_SILENT = 2
"""Looks in a row at which the replica in use is not ready."""
Dial = Callable[[str], Awaitable[asyncio.Transport]]


class _Replica:
    """One replica, and what is joined with it."""

    def __init__(self) -> None:
        self.open: set[Open] = set()


class GcsReplicas:
    """The URLs of the gcs, and what is joined with each."""

    def __init__(self, settings: Settings, gcs_url: str, dial: Dial) -> None:
        self._endpoints = Endpoints(gcs_url)
        self._dial = dial
        self._clients = {
            url: Client(url, token="", peer="gateway", settings=settings)
            for url in self._endpoints.urls
        }
        self._replicas = {url: _Replica() for url in self._endpoints.urls}

    async def connect(self) -> tuple[asyncio.Transport, Holder]:
        """Return a connection to the replica in use, or the next that can be reached, and that replica.

        UnavailableError if none can be.
        """
        reasons = []
        for _ in self._endpoints.urls:
            url = self._endpoints.current
            try:
                return await self._dial(url), self._replicas[url]
            except UnavailableError as error:
                reasons.append(f"{error}")
                self._endpoints.leave(url)
        raise UnavailableError("\n".join(reasons))

    async def run(self) -> None:
        """Look whether the replica in use is ready, for ever."""
        silent = 0
        while self._endpoints.several:
            await asyncio.sleep(STEADY_S)
            current = self._endpoints.current
            silent = 0 if await self._is_ready(current) else silent + 1
            if silent < _SILENT:
                continue
            for other in self._endpoints.others:
                if await self._is_ready(other):
                    self._endpoints.current, silent = other, 0
                    for one in list(self._replicas[current].open):
                        one.abort()
                    break

    async def _is_ready(self, url: str) -> bool:
        try:
            await self._clients[url].call("GET", READY_PATH, timeout_s=PROBE_S, retry=False)
        except StokerError:
            return False
        return True

    async def close(self) -> None:
        """Close the connections of the looks."""
        for client in self._clients.values():
            await client.close()
