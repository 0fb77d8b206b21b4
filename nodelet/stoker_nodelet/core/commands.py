"""Commands of the lease machine, its only output besides the state; the shell executes them in order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkWorker:
    """Order to fork a worker; ``lease_id`` is empty for a warm one."""

    worker_id: str
    lease_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignWorker:
    """Order to give a registered worker its lease; answered by WorkerAssigned or AssignFailed."""

    worker_id: str
    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminateWorker:
    """Order to end the worker and its descendants; a driver is asked to leave first."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RetireWorker:
    """Order to ask the worker to leave; answered by RetireAnswered."""

    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceLease:
    """Order to answer those who wait for the lease: it has its worker."""

    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseLease:
    """Order to answer those who wait for the lease with the error of ``code``: it gets no worker."""

    lease_id: str
    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseRelease:
    """Order to answer the release of leases with an error: its sender no longer leads."""

    message: str


Command = (
    ForkWorker
    | AssignWorker
    | TerminateWorker
    | RetireWorker
    | AnnounceLease
    | RefuseLease
    | RefuseRelease
)

Outbox = list[Command]
"""The commands of one step so far. Whatever decides something appends to it what follows."""
