"""An index of the leases in the phase STARTING: by requirements and job, then by node.

``lifecycle`` and ``machine`` maintain it, so that ``explain`` can say where a worker is being started
without a scan of all requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker_scheduler.core.leases.lease import LeaseState
    from stoker_scheduler.core.model.requirements import Requirements


class StartingLeases:
    """The leases whose workers are being started, and since when."""

    __slots__ = ("_nodes",)

    def __init__(self) -> None:
        self._nodes: dict[tuple[Requirements, str], dict[str, dict[str, float]]] = {}

    def add(self, lease: LeaseState) -> None:
        """Add ``lease``; no earlier one of the index was granted after it."""
        nodes = self._nodes.setdefault((lease.requirements, lease.job_id), {})
        nodes.setdefault(lease.node_id, {})[lease.lease_id] = lease.granted_at_s

    def discard(self, lease: LeaseState) -> None:
        """Remove ``lease``, if it is there."""
        nodes = self._nodes.get((lease.requirements, lease.job_id), {})
        leases = nodes.get(lease.node_id, {})
        if lease.lease_id not in leases:
            return
        del leases[lease.lease_id]
        if not leases:
            del nodes[lease.node_id]
        if not nodes:
            del self._nodes[lease.requirements, lease.job_id]

    def since_s(self, requirements: Requirements, job_id: str) -> Mapping[str, float]:
        """Return the nodes where leases start, and since when the oldest of each does."""
        nodes = self._nodes.get((requirements, job_id), {})
        return {node_id: next(iter(leases.values())) for node_id, leases in nodes.items()}

    def lease_ids(self) -> list[str]:
        """Return all leases that start, in no particular order."""
        groups = (leases for nodes in self._nodes.values() for leases in nodes.values())
        return [lease_id for leases in groups for lease_id in leases]
