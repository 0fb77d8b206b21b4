"""The registry of placement groups: applies ``groups.rules`` to what users and the reconciler ask."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING

from stoker_gcs.registry.groups import rules
from stoker_gcs.registry.groups.rules import GROUPS
from stoker_gcs.state import schema
from stoker_gcs.store.changes import Change, WriteConflict
from stoker_wire.amounts import check_parts
from stoker_wire.constraints import node_filters
from stoker_wire.errors import BadRequestError, ConflictError, NameTakenError, NotFoundError
from stoker_wire.ids import Prefix, check_id
from stoker_wire.messages.events import EventKind
from stoker_wire.messages.groups import (
    CreatePlacementGroup,
    GroupState,
    PlacementGroup,
    PreemptGroup,
    ReleaseBundles,
)

if TYPE_CHECKING:
    from stoker_gcs.registry.jobs.registry import JobRegistry
    from stoker_gcs.state.records import StateStore


class GroupRegistry:
    """Durable creation, lookup and ends of placement groups."""

    def __init__(self, state: StateStore, jobs: JobRegistry) -> None:
        self._state = state
        self._jobs = jobs

    async def create(self, body: CreatePlacementGroup) -> PlacementGroup:
        """Accept a group, durably. The same id again gives the same group."""
        check_id(body.group_id, Prefix.GROUP, field="group_id")
        _check_bundles(body)
        for index, bundle in enumerate(body.bundles):
            check_parts(bundle.resources, f"bundles.{index}.resources")
            node_filters.check(bundle.node_filter, f"bundles.{index}.node_filter")
        existing = await self._state.find(GROUPS, body.group_id)
        if existing is not None:
            return _same(existing.record, body)
        await self._jobs.check_living(body.job_id, field="job_id")
        namespace = body.namespace
        job = self._jobs.live.get(body.job_id)
        if not namespace and job is not None:
            namespace = job.namespace
        group = rules.created(body, namespace, self._state.now())
        event = self._state.event(EventKind.GROUP_CREATED, group.group_id, group)
        while True:
            try:
                await self._state.writer.apply(Change((GROUPS.insert(group),), (event,)))
            except WriteConflict:
                other = await self._conflicting(body, namespace)
                if other is not None:
                    return other
                continue
            return group

    async def _conflicting(
        self, body: CreatePlacementGroup, namespace: str
    ) -> PlacementGroup | None:
        """Return the group with this id; None if the one with this name has gone since."""
        existing = await self._state.find(GROUPS, body.group_id)
        if existing is not None:
            return _same(existing.record, body)
        try:
            named = await self.get_named(namespace, body.name)
        except NotFoundError:
            return None
        raise NameTakenError(
            f"the name {body.name!r} is taken in namespace {namespace!r}\n"
            f"by placement group {named.group_id} ({named.state}): choose another, or remove that one",
            field="name",
        )

    async def get_named(self, namespace: str, name: str) -> PlacementGroup:
        """Return the living group of this name."""
        where = {"live_name": rules.live_name(namespace, name)}
        rows = await self._state.store.select(schema.PLACEMENT_GROUPS, where, limit=1)
        if not rows:
            raise NotFoundError(
                f"there is no living placement group {name!r} in namespace {namespace!r}"
            )
        return GROUPS.decode(rows[0]).record

    async def get(self, group_id: str, wait_s: float) -> PlacementGroup:
        """Return the group; with ``wait_s``, once it is CREATED or REMOVED, or the time is over."""
        settled = (GroupState.CREATED, GroupState.REMOVED)
        return await self._state.wait_for(
            GROUPS, group_id, lambda group: group.state in settled, wait_s
        )

    async def remove(self, group_id: str, reason: str) -> PlacementGroup:
        """End a group; what runs in it is ended by the scheduler, which follows the event."""
        now = self._state.now()
        return await self._state.change(
            GROUPS, group_id, lambda group: rules.removed(group, reason, now)
        )

    async def preempt(self, group_id: str, body: PreemptGroup) -> PlacementGroup:
        """Have all bundles of a group placed again; the scheduler gives up those that it has."""
        now = self._state.now()
        return await self._state.change(
            GROUPS, group_id, lambda group: rules.preempted(group, body.lease_id, body.reason, now)
        )

    async def release(self, group_id: str, body: ReleaseBundles) -> PlacementGroup:
        """Give up some bundles of a group for good; a group that has no other ends."""
        now = self._state.now()
        return await self._state.change(
            GROUPS,
            group_id,
            lambda group: rules.released(group, body.bundles, "its user released it", now),
        )

    async def node_lost(
        self,
        node_id: str,
        before_incarnation: int,
        reason: str,
        *,
        stay: Collection[PlacementGroup] = (),
    ) -> None:
        """Have the bundles placed again that were on these incarnations of a node; some groups ``stay``."""
        kept, now = {group.group_id for group in stay}, self._state.now()
        for group in await self.living():
            if group.group_id not in kept and any(
                one.node_id == node_id for one in group.placements.values()
            ):
                await self._state.change(
                    GROUPS,
                    group.group_id,
                    lambda current: rules.node_lost(
                        current, node_id, before_incarnation, reason, now
                    ),
                )

    async def end_job(self, job_id: str, reason: str, *, before_s: float = math.inf) -> None:
        """Remove the living groups of a job that were created before then, except detached ones."""
        for group in await self.living(job_id):
            if not group.detached and group.created_at_s < before_s:
                await self.remove(group.group_id, reason)

    async def living(self, job_id: str = "") -> list[PlacementGroup]:
        """Return the groups that are not removed, of one job or of all."""
        of_job = {"job_id": job_id} if job_id else {}
        return await self._state.all(GROUPS, {"state": rules.LIVING, **of_job})


def _check_bundles(body: CreatePlacementGroup) -> None:
    for index, bundle in enumerate(body.bundles):
        if not any(bundle.resources.values()):
            raise BadRequestError(
                f"bundles: bundle {index} asks for nothing\ngive it a resource",
                field=f"bundles.{index}",
            )


def _same(group: PlacementGroup, body: CreatePlacementGroup) -> PlacementGroup:
    """Return the placement group that a request made when it was sent first; its id is no other's to use."""
    if (group.job_id, group.name, group.bundles) != (body.job_id, body.name, body.bundles):
        raise ConflictError(
            f"there is another placement group {group.group_id} already\nchoose another id",
            field="group_id",
        )
    return group
