"""Leases that the gcs owns, for actors and drivers: requested, recorded in SQL, and released.

Used by the placement of actors and of drivers, and by their rules. A request is repeated under one
``request_id``, so a lost reply, a new scheduler or a restarted gcs never leads to two workers. A row
leaves SQL only once the scheduler has been told, or with what the lease was for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.state import schema
from stoker_gcs.store.changes import Change, Delete, Operation, Update, Upsert
from stoker_wire.errors import NotFoundError, StokerError
from stoker_wire.http.tolerant import TolerantDecoder
from stoker_wire.messages.cluster import (
    GrantedLease,
    Lease,
    LeaseReply,
    LeaseRequest,
    ReleaseLeases,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from stoker_gcs.peer_clients import PeerClients
    from stoker_gcs.state.records import StateStore
    from stoker_gcs.store.changes import Value
    from stoker_wire.messages.groups import RequestBundles
    from stoker_wire.process.background import Background

_log = logging.getLogger(__name__)
OWNER = "gcs"
POLL_S = 10.0
FIRST_POLL_S = 1.0
PAUSE_S = (0.05, 1.0)
HELD, RELEASING = "HELD", "RELEASING"
RELEASE_TRIES = 120
_encode = msgspec.msgpack.Encoder().encode
_decoder = TolerantDecoder(Lease)


@dataclass(frozen=True, slots=True)
class Refused:
    """A refusal of the scheduler that is final; ``error`` says why."""

    error: StokerError


async def request_lease(
    peers: PeerClients,
    request: LeaseRequest,
    *,
    still_wanted: Callable[[], Awaitable[bool]],
    on_delayed: Callable[[str], Awaitable[None]],
) -> GrantedLease | Refused | None:
    """Request one worker, as :func:`poll_scheduler` does."""
    result = await poll_scheduler(
        peers, "/v1/leases", request, still_wanted=still_wanted, on_delayed=on_delayed
    )
    return result.granted[0] if isinstance(result, LeaseReply) else result


async def poll_scheduler(
    peers: PeerClients,
    path: str,
    request: LeaseRequest | RequestBundles,
    *,
    still_wanted: Callable[[], Awaitable[bool]],
    on_delayed: Callable[[str], Awaitable[None]],
) -> LeaseReply | Refused | None:
    """Long-poll until leases are granted or refused; return None once they are not ``still_wanted``.

    ``on_delayed`` is called with the reason of the wait, each time that it changes.
    """
    last_reason, pause_s = "", PAUSE_S[0]
    # The first poll is short, so that the reason of a wait is known soon.
    poll = msgspec.structs.replace(request, wait_s=FIRST_POLL_S)
    while await still_wanted():
        reason = ""
        try:
            reply = await peers.call_scheduler(
                "POST", path, poll, reply=LeaseReply, timeout_s=POLL_S + 5.0
            )
        except StokerError as error:
            if not error.retryable:
                return Refused(error)
            reason = str(error)
        else:
            if reply.granted:
                return reply
            reason = reply.note or (
                f"{reply.queue_position} demands wait before it" if reply.queue_position else ""
            )
            pause_s, poll = PAUSE_S[0], request
        if reason and reason != last_reason:
            await on_delayed(reason)
            last_reason = reason
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, PAUSE_S[1])
    return None


def upsert_lease_row(lease: Lease, *, job_id: str) -> Upsert:
    """Return the operation that records a lease. ``job_id``: the job with whose end the row goes."""
    row: dict[str, Value] = {
        "lease_id": lease.lease_id,
        "job_id": job_id,
        "node_id": lease.node_id,
        "state": HELD,
        "version": 1,
        "record": _encode(lease),
    }
    return Upsert(schema.LEASES, row)


def delete_lease_row(lease_id: str) -> tuple[Operation, ...]:
    """Return the operations that delete the row of a lease, if there is a lease."""
    return (Delete(schema.LEASES, {"lease_id": lease_id}),) if lease_id else ()


def releasing_lease_row(lease_id: str) -> tuple[Operation, ...]:
    """Return the operation that marks a lease for release, if there is a lease and it has a row."""
    key = {"lease_id": lease_id}
    release = Update(schema.LEASES, key, {"state": RELEASING}, must_exist=False)
    return (release,) if lease_id else ()


class LeaseReleaser:
    """Releases in the background, repeated until the scheduler has answered.

    A row in state RELEASING survives a crash of the gcs; :meth:`resume` takes it up.
    """

    def __init__(self, state: StateStore, peers: PeerClients, background: Background) -> None:
        self._state = state
        self._peers = peers
        self._background = background
        self._in_flight: set[str] = set()

    def start(self, lease_id: str, reason: str) -> None:
        """Release the lease and kill its worker, in the background."""
        if lease_id and lease_id not in self._in_flight:
            self._in_flight.add(lease_id)
            self._background.spawn(self._release(lease_id, reason), name=f"release-{lease_id}")

    async def resume(self) -> None:
        """Take up the releases that a crash interrupted."""
        for row in await self._state.store.select(
            schema.LEASES, {"state": RELEASING}, limit=100_000
        ):
            self.start(row["lease_id"], "released before the gcs restarted")

    async def _release(self, lease_id: str, reason: str) -> None:
        body = ReleaseLeases(lease_ids=(lease_id,), kill=True, reason=reason)
        try:
            for attempt in range(RELEASE_TRIES):
                try:
                    with contextlib.suppress(NotFoundError):
                        await self._peers.call_scheduler("POST", "/v1/leases/release", body)
                    await self._state.writer.apply(Change(delete_lease_row(lease_id)))
                    return
                except StokerError as error:
                    _log.debug("lease %s is not released yet: %s", lease_id, error)
                await asyncio.sleep(min(0.1 * 2**attempt, 5.0))
        finally:
            self._in_flight.discard(lease_id)

    async def leases_on_node(self, node_id: str, *, before_incarnation: int) -> list[Lease]:
        """Return the leases on a node from incarnations before this one."""
        rows = await self._state.store.select(schema.LEASES, {"node_id": node_id}, limit=100_000)
        leases = [_decoder.decode(row["record"]) for row in rows]
        return [lease for lease in leases if lease.node_incarnation < before_incarnation]
