"""The controller of schedules: submits jobs when their times come. Runs on the leading replica only."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from stoker_wire.errors import StokerError

if TYPE_CHECKING:
    from stoker_gcs.registry.schedules.registry import ScheduleRegistry
    from stoker_gcs.state.records import StateStore

_log = logging.getLogger(__name__)
LOOK_S = 60.0
"""How long it waits at most: the clock of the machine may be set."""
RETRY_S = 1.0


class ScheduleController:
    """The loop over all schedules."""

    def __init__(self, state: StateStore, schedules: ScheduleRegistry) -> None:
        self._state = state
        self._schedules = schedules

    async def run(self) -> None:
        """Start what is due, until cancelled."""
        while True:
            self._schedules.changed.clear()
            wait_s = await self.start_due(self._state.now())
            try:
                async with asyncio.timeout(wait_s):
                    await self._schedules.changed.wait()
            except TimeoutError:
                continue

    async def start_due(self, now_s: float) -> float:
        """Start or skip the runs whose time has come by then; return for how long there is none."""
        wait_s = LOOK_S
        for schedule in list(self._schedules.view.values()):
            if schedule.next_at_s is None:
                continue
            if schedule.next_at_s <= now_s:
                try:
                    await self._schedules.run_due(schedule.name, now_s)
                except StokerError as error:
                    _log.warning("schedule %s waits: %s", schedule.name, error)
                    wait_s = min(wait_s, RETRY_S)
            else:
                wait_s = min(wait_s, schedule.next_at_s - now_s)
        return wait_s
