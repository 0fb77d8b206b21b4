"""Commands of the lease machine, its only output besides the state; the shell executes them in order."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkWorker:
    """Fork a worker; ``lease_id`` is empty for a warm one."""

    worker_id: str
    lease_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignWorker:
    """Tell a registered worker which lease it serves; answer WorkerAssigned or AssignFailed."""

    worker_id: str
    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminateWorker:
    """End the worker and its descendants; a driver is asked to leave first."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RetireWorker:
    """Ask the worker to leave; answer RetireAnswered."""

    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceLease:
    """Answer those who wait for the lease: it has its worker."""

    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseLease:
    """Answer those who wait for the lease with the error of ``code``: it gets no worker."""

    lease_id: str
    code: str
    message: str


Command = ForkWorker | AssignWorker | TerminateWorker | RetireWorker | AnnounceLease | RefuseLease


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one step: the commands, in order.

    ``fenced`` is not empty if the event changed nothing because its sender no longer leads: it says
    so, for the error that the sender gets.
    """

    commands: list[Command] = field(default_factory=list)
    fenced: str = ""
