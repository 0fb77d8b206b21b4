"""The move of an asyncio client from a replica that does not answer to one that does.

What is under way at a URL is *attended*. While that is silent the replica is asked whether it is ready,
and the others if it does not say so; once one of them is, all that is attended ends with an
UnavailableError that says where the client moved, and whoever started it begins again there. Nothing
runs while nothing is under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from stoker_wire.errors import StokerError, UnavailableError
from stoker_wire.http.client.endpoints import HEDGE_S, PROBE_S, STEADY_S, Endpoints
from stoker_wire.process.background import Background

_TICK_S = 0.2
_HELD_UP_S = 0.2
"""A probe that took so much longer than it may proves only that this process was held up."""


class Replicas:
    """The watch over the URL in use. ``is_ready(url)`` asks a replica, for as long as it is let."""

    def __init__(self, endpoints: Endpoints, is_ready: Callable[[str], Awaitable[bool]]) -> None:
        self._endpoints = endpoints
        self._is_ready = is_ready
        self._attended: dict[asyncio.Timeout, tuple[str, float]] = {}
        """The URL of each request under way, and when it began."""
        self._heard_at_s = 0.0
        self._probed_at_s = 0.0
        self._background = Background("replicas")

    @asynccontextmanager
    async def attend(self, url: str) -> AsyncIterator[None]:
        """Raise UnavailableError in the body once the client has moved on from ``url``."""
        loop = asyncio.get_running_loop()
        scope = asyncio.timeout(None)
        if url != self._endpoints.current:
            raise self._moved(url)
        try:
            async with scope:
                self._attended[scope] = url, loop.time()
                if not len(self._background):
                    self._background.spawn(self._watch(), name="watch")
                yield
            self._heard_at_s = loop.time()
        except TimeoutError as error:
            if isinstance(error, StokerError) or not scope.expired():
                raise
            raise self._moved(url) from None
        finally:
            self._attended.pop(scope, None)

    def _moved(self, url: str) -> UnavailableError:
        return UnavailableError(f"{url} did not answer\n{self._endpoints.current} is asked now")

    async def close(self) -> None:
        """End the watch."""
        await self._background.close()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while self._attended:
            left_s = self._due_at_s() - loop.time()
            if left_s > 0:
                await asyncio.sleep(min(left_s, _TICK_S))
                continue
            await self.check()

    def _due_at_s(self) -> float:
        """Return when to ask the replica next: soon for what began since, later for what goes on."""
        known_at_s = max(self._heard_at_s, self._probed_at_s)
        began = [began_s for _, began_s in self._attended.values() if began_s > self._probed_at_s]
        if not began:
            return known_at_s + STEADY_S
        return min(
            max(self._heard_at_s, min(began)) + HEDGE_S, max(known_at_s, began[0]) + STEADY_S
        )

    async def check(self) -> None:
        """Ask the replica in use whether it is ready; move to the first other one that is, if not."""
        silent = self._endpoints.current
        answers = await self._answers(silent)
        self._probed_at_s = asyncio.get_running_loop().time()
        if answers:
            return
        others = self._endpoints.others
        ready = await asyncio.gather(*(self._answers(url) for url in others))
        if self._endpoints.current != silent:
            return
        for url, is_ready in zip(others, ready, strict=True):
            if is_ready:
                self._endpoints.current = url
                self.drop(silent)
                return

    def drop(self, url: str) -> None:
        """End what is under way at ``url``."""
        now_s = asyncio.get_running_loop().time()
        for scope, (at, _) in self._attended.items():
            if at == url and not scope.expired():
                scope.reschedule(now_s)

    async def _answers(self, url: str) -> bool:
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            try:
                async with asyncio.timeout(PROBE_S):
                    return await self._is_ready(url)
            except TimeoutError:
                if loop.time() - began_s < PROBE_S + _HELD_UP_S:
                    return False
