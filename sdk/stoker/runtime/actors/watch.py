"""What the gcs says of actors that this process calls: one watch, begun with the first of them.

A line to an actor's worker usually closes when the worker ends. It does not when the machine loses
power, freezes or is cut off: then only the gcs knows that the actor is dead or lives elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec

from stoker.exceptions import StokerError
from stoker_wire.errors import CompactedError
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
_AGAIN_S = 0.5
_LIST_S = 10.0


class ActorWatch:
    """Tells ``on_change`` what became of each actor; ``on_gap`` when some may be missed."""

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
        self._begun: asyncio.Event | None = None

    async def begin(self) -> None:
        """Return once all that happens from now on will be told. Does not raise."""
        if self._begun is None:
            self._begun = asyncio.Event()
            self._io.background.spawn(self._watch(self._begun), name="actor-news")
        await self._begun.wait()

    async def _watch(self, begun: asyncio.Event) -> None:
        gcs = self._gcs
        while self._io.running:
            try:
                page = await gcs.call(
                    "GET", "/v1/actors", reply=Page[Actor], query={"limit": 1}, timeout_s=_LIST_S
                )
                if begun.is_set():
                    self._on_gap()
                begun.set()
                news = gcs.watch("/v1/events", page.seq, {"kind": _KINDS})
                async with aclosing(news) as events:
                    async for event in events:
                        self._on_change(msgspec.convert(event.payload, Actor))
            except CompactedError:
                continue
            except StokerError:
                await asyncio.sleep(_AGAIN_S)
