"""The sentences of a story: what an event, or an attempt of a task, says happened, and why. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_wire.errors import OutOfMemoryError, PreemptedError
from stoker_wire.messages.cluster import Node, WorkerExit
from stoker_wire.messages.elastic import GenerationTurn
from stoker_wire.messages.events import EventKind, Payload, StoryLine, payload_of
from stoker_wire.messages.groups import PlacementGroup
from stoker_wire.messages.node_api import BuildState, EnvironmentBuild
from stoker_wire.messages.schedules import Schedule
from stoker_wire.messages.work import (
    Actor,
    Job,
    SlowRank,
    SlowTask,
    TaskRecord,
    TaskState,
)

if TYPE_CHECKING:
    from stoker_wire.data.spans import Span
    from stoker_wire.messages.control import Event
    from stoker_wire.messages.elastic import ElasticState

_FRAMES = 3
_Sentence = tuple[str, str]
"""What happened, and why."""


def line_of(event: Event) -> StoryLine:
    """Return the line of an event; one of a newer gcs has its kind as its sentence."""
    text, why = event.kind.replace(".", " "), ""
    try:
        payload: Payload | None = payload_of(event)
    except ValueError:
        payload = None
    if isinstance(payload, Node):
        text, why = _node(event.kind, payload)
    elif isinstance(payload, Job):
        text, why = _job(event.kind, payload)
    elif isinstance(payload, Actor):
        text, why = _actor(event.kind, payload)
    elif isinstance(payload, PlacementGroup):
        text, why = _group(event.kind, payload)
    elif isinstance(payload, WorkerExit):
        text, why = _exit(payload)
    elif isinstance(payload, EnvironmentBuild):
        text, why = _build(payload)
    elif isinstance(payload, SlowRank):
        text = f"rank {payload.rank} of job {payload.job_id} is {payload.ratio:g} times slower"
    elif isinstance(payload, GenerationTurn):
        stays = payload.before == payload.after
        text = (
            f"generation {payload.generation} with {payload.replicas} replicas: "
            f"{f'still {payload.after}' if stays else f'{payload.before} -> {payload.after}'}"
        )
        why = payload.why
    elif isinstance(payload, SlowTask):
        text, why = _slow(payload)
    elif isinstance(payload, Schedule):
        text, why = f"schedule {payload.name}: {_verb(event.kind)}", payload.message
    return StoryLine(
        at_s=event.at_s, kind=event.kind, about=event.subject, text=text, why=why, seq=event.seq
    )


def _slow(task: SlowTask) -> _Sentence:
    usual = f"99 of 100 runs of {task.name} take {task.p99_s:.3g} s at most"
    text = f"task {task.task_id} has run for {task.ran_s:.3g} s, while {usual}"
    return text, f"it is in {innermost(task)}"


def innermost(task: SlowTask) -> str:
    """Return the innermost functions of a slow task, as a clause."""
    frames = [line.strip() for line in task.stack.splitlines() if line.startswith("  ")]
    return ", called by ".join(frames[:_FRAMES]) or "code that was not seen"


def _verb(kind: str) -> str:
    return kind.partition(".")[2].replace("_", " ")


def _node(kind: str, node: Node) -> _Sentence:
    name = f"node {node.node_id}"
    match kind:
        case EventKind.NODE_REGISTERED:
            again = "" if node.incarnation == 1 else f" again, as incarnation {node.incarnation}"
            return f"{name} on {node.hostname} registered{again}", ""
        case EventKind.NODE_WARMED:
            return f"{name} has {len(node.warm_kernels)} kernels in its cache", ""
        case EventKind.NODE_PRESSED:
            why = "; ".join(f"{one.kind}: {one.reason}" for one in node.conditions)
            return f"{name} takes no new work", why
        case EventKind.NODE_RELIEVED:
            return f"{name} takes new work again", ""
        case EventKind.NODE_DRAINING if node.drain is not None:
            heir = f"; {node.objects_at} takes over its objects" if node.objects_at else ""
            return f"{name} is {node.drain.text}{heir}", ""
        case EventKind.NODE_DELETED:
            return f"the record of {name} left by retention", ""
        case EventKind.GPU_QUARANTINED | EventKind.GPU_RELEASED:
            out = [one for one in node.devices if one.quarantine]
            why = "; ".join(f"GPU {one.index}: {one.quarantine}" for one in out)
            return f"{name} has {len(out)} GPUs in quarantine", why
    return f"{name} {_verb(kind)}", node.reason


def _job(kind: str, job: Job) -> _Sentence:
    name = f"job {job.job_id}"
    match kind:
        case EventKind.JOB_SUBMITTED:
            how = f" by schedule {job.schedule}" if job.schedule else ""
            return f"{name} was submitted{how}: {job.entrypoint}", ""
        case EventKind.JOB_DELAYED:
            return f"the driver of {name} waits", job.message
        case EventKind.JOB_STARTED:
            where = f" on node {job.node_id}" if job.node_id else f" on {job.hostname}"
            lease = f" under lease {job.lease_id}" if job.lease_id else ""
            attempt = f", attempt {job.attempt}" if job.attempt > 1 else ""
            return f"the driver of {name} started{where}{lease}{attempt}", ""
        case EventKind.JOB_CHANGED:
            return f"the driver of {name} attached", ""
        case EventKind.JOB_HINTED:
            return f"{name} said how fast it is", job.elastic.hints_problem if job.elastic else ""
        case EventKind.JOB_SCALED:
            return _scaling(name, job.elastic)
        case EventKind.JOB_RETRYING:
            last = job.attempts[-1] if job.attempts else None
            which = f"attempt {last.attempt}" if last else "an attempt"
            ended = "was preempted" if last and last.preempted else "failed"
            where = f" on node {last.node_id}" if last and last.node_id else ""
            return (
                f"{which} of {name} {ended}{where}, and another follows",
                last.cause if last else "",
            )
        case EventKind.JOB_FINISHED:
            code = "" if job.exit_code is None else f" with exit code {job.exit_code}"
            return f"{name} is {job.state}{code}", job.message
    return f"{name} was {_verb(kind)}", job.message


def _scaling(name: str, state: ElasticState | None) -> _Sentence:
    if state is None:
        return f"{name} is rigid from now on", ""
    has = f"generation {state.generation} with {len(state.replicas)} replicas"
    if state.offer is not None:
        count = len(state.offer.replicas)
        return f"{name}, {has}, was offered {count}", state.offer.reason
    return f"{name} has {has}", ""


def _actor(kind: str, actor: Actor) -> _Sentence:
    name = f"actor {actor.actor_id}"
    why = actor.death_cause.message if actor.death_cause else ""
    match kind:
        case EventKind.ACTOR_CREATED:
            owner = f" by {actor.owner.peer_id}" if actor.owner else ""
            return f"{name} ({actor.class_name}) was created{owner}", actor.pending_reason
        case EventKind.ACTOR_SUPPLIED:
            return f"the arguments of {name} arrived", ""
        case EventKind.ACTOR_DELAYED:
            return f"{name} waits for a lease", actor.pending_reason
        case EventKind.ACTOR_PLACED:
            where = f"node {actor.node_id}, worker {actor.worker_id}"
            return f"{name} was placed on {where}, under lease {actor.lease_id}", ""
        case EventKind.ACTOR_STARTED:
            return f"{name} is ALIVE on node {actor.node_id}", ""
        case EventKind.ACTOR_SAVED:
            return f"{name} saved its state", actor.state_object
        case EventKind.ACTOR_RESTARTING:
            code = actor.death_cause.code if actor.death_cause is not None else ""
            oom = code == OutOfMemoryError.code
            left = actor.restarts_left(oom=oom)
            how = f"restarts ({'unlimited' if left is None else left} restarts left)"
            if code == PreemptedError.code:
                how = "was preempted and restarts"
            elif oom:
                how = f"was out of memory and {how}"
            return f"{name} {how}", why
        case EventKind.ACTOR_DIED:
            return f"{name} died", why
    return f"{name} {_verb(kind)}", why


def _group(kind: str, group: PlacementGroup) -> _Sentence:
    name = f"placement group {group.group_id}"
    match kind:
        case EventKind.GROUP_CREATED:
            return f"{name} of {len(group.bundles)} bundles was created", ""
        case EventKind.GROUP_DELAYED:
            return f"{name} waits for room", group.reason
        case EventKind.GROUP_PLACED:
            nodes = ", ".join(sorted({one.node_id for one in group.placements.values()}))
            return f"{name} was placed on {nodes}", ""
        case EventKind.GROUP_RESCHEDULING:
            return f"{name} is placed again", group.reason
        case EventKind.GROUP_SHRUNK:
            left = len(group.placements)
            return f"{name} has {left} bundles left", group.reason
    return f"{name} was {_verb(kind)}", group.reason


def _exit(exit_: WorkerExit) -> _Sentence:
    how = "was preempted" if exit_.preempted else "ended"
    lease = f" (lease {exit_.lease_id})" if exit_.lease_id else ""
    ended = f"exit code {exit_.exit_code}" if exit_.signal is None else f"signal {exit_.signal}"
    text = f"worker {exit_.worker_id} on node {exit_.node_id}{lease} {how} with {ended}"
    return text, exit_.cause


def _build(build: EnvironmentBuild) -> _Sentence:
    what = f"{build.what} for job {build.job_id}"
    match build.state:
        case BuildState.READY:
            return f"node {build.node_id} has installed {what}, in {build.took_s:.1f} s", ""
        case BuildState.FAILED:
            return (
                f"node {build.node_id} cannot install {what}, after {build.took_s:.1f} s",
                build.message,
            )
    return f"node {build.node_id} installs {what}", ""


def lines_of_attempt(record: TaskRecord, before: TaskRecord | None = None) -> list[StoryLine]:
    """Return the lines of an attempt, which follows the attempt ``before``: submitted, begun, ended."""
    name = f"attempt {record.attempt} of task {record.task_id}"
    lines: list[StoryLine] = []

    def add(at_s: float | None, kind: str, text: str, why: str = "") -> None:
        if at_s is not None:
            lines.append(StoryLine(at_s=at_s, kind=kind, about=record.task_id, text=text, why=why))

    began_s, ended_s = record.started_at_s, record.ended_at_s
    if before is None or record.submitted_at_s != before.submitted_at_s:
        owner = f" by {record.owner_id}" if record.owner_id else ""
        waits = record.waiting_for if record.state is TaskState.WAITING else ""
        text = f"{name} ({record.name}) was submitted{owner}"
        add(record.submitted_at_s, "task.submitted", text, waits)
    where = f" on node {record.node_id}" if record.node_id else ""
    where += f", worker {record.worker_id}" if record.worker_id else ""
    actor = f" of actor {record.actor_id}" if record.actor_id else ""
    waited = _after(record.submitted_at_s if before is None else None, began_s)
    add(began_s, "task.started", f"{name} began{where}{actor}{waited}")
    if record.spans is not None:
        for span in record.spans.items:
            add(span.started_at_s, "task.span", _span(span))
        if left := record.spans.left_out:
            add(ended_s, "task.span", f"{left} more spans were beyond the bounds of an attempt")
    if record.state.terminal:
        # Of one whose worker died at once, nobody has told when it began.
        ran = _after(began_s, ended_s) if began_s is not None else where
        at_s = ended_s or began_s or record.submitted_at_s
        add(at_s, "task.ended", f"{name} is {record.state}{ran}", _why(record))
    return lines


def _span(span: Span) -> str:
    ended = f", ended by {span.error}" if span.error else ""
    given = ", ".join(f"{name}={value}" for name, value in span.attributes.items())
    named = f"{span.name} ({given})" if given else span.name
    return f"{named} took {max(0.0, span.ended_at_s - span.started_at_s):.3f} s{ended}"


def _after(from_s: float | None, to_s: float | None) -> str:
    if from_s is None or to_s is None:
        return ""
    return f" after {max(0.0, to_s - from_s):.3f} s"


def _why(record: TaskRecord) -> str:
    if record.error is None:
        return ""
    return f"{record.error.code}: {record.error.message}"
