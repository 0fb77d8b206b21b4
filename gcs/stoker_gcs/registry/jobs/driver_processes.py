"""Whether the process of a driver that says nothing still runs: seen here, or asked of a nodelet beside it.

A process lives as long as its pid names one with the same start time. Only who shares its pid namespace
can tell; of a driver on a machine without a nodelet nobody can.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_wire.errors import NotFoundError, StokerError
from stoker_wire.messages.node_api import Process
from stoker_wire.process.host_identity import pid_namespace, start_time

if TYPE_CHECKING:
    from stoker_gcs.peer_clients import PeerClients
    from stoker_wire.messages.work import Job

_ASK_S = 2.0


class DriverProcesses:
    """The processes of attached drivers."""

    def __init__(self, peers: PeerClients) -> None:
        self._peers = peers

    async def runs(self, job: Job) -> bool | None:
        """Return whether the driver's process still runs; None if nobody can tell."""
        if not job.pid_namespace or not job.pid_started:
            return None
        if job.pid_namespace == pid_namespace():
            return start_time(job.pid) == job.pid_started
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
                    return False
                continue
            except StokerError:
                continue
            if process.pid_namespace == job.pid_namespace:
                return process.started == job.pid_started
        return None
