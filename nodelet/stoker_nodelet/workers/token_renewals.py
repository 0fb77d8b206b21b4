"""New tokens for living processes, when another secret signs.

The loop here is alone in renewing what a process was given before. Who is behind is no guess: a worker has
answered with the new token, and the driver of a submitted job looks at its file once a second at least
while it shows what is in it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from stoker_wire.errors import StokerError
from stoker_wire.http.auth import LOOK_S, write_private
from stoker_wire.messages.common import Empty
from stoker_wire.messages.node_api import RenewToken

if TYPE_CHECKING:
    from stoker_nodelet.workers.processes import Process, Processes

FOLLOWED_S = 1.5 * LOOK_S
"""After so long nobody shows what was in a file before."""
_RENEW_S = 5.0
_AGAIN_S = 1.0
_AT_ONCE = 32
_IN_FLIGHT_S = 15.0

_log = logging.getLogger(__name__)


class TokenRenewals:
    """The renewals of one node's processes."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._identity = processes.identity
        self._due = asyncio.Event()
        self._identity.tokens.secret.on_change(self._due.set)

    def behind(self) -> tuple[str, ...]:
        """Return the processes that have not taken the token which the present secret signs."""
        return tuple(
            f"worker {worker_id} (pid {process.pid}) on node {self._identity.node_id}"
            for worker_id, process in self._late()
        )

    def _late(self) -> list[tuple[str, Process]]:
        return [
            (worker_id, process)
            for worker_id, process in self._processes.living.items()
            if process.served is not None
            and process.job_token != process.served.token(self._identity)
        ]

    async def run(self) -> None:
        """Renew tokens whenever the secret changes, until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            slots = asyncio.Semaphore(_AT_ONCE)
            # What was made before the change may still be on its way to a worker.
            until_s = time.monotonic() + _IN_FLIGHT_S
            while (late := self._late()) or time.monotonic() < until_s:
                async with asyncio.TaskGroup() as group:
                    for worker_id, process in late:
                        group.create_task(self._renew(worker_id, process, slots))
                await asyncio.sleep(_AGAIN_S)

    async def _renew(self, worker_id: str, process: Process, slots: asyncio.Semaphore) -> None:
        async with slots:
            served = process.served
            assert served is not None
            token = served.token(self._identity)
            try:
                if process.token_file is not None:
                    write_private(process.token_file, f"{token}\n")
                    await asyncio.sleep(FOLLOWED_S)
                else:
                    await self._processes.client_of(process).call(
                        "POST",
                        "/v1/token",
                        RenewToken(token=token),
                        reply=Empty,
                        timeout_s=_RENEW_S,
                    )
            except (StokerError, OSError) as error:
                # A worker that starts or ends answers later, or never: then it is not among the living.
                _log.info("%s has not taken its new token yet: %s", worker_id, error)
                return
            if process.served is served:
                process.job_token = token
