"""Seeking a lease from the scheduler for something that the gcs owns: an actor or a driver.

Called by the placing loops of actors and jobs. A lease request is repeated under one ``request_id``,
so a lost reply, a new scheduler or a restarted gcs never leads to two workers.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.state import schema
from stoker_gcs.store.changes import Change, Delete, Operation, Upsert
from stoker_wire.errors import NotFoundError, StokerError
from stoker_wire.messages.cluster import (
    GrantedLease,
    Lease,
    LeaseReply,
    LeaseRequest,
    ReleaseLeases,
    WorkerExit,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from stoker_gcs.peer_clients import Links
    from stoker_gcs.state.records import Truth
    from stoker_gcs.store.changes import Value
    from stoker_wire.process.background import Background

_log = logging.getLogger("stoker.gcs.placing")
OWNER = "gcs"
POLL_S = 10.0
FIRST_POLL_S = 1.0
PAUSE_S = (0.05, 1.0)
HELD, RELEASING = "HELD", "RELEASING"
RELEASE_TRIES = 120
_encode = msgspec.msgpack.Encoder().encode
_lease = msgspec.msgpack.Decoder(Lease)


@dataclass(frozen=True, slots=True)
class Refused:
    """The scheduler will not place it, now or ever; ``error`` says why."""

    error: StokerError


async def seek(
    links: Links,
    request: LeaseRequest,
    *,
    wanted: Callable[[], Awaitable[bool]],
    delayed: Callable[[str], Awaitable[None]],
) -> GrantedLease | Refused | None:
    """Long-poll until a worker is granted or refused; None once it is no longer ``wanted``.

    ``delayed`` is told why it waits, each time that the reason changes.
    """
    said, pause_s = "", PAUSE_S[0]
    # The first poll is short, so that what waits soon says why.
    asked = msgspec.structs.replace(request, wait_s=FIRST_POLL_S)
    while await wanted():
        note = ""
        try:
            reply = await links.scheduler(
                "POST", "/v1/leases", asked, reply=LeaseReply, timeout_s=POLL_S + 5.0
            )
        except StokerError as error:
            if not error.retryable:
                return Refused(error)
            note = str(error)
        else:
            if reply.granted:
                return reply.granted[0]
            note = reply.note or (
                f"{reply.queue_position} demands wait before it" if reply.queue_position else ""
            )
            pause_s, asked = PAUSE_S[0], request
        if note and note != said:
            await delayed(note)
            said = note
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, PAUSE_S[1])
    return None


def held(lease: Lease, *, job_id: str, state: str = HELD) -> Upsert:
    """The operation that notes a lease of ours. ``job_id``: at whose end the row goes."""
    row: dict[str, Value] = {
        "lease_id": lease.lease_id,
        "job_id": job_id,
        "node_id": lease.node_id,
        "state": state,
        "version": 1,
        "record": _encode(lease),
    }
    return Upsert(schema.LEASES, row)


def gone(lease_id: str) -> tuple[Operation, ...]:
    """The operations that forget a lease, if there is one."""
    return (Delete(schema.LEASES, {"lease_id": lease_id}),) if lease_id else ()


class Releases:
    """Gives leases back until the scheduler has heard; the rows in SQL survive a crash meanwhile."""

    def __init__(self, truth: Truth, links: Links, background: Background) -> None:
        self._truth = truth
        self._links = links
        self._background = background
        self._under_way: set[str] = set()

    def start(self, lease_id: str, reason: str) -> None:
        """Release (and kill) in the background."""
        if lease_id and lease_id not in self._under_way:
            self._under_way.add(lease_id)
            self._background.spawn(self._release(lease_id, reason), name=f"release-{lease_id}")

    async def resume(self) -> None:
        """Take up what a crash interrupted."""
        for row in await self._truth.store.select(
            schema.LEASES, {"state": RELEASING}, limit=100_000
        ):
            self.start(row["lease_id"], "released before the gcs restarted")

    async def _release(self, lease_id: str, reason: str) -> None:
        body = ReleaseLeases(lease_ids=(lease_id,), kill=True, reason=reason)
        try:
            for attempt in range(RELEASE_TRIES):
                try:
                    await self._links.tell_scheduler("POST", "/v1/leases/release", body)
                    break
                except NotFoundError:
                    break
                except StokerError as error:
                    _log.debug("lease %s is not released yet: %s", lease_id, error)
                await asyncio.sleep(min(0.1 * 2**attempt, 5.0))
            await self._truth.journal.apply(Change(gone(lease_id)))
        finally:
            self._under_way.discard(lease_id)

    async def on_node(self, node_id: str, *, before_incarnation: int) -> list[Lease]:
        """Our leases on a node from incarnations before this one."""
        rows = await self._truth.store.select(schema.LEASES, {"node_id": node_id}, limit=100_000)
        leases = [_lease.decode(row["record"]) for row in rows]
        return [lease for lease in leases if lease.node_incarnation < before_incarnation]


async def exit_of(truth: Truth, worker_id: str) -> WorkerExit | None:
    """How a worker ended, if its nodelet has told already (perhaps before the grant arrived)."""
    if not worker_id:
        return None
    where = {"subject": worker_id, "kind": "worker.exited"}
    rows = await truth.store.select(schema.EVENTS, where, limit=1)
    if not rows:
        return None
    return msgspec.msgpack.decode(rows[0]["payload"], type=WorkerExit)
