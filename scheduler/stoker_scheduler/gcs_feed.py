"""The feed from the gcs: nodes, ends of jobs and exits of workers, turned into events of the core.

It lists the nodes, asks each nodelet which leases it holds (so that a new leader knows what its
predecessor granted), and then follows the gcs's event log. A node gets no new lease before its nodelet
has answered: what it holds must not be allocated twice. One feed belongs to one term.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol

import msgspec

from stoker_scheduler.core import events as ev
from stoker_scheduler.core.model.resources import UNIT, InvalidDemandError
from stoker_scheduler.wire_types import requirements_of, spec_of
from stoker_wire.errors import CompactedError, StokerError
from stoker_wire.messages.cluster import (
    Demand,
    HeldLease,
    HeldLeases,
    LeaseKind,
    Node,
    NodeState,
    StartedLease,
    WorkerExit,
)
from stoker_wire.messages.control import Event, Page
from stoker_wire.messages.events import EventKind, payload_as

if TYPE_CHECKING:
    from stoker_scheduler.nodelet_clients import NodeletClients
    from stoker_wire.http.client.client import Client
    from stoker_wire.process.background import Background

_log = logging.getLogger(__name__)

KINDS = ",".join(("node.", EventKind.JOB_FINISHED, EventKind.WORKER_EXITED))
PAGE_LIMIT = 1000
ADOPTION_TIMEOUT_S = 3.0
"""Nodelets that have not answered by then join when they do; the others need not wait."""
RETRY_PAUSE_S = 0.5


class EventSink(Protocol):
    """The engine, as far as the feed uses it."""

    adopting: bool

    def now(self) -> float:
        """Return the time of an event that happens now."""

    def apply(self, event: ev.Event) -> None:
        """Apply an event to the state."""

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
        self._adoptions: dict[str, asyncio.Task[None]] = {}

    async def load(self) -> int:
        """List the nodes and adopt their leases; return the sequence number to watch from."""
        seq = await self._list_nodes()
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
                seq = await self._list_nodes()
            except StokerError as error:
                _log.warning("the gcs's events cannot be followed: %s", error)
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _list_nodes(self) -> int:
        listed: dict[str, Node] = {}
        seq, cursor = -1, ""
        while True:
            query = {"limit": PAGE_LIMIT, "cursor": cursor or None}
            page = await self._gcs.call("GET", "/v1/nodes", reply=Page[Node], query=query)
            listed.update((node.node_id, node) for node in page.items)
            seq = page.seq if seq < 0 else min(seq, page.seq)
            cursor = page.next_cursor
            if not cursor:
                break
        for node in listed.values():
            if node.state is not NodeState.DEAD:
                self._update(node, registered=False)
        for node_id, node in list(self._nodes.items()):
            if node_id not in listed:
                self._remove(node, "it is no longer registered")
        return seq

    def _apply(self, event: Event) -> None:
        engine = self._engine
        if (node := payload_as(event, Node)) is not None:
            known = self._nodes.get(node.node_id)
            if known is not None and node.incarnation < known.incarnation:
                return
            if node.state is NodeState.DEAD:
                self._remove(node, node.reason)
            else:
                self._update(node, registered=event.kind == EventKind.NODE_REGISTERED)
        elif event.kind == EventKind.JOB_FINISHED:
            engine.apply(ev.JobFinished(at_s=engine.now(), job_id=event.subject))
        elif (exited := payload_as(event, WorkerExit)) is not None:
            if exited.lease_id:
                engine.apply(
                    ev.WorkerExited(
                        at_s=engine.now(), lease_id=exited.lease_id, reason=exited.cause
                    )
                )
            # Its own leases, for tasks of its tasks, have nobody to use or return them.
            engine.apply(ev.OwnerLost(at_s=engine.now(), owner_id=exited.worker_id))

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
                    self._join(node)
                    for lease in held.leases:
                        self._adopt(held, lease)
                return
        finally:
            del self._adoptions[node_id]
            if not self._adoptions:
                self._engine.adopting = False

    def _adopt(self, held: HeldLeases, report: HeldLease) -> None:
        lease = report.lease
        has_worker = report.pid if lease.kind is LeaseKind.DRIVER else report.address.peer_id
        if not has_worker:
            # It was never granted, and its owner repeats the request.
            self._nodelets.release(
                held.node_id, lease.lease_id, kill=True, reason="its scheduler is gone"
            )
            return
        adopted = ev.LeaseAdopted(
            at_s=self._engine.now(),
            lease_id=lease.lease_id,
            owner_id=lease.owner_id,
            job_id=lease.job_id,
            kind=ev.Kind(lease.kind.value),
            node_id=held.node_id,
            incarnation=held.incarnation,
            requirements=requirements_of(Demand(job_id=lease.job_id, resources=lease.resources)),
            gpus={index: round(share * UNIT) for index, share in lease.gpus.items()},
            granted_at_s=lease.granted_at_s,
            blocked=lease.blocked,
            actor_id=lease.actor_id,
            name=lease.name,
        )
        started = StartedLease(worker_id=report.worker_id, address=report.address, pid=report.pid)
        self._engine.adopt(adopted, started)
