"""The elastic jobs that live, and the placement groups of their replicas, as the gcs has them.

:mod:`stoker_scheduler.gcs_feed` keeps this copy up to date; what the controller's own calls answer is put in
at once, so that no step is ordered twice.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from stoker_scheduler.core.elastic.generations import (
    OpenOffer,
    Place,
    Places,
    Reservation,
    Standing,
)
from stoker_wire.constraints.label_selectors import NODE_ID_LABEL
from stoker_wire.messages.groups import Bundle, GroupState, PlacementGroup
from stoker_wire.messages.work import Job, JobState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker_scheduler.core.elastic.allocations import Allocation
    from stoker_wire.messages.elastic import ElasticState, Replica, Scaling

_GROUP = "pg_elastic."
AWAY_S = 1800.0
"""For how long a job is not moved back, without more replicas, to a node on which it gave a place back."""


def new_group_id() -> str:
    """Return the id of a placement group of replicas, by which it is known as one."""
    return f"{_GROUP}{os.urandom(8).hex()}"


def is_of_replicas(group_id: str) -> bool:
    """Return whether a placement group was made for replicas of an elastic job."""
    return group_id.startswith(_GROUP)


def bundle_of(scaling: Scaling, node_id: str = "") -> Bundle:
    """Return the bundle of a replica, on a node if one is given."""
    pin = {NODE_ID_LABEL: node_id} if node_id else {}
    return Bundle(
        resources=scaling.resources,
        label_selector={**scaling.label_selector, **pin},
        node_filter=scaling.node_filter,
        tolerations=scaling.tolerations,
    )


@dataclass(slots=True)
class ElasticDirectory:
    """Elastic jobs and their groups, by id."""

    jobs: dict[str, Job] = field(default_factory=dict)
    groups: dict[str, PlacementGroup] = field(default_factory=dict)
    _returned_at_s: dict[tuple[str, str], float] = field(default_factory=dict)
    """When a job last gave a place on a node back, by (job, node)."""

    def put_job(self, job: Job) -> None:
        """Add or update a job; an older state than is known of it is let pass."""
        known = self.jobs.get(job.job_id)
        if job.elastic is None or job.state.terminal:
            self.jobs.pop(job.job_id, None)
        elif known is None or known.elastic is None or known.elastic.version <= job.elastic.version:
            self.jobs[job.job_id] = job

    def put_state(self, job_id: str, state: ElasticState) -> None:
        """Update a job by the answer to an order of the controller."""
        job = self.jobs.get(job_id)
        if job is not None:
            self.put_job(msgspec.structs.replace(job, elastic=state))

    def drop_job(self, job_id: str) -> None:
        """Remove a job that has ended."""
        self.jobs.pop(job_id, None)

    def note_returned(self, job_id: str, nodes: Iterable[str], at_s: float) -> None:
        """Note that a job gave places on these nodes back; ``at_s`` in seconds since 1970."""
        since_s, known = at_s - AWAY_S, self._returned_at_s
        self._returned_at_s = {one: known[one] for one in known if known[one] > since_s}
        self._returned_at_s |= {(job_id, node_id): at_s for node_id in nodes}

    def returned(self, job_id: str, now_s: float) -> frozenset[str]:
        """Return the nodes on which a job gave places back within ``AWAY_S``."""
        return frozenset(
            node_id
            for (name, node_id), at_s in self._returned_at_s.items()
            if name == job_id and now_s - at_s < AWAY_S
        )

    def put_group(self, group: PlacementGroup) -> None:
        """Add or update a placement group, if it is of replicas; remove one that has ended."""
        if not is_of_replicas(group.group_id):
            return
        if group.state is GroupState.REMOVED:
            self.groups.pop(group.group_id, None)
        else:
            self.groups[group.group_id] = group

    def drop_group(self, group_id: str) -> None:
        """Remove a placement group that has ended."""
        self.groups.pop(group_id, None)

    def running(self) -> list[tuple[Job, ElasticState]]:
        """Return the jobs that may have replicas, in the order of their submission."""
        found = [
            (job, job.elastic)
            for job in self.jobs.values()
            if job.elastic is not None and job.state is JobState.RUNNING
        ]
        return sorted(found, key=lambda one: (one[0].created_at_s, one[0].job_id))

    def strays(self) -> list[str]:
        """Return the groups of jobs that are not elastic any more, or do not run."""
        running = {job.job_id for job, _ in self.running()}
        return [name for name, group in self.groups.items() if group.job_id not in running]

    def standings(self, job_ids: Iterable[str]) -> list[Standing]:
        """Return how jobs stand, in the order of their submission."""
        wanted, by_job = set(job_ids), self._groups_by_job()
        return [
            standing_of(job.job_id, state, by_job.get(job.job_id, []))
            for job, state in self.running()
            if job.job_id in wanted
        ]

    def _groups_by_job(self) -> dict[str, list[PlacementGroup]]:
        found: dict[str, list[PlacementGroup]] = {}
        for group in self.groups.values():
            found.setdefault(group.job_id, []).append(group)
        return found


def standing_of(job_id: str, state: ElasticState, groups: list[PlacementGroup]) -> Standing:
    """Return how a job stands, by its record and the placement groups that were made for it."""
    held = {
        (group.group_id, bundle): place.node_id
        for group in groups
        for bundle, place in group.placements.items()
    }

    def is_held(place: Place) -> bool:
        return held.get((place.group_id, place.bundle)) == place.node_id

    places, offer = places_of(state.replicas), None
    offered: Places = ()
    if state.offer is not None:
        offered = places_of(state.offer.replicas)
        offer = OpenOffer(
            offered,
            state.offer.withdraws,
            state.offer.answer_by_s,
            is_broken=not all(map(is_held, offered)),
        )
    used = {(place.group_id, place.bundle) for place in (*places, *offered)}
    reservations, unused = [], []
    for group in groups:
        own = [i for i in group.placements if (group.group_id, i) in used]
        if own:
            rest = tuple(i for i in group.placements if (group.group_id, i) not in used)
            unused += [(group.group_id, rest)] if rest else []
        else:
            reservations.append(_reservation(group))
    return Standing(
        job_id=job_id,
        version=state.version,
        places=places,
        offer=offer,
        reservations=tuple(reservations),
        gone=tuple(place for place in places if not is_held(place)),
        unused=tuple(unused),
        has_lost=state.lost > 0,
        min_replicas=state.scaling.min_replicas,
        max_replicas=state.scaling.max_replicas,
        grace_s=state.scaling.grace_s,
        spares=0 if state.hints is None else state.hints.spares,
        returned=() if state.hints is None else _held_of(places, state.hints.unwanted),
    )


def _held_of(places: Places, unwanted: Iterable[Replica]) -> Places:
    given_back = set(places_of(unwanted))
    return tuple(place for place in places if place in given_back)


def _reservation(group: PlacementGroup) -> Reservation:
    places = None
    if group.state is GroupState.CREATED:
        places = tuple(
            Place(group.group_id, bundle, place.node_id)
            for bundle, place in group.placements.items()
        )
    return Reservation(group.group_id, _wanted(group), group.created_at_s, places)


def _wanted(group: PlacementGroup) -> Allocation:
    """Return the replicas by node for which a group was made: each bundle is pinned to a node."""
    left = (one for index, one in enumerate(group.bundles) if index not in group.released)
    return tuple(Counter(one.label_selector[NODE_ID_LABEL] for one in left).items())


def places_of(replicas: Iterable[Replica]) -> Places:
    """Return the places of replicas."""
    return tuple(Place(one.group_id, one.bundle, one.node_id) for one in replicas)
