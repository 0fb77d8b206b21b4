"""Placement of groups: one long poll of the scheduler per group with bundles that are not placed.

Runs on the leading replica, started by the reconciler; the rules decide whether the grant is still
wanted. One that is not needs no release: the scheduler follows the end of the group, or a later attempt.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from stoker_gcs.registry.groups import rules
from stoker_gcs.registry.groups.rules import GROUPS
from stoker_gcs.registry.leases import POLL_S, Refused, poll_scheduler
from stoker_wire.errors import PlacementGroupRemovedError
from stoker_wire.messages.groups import RequestBundles

if TYPE_CHECKING:
    from stoker_gcs.peer_clients import PeerClients
    from stoker_gcs.registry.groups.registry import GroupRegistry
    from stoker_gcs.state.records import StateStore
    from stoker_wire.messages.cluster import LeaseReply
    from stoker_wire.messages.groups import PlacementGroup

AT_ONCE = 1024


class GroupPlacement:
    """Placement of the bundles of groups, all or none."""

    def __init__(self, state: StateStore, peers: PeerClients, registry: GroupRegistry) -> None:
        self._state = state
        self._peers = peers
        self._registry = registry
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def place(self, group_id: str) -> None:
        """Have the scheduler reserve the missing bundles of a group, or end it with its reason."""
        async with self._slots:
            group = await self._state.get(GROUPS, group_id)
            if not rules.missing(group):
                return
            result = await self._request(group)
            if isinstance(result, Refused):
                if not isinstance(result.error, PlacementGroupRemovedError):
                    await self._registry.remove(group_id, str(result.error))
            elif result is not None:
                now = self._state.now()
                await self._state.change(
                    GROUPS,
                    group_id,
                    lambda current: rules.placed(current, result.granted, group.attempt, now),
                )

    async def _request(self, group: PlacementGroup) -> LeaseReply | Refused | None:
        async def still_wanted() -> bool:
            current = await self._state.get(GROUPS, group.group_id)
            return bool(rules.missing(current)) and current.attempt == group.attempt

        async def on_delayed(reason: str) -> None:
            await self._state.change(
                GROUPS, group.group_id, lambda current: rules.delayed(current, reason)
            )

        return await poll_scheduler(
            self._peers,
            "/v1/bundles",
            request_for(group, wait_s=POLL_S),
            still_wanted=still_wanted,
            on_delayed=on_delayed,
        )


def request_for(group: PlacementGroup, *, wait_s: float = 0.0) -> RequestBundles:
    """Return the request for the missing bundles of a group."""
    indices = rules.missing(group)
    return RequestBundles(
        request_id=f"r_{group.group_id}.{group.attempt}",
        group_id=group.group_id,
        job_id=group.job_id,
        bundles=tuple(group.bundles[index] for index in indices),
        indices=indices,
        strategy=group.strategy,
        taken=tuple(sorted({one.node_id for one in group.placements.values()})),
        name=group.name,
        wait_s=wait_s,
        preemptible=group.preemptible,
        preemption_grace_s=group.preemption_grace_s,
    )
