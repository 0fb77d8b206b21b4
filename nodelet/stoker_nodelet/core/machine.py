"""``step``: the one place where leases meet workers.

A worker that ran a job's code serves only that job again; one that had a GPU serves nobody again
(its CUDA context holds the device's memory, and its visible devices are fixed). A GPU is free only
when the process that used it is gone, so a lease may be parked until then.
"""

from __future__ import annotations

from typing import assert_never

from stoker_nodelet.core.events import (
    AnnounceLease,
    AssignFailed,
    AssignWorker,
    Command,
    Event,
    ForkFailed,
    ForkWorker,
    JobFinished,
    KillWorker,
    LeaseRequested,
    LeasesReleased,
    NodeFenced,
    NodeRegistered,
    RefuseLease,
    RetireAnswered,
    RetireWorker,
    Ticked,
    WorkerAssigned,
    WorkerCondemned,
    WorkerExited,
    WorkerForked,
    WorkerRegistered,
    WorkerSpent,
)
from stoker_nodelet.core.state import (
    GPU_SLACK,
    HeldLease,
    LeasePhase,
    Policy,
    State,
    Worker,
    WorkerPhase,
    remember,
)
from stoker_wire.messages.cluster import LeaseKind


def step(state: State, event: Event) -> list[Command]:
    """Apply ``event`` to ``state`` and return what is to be done, in order."""
    match event:
        case NodeRegistered():
            state.incarnation = event.incarnation
            return []
        case NodeFenced():
            return _fenced(state)
        case LeaseRequested():
            return _requested(state, event)
        case LeasesReleased():
            return _released(state, event)
        case WorkerForked():
            return _forked(state, event)
        case ForkFailed():
            return _gone(state, event.worker_id, 0.0, event.reason, code=event.code)
        case WorkerRegistered():
            return _registered(state, event)
        case WorkerAssigned():
            return _assigned(state, event)
        case AssignFailed():
            return _assign_failed(state, event)
        case WorkerExited():
            return _gone(state, event.worker_id, event.at_s, event.cause)
        case WorkerCondemned():
            return _condemn(state, event.worker_id, event.at_s, event.reason)
        case WorkerSpent():
            if event.worker_id in state.workers:
                state.workers[event.worker_id].spent = True
            return []
        case RetireAnswered():
            return _retire_answered(state, event)
        case JobFinished():
            return _job_finished(state, event)
        case Ticked():
            return _ticked(state, event)
        case _:
            assert_never(event)


def _requested(state: State, event: LeaseRequested) -> list[Command]:
    lease = event.lease
    lease_id = lease.lease_id

    def refuse(code: str, message: str) -> list[Command]:
        return [RefuseLease(lease_id=lease_id, code=code, message=message)]

    if lease.node_incarnation != state.incarnation:
        return refuse(
            "fenced",
            f"{lease_id} is for incarnation {lease.node_incarnation} of this node, "
            f"which is now incarnation {state.incarnation}",
        )
    if event.epoch < state.epoch:
        return refuse("fenced", _stale(event.epoch, state.epoch))
    state.epoch = event.epoch
    if lease_id in state.ended:
        return refuse("conflict", f"{lease_id} has ended on this node")
    if lease_id in state.leases:
        ready = state.leases[lease_id].phase is LeasePhase.READY
        return [AnnounceLease(lease_id=lease_id)] if ready else []
    if lease.job_id in state.finished_jobs and lease.kind is not LeaseKind.ACTOR:
        return refuse("conflict", f"{lease.job_id} has finished")
    over = _overcommitted(state, lease.gpus, with_dying=False)
    if over:
        return refuse("conflict", f"{lease_id}: {over}")
    held = HeldLease(lease, LeasePhase.PARKED, event.env_key, event.adoptable, event.worker_id)
    state.leases[lease_id] = held
    return _place(state, held, event.at_s)


