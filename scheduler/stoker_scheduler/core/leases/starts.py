"""Leases whose workers are being started: for which need of which job, on which nodes, since when.

Kept by ``lifecycle`` and ``machine``, so that ``explain`` finds them without a look at every request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker_scheduler.core.model.requirements import Need
    from stoker_scheduler.core.state import LeaseState


class Starts:
    """The leases in the phase STARTING, by need and job, then by node."""

    __slots__ = ("_nodes",)

    def __init__(self) -> None:
        self._nodes: dict[tuple[Need, str], dict[str, dict[str, float]]] = {}

    def add(self, lease: LeaseState) -> None:
        """Note that ``lease`` starts; the time at which it was granted is the latest so far."""
        nodes = self._nodes.setdefault((lease.need, lease.job_id), {})
        nodes.setdefault(lease.node_id, {})[lease.lease_id] = lease.granted_at_s

    def drop(self, lease: LeaseState) -> None:
        """Take ``lease`` out; dropping what does not start changes nothing."""
        nodes = self._nodes.get((lease.need, lease.job_id), {})
        leases = nodes.get(lease.node_id, {})
        if lease.lease_id not in leases:
            return
        del leases[lease.lease_id]
        if not leases:
            del nodes[lease.node_id]
        if not nodes:
            del self._nodes[lease.need, lease.job_id]

    def since_s(self, need: Need, job_id: str) -> Mapping[str, float]:
        """Return the nodes where leases start, and since when the oldest of each does."""
        nodes = self._nodes.get((need, job_id), {})
        return {node_id: next(iter(leases.values())) for node_id, leases in nodes.items()}

    def lease_ids(self) -> list[str]:
        """Return all leases that start, in no particular order."""
        groups = (leases for nodes in self._nodes.values() for leases in nodes.values())
        return [lease_id for leases in groups for lease_id in leases]
