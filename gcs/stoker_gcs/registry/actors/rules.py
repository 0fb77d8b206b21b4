"""The state machine of an actor: pure rules over its record (called by ``actors.registry``).

===================  ==================================  ====================
from                 event                               to
===================  ==================================  ====================
(none)               created                             PENDING
PENDING, RESTARTING  arguments supplied                  same, may be placed
PENDING, RESTARTING  placed on a worker                  same, with an address
PENDING, RESTARTING  constructor returned                ALIVE
PENDING, RESTARTING  constructor raised, or infeasible   DEAD
ALIVE                it ended itself                     DEAD
ALIVE                it ended itself by a failure        RESTARTING or DEAD
not DEAD             worker or node lost, restarts left  RESTARTING
not DEAD             worker or node lost, none left      DEAD
not DEAD             preempted                           RESTARTING
not DEAD             killed, restarts left               RESTARTING
not DEAD             killed, no restart; its job ends    DEAD
not DEAD             its owner ended                     DEAD
===================  ==================================  ====================

Each start has its own incarnation; whatever an older one reports is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

import msgspec

from stoker_gcs.registry.leases import delete_lease_row, releasing_lease_row, upsert_lease_row
from stoker_gcs.state import schema
from stoker_gcs.state.records import RecordTable, Transition
from stoker_gcs.store.changes import Operation, Update
from stoker_wire.errors import FencedError, OutOfMemoryError, PreemptedError
from stoker_wire.messages.cluster import LeaseKind
from stoker_wire.messages.common import ErrorInfo
from stoker_wire.messages.events import EventKind
from stoker_wire.messages.work import DETACHED_JOB, Actor, ActorState, CreateActor, ReportActor

if TYPE_CHECKING:
    from stoker_wire.messages.cluster import GrantedLease, WorkerExit

ACTORS: RecordTable[Actor] = RecordTable(
    schema.ACTORS,
    Actor,
    lambda actor: {
        "actor_id": actor.actor_id,
        "job_id": actor.job_id,
        "state": actor.state.value,
        "node_id": actor.node_id,
        "namespace": actor.namespace,
        "name": actor.name,
        "class_name": actor.class_name,
        "live_name": live_name(actor.namespace, actor.name)
        if actor.name and actor.state is not ActorState.DEAD
        else None,
        "incarnation": actor.incarnation,
    },
    label="actor",
    fences=("incarnation",),
)
TRANSITIONS = {
    ActorState.PENDING: frozenset({ActorState.ALIVE, ActorState.RESTARTING, ActorState.DEAD}),
    ActorState.ALIVE: frozenset({ActorState.RESTARTING, ActorState.DEAD}),
    ActorState.RESTARTING: frozenset({ActorState.ALIVE, ActorState.RESTARTING, ActorState.DEAD}),
    ActorState.DEAD: frozenset[ActorState](),
}
MAX_PAUSE_S = 300.0
"""The longest pause before a restart, unless ``restart_delay_s`` itself is longer."""
OOM_DELAY_S = 1.0
"""The first pause after a death for want of memory: others need time to give some back."""
_DOUBLINGS = 40
SHOWN_LINES = 10
"""Lines of a process's last output in its cause of death; ``extra`` has all that were recorded."""
LIVING = (ActorState.PENDING.value, ActorState.ALIVE.value, ActorState.RESTARTING.value)
AWAITS_ARGUMENTS = "its constructor's arguments are not there yet"
_replace = msgspec.structs.replace
_encode = msgspec.msgpack.Encoder().encode


def live_name(namespace: str, name: str) -> str:
    """Return what must be unique among living actors."""
    return f"{namespace}/{name}"