def _stale(epoch: int, seen: int) -> str:
    return f"the scheduler of epoch {epoch} no longer leads: this node has heard epoch {seen}"


def _overcommitted(state: State, gpus: dict[int, float], *, with_dying: bool) -> str:
    """Why ``gpus`` do not fit; a new lease counts those that wait for dying workers as well."""
    use = state.gpu_use(with_dying=with_dying)
    if not with_dying:
        for held in state.leases.values():
            if held.phase is LeasePhase.PARKED:
                for index, share in held.lease.gpus.items():
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


def _place(state: State, held: HeldLease, at_s: float) -> list[Command]:
    """Give a parked lease a worker, unless a dying one still holds its devices."""
    if _overcommitted(state, held.lease.gpus, with_dying=True):
        return []
    held.phase = LeasePhase.STARTING
    worker = _pick(state, held)
    if worker is None:
        worker = Worker(held.next_worker_id, WorkerPhase.STARTING, at_s, at_s)
        state.workers[worker.worker_id] = worker
        _bind(worker, held)
        return [ForkWorker(worker_id=worker.worker_id, lease_id=held.lease.lease_id)]
    _bind(worker, held)
    if worker.phase is WorkerPhase.STARTING:
        return []  # the reply to its registration carries the lease
    worker.phase = WorkerPhase.LEASED
    worker.since_s = at_s
    return [AssignWorker(worker_id=worker.worker_id, lease_id=held.lease.lease_id)]


def _bind(worker: Worker, held: HeldLease) -> None:
    lease = held.lease
    held.worker_id = worker.worker_id
    worker.lease_id = lease.lease_id
    worker.kind = lease.kind
    worker.job_id = lease.job_id
    worker.env_key = held.env_key
    worker.actor_id = lease.actor_id
    worker.gpus = dict(lease.gpus)


def _pick(state: State, held: HeldLease) -> Worker | None:
    """The best worker there is: one of the job (the last used), else a fresh one."""
    lease = held.lease
    if lease.kind is LeaseKind.DRIVER:
        return None
    idle = [w for w in state.workers.values() if w.phase is WorkerPhase.IDLE and not w.spent]
    if lease.kind is LeaseKind.TASK and not lease.gpus:
        same = [w for w in idle if w.job_id == lease.job_id and w.env_key == held.env_key]
        if same:
            return max(same, key=lambda worker: worker.since_s)
    if not held.adoptable:
        return None
    fresh = [worker for worker in idle if worker.fresh]
    if fresh:
        return fresh[0]
    starting = (w for w in state.workers.values() if w.phase is WorkerPhase.STARTING and w.fresh)
    return next(starting, None)


def _released(state: State, event: LeasesReleased) -> list[Command]:
    if event.epoch < state.epoch:
        first = event.lease_ids[0] if event.lease_ids else ""
        return [
            RefuseLease(lease_id=first, code="fenced", message=_stale(event.epoch, state.epoch))
        ]
    state.epoch = event.epoch
    commands: list[Command] = []
    for lease_id in event.lease_ids:
        held = state.leases.get(lease_id)
        if held is None:
            remember(state.ended, lease_id)  # a start that comes after its release is refused
            continue
        commands += _end_lease(state, held, event.reason or "its lease was released")
        worker = state.workers.get(held.worker_id)
        if worker is None:
            continue
        assigning = worker.phase is WorkerPhase.LEASED and held.phase is not LeasePhase.READY
        starting = worker.phase is WorkerPhase.STARTING and worker.gpus
        if event.kill or held.lease.kind is not LeaseKind.TASK or assigning or starting:
            commands += _kill(worker, event.at_s, event.reason or "its lease was released")
            continue
        worker.lease_id = ""
        worker.spent = worker.spent or bool(worker.gpus)
        if worker.phase is WorkerPhase.LEASED:
            worker.phase = WorkerPhase.IDLE
            worker.since_s = event.at_s
            if worker.spent:
                commands += _retire(worker, event.at_s)
    return commands


