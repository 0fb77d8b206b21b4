"""The watch of the gcs's actor events: one per process, started with the first actor that it calls.

A channel to an actor's worker usually closes when the worker ends. It does not when the machine loses
power, freezes or is cut off: then only the gcs knows that the actor is dead or lives elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from stoker.exceptions import StokerError
from stoker_wire.errors import CompactedError
from stoker_wire.http.tolerant import convert_known
from stoker_wire.messages.control import Page
from stoker_wire.messages.events import EventKind
from stoker_wire.messages.work import Actor

if TYPE_CHECKING:
    from stoker.runtime.process.io_thread import IoThread
    from stoker_wire.http.client.client import Client

_KINDS = ",".join(
    (
        EventKind.ACTOR_CREATED,
        EventKind.ACTOR_PLACED,
        EventKind.ACTOR_STARTED,
        EventKind.ACTOR_DELAYED,
        EventKind.ACTOR_DIED,
        EventKind.ACTOR_RESTARTING,
    )
)
_RETRY_S = 0.5
_LIST_S = 10.0


class ActorWatch:
    """A stream of actor records: ``on_change`` gets each, ``on_gap`` is called when some may be missed."""

    def __init__(
        self,
        io: IoThread,
        gcs: Client,
        on_change: Callable[[Actor], None],
        on_gap: Callable[[], None],
    ) -> None:
        self._io = io
        self._gcs = gcs
        self._on_change = on_change
        self._on_gap = on_gap
        self._started: asyncio.Event | None = None

    async def start(self) -> None:
        """Start the watch; return once no later event will be missed. Does not raise."""
        if self._started is None:
            self._started = asyncio.Event()
            self._io.background.spawn(self._watch(self._started), name="actor-watch")
        await self._started.wait()

    async def _watch(self, started: asyncio.Event) -> None:
        gcs = self._gcs
        while self._io.running:
            try:
                page = await gcs.call(
                    "GET", "/v1/actors", reply=Page[Actor], query={"limit": 1}, timeout_s=_LIST_S
                )
                if started.is_set():
                    self._on_gap()
                started.set()
                stream = gcs.watch("/v1/events", page.seq, {"kind": _KINDS})
                async with aclosing(stream) as events:
                    async for event in events:
                        self._on_change(convert_known(event.payload, Actor))
            except CompactedError:
                continue
            except StokerError:
                await asyncio.sleep(_RETRY_S)
