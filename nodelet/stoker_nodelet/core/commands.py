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
class NotifyWorker:
    """Order to tell the worker that it will be ended in ``grace_s``; answered by StopAnswered.

    An actor that ``saves`` its state ends by itself instead, once it has.
    """

    worker_id: str
    lease_id: str
    grace_s: float
    reason: str
    saves: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminateWorker:
    """Order to signal the worker and its descendants: to end itself, or with ``force`` to end it."""

    worker_id: str
    force: bool


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
class ReadGpus:
    """Order to measure the GPUs now: some were left; answered by GpusRead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportGpus:
    """Order to tell the cluster which GPUs are quarantined: it has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseOrder:
    """Order to answer the request that led to this step with the error of ``code``; nothing was done."""

    code: str
    message: str


Command = (
    ForkWorker
    | AssignWorker
    | NotifyWorker
    | TerminateWorker
    | RetireWorker
    | AnnounceLease
    | RefuseLease
    | ReadGpus
    | ReportGpus
    | RefuseOrder
)

Outbox = list[Command]
"""The commands of one step so far. Whatever decides something appends to it what follows."""
