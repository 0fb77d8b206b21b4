"""Leader election: the scheduler's campaign at the gcs, and what begins and ends with a term.

The leader renews a third into its time. While the gcs cannot be reached it goes on, because nobody
else can be elected then and nodelets refuse any epoch older than one they have seen.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from stoker_wire.errors import ConflictError, NotLeaderError, StokerError
from stoker_wire.messages.control import Campaign, Leader

if TYPE_CHECKING:
    from stoker_wire.http.client.client import Client

_log = logging.getLogger(__name__)

NAME = "scheduler"
UNREACHABLE_PAUSE_S = 0.2
STANDBY_PAUSE_S = 0.5
"""How often a standby campaigns: the gcs then looks whether the leader is still there."""
STANDBY_TIMEOUT_S = 5.0
"""That look may take a while where the leader's host does not answer."""


class Leadership:
    """A campaign without end. ``begin(leader)`` starts a term, ``end(url of the new leader)`` ends it.

    ``renewed(leader)`` is called when the epoch grew while nobody else led.
    """

    def __init__(
        self,
        gcs: Client,
        *,
        holder: str,
        url: str,
        ttl_s: float,
        begin: Callable[[Leader], Awaitable[None]],
        renewed: Callable[[Leader], None],
        end: Callable[[str], Awaitable[None]],
    ) -> None:
        self._gcs = gcs
        self._holder = holder
        self._url = url
        self._ttl_s = ttl_s
        self._begin = begin
        self._renewed = renewed
        self._end = end
        self._recheck = asyncio.Event()
        self.epoch = 0
        self.leader_url = ""

    @property
    def leads(self) -> bool:
        """Whether this scheduler has a term."""
        return self.epoch > 0

    def recheck(self) -> None:
        """Campaign again at once: a nodelet knows a later leader."""
        self._recheck.set()

    async def run(self) -> None:
        """Campaign until cancelled."""
        while True:
            pause_s = self._ttl_s / 3
            try:
                await self._campaign()
            except ConflictError as error:
                self.leader_url = str(error.extra.get("leader", ""))
                # In time to ask a leader that is late with its renewal: a frozen one is replaced.
                ask_in_s = float(error.extra.get("ask_in_s", 0.0)) or STANDBY_PAUSE_S
                pause_s = min(pause_s, STANDBY_PAUSE_S, ask_in_s)
                if self.leads:
                    _log.warning("leadership lost to %s", self.leader_url)
                    self.epoch = 0
                    await self._end(self.leader_url)
            except StokerError as error:
                _log.warning("the gcs does not answer the campaign: %s", error)
                pause_s = UNREACHABLE_PAUSE_S
            await self._pause(pause_s)

    async def _campaign(self) -> None:
        body = Campaign(holder=self._holder, url=self._url, ttl_s=self._ttl_s, epoch=self.epoch)
        timeout_s = self._ttl_s / 2 if self.leads else STANDBY_TIMEOUT_S
        leader = await self._gcs.call(
            "POST", f"/v1/leaders/{NAME}", body, reply=Leader, timeout_s=timeout_s
        )
        before, self.leader_url = self.epoch, leader.url
        if before == leader.epoch:
            return
        if before and leader.epoch == before + 1:
            # The term lapsed while the gcs was away and nobody else had one in between.
            self.epoch = leader.epoch
            self._renewed(leader)
            return
        if before:
            self.epoch = 0
            await self._end("")
        _log.info("leading in epoch %d", leader.epoch)
        await self._begin(leader)
        self.epoch = leader.epoch

    async def _pause(self, pause_s: float) -> None:
        try:
            async with asyncio.timeout(pause_s):
                await self._recheck.wait()
            # Not faster than this, whatever nodelets say.
            await asyncio.sleep(UNREACHABLE_PAUSE_S)
        except TimeoutError:
            pass
        self._recheck.clear()


def not_leader(leader_url: str) -> NotLeaderError:
    """Return the error that sends a caller to the scheduler that leads."""
    where = f"\nask {leader_url}" if leader_url else "\nask the gcs who does"
    return NotLeaderError(f"this scheduler does not lead{where}", extra={"leader": leader_url})
