"""The feed from the gcs: queues, jobs, nodes and exits of workers, turned into events of the core.

It lists them, asks each nodelet which leases it holds (so that a new leader knows what its
predecessor granted), and then follows the gcs's event log. A node gets no new lease before its nodelet
has answered: what it holds must not be allocated twice. One feed belongs to one term.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from stoker_scheduler.core import events as ev
from stoker_scheduler.core.model.queues import QueueSpec
from stoker_scheduler.core.model.resources import UNIT, InvalidDemandError, to_units
from stoker_scheduler.core.queueing.policies import POLICIES
from stoker_scheduler.jobs import JobDirectory, JobFacts
from stoker_scheduler.policy_loading import load_policies
from stoker_scheduler.wire_types import gang_of, node_filter_of, requirements_of, spec_of
from stoker_wire.amounts import SMALLEST_PART
from stoker_wire.errors import CompactedError, NotFoundError, StokerError
from stoker_wire.messages.cluster import (
    Demand,
    HeldLease,
    HeldLeases,
    Lease,
    LeaseKind,
    Node,
    NodeState,
    StartedLease,
    WorkerExit,
)
from stoker_wire.messages.control import Event, Page
from stoker_wire.messages.events import EventKind, payload_as
from stoker_wire.messages.groups import GroupState, PlacementGroup
from stoker_wire.messages.queues import Queue
from stoker_wire.messages.work import Job, JobState, SlowRank

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from stoker_scheduler.core.leases.lease import LeaseState
    from stoker_scheduler.core.model.node_filters import NodeFilter
    from stoker_scheduler.core.state import State
    from stoker_scheduler.elastic.directory import ElasticDirectory
    from stoker_scheduler.nodelet_clients import NodeletClients
    from stoker_wire.http.client.client import Client
    from stoker_wire.process.background import Background

_log = logging.getLogger(__name__)

KINDS = ",".join(
    ("node.", "gpu.", "placement_group.", "queue.", "job.", "rank.", EventKind.WORKER_EXITED)
)
LIVING_JOBS = ",".join((JobState.PENDING, JobState.RUNNING))
LIVING_GROUPS = ",".join((GroupState.PENDING, GroupState.CREATED, GroupState.RESCHEDULING))
R = TypeVar("R", Node, PlacementGroup, Queue, Job, Event)
PAGE_LIMIT = 1000
ADOPTION_TIMEOUT_S = 3.0
"""Nodelets that have not answered by then join when they do; the others need not wait."""
RETRY_PAUSE_S = 0.5
OWNERS_PER_QUERY = 100


class EventSink(Protocol):
    """The engine, as far as the feed uses it."""

    adopting: bool
    jobs: JobDirectory
    elastic: ElasticDirectory
    state: State

    def now(self) -> float:
        """Return the time of an event that happens now."""

    def apply(self, event: ev.Event) -> None:
        """Apply an event to the state."""

    def end_attempt(self, job_id: str) -> None:
        """End all that an attempt of a job has and waits for."""

    def adopt(self, event: ev.LeaseAdopted, started: StartedLease) -> None:
        """Add a lease of the leader before."""


class GcsFeed:
    """One feed of events into ``engine``, which also keeps ``nodelets`` up to date."""

    def __init__(
        self, gcs: Client, *, engine: EventSink, nodelets: NodeletClients, background: Background
    ) -> None:
        self._gcs = gcs
        self._engine = engine
        self._nodelets = nodelets
        self._background = background
        self._nodes: dict[str, Node] = {}
        self._groups: set[str] = set()
        self._queues: dict[str, Queue] = {}
        self._adoptions: dict[str, asyncio.Task[None]] = {}

    async def load(self) -> int:
        """List what there is and adopt the nodes' leases; return the sequence number to watch from."""
        seq = await self._list()
        if self._adoptions:
            self._engine.adopting = True
            await asyncio.wait(self._adoptions.values(), timeout=ADOPTION_TIMEOUT_S)
            self._engine.adopting = bool(self._adoptions)
        return seq

    async def follow(self, seq: int) -> None:
        """Follow the gcs's event log until cancelled."""
        while True:
            try:
                events = self._gcs.watch("/v1/events", seq, {"kind": KINDS})
                async with aclosing(events):
                    async for event in events:
                        seq = event.seq
                        try:
                            self._apply(event)
                        except msgspec.ValidationError as error:
                            _log.error("event ignored: %d, %s: %s", seq, event.kind, error)
            except CompactedError:
                seq = await self._list()
                await self._lose_ended(self._engine.state.leases.values())
            except StokerError as error:
                _log.warning("the gcs's events cannot be followed: %s", error)
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _list(self) -> int:
        """List all; nodes at last, whose leases are of jobs, queues and groups."""
        return min(
            await self._list_queues(),
            await self._list_jobs(),
            await self._list_groups(),
            await self._list_nodes(),
        )

    async def _list_queues(self) -> int:
        queues, seq = await self._list_all("/v1/queues", Page[Queue])
        self._queues = {queue.name: queue for queue in queues}
        self._queues_changed()
        return seq

    async def _list_jobs(self) -> int:
        jobs, seq = await self._list_all("/v1/jobs", Page[Job], state=LIVING_JOBS)
        for job in jobs:
            self._engine.elastic.put_job(job)
            if self._engine.jobs.put(job):
                self._engine.end_attempt(job.job_id)
        for job_id in self._engine.jobs.ids() - {job.job_id for job in jobs}:
            self._end_job(job_id)
        return seq

    async def _list_groups(self) -> int:
        """Add the placement groups before the nodes: what these hold of others is to be released."""
        groups, seq = await self._list_all(
            "/v1/placement-groups", Page[PlacementGroup], state=LIVING_GROUPS
        )
        for group in groups:
            self._engine.elastic.put_group(group)
            self._add_group(group)
        for group_id in self._groups - {group.group_id for group in groups}:
            self._remove_group(group_id)
        return seq

    async def _list_all(
        self, path: str, page_type: type[Page[R]], **filters: str
    ) -> tuple[list[R], int]:
        """Return all items of a list, and the sequence number to watch from.

        A gcs of an older minor version has fewer lists, and nothing in them.
        """
        items: list[R] = []
        seq, cursor = -1, ""
        while True:
            query = {**filters, "limit": PAGE_LIMIT, "cursor": cursor or None}
            try:
                page = await self._gcs.call("GET", path, reply=page_type, query=query)
            except NotFoundError:
                return [], sys.maxsize
            items += page.items
            seq = page.seq if seq < 0 else min(seq, page.seq)
            cursor = page.next_cursor
            if not cursor:
                return items, seq

    async def _list_nodes(self) -> int:
        nodes, seq = await self._list_all("/v1/nodes", Page[Node])
        listed = {node.node_id: node for node in nodes}
        for node in listed.values():
            if node.state is not NodeState.DEAD:
                self._update(node, registered=False)
        for node_id, node in list(self._nodes.items()):
            if node_id not in listed:
                self._remove(node, "it is no longer registered")
        return seq

    def _apply(self, event: Event) -> None:
        engine = self._engine
        if event.kind == EventKind.NODE_DELETED:
            return  # It was removed when it died.
        if (node := payload_as(event, Node)) is not None:
            known = self._nodes.get(node.node_id)
            if known is not None and node.incarnation < known.incarnation:
                return
            if node.state is NodeState.DEAD:
                self._remove(node, node.reason)
            else:
                self._update(node, registered=event.kind == EventKind.NODE_REGISTERED)
        elif (group := payload_as(event, PlacementGroup)) is not None:
            engine.elastic.put_group(group)
            if group.state is GroupState.REMOVED:
                self._remove_group(group.group_id)
            elif event.kind == EventKind.GROUP_CREATED:
                self._add_group(group)
            elif event.kind == EventKind.GROUP_SHRUNK:
                self._shrink_group(group)
        elif (queue := payload_as(event, Queue)) is not None:
            self._queues[queue.name] = queue
            if event.kind == EventKind.QUEUE_REMOVED:
                del self._queues[queue.name]
            self._queues_changed()
        elif event.kind in (EventKind.JOB_FINISHED, EventKind.JOB_DELETED):
            self._end_job(event.subject)
        elif (job := payload_as(event, Job)) is not None:
            engine.elastic.put_job(job)
            if engine.jobs.put(job):
                engine.end_attempt(job.job_id)
            if event.kind == EventKind.JOB_SUBMITTED:
                engine.apply(ev.JobAdded(at_s=engine.now(), job_id=job.job_id))
        elif (slow := payload_as(event, SlowRank)) is not None:
            rank = f"{slow.job_id}/{slow.group}/{slow.rank}"
            engine.apply(ev.RankSlow(at_s=engine.now(), node_id=slow.node_id, rank=rank))
        elif (exited := payload_as(event, WorkerExit)) is not None:
            if exited.lease_id:
                engine.apply(
                    ev.WorkerExited(
                        at_s=engine.now(), lease_id=exited.lease_id, reason=exited.cause
                    )
                )
            # Its own leases, for tasks of its tasks, have nobody to use or return them.
            engine.apply(ev.OwnerLost(at_s=engine.now(), owner_id=exited.worker_id))

    def _queues_changed(self) -> None:
        if any(queue.policy and queue.policy not in POLICIES for queue in self._queues.values()):
            load_policies()
        self._engine.jobs.set_filters(filters_of(self._queues))
        specs = tuple(queue_spec_of(queue) for queue in self._queues.values())
        self._engine.apply(ev.QueuesChanged(at_s=self._engine.now(), queues=specs))

    def _add_group(self, group: PlacementGroup) -> None:
        self._groups.add(group.group_id)
        gang = gang_of(group.bundles, group.strategy)
        self._engine.apply(
            ev.GroupAdded(
                at_s=self._engine.now(), group_id=group.group_id, job_id=group.job_id, gang=gang
            )
        )
        if group.released:
            self._shrink_group(group)

    def _shrink_group(self, group: PlacementGroup) -> None:
        self._engine.apply(
            ev.GroupShrunk(at_s=self._engine.now(), group_id=group.group_id, bundles=group.released)
        )

    def _remove_group(self, group_id: str) -> None:
        self._groups.discard(group_id)
        self._engine.elastic.drop_group(group_id)
        self._engine.apply(ev.GroupRemoved(at_s=self._engine.now(), group_id=group_id))

    def _update(self, node: Node, *, registered: bool) -> None:
        """Add or update a node. A fresh registration holds no lease; other nodelets are asked first."""
        known = self._nodes.get(node.node_id)
        self._nodes[node.node_id] = node
        if registered or (known is not None and known.incarnation == node.incarnation):
            if node.node_id not in self._adoptions:
                self._join(node)
            return
        if node.node_id not in self._adoptions:
            work = self._adopt_leases(node.node_id)
            task = self._background.spawn(work, name=f"adopt from {node.node_id}")
            self._adoptions[node.node_id] = task

    def _join(self, node: Node) -> None:
        self._nodelets.add(node)
        try:
            spec = spec_of(node)
        except InvalidDemandError as error:
            _log.warning("node ignored: %s: %s", node.node_id, error)
            return
        self._engine.apply(ev.NodeJoined(at_s=self._engine.now(), spec=spec))

    def _remove(self, node: Node, reason: str) -> None:
        self._nodes.pop(node.node_id, None)
        engine = self._engine
        engine.apply(
            ev.NodeLost(
                at_s=engine.now(),
                node_id=node.node_id,
                incarnation=node.incarnation,
                reason=reason,
            )
        )
        self._nodelets.remove(node.node_id)

    async def _lose_ended(self, leases: Iterable[Lease | LeaseState]) -> None:
        """End what belongs to workers that ended while nobody here followed the log."""
        engine, now_s = self._engine, self._engine.now()
        owners = {one.owner_id: one.owner_node_id for one in leases if one.owner_node_id}
        for owner_id, node_id in owners.items():
            if node_id not in self._nodes:
                engine.apply(ev.OwnerLost(at_s=now_s, owner_id=owner_id))
        owner_ids = sorted(owners)
        for first in range(0, len(owner_ids), OWNERS_PER_QUERY):
            some = owner_ids[first : first + OWNERS_PER_QUERY]
            try:
                exits, _ = await self._list_all(
                    "/v1/events",
                    Page[Event],
                    kind=EventKind.WORKER_EXITED,
                    subject=",".join(some),
                )
            except StokerError as error:
                _log.warning("the ends of %d owners are unknown: %s", len(some), error)
                continue
            for exited in exits:
                engine.apply(ev.OwnerLost(at_s=engine.now(), owner_id=exited.subject))

    def _end_job(self, job_id: str) -> None:
        self._engine.jobs.drop(job_id)
        self._engine.elastic.drop_job(job_id)
        self._engine.apply(ev.JobFinished(at_s=self._engine.now(), job_id=job_id))

    async def _adopt_leases(self, node_id: str) -> None:
        """Ask a nodelet for its leases until it answers; then its node joins with them."""
        try:
            while True:
                node = self._nodes.get(node_id)
                if node is None:
                    return
                try:
                    held = await self._nodelets.held(node)
                except StokerError as error:
                    _log.warning("nodelet does not list its leases: %s: %s", node_id, error)
                    await asyncio.sleep(RETRY_PAUSE_S)
                    continue
                node = self._nodes.get(node_id)
                if node is not None:
                    # Nothing is placed there before what it holds is known.
                    self._join(msgspec.structs.replace(node, state=NodeState.SUSPECT))
                    # Bundles first: other leases may be in them.
                    for lease in sorted(held.leases, key=lambda one: not _is_bundle(one)):
                        self._adopt(held, lease)
                    self._join(node)
                    await self._lose_ended(one.lease for one in held.leases)
                return
        finally:
            del self._adoptions[node_id]
            if not self._adoptions:
                self._engine.adopting = False

    def _adopt(self, held: HeldLeases, report: HeldLease) -> None:
        lease = report.lease
        if not _was_granted(report):
            # It was never granted, and its owner repeats the request.
            self._nodelets.release(
                held.node_id, lease.lease_id, kill=True, reason="its scheduler is gone"
            )
            return
        job = self._engine.jobs.get(lease.job_id) or JobFacts()
        adopted = ev.LeaseAdopted(
            at_s=self._engine.now(),
            lease_id=lease.lease_id,
            owner_id=lease.owner_id,
            job_id=lease.job_id,
            kind=ev.Kind(lease.kind.value),
            node_id=held.node_id,
            incarnation=held.incarnation,
            requirements=requirements_of(
                Demand(
                    job_id=lease.job_id,
                    resources=lease.resources,
                    background=lease.background,
                    tolerations=lease.tolerations,
                )
            ),
            group_id=lease.group_id,
            bundle=lease.bundle,
            gpus={index: round(share * UNIT) for index, share in lease.gpus.items()},
            granted_at_s=lease.granted_at_s,
            blocked=lease.blocked,
            actor_id=lease.actor_id,
            name=lease.name,
            user=job.user,
            queue=job.queue,
            priority=lease.priority,
            preemptible=lease.preemptible,
            preemption_grace_s=lease.preemption_grace_s,
            owner_node_id=lease.owner_node_id,
        )
        started = StartedLease(worker_id=report.worker_id, address=report.address, pid=report.pid)
        self._engine.adopt(adopted, started)