def _retire(worker: Worker, at_s: float) -> list[Command]:
    worker.phase = WorkerPhase.RETIRING
    worker.since_s = at_s
    return [RetireWorker(worker_id=worker.worker_id)]


def _end_lease(state: State, held: HeldLease, reason: str) -> list[Command]:
    lease_id = held.lease.lease_id
    del state.leases[lease_id]
    remember(state.ended, lease_id)
    if held.phase is LeasePhase.READY:
        return []
    return [RefuseLease(lease_id=lease_id, code="conflict", message=f"{lease_id}: {reason}")]


def _kill(worker: Worker, at_s: float, reason: str) -> list[Command]:
    if worker.phase is WorkerPhase.DYING:
        return []
    worker.phase = WorkerPhase.DYING
    worker.since_s = at_s
    worker.reason = reason
    return [KillWorker(worker_id=worker.worker_id, reason=reason)]


def _condemn(state: State, worker_id: str, at_s: float, reason: str) -> list[Command]:
    worker = state.workers.get(worker_id)
    if worker is None:
        return []
    held = state.leases.get(worker.lease_id)
    serves = held is not None and held.worker_id == worker_id
    ended = _end_lease(state, held, reason) if held is not None and serves else []
    return ended + _kill(worker, at_s, reason)


def _forked(state: State, event: WorkerForked) -> list[Command]:
    worker = state.workers.get(event.worker_id)
    if worker is None:
        return []
    worker.pid = event.pid
    held = state.leases.get(worker.lease_id)
    if held is None or worker.kind is not LeaseKind.DRIVER:
        return []
    worker.phase = WorkerPhase.LEASED
    worker.since_s = event.at_s
    held.phase = LeasePhase.READY
    return [AnnounceLease(lease_id=held.lease.lease_id)]


def _registered(state: State, event: WorkerRegistered) -> list[Command]:
    worker = state.workers.get(event.worker_id)
    if worker is None or worker.phase is not WorkerPhase.STARTING:
        return []  # said twice, or it is to die
    worker.pid = event.pid
    worker.address = event.address
    worker.since_s = event.at_s
    held = state.leases.get(worker.lease_id)
    if held is None:
        worker.phase = WorkerPhase.IDLE
        return []
    worker.phase = WorkerPhase.LEASED
    held.phase = LeasePhase.READY
    return [AnnounceLease(lease_id=held.lease.lease_id)]


def _assigned(state: State, event: WorkerAssigned) -> list[Command]:
    held = state.leases.get(event.lease_id)
    if held is None or not _is_being_assigned(state, held, event.worker_id):
        return []
    held.phase = LeasePhase.READY
    return [AnnounceLease(lease_id=event.lease_id)]


def _assign_failed(state: State, event: AssignFailed) -> list[Command]:
    """The worker is of no use; the lease gets one more try, with a worker of its own."""
    held = state.leases.get(event.lease_id)
    worker = state.workers.get(event.worker_id)
    if held is None or worker is None or not _is_being_assigned(state, held, event.worker_id):
        return []
    if held.retried or held.lease.gpus:
        return _end_lease(state, held, event.reason) + _kill(worker, event.at_s, event.reason)
    commands = _kill(worker, event.at_s, event.reason)
    held.retried = True
    held.adoptable = False
    held.phase = LeasePhase.PARKED
    held.worker_id = ""
    return commands + _place(state, held, event.at_s)


def _is_being_assigned(state: State, held: HeldLease, worker_id: str) -> bool:
    worker = state.workers.get(worker_id)
    return (
        worker is not None
        and held.worker_id == worker_id
        and held.phase is LeasePhase.STARTING
        and worker.phase is WorkerPhase.LEASED
    )


