"""What the gcs tells the scheduler, turned into events: nodes, ends of jobs, exits of workers.

One Cluster belongs to one Engine. It lists the nodes, asks each nodelet which leases it holds (so
that a new leader knows what its predecessor granted), and then follows the gcs's event log. A node
gets no new lease before its nodelet was asked: what it holds must not be given away twice.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec

from stoker_scheduler.core import events as ev
from stoker_scheduler.core.model.resources import UNIT, InvalidDemandError
from stoker_scheduler.wire_types import need_of, spec_of
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
    from structlog.typing import FilteringBoundLogger

    from stoker_scheduler.engine import Engine
    from stoker_wire.http.client import Client

KINDS = ",".join(("node.", EventKind.JOB_FINISHED, EventKind.WORKER_EXITED))
PAGE_LIMIT = 1000
FIRST_LOOK_S = 3.0
"""Nodelets that have not answered by then join when they do; the others need not wait."""
ASK_PAUSE_S = 0.5


class Cluster:
    """See the module."""

    def __init__(self, gcs: Client, engine: Engine, log: FilteringBoundLogger) -> None:
        self._gcs = gcs
        self._engine = engine
        self._log = log
        self._records: dict[str, Node] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def load(self) -> int:
        """List the nodes and adopt their leases; return the sequence number to watch from."""
        seq = await self._list()
        if self._asking:
            self._engine.adopting = True
            await asyncio.wait(self._asking.values(), timeout=FIRST_LOOK_S)
            self._engine.adopting = bool(self._asking)
        return seq

    async def follow(self, seq: int) -> None:
        """Follow the gcs's event log for ever."""
        while True:
            try:
                events = self._gcs.watch("/v1/events", seq, {"kind": KINDS})
                async with aclosing(events):
                    async for event in events:
                        seq = event.seq
                        try:
                            self._take(event)
                        except msgspec.ValidationError as error:
                            self._log.error(
                                "event ignored", seq=seq, kind=event.kind, why=str(error)
                            )
            except CompactedError:
                seq = await self._list()
            except StokerError as error:
                self._log.warning("the gcs's events cannot be followed", why=str(error))
                await asyncio.sleep(ASK_PAUSE_S)

    async def _list(self) -> int:
        seen: dict[str, Node] = {}
        seq, cursor = -1, ""
        while True:
            query = {"limit": PAGE_LIMIT, "cursor": cursor or None}
            page = await self._gcs.call("GET", "/v1/nodes", reply=Page[Node], query=query)
            seen.update((node.node_id, node) for node in page.items)
            seq = page.seq if seq < 0 else min(seq, page.seq)
            cursor = page.next_cursor
            if not cursor:
                break
        for node in seen.values():
            if node.state is not NodeState.DEAD:
                self._meet(node, fresh=False)
        for node_id, node in list(self._records.items()):
            if node_id not in seen:
                self._lose(node, "it is no longer registered")
        return seq

    def _take(self, event: Event) -> None:
        engine = self._engine
        if (node := payload_as(event, Node)) is not None:
            known = self._records.get(node.node_id)
            if known is not None and node.incarnation < known.incarnation:
                return
            if node.state is NodeState.DEAD:
                self._lose(node, node.reason)
            else:
                self._meet(node, fresh=event.kind == EventKind.NODE_REGISTERED)
        elif event.kind == EventKind.JOB_FINISHED:
            engine.apply(ev.JobFinished(at_s=engine.now(), job_id=event.subject))
        elif (exited := payload_as(event, WorkerExit)) is not None:
            if exited.lease_id:
                engine.apply(
                    ev.WorkerExited(
                        at_s=engine.now(), lease_id=exited.lease_id, reason=exited.cause
                    )
                )
            # What it asked for itself, for tasks of its tasks, nobody will use or give back.
            engine.apply(ev.OwnerLost(at_s=engine.now(), owner_id=exited.worker_id))

    def _meet(self, node: Node, *, fresh: bool) -> None:
        """Know a node. A fresh registration holds nothing; others are asked first."""
        known = self._records.get(node.node_id)
        self._records[node.node_id] = node
        if fresh or (known is not None and known.incarnation == node.incarnation):
            if node.node_id not in self._asking:
                self._join(node)
            return
        if node.node_id not in self._asking:
            work = self._ask_until_told(node.node_id)
            task = self._engine.background.spawn(work, name=f"adopt from {node.node_id}")
            self._asking[node.node_id] = task

    def _join(self, node: Node) -> None:
        self._engine.nodelets.add(node)
        try:
            spec = spec_of(node)
        except InvalidDemandError as error:
            self._log.warning("node ignored", node_id=node.node_id, why=str(error))
            return
        self._engine.apply(ev.NodeJoined(at_s=self._engine.now(), spec=spec))

    def _lose(self, node: Node, reason: str) -> None:
        self._records.pop(node.node_id, None)
        engine = self._engine
        engine.apply(
            ev.NodeLost(
                at_s=engine.now(),
                node_id=node.node_id,
                incarnation=node.incarnation,
                reason=reason,
            )
        )
        engine.nodelets.remove(node.node_id)

    async def _ask_until_told(self, node_id: str) -> None:
        try:
            while True:
                node = self._records.get(node_id)
                if node is None:
                    return
                try:
                    held = await self._engine.nodelets.held(node)
                except StokerError as error:
                    self._log.warning(
                        "nodelet does not tell its leases", node_id=node_id, why=str(error)
                    )
                    await asyncio.sleep(ASK_PAUSE_S)
                    continue
                node = self._records.get(node_id)
                if node is not None:
                    self._join(node)
                    for lease in held.leases:
                        self._adopt(held, lease)
                return
        finally:
            del self._asking[node_id]
            if not self._asking:
                self._engine.adopting = False

    def _adopt(self, held: HeldLeases, report: HeldLease) -> None:
        engine, lease = self._engine, report.lease
        unborn = not (report.pid if lease.kind is LeaseKind.DRIVER else report.address.peer_id)
        if unborn:
            # Its asker was never told, and asks again under the same request.
            engine.nodelets.release(
                held.node_id, lease.lease_id, kill=True, reason="its scheduler is gone"
            )
            return
        demand = Demand(job_id=lease.job_id, resources=lease.resources)
        engine.started[lease.lease_id] = StartedLease(
            worker_id=report.worker_id, address=report.address, pid=report.pid
        )
        engine.apply(
            ev.LeaseAdopted(
                at_s=engine.now(),
                lease_id=lease.lease_id,
                owner_id=lease.owner_id,
                job_id=lease.job_id,
                kind=ev.Kind(lease.kind.value),
                node_id=held.node_id,
                incarnation=held.incarnation,
                need=need_of(demand),
                gpus={index: round(share * UNIT) for index, share in lease.gpus.items()},
                granted_at_s=lease.granted_at_s,
                blocked=lease.blocked,
                actor_id=lease.actor_id,
                name=lease.name,
            )
        )
