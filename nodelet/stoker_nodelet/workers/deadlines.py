"""The end of workers that do not end a call after its ``timeout``: they are silent, or stopped.

Workers write the deadline of the call that they run into shared memory
(:mod:`stoker_wire.process.call_deadline`); here it is read, four times a second, and whoever is past it is
killed, whether or not the worker, its owner, a scheduler or the gcs answers. Owned by the nodelet's service.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import dataclass

from stoker_nodelet.workers.workers import Workers
from stoker_wire.process.call_deadline import FOLDER, CallDeadline, cell_path, read_deadline

_PERIOD_S = 0.25

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The deadlines of the calls of one node."""

    workers: Workers

    def open(self) -> None:
        """Make the folder that workers write to."""
        (self.workers.identity.arena_dir / FOLDER).mkdir(mode=0o700, exist_ok=True)

    async def run(self) -> None:
        """Kill for ever who is past its deadline."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            if self.workers.state.workers:
                self.look()

    def look(self) -> None:
        """Kill the workers that are past their deadlines now."""
        arena_dir, now_s = self.workers.identity.arena_dir, time.monotonic()
        try:
            names = os.listdir(arena_dir / FOLDER)
        except OSError:
            return  # it was removed: the node ends
        for worker_id in names:
            path = cell_path(arena_dir, worker_id)
            call = read_deadline(path)
            # Read twice: it may have been written meanwhile.
            if call is not None and call.at_s < now_s and call == read_deadline(path):
                self._kill(worker_id, call)

    def _kill(self, worker_id: str, call: CallDeadline) -> None:
        process = self.workers.processes.living.get(worker_id)
        if process is None or process.overdue is not None:
            return
        process.overdue = call
        what = (
            f"ran longer than its timeout of {call.timeout_s:g} s"
            if call.timeout_s
            else "was stopped"
        )
        reason = (
            f"task {call.task_id} {what}, and this worker did not end it: its interpreter was busy or its "
            "process stopped"
        )
        _log.info("%s: %s", worker_id, reason)
        self.workers.kill(worker_id, reason)