def _is_bundle(held: HeldLease) -> bool:
    return held.lease.kind is LeaseKind.BUNDLE


def _was_granted(held: HeldLease) -> bool:
    """Return whether the leader before may have granted the lease: it has a worker, or is committed."""
    match held.lease.kind:
        case LeaseKind.BUNDLE:
            return not held.prepared
        case LeaseKind.DRIVER:
            return bool(held.pid)
        case _:
            return bool(held.address.peer_id)


def filters_of(queues: Mapping[str, Queue]) -> dict[str, tuple[NodeFilter, ...]]:
    """Return the node filters of each queue that has some, its own and those of the queues above it."""
    found = {}
    for name in queues:
        path, above = [], name
        while above in queues and above not in path:
            path.append(above)
            above = queues[above].parent
        filters = [
            node_filter_of(queues[one].node_filter, one) for one in path if queues[one].node_filter
        ]
        if filters:
            found[name] = tuple(filters)
    return found


def queue_spec_of(queue: Queue) -> QueueSpec:
    """Return the core's spec of a queue of the gcs."""
    return QueueSpec(
        name=queue.name,
        parent=queue.parent,
        weight=queue.weight,
        quota=_limits_of(queue.quota),
        limit=_limits_of(queue.limit),
        user_limit=_limits_of(queue.user_limit),
        job_limit=_limits_of(queue.job_limit),
        rate_limit=queue.rate_limit,
        stopped=queue.stopped,
        policy=queue.policy,
    )


def _limits_of(amounts: Mapping[str, float]) -> dict[str, int]:
    """Return the most that there may be of each resource, in units; none at all is a limit as well.

    So is less than can be counted, which a gcs before this version has taken.
    """
    units = to_units({name: amount for name, amount in amounts.items() if amount >= SMALLEST_PART})
    return {name: units.get(name, 0) for name in sorted(amounts)}
