"""The ends of leases and of workers: one ladder, notice, SIGTERM, SIGKILL, whoever asks for the end.

A worker that is preempted, or whose code has registered stop callbacks, starts at the notice, and so does an
actor that saves its state, as its node stops; a driver at SIGTERM, which is its notice; every other at
SIGKILL. From there on time alone takes a worker further, whatever it does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from stoker_nodelet.core.commands import NotifyWorker, Outbox, RefuseLease, TerminateWorker
from stoker_nodelet.core.leases import WorkKind
from stoker_nodelet.core.state import LeasePhase, Rung, Stop, WorkerPhase, remember

if TYPE_CHECKING:
    from stoker_nodelet.core.state import LeaseEntry, State, WorkerEntry


def end_lease(state: State, lease: LeaseEntry, reason: str, outbox: Outbox) -> None:
    """End a lease, and refuse it if it still waits for its worker."""
    forget_lease(state, lease)
    if lease.phase is not LeasePhase.READY:
        lease_id = lease.terms.lease_id
        outbox.append(
            RefuseLease(lease_id=lease_id, code="conflict", message=f"{lease_id}: {reason}")
        )


def forget_lease(state: State, lease: LeaseEntry) -> None:
    """Remove a lease; a start of it that comes late is refused."""
    lease_id = lease.terms.lease_id
    del state.leases[lease_id]
    remember(state.ended_leases, lease_id)


def preempt(worker: WorkerEntry, at_s: float, grace_s: float, reason: str, outbox: Outbox) -> None:
    """Give a worker notice that it ends in ``grace_s``; the first notice counts."""
    if worker.stop is not None:
        return
    worker.reason = reason
    is_driver = worker.kind is WorkKind.DRIVER
    rung = Rung.TERM if is_driver else Rung.NOTICE
    worker.stop = Stop(rung, at_s + grace_s, preempted=True)
    if is_driver:
        outbox.append(TerminateWorker(worker_id=worker.worker_id, force=False))
        return
    worker.saves = True
    outbox.append(_notice(worker, grace_s))


def terminate(state: State, worker: WorkerEntry, at_s: float, reason: str, outbox: Outbox) -> None:
    """End a worker in order: with notice if its code wants it, and a driver by SIGTERM first."""
    if worker.phase is WorkerPhase.TERMINATING:
        return
    worker.reason = reason
    stop = worker.stop
    if not worker.has_callbacks:
        rung = Rung.TERM if worker.kind is WorkKind.DRIVER else Rung.KILL
        _climb(state, worker, at_s, rung, outbox)
    elif stop is None:
        _climb(state, worker, at_s, Rung.NOTICE, outbox)
    else:
        worker.phase, worker.since_s = WorkerPhase.TERMINATING, at_s
        stop.until_s = min(stop.until_s, at_s + state.policy.notice_grace_s)


def kill(state: State, worker: WorkerEntry, at_s: float, reason: str, outbox: Outbox) -> None:
    """End a worker without notice: it does harm, does not answer, or belongs to nobody."""
    worker.has_callbacks = False
    is_ending = worker.phase is WorkerPhase.TERMINATING
    if is_ending and worker.kind is not WorkKind.DRIVER and not _is_killed(worker):
        _climb(state, worker, at_s, Rung.KILL, outbox)
    terminate(state, worker, at_s, reason, outbox)


def _is_killed(worker: WorkerEntry) -> bool:
    return worker.stop is not None and worker.stop.rung is Rung.KILL


def climb(state: State, worker: WorkerEntry, at_s: float, outbox: Outbox) -> None:
    """Take a worker to the next rung if that is due."""
    stop = worker.stop
    if stop is None or at_s < stop.until_s:
        return
    lease = state.leases.get(worker.lease_id)
    if lease is not None and lease.worker_id == worker.worker_id:
        end_lease(state, lease, worker.reason, outbox)
    _climb(state, worker, at_s, Rung.TERM if stop.rung is Rung.NOTICE else Rung.KILL, outbox)


def _climb(state: State, worker: WorkerEntry, at_s: float, rung: Rung, outbox: Outbox) -> None:
    policy, grace_s = state.policy, state.policy.notice_grace_s
    match rung:
        case Rung.NOTICE:
            until_s = at_s + grace_s
        case Rung.TERM:
            until_s = at_s + policy.term_grace_s
        case Rung.KILL:
            until_s = at_s + policy.worker_end_s
        case _:
            assert_never(rung)
    preempted = worker.stop is not None and worker.stop.preempted
    worker.phase, worker.since_s = WorkerPhase.TERMINATING, at_s
    worker.stop = Stop(rung, until_s, preempted)
    if rung is Rung.NOTICE:
        outbox.append(_notice(worker, grace_s))
        return
    outbox.append(TerminateWorker(worker_id=worker.worker_id, force=rung is Rung.KILL))


def _notice(worker: WorkerEntry, grace_s: float) -> NotifyWorker:
    return NotifyWorker(
        worker_id=worker.worker_id,
        lease_id=worker.lease_id,
        grace_s=grace_s,
        reason=worker.reason,
        saves=worker.saves,
    )
