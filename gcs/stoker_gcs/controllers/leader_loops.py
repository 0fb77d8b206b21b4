"""Which gcs replica runs the loops that must run once: sweep, placement, clean-up.

On a store that one process owns, this one leads at once. On a shared store the replicas campaign for
the name ``gcs``, and a replica that cannot renew in time stops its loops before another may start.
Even two leaders at once would do no harm: every write they make is a compare and swap.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from stoker_wire.errors import ConflictError, StokerError
from stoker_wire.messages.control import Campaign
from stoker_wire.process.background import Background

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping
    from typing import Any

    from stoker_gcs.controllers.leader_election import Leaders

_log = logging.getLogger("stoker.gcs")
NAME = "gcs"
TTL_S = 3.0
RESTART_S = 0.5


class Leading:
    """Runs ``loops`` (name -> coroutine function) while this replica leads."""

    def __init__(
        self,
        leaders: Leaders,
        *,
        holder: str,
        url: Callable[[], str],
        alone: bool,
        loops: Mapping[str, Callable[[], Coroutine[Any, Any, None]]],
    ) -> None:
        self._leaders = leaders
        self._holder = holder
        self._url = url
        self._alone = alone
        self._loops = loops
        self._campaigned = False
        self.leads = False

    async def run(self) -> None:
        """Lead when possible, until cancelled."""
        while True:
            if not self._alone:
                await self._win()
            try:
                async with Background("gcs-leader") as background:
                    self.leads = True
                    for name, loop in self._loops.items():
                        background.spawn(keep(name, loop), name=name)
                    await self._hold()
            finally:
                self.leads = False

    async def resign(self) -> None:
        """Let another replica take over at once."""
        if self._campaigned:
            with contextlib.suppress(StokerError):
                await self._leaders.resign(NAME, self._holder)

    async def _win(self) -> None:
        while True:
            try:
                await self._campaign()
            except ConflictError:
                await asyncio.sleep(TTL_S / 3)
            except StokerError as error:
                _log.warning("cannot campaign: %s", error)
                await asyncio.sleep(TTL_S / 3)
            else:
                return

    async def _hold(self) -> None:
        if self._alone:
            await asyncio.Event().wait()
        loop = asyncio.get_running_loop()
        until = loop.time() + TTL_S * 2 / 3
        while loop.time() < until:
            await asyncio.sleep(TTL_S / 4)
            asked_at_s = loop.time()
            try:
                async with asyncio.timeout_at(until):
                    await self._campaign()
            except ConflictError:
                return
            except (StokerError, TimeoutError):
                continue
            until = asked_at_s + TTL_S * 2 / 3

    async def _campaign(self) -> None:
        self._campaigned = True
        body = Campaign(holder=self._holder, url=self._url(), ttl_s=TTL_S)
        await self._leaders.campaign(NAME, body)


async def keep(name: str, loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a loop that must not end; when it fails (a database that is away), start it again."""
    while True:
        try:
            await loop()
        except StokerError as error:
            _log.warning("the loop %s waits: %s", name, error)
        except Exception:
            _log.exception("the loop %s failed and starts again", name)
        await asyncio.sleep(RESTART_S)