def created(body: CreateActor, namespace: str, now_s: float, *, origin_job_id: str = "") -> Actor:
    """Return the actor that a request creates."""
    return Actor(
        actor_id=body.actor_id,
        job_id=body.demand.job_id,
        origin_job_id=origin_job_id,
        class_name=body.class_name,
        state=ActorState.PENDING,
        name=body.name,
        namespace=namespace,
        detached=body.detached,
        max_restarts=body.max_restarts,
        max_oom_restarts=body.max_oom_restarts,
        restart_delay_s=body.restart_delay_s,
        max_task_retries=body.max_task_retries,
        resources=body.demand.resources,
        created_at_s=now_s,
        handle_info=body.handle_info,
        owner=body.owner,
        awaits_arguments=body.awaits_arguments,
        saves_state=body.saves_state,
        last_alive=-1,
        pending_reason=AWAITS_ARGUMENTS if body.awaits_arguments else "",
    )


def lease_job(actor: Actor) -> str:
    """Return the job with whose end the actor's lease ends; a detached actor's ends with none."""
    return DETACHED_JOB if actor.detached else actor.job_id


def waits(actor: Actor) -> bool:
    """Return whether the actor needs a lease."""
    unplaced = actor.state in (ActorState.PENDING, ActorState.RESTARTING) and not actor.lease_id
    return unplaced and not actor.awaits_arguments


def delayed(actor: Actor, reason: str) -> Transition[Actor] | None:
    """Record why it waits; None if for the same reason as before."""
    if not waits(actor) or actor.pending_reason == reason:
        return None
    return Transition(_replace(actor, pending_reason=reason), EventKind.ACTOR_DELAYED)


def supplied(actor: Actor, spec: CreateActor, payload: bytes) -> Transition[Actor] | None:
    """Add the constructor's arguments; None if they were there before, or it is dead."""
    if actor.state is ActorState.DEAD or not actor.awaits_arguments:
        return None
    then = _replace(actor, awaits_arguments=False, pending_reason="")
    whole = _encode(_replace(spec, payload=payload, awaits_arguments=False))
    store = Update(schema.ACTORS, {"actor_id": actor.actor_id}, {"spec": whole})
    return Transition(then, EventKind.ACTOR_SUPPLIED, operations=(store,))


def placed(actor: Actor, granted: GrantedLease, incarnation: int) -> Transition[Actor] | None:
    """Put it on the worker leased for this incarnation; None if that is no longer wanted."""
    if not waits(actor) or actor.incarnation != incarnation:
        return None
    then = _replace(
        actor,
        node_id=granted.lease.node_id,
        node_incarnation=granted.lease.node_incarnation,
        worker_id=granted.worker_id,
        lease_id=granted.lease.lease_id,
        pid=granted.pid,
        address=granted.address,
        pending_reason="",
        restart_at_s=None,
    )
    lease = _replace(granted.lease, kind=LeaseKind.ACTOR, actor_id=actor.actor_id)
    return Transition(
        then,
        EventKind.ACTOR_PLACED,
        operations=(upsert_lease_row(lease, job_id=lease_job(actor)),),
    )


def reported(actor: Actor, body: ReportActor, now_s: float) -> Transition[Actor] | None:
    """Apply its worker's report: how the constructor ended, or that the actor ends itself."""
    if actor.incarnation != body.incarnation:
        raise FencedError(
            f"actor {actor.actor_id} is at incarnation {actor.incarnation}, this report is of "
            f"{body.incarnation}\n"
            "end this worker"
        )
    if body.state is ActorState.DEAD:
        cause = body.error or ErrorInfo(code="actor_died", message="the actor ended itself")
        return worker_lost(
            actor, cause, now_s, lease_id=actor.lease_id, restart=body.restart, release=True
        )
    if actor.state is ActorState.DEAD:
        raise FencedError(f"actor {actor.actor_id} is dead\nend this worker")
    if body.state_object:
        if actor.state_object == body.state_object:
            return None
        saved = _replace(actor, state_object=body.state_object, saved_at_s=now_s)
        return Transition(saved, EventKind.ACTOR_SAVED)
    if ActorState.ALIVE not in TRANSITIONS[actor.state]:
        return None
    then = _replace(
        actor,
        state=ActorState.ALIVE,
        started_at_s=now_s,
        worker_id=body.worker_id or actor.worker_id,
        pending_reason="",
    )
    return Transition(then, EventKind.ACTOR_STARTED)


