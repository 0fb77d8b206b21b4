"""Processes of the control plane that are there: replicas of the gcs, and schedulers with their standbys.

Each gcs notes itself and the schedulers that campaign at it, as ephemeral entries that all replicas see.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from stoker_gcs.ephemeral.fallback import FallbackEphemeralStore

KEEP_S = 15.0
EVERY_S = 5.0
_KIND = "process"


class Present(NamedTuple):
    """A process that was there some seconds ago."""

    service: str
    id: str
    url: str


class Presence:
    """The processes that were heard of within the last seconds."""

    def __init__(self, ephemeral: FallbackEphemeralStore) -> None:
        self._ephemeral = ephemeral
        self._noted: dict[tuple[str, str], tuple[str, float]] = {}

    def note(self, service: str, id_: str, url: str) -> None:
        """Note that a process is there. One that says so often is written down now and then."""
        now_s = asyncio.get_running_loop().time()
        known_url, noted_s = self._noted.get((service, id_), ("", 0.0))
        if url == known_url and now_s - noted_s < EVERY_S:
            return
        if len(self._noted) > 1000:
            self._noted.clear()
        self._noted[service, id_] = url, now_s
        self._ephemeral.put(_KIND, f"{service} {id_}", url.encode(), KEEP_S)

    def forget(self, service: str, id_: str) -> None:
        """Note that a process leaves."""
        self._noted.pop((service, id_), None)
        self._ephemeral.remove(_KIND, f"{service} {id_}")

    async def all(self) -> list[Present]:
        """Return those that are there."""
        found = (await self._ephemeral.all(_KIND)).items()
        parts = ((*key.partition(" ")[::2], url) for key, url in found)
        return sorted(
            Present(service, id_, url.decode(errors="replace")) for service, id_, url in parts
        )

    async def run(self, service: str, id_: str, url: str) -> None:
        """Note one again and again, until cancelled."""
        while True:
            self.note(service, id_, url)
            await asyncio.sleep(EVERY_S)
