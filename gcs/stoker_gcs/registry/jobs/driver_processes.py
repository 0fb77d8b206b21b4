"""Whether the process of a driver that says nothing still runs: seen here, or asked of a nodelet beside it.

A process lives as long as its pid names one with the same start time. Only who shares its pid namespace
can tell; of a driver on a machine without a nodelet nobody can.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from stoker_wire.errors import NotFoundError, StokerError
from stoker_wire.messages.node_api import Process
from stoker_wire.process.host_identity import pid_namespace, start_time

if TYPE_CHECKING:
    from stoker_gcs.peer_clients import PeerClients
    from stoker_wire.messages.work import Job

_ASK_S = 2.0


class Seen(Enum):
    """Result of a look at the process of a driver."""

    RUNNING = "running"
    GONE = "gone"
    CUT_OFF = "cut off"
    """The nodelet beside it does not answer, so it may be cut off with all of its host."""
    UNSEEN = "unseen"
    """Nobody is there who could tell."""


class DriverProcesses:
    """The processes of attached drivers."""

    def __init__(self, peers: PeerClients) -> None:
        self._peers = peers

    async def look(self, job: Job) -> Seen:
        """Look whether the driver's process still runs."""
        if not job.pid_namespace or not job.pid_started:
            return Seen.UNSEEN
        if job.pid_namespace == pid_namespace():
            return _seen(start_time(job.pid) == job.pid_started)
        found = Seen.UNSEEN
        for node in self._peers.live_nodes():
            if node.hostname != job.hostname:
                continue
            try:
                process = await self._peers.client(node.url).call(
                    "GET",
                    f"/v1/processes/{job.pid}",
                    reply=Process,
                    timeout_s=_ASK_S,
                    retry=False,
                )
            except NotFoundError as error:
                if error.extra.get("pid_namespace") == job.pid_namespace:
                    return Seen.GONE
                continue
            except StokerError:
                found = Seen.CUT_OFF
                continue
            if process.pid_namespace == job.pid_namespace:
                return _seen(process.started == job.pid_started)
        return found


def _seen(runs: bool) -> Seen:
    return Seen.RUNNING if runs else Seen.GONE