def died(
    actor: Actor, cause: ErrorInfo, now_s: float, *, release: bool
) -> Transition[Actor] | None:
    """End it. ``release``: its worker may still run and must be killed."""
    if ActorState.DEAD not in TRANSITIONS[actor.state]:
        return None
    then = _replace(
        actor, state=ActorState.DEAD, ended_at_s=now_s, death_cause=cause, pending_reason=""
    )
    return Transition(then, EventKind.ACTOR_DIED, operations=_end_lease(actor, release))


def worker_lost(
    actor: Actor,
    cause: ErrorInfo,
    now_s: float,
    *,
    lease_id: str,
    restart: bool = True,
    release: bool = False,
    moves: bool = False,
) -> Transition[Actor] | None:
    """Restart it, or end it with the cause: the worker behind ``lease_id`` is gone.

    One that was preempted, or ``moves`` to another node, is restarted whatever restarts are left, and uses
    up none.
    """
    if ActorState.RESTARTING not in TRANSITIONS[actor.state] or actor.lease_id != lease_id:
        return None
    preempted = moves or cause.code == PreemptedError.code
    oom = not preempted and cause.code == OutOfMemoryError.code
    may_restart = preempted or actor.restarts_left(oom=oom) != 0
    if not (restart and may_restart):
        return died(actor, cause, now_s, release=release)
    pause_s = 0.0 if preempted else _pause_s(actor, oom=oom)
    then = _replace(
        actor,
        state=ActorState.RESTARTING,
        restart_at_s=now_s + pause_s if pause_s else None,
        incarnation=actor.incarnation + 1,
        restarts=actor.restarts + (not preempted),
        oom_restarts=actor.oom_restarts + oom,
        preemptions=actor.preemptions + preempted,
        node_id="",
        node_incarnation=0,
        worker_id="",
        lease_id="",
        pid=0,
        address=None,
        started_at_s=None,
        ran_before_s=actor.ran_before_s + now_s - (actor.started_at_s or now_s),
        death_cause=cause,
        last_alive=actor.incarnation if actor.state is ActorState.ALIVE else actor.last_alive,
        pending_reason=AWAITS_ARGUMENTS if actor.awaits_arguments else f"restarts: {cause.message}",
    )
    return Transition(then, EventKind.ACTOR_RESTARTING, operations=_end_lease(actor, release))


def _pause_s(actor: Actor, *, oom: bool) -> float:
    """Return how long a restart waits: twice as long each time, a quarter more or less for each actor."""
    delay_s = max(actor.restart_delay_s, OOM_DELAY_S) if oom else actor.restart_delay_s
    if not delay_s:
        return 0.0
    earlier = actor.oom_restarts if oom else actor.restarts - actor.oom_restarts
    whole_s = delay_s * 2.0 ** min(earlier, _DOUBLINGS)
    part = crc32(f"{actor.actor_id} {actor.incarnation}".encode()) / 2**32
    return min(whole_s, max(MAX_PAUSE_S, delay_s)) * (0.75 + part / 2)


def exit_cause(exit_: WorkerExit) -> ErrorInfo:
    """Return the forensics of a worker's exit as a cause of death."""
    how = f"exit code {exit_.exit_code}" if exit_.signal is None else f"signal {exit_.signal}"
    text = f"its worker {exit_.worker_id} ended: {exit_.cause or how}"
    if exit_.memory is not None:
        text += f".\n{exit_.memory.text}"
    if exit_.last_log_lines:
        lines = "".join(f"\n    {line}" for line in exit_.last_log_lines[-SHOWN_LINES:])
        text += f".\nlast output:{lines}"
    code = PreemptedError.code if exit_.preempted else "actor_died"
    return ErrorInfo(
        code=OutOfMemoryError.code if exit_.oom else code,
        message=text,
        extra=msgspec.to_builtins(exit_),
    )


def _end_lease(actor: Actor, release: bool) -> tuple[Operation, ...]:
    end = releasing_lease_row if release else delete_lease_row
    return end(actor.lease_id)
