"""The transition function: all decisions about which worker serves which lease.

A worker that ran a job's code serves only that job again; one that had a GPU serves nobody again
(its CUDA context holds the device's memory, and its visible devices are fixed). A GPU is free only
when the process that used it is gone and its memory is free (``gpus``), so a lease may have to await its
devices until then.

Handlers change the state that they are given and append commands to ``outbox``; they read no clock and no
wire type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from stoker_nodelet.core import gpus as gpu_rules
from stoker_nodelet.core.commands import (
    AnnounceLease,
    AssignWorker,
    ForkWorker,
    Outbox,
    RefuseLease,
    RefuseOrder,
    RetireWorker,
)
from stoker_nodelet.core.ends import climb, end_lease, forget_lease, kill, preempt, terminate
from stoker_nodelet.core.events import (
    AssignFailed,
    AttemptEnded,
    BundlesCommitted,
    BundlesRequested,
    CallbacksRegistered,
    Event,
    ForkFailed,
    GpuReleased,
    GpusRead,
    JobDeleted,
    JobFinished,
    LeaseRequested,
    LeasesReleased,
    LeasesStopped,
    NodeDrained,
    NodeFenced,
    NodeRegistered,
    RetireAnswered,
    StopAnswered,
    Ticked,
    WorkerAssigned,
    WorkerExited,
    WorkerForked,
    WorkerKillRequested,
    WorkerRegistered,
    WorkerSpent,
)
from stoker_nodelet.core.leases import LeaseTerms, WorkKind
from stoker_nodelet.core.state import (
    GPU_SLACK,
    BundleEntry,
    LeaseEntry,
    LeasePhase,
    Policy,
    Rung,
    State,
    Stop,
    WorkerEntry,
    WorkerPhase,
    remember,
)


def step(state: State, event: Event) -> Outbox:
    """Apply one event, and return the commands that follow from it, in order."""
    outbox: Outbox = []
    match event:
        case NodeRegistered():
            state.incarnation, state.fenced = event.incarnation, False
            # A leader joins a fresh node without a word to it: one before it could be quicker.
            state.epoch = max(state.epoch, event.epoch)
        case NodeDrained():
            state.drained_until_s = event.at_s + state.policy.drain_order_s
        case NodeFenced():
            _fenced(state, event, outbox)
        case LeaseRequested():
            _requested(state, event, outbox)
        case BundlesRequested():
            _bundles_requested(state, event, outbox)
        case BundlesCommitted():
            _bundles_committed(state, event, outbox)
        case LeasesReleased():
            _released(state, event, outbox)
        case LeasesStopped():
            _stopped(state, event, outbox)
        case StopAnswered():
            _stop_answered(state, event, outbox)
        case WorkerForked():
            _forked(state, event, outbox)
        case ForkFailed():
            _exited(state, event.worker_id, 0.0, event.reason, outbox, code=event.code)
        case WorkerRegistered():
            _registered(state, event, outbox)
        case WorkerAssigned():
            _assigned(state, event, outbox)
        case AssignFailed():
            _assign_failed(state, event, outbox)
        case WorkerExited():
            gpu_rules.left(state, event, outbox)
            _exited(state, event.worker_id, event.at_s, event.cause, outbox)
        case WorkerKillRequested():
            end = terminate if event.in_order else kill
            if event.saves and event.worker_id in state.workers:
                worker = state.workers[event.worker_id]
                worker.saves = worker.has_callbacks = True
            _end_worker(state, end, event.worker_id, event.at_s, event.reason, outbox)
        case WorkerSpent():
            if event.worker_id in state.workers:
                state.workers[event.worker_id].spent = True
        case CallbacksRegistered():
            if event.worker_id in state.workers:
                state.workers[event.worker_id].has_callbacks = True
        case RetireAnswered():
            _retire_answered(state, event, outbox)
        case JobFinished():
            _job_finished(state, event, outbox)
        case GpusRead():
            gpu_rules.read(state, event, outbox)
            _retry_awaiting(state, event.at_s, outbox)
        case GpuReleased():
            gpu_rules.release(state, event, outbox)
            _retry_awaiting(state, event.at_s, outbox)
        case AttemptEnded():
            reason = f"an attempt of {event.job_id} has ended"
            _end_work(state, event.job_id, reason, event.at_s, outbox)
        case JobDeleted():
            state.finished_jobs.pop(event.job_id, None)
        case Ticked():
            gpu_rules.expire(state, event.at_s, outbox)
            _retry_awaiting(state, event.at_s, outbox)
            _ticked(state, event, outbox)
        case _:
            assert_never(event)
    return outbox


def _requested(state: State, event: LeaseRequested, outbox: Outbox) -> None:
    terms = event.lease
    lease_id = terms.lease_id

    def refuse(code: str, message: str) -> None:
        outbox.append(RefuseLease(lease_id=lease_id, code=code, message=message))

    if state.fenced or terms.node_incarnation != state.incarnation:
        refuse("fenced", _other_incarnation(state, terms))
        return
    if event.epoch < state.epoch:
        refuse("fenced", _stale(event.epoch, state.epoch))
        return
    state.epoch = event.epoch
    if lease_id in state.ended_leases:
        refuse("conflict", f"{lease_id} has ended on this node")
        return
    if lease_id in state.leases:
        ready = state.leases[lease_id].phase is LeasePhase.READY
        if ready:
            outbox.append(AnnounceLease(lease_id=lease_id))
        return
    if terms.job_id in state.finished_jobs and terms.kind is not WorkKind.ACTOR:
        refuse("job_finished", f"{terms.job_id} has finished")
        return
    over = _overcommitted(state, terms.gpus, with_ending=False)
    if over:
        refuse("conflict", f"{lease_id}: {over}")
        return
    lease = LeaseEntry(
        terms,
        LeasePhase.AWAITING_DEVICES,
        event.env_key,
        event.applicable_after_fork,
        event.worker_id,
    )
    state.leases[lease_id] = lease
    _give_worker(state, lease, event.at_s, outbox)


def _bundles_requested(state: State, event: BundlesRequested, outbox: Outbox) -> None:
    refusal = _bundles_refusal(state, event)
    if refusal is not None:
        outbox.append(refusal)
        return
    state.epoch = event.epoch
    for terms in event.leases:
        if terms.lease_id not in state.bundles:
            prepared_at_s = event.at_s if event.prepare else None
            entry = BundleEntry(terms.lease_id, terms.job_id, prepared_at_s)
            state.bundles[terms.lease_id] = entry


def _bundles_refusal(state: State, event: BundlesRequested) -> RefuseOrder | None:
    for terms in event.leases:
        if state.fenced or terms.node_incarnation != state.incarnation:
            message = _other_incarnation(state, terms)
            return RefuseOrder(code="fenced", message=message)
        if terms.lease_id in state.ended_leases:
            message = f"{terms.lease_id} has ended on this node"
            return RefuseOrder(code="conflict", message=message)
    if event.epoch < state.epoch:
        return RefuseOrder(code="fenced", message=_stale(event.epoch, state.epoch))
    return None


def _bundles_committed(state: State, event: BundlesCommitted, outbox: Outbox) -> None:
    if event.epoch < state.epoch:
        outbox.append(RefuseOrder(code="fenced", message=_stale(event.epoch, state.epoch)))
        return
    for lease_id in event.lease_ids:
        if lease_id in state.bundles:
            state.bundles[lease_id].prepared_at_s = None


def _end_bundle(state: State, lease_id: str) -> None:
    del state.bundles[lease_id]
    remember(state.ended_leases, lease_id)


def _other_incarnation(state: State, terms: LeaseTerms) -> str:
    if state.fenced:
        return f"{terms.lease_id} is for an incarnation of this node that is over"
    return (
        f"{terms.lease_id} is for incarnation {terms.node_incarnation} of this node, "
        f"which is now incarnation {state.incarnation}"
    )


def _stale(epoch: int, seen: int) -> str:
    return f"the scheduler of epoch {epoch} no longer leads: this node has seen epoch {seen}"


def _overcommitted(state: State, gpus: dict[int, float], *, with_ending: bool) -> str:
    """Return why ``gpus`` do not fit, or nothing.

    Without ``with_ending`` the devices of ending workers count as free, but not those that a lease
    already awaits: a new lease may queue behind workers, not behind leases. So do those of which it is not
    known yet whether their memory is free.
    """
    for index in gpus:
        unusable = gpu_rules.obstacle(state, index, with_left=with_ending)
        if unusable:
            return unusable
    use = state.gpu_use(with_ending=with_ending)
    if not with_ending:
        for lease in state.leases.values():
            if lease.phase is LeasePhase.AWAITING_DEVICES:
                for index, share in lease.terms.gpus.items():
                    use[index] = use.get(index, 0.0) + share
    for index, share in gpus.items():
        if use.get(index, 0.0) + share > 1.0 + GPU_SLACK:
            holders = sorted(
                worker.lease_id for worker in state.workers.values() if index in worker.gpus
            )
            return (
                f"GPU {index} has {max(0.0, 1.0 - use[index]):g} left, {share:g} was asked "
                f"(held by {', '.join(holders)})"
            )
    return ""


def _give_worker(state: State, lease: LeaseEntry, at_s: float, outbox: Outbox) -> None:
    """Give a lease a worker, unless one that ends still holds its devices."""
    if _overcommitted(state, lease.terms.gpus, with_ending=True):
        return
    lease.phase = LeasePhase.STARTING
    worker = _choose_worker(state, lease)
    if worker is None:
        worker = WorkerEntry(lease.next_worker_id, WorkerPhase.STARTING, at_s, at_s)
        state.workers[worker.worker_id] = worker
        _bind(worker, lease)
        outbox.append(ForkWorker(worker_id=worker.worker_id, lease_id=lease.terms.lease_id))
        return
    _bind(worker, lease)
    if worker.phase is WorkerPhase.STARTING:
        return  # the reply to its registration carries the lease
    worker.phase = WorkerPhase.LEASED
    worker.since_s = at_s
    outbox.append(AssignWorker(worker_id=worker.worker_id, lease_id=lease.terms.lease_id))


def _bind(worker: WorkerEntry, lease: LeaseEntry) -> None:
    terms = lease.terms
    lease.worker_id = worker.worker_id
    worker.lease_id = terms.lease_id
    worker.kind = terms.kind
    worker.job_id = terms.job_id
    worker.env_key = lease.env_key
    worker.actor_id = terms.actor_id
    worker.gpus = dict(terms.gpus)


def _choose_worker(state: State, lease: LeaseEntry) -> WorkerEntry | None:
    """Return the best worker there is: one of the job (the last used), else a fresh one."""
    terms = lease.terms
    if terms.kind is WorkKind.DRIVER:
        return None
    idle = [w for w in state.workers.values() if w.phase is WorkerPhase.IDLE and not w.spent]
    if terms.kind is WorkKind.TASK and not terms.gpus:
        same = [w for w in idle if w.job_id == terms.job_id and w.env_key == lease.env_key]
        if same:
            return max(same, key=lambda worker: worker.since_s)
    if not lease.applicable_after_fork:
        return None
    fresh = [worker for worker in idle if worker.fresh]
    if fresh:
        return fresh[0]
    starting = (w for w in state.workers.values() if w.phase is WorkerPhase.STARTING and w.fresh)
    return next(starting, None)


def _released(state: State, event: LeasesReleased, outbox: Outbox) -> None:
    if event.epoch < state.epoch:
        outbox.append(RefuseOrder(code="fenced", message=_stale(event.epoch, state.epoch)))
        return
    state.epoch = event.epoch
    for lease_id in event.lease_ids:
        if lease_id in state.bundles:
            _end_bundle(state, lease_id)
            continue
        lease = state.leases.get(lease_id)
        if lease is None:
            # A start that comes after its release is refused.
            remember(state.ended_leases, lease_id)
            continue
        end_lease(state, lease, event.reason or "its lease was released", outbox)
        worker = state.workers.get(lease.worker_id)
        if worker is None:
            continue
        assigning = worker.phase is WorkerPhase.LEASED and lease.phase is not LeasePhase.READY
        starting = worker.phase is WorkerPhase.STARTING and worker.gpus
        if event.kill or lease.terms.kind is not WorkKind.TASK or assigning or starting:
            terminate(state, worker, event.at_s, event.reason or "its lease was released", outbox)
            continue
        worker.lease_id, worker.stop, worker.has_callbacks, worker.saves = "", None, False, False
        worker.spent = worker.spent or bool(worker.gpus)
        if worker.phase is WorkerPhase.LEASED:
            worker.phase = WorkerPhase.IDLE
            worker.since_s = event.at_s
            if worker.spent:
                _retire(worker, event.at_s, outbox)


def _stopped(state: State, event: LeasesStopped, outbox: Outbox) -> None:
    if event.epoch < state.epoch:
        outbox.append(RefuseOrder(code="fenced", message=_stale(event.epoch, state.epoch)))
        return
    state.epoch = event.epoch
    for lease_id in event.lease_ids:
        lease = state.leases.get(lease_id)
        worker = state.workers.get(lease.worker_id) if lease is not None else None
        if worker is not None:
            preempt(worker, event.at_s, event.grace_s, event.reason, outbox)


def _stop_answered(state: State, event: StopAnswered, outbox: Outbox) -> None:
    """Go on at once: a worker that has run its callbacks has nothing more to save.

    One that had none may use its grace to finish, if it is preempted.
    """
    worker = state.workers.get(event.worker_id)
    if worker is None or worker.lease_id != event.lease_id or worker.stop is None:
        return
    over = event.callbacks > 0 or worker.phase is WorkerPhase.TERMINATING
    if over and worker.stop.rung is Rung.NOTICE:
        worker.stop.until_s = event.at_s
        climb(state, worker, event.at_s, outbox)


def _retire(worker: WorkerEntry, at_s: float, outbox: Outbox) -> None:
    worker.phase = WorkerPhase.RETIRING
    worker.since_s = at_s
    outbox.append(RetireWorker(worker_id=worker.worker_id))


Ending = Callable[[State, WorkerEntry, float, str, Outbox], None]
"""Either of ``terminate`` and ``kill``."""


def _end_worker(
    state: State, end: Ending, worker_id: str, at_s: float, reason: str, outbox: Outbox
) -> None:
    worker = state.workers.get(worker_id)
    if worker is None:
        return
    lease = state.leases.get(worker.lease_id)
    if lease is not None and lease.worker_id == worker_id:
        end_lease(state, lease, reason, outbox)
    end(state, worker, at_s, reason, outbox)


def _forked(state: State, event: WorkerForked, outbox: Outbox) -> None:
    worker = state.workers.get(event.worker_id)
    if worker is None:
        return
    worker.pid = event.pid
    lease = state.leases.get(worker.lease_id)
    if lease is None or worker.kind is not WorkKind.DRIVER:
        return
    worker.phase = WorkerPhase.LEASED
    worker.since_s = event.at_s
    lease.phase = LeasePhase.READY
    outbox.append(AnnounceLease(lease_id=lease.terms.lease_id))


def _registered(state: State, event: WorkerRegistered, outbox: Outbox) -> None:
    worker = state.workers.get(event.worker_id)
    if worker is None or worker.phase is not WorkerPhase.STARTING:
        return  # it registered twice, or is to end
    worker.pid = event.pid
    worker.since_s = event.at_s
    lease = state.leases.get(worker.lease_id)
    if lease is None:
        worker.phase = WorkerPhase.IDLE
        return
    worker.phase = WorkerPhase.LEASED
    lease.phase = LeasePhase.READY
    outbox.append(AnnounceLease(lease_id=lease.terms.lease_id))


def _assigned(state: State, event: WorkerAssigned, outbox: Outbox) -> None:
    lease = state.leases.get(event.lease_id)
    if lease is None or not _is_being_assigned(state, lease, event.worker_id):
        return
    lease.phase = LeasePhase.READY
    outbox.append(AnnounceLease(lease_id=event.lease_id))


def _assign_failed(state: State, event: AssignFailed, outbox: Outbox) -> None:
    """End the worker; the lease gets one more try, with a worker of its own."""
    lease = state.leases.get(event.lease_id)
    worker = state.workers.get(event.worker_id)
    if lease is None or worker is None or not _is_being_assigned(state, lease, event.worker_id):
        return
    if lease.retried or lease.terms.gpus:
        end_lease(state, lease, event.reason, outbox)
        terminate(state, worker, event.at_s, event.reason, outbox)
        return
    terminate(state, worker, event.at_s, event.reason, outbox)
    lease.retried = True
    lease.applicable_after_fork = False  # so that the next one is forked for it
    lease.phase = LeasePhase.AWAITING_DEVICES
    lease.worker_id = ""
    _give_worker(state, lease, event.at_s, outbox)


def _is_being_assigned(state: State, lease: LeaseEntry, worker_id: str) -> bool:
    worker = state.workers.get(worker_id)
    return (
        worker is not None
        and lease.worker_id == worker_id
        and lease.phase is LeasePhase.STARTING
        and worker.phase is WorkerPhase.LEASED
    )


def _exited(
    state: State,
    worker_id: str,
    at_s: float,
    cause: str,
    outbox: Outbox,
    *,
    code: str = "worker_died",
) -> None:
    worker = state.workers.pop(worker_id, None)
    if worker is None:
        return
    lease = state.leases.get(worker.lease_id)
    if lease is not None and lease.worker_id == worker_id:
        forget_lease(state, lease)
        if lease.phase is not LeasePhase.READY:
            message = f"the worker died before it served its lease\n{cause}"
            if code == "runtime_env_failed":  # it would fail again: the caller must know
                message = cause
            outbox.append(RefuseLease(lease_id=worker.lease_id, code=code, message=message))
    _retry_awaiting(state, at_s, outbox)


def _retry_awaiting(state: State, at_s: float, outbox: Outbox) -> None:
    for waiting in [
        one for one in state.leases.values() if one.phase is LeasePhase.AWAITING_DEVICES
    ]:
        refusal = gpu_rules.refusal(state, waiting.terms.gpus)
        if refusal:
            end_lease(state, waiting, refusal, outbox)
        else:
            _give_worker(state, waiting, at_s, outbox)


def _retire_answered(state: State, event: RetireAnswered, outbox: Outbox) -> None:
    worker = state.workers.get(event.worker_id)
    if worker is None or worker.phase is not WorkerPhase.RETIRING:
        return
    if worker.gpus and (event.leaves or event.uses_gpus):  # quickly: others wait for its devices
        terminate(state, worker, event.at_s, "its lease of GPUs was released", outbox)
        return
    worker.phase = WorkerPhase.TERMINATING if event.leaves else WorkerPhase.IDLE
    worker.since_s = event.at_s
    worker.reason = "max_calls reached" if worker.spent else "idle"
    if event.leaves:
        worker.stop = Stop(Rung.TERM, event.at_s + state.policy.worker_end_s)
    worker.refused_to_retire += 1
    if worker.gpus:
        worker.gpus = {}
        _retry_awaiting(state, event.at_s, outbox)


def _job_finished(state: State, event: JobFinished, outbox: Outbox) -> None:
    remember(state.finished_jobs, event.job_id)
    _end_work(state, event.job_id, f"{event.job_id} finished", event.at_s, outbox)


def _end_work(state: State, job_id: str, reason: str, at_s: float, outbox: Outbox) -> None:
    """End the leases and workers of a job, except those of actors."""
    for lease in list(state.leases.values()):
        if lease.terms.job_id == job_id and lease.terms.kind is not WorkKind.ACTOR:
            end_lease(state, lease, reason, outbox)
    for worker in state.workers.values():
        if worker.job_id == job_id and worker.kind is not WorkKind.ACTOR:
            terminate(state, worker, at_s, reason, outbox)


def _fenced(state: State, event: NodeFenced, outbox: Outbox) -> None:
    state.fenced = True
    reason = "the cluster gave this node up"
    for lease_id in list(state.bundles):
        _end_bundle(state, lease_id)
    for lease in list(state.leases.values()):
        end_lease(state, lease, reason, outbox)
    for worker in state.workers.values():
        kill(state, worker, event.at_s, reason, outbox)


def _idle_limit_s(policy: Policy, worker: WorkerEntry, *, drained: bool) -> float:
    """Return how long an idle worker is left alone before it is asked to leave."""
    if drained:
        return policy.spent_retire_s
    if not worker.spent:
        return policy.worker_idle_s
    return min(
        policy.spent_retire_s * 2.0 ** min(worker.refused_to_retire, 16), policy.spent_retire_max_s
    )


def _ticked(state: State, event: Ticked, outbox: Outbox) -> None:
    policy = state.policy
    for bundle in list(state.bundles.values()):
        since_s = bundle.prepared_at_s
        if since_s is not None and event.at_s - since_s > policy.prepared_ttl_s:
            _end_bundle(state, bundle.lease_id)
    drained = event.at_s < state.drained_until_s
    warm = policy.warm_workers if drained else 0
    for worker in list(state.workers.values()):
        waited_s = event.at_s - worker.since_s
        if worker.stop is not None:
            climb(state, worker, event.at_s, outbox)
        elif worker.phase is WorkerPhase.STARTING and waited_s > policy.worker_start_s:
            reason = f"it did not register within {policy.worker_start_s:g} s"
            _end_worker(state, kill, worker.worker_id, event.at_s, reason, outbox)
        elif worker.fresh and worker.phase in (WorkerPhase.STARTING, WorkerPhase.IDLE):
            warm += 1
        elif worker.phase is WorkerPhase.IDLE and waited_s >= _idle_limit_s(
            policy, worker, drained=drained
        ):
            _retire(worker, event.at_s, outbox)
    unused = [worker_id for worker_id in event.worker_ids if worker_id not in state.workers]
    for worker_id in unused[: max(0, policy.warm_workers - warm)]:
        state.workers[worker_id] = WorkerEntry(
            worker_id, WorkerPhase.STARTING, event.at_s, event.at_s
        )
        outbox.append(ForkWorker(worker_id=worker_id))