def _gone(
    state: State, worker_id: str, at_s: float, cause: str, *, code: str = "worker_died"
) -> list[Command]:
    worker = state.workers.pop(worker_id, None)
    if worker is None:
        return []
    commands: list[Command] = []
    held = state.leases.get(worker.lease_id)
    if held is not None and held.worker_id == worker_id:
        starting = held.phase is not LeasePhase.READY
        _end_lease(state, held, cause)
        if starting:
            message = f"the worker died before it served its lease\n{cause}"
            if code == "runtime_env_failed":  # it would fail again: the caller must hear of it
                message = cause
            commands.append(RefuseLease(lease_id=worker.lease_id, code=code, message=message))
    return commands + _place_parked(state, at_s)


def _place_parked(state: State, at_s: float) -> list[Command]:
    commands: list[Command] = []
    for parked in [h for h in state.leases.values() if h.phase is LeasePhase.PARKED]:
        commands += _place(state, parked, at_s)
    return commands


def _retire_answered(state: State, event: RetireAnswered) -> list[Command]:
    worker = state.workers.get(event.worker_id)
    if worker is None or worker.phase is not WorkerPhase.RETIRING:
        return []
    if worker.gpus and (event.leaves or event.uses_gpus):  # quickly: others wait for its devices
        return _kill(worker, event.at_s, "its lease of GPUs was released")
    worker.phase = WorkerPhase.DYING if event.leaves else WorkerPhase.IDLE
    worker.since_s = event.at_s
    worker.reason = "max_calls reached" if worker.spent else "idle"
    worker.asked += 1
    if not worker.gpus:
        return []
    worker.gpus = {}
    return _place_parked(state, event.at_s)


def _job_finished(state: State, event: JobFinished) -> list[Command]:
    remember(state.finished_jobs, event.job_id)
    reason = f"{event.job_id} finished"
    commands: list[Command] = []
    for held in list(state.leases.values()):
        if held.lease.job_id == event.job_id and held.lease.kind is not LeaseKind.ACTOR:
            commands += _end_lease(state, held, reason)
    for worker in state.workers.values():
        if worker.job_id == event.job_id and worker.kind is not LeaseKind.ACTOR:
            commands += _kill(worker, event.at_s, reason)
    return commands


def _fenced(state: State) -> list[Command]:
    reason = "the cluster gave this node up"
    commands: list[Command] = []
    for held in list(state.leases.values()):
        commands += _end_lease(state, held, reason)
    for worker in state.workers.values():
        commands += _kill(worker, worker.since_s, reason)
    return commands


def _patience_s(policy: Policy, worker: Worker) -> float:
    """How long an idle worker is left alone before it is asked to leave."""
    if not worker.spent:
        return policy.worker_idle_s
    return min(policy.spent_ask_s * 2.0 ** min(worker.asked, 16), policy.spent_ask_max_s)


def _ticked(state: State, event: Ticked) -> list[Command]:
    policy = state.policy
    commands: list[Command] = []
    warm = 0
    for worker in list(state.workers.values()):
        waited_s = event.at_s - worker.since_s
        if worker.phase is WorkerPhase.DYING and waited_s > policy.worker_end_s:
            worker.since_s = event.at_s
            commands.append(KillWorker(worker_id=worker.worker_id, reason=worker.reason))
        elif worker.phase is WorkerPhase.STARTING and waited_s > policy.worker_start_s:
            reason = f"it did not register within {policy.worker_start_s:g} s"
            commands += _condemn(state, worker.worker_id, event.at_s, reason)
        elif worker.fresh and worker.phase in (WorkerPhase.STARTING, WorkerPhase.IDLE):
            warm += 1
        elif worker.phase is WorkerPhase.IDLE and waited_s >= _patience_s(policy, worker):
            commands += _retire(worker, event.at_s)
    unused = [worker_id for worker_id in event.worker_ids if worker_id not in state.workers]
    for worker_id in unused[: max(0, policy.warm_workers - warm)]:
        state.workers[worker_id] = Worker(worker_id, WorkerPhase.STARTING, event.at_s, event.at_s)
        commands.append(ForkWorker(worker_id=worker_id))
    return commands
