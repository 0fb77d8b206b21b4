"""Elastic jobs of a cluster's event log, to be run again in virtual time under another policy.

Of each job the log has its limits and, in its hints, the parameters of its step times and the noise of its
gradients as it went on. It did as much work as its last progress says; of one that goes on, what it declared.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stoker_goodput.throughput import ThroughputParams
from stoker_scheduler.elastic.candidates import hints_of, limits_of
from stoker_scheduler.simulation.elastic.profiles import Model, StepTime
from stoker_scheduler.simulation.elastic.workloads import WorkloadJob
from stoker_scheduler.simulation.inputs import InputError
from stoker_wire.http.tolerant import convert_known
from stoker_wire.messages.control import Event
from stoker_wire.messages.events import payload_as
from stoker_wire.messages.work import Job, JobState

if TYPE_CHECKING:
    from pathlib import Path

    from stoker_goodput.batches import BatchLimits
    from stoker_goodput.efficiency import GradientNoise
    from stoker_wire.messages.elastic import ElasticState

EPOCHS = 20
"""Parts of a job for which the noise is kept apart."""


@dataclass(frozen=True)
class RecordedModel(Model):
    """A job as it was recorded: its step times are those of its parameters, on any placement."""

    params: ThroughputParams | None = None

    def step_time(self, placement: tuple[int, ...], local_batch: int) -> StepTime:
        """Return the times of a pass."""
        assert self.params is not None
        step = float(self.params.step_time(len(placement), sum(placement), local_batch))
        return StepTime(step, step - float(self.params.accumulation_time(local_batch)))


@dataclass(frozen=True, slots=True)
class Recording:
    """The jobs of a log that can be run again, how long those took that have ended, and what is left out."""

    jobs: tuple[WorkloadJob, ...]
    completion_s: tuple[float, ...]
    left_out: tuple[str, ...]
    """Jobs that said nothing of their speed, or of what they have done."""


def read_events(path: Path, gpus: int) -> Recording:
    """Return the elastic jobs of a file of events: JSON lines, or what ``stoker list events --json`` prints.

    ``gpus`` is what the cluster has. Raises InputError, with the line, for what is no event, and if no job is
    left.
    """
    states: dict[str, list[ElasticState]] = {}
    last: dict[str, Job] = {}
    for event in _events(path):
        job = payload_as(event, Job) if event.kind.startswith("job.") else None
        if job is not None:
            last[job.job_id] = job
            if job.elastic is not None:
                states.setdefault(job.job_id, []).append(job.elastic)
    jobs, took_s, left_out = [], [], []
    begin_s = min((last[name].created_at_s for name in states), default=0.0)
    for name, some in states.items():
        job = last[name]
        model = _model(name, job, some)
        if model is None:
            left_out.append(name)
            continue
        jobs.append(_workload_job(job, model, some, begin_s, gpus))
        if job.ended_at_s is not None:
            took_s.append(job.ended_at_s - job.created_at_s)
    if not jobs:
        raise InputError(
            f"{path}: no elastic job of it has said how fast it is, and what it has done "
            f"({len(states)} elastic jobs of {len(last)})\n"
            "take the events of a time in which some ran: stoker list events --filter kind=job. --json"
        )
    jobs.sort(key=lambda one: (one.submitted_s, one.name))
    return Recording(tuple(jobs), tuple(took_s), tuple(left_out))


def _events(path: Path) -> Iterable[Event]:
    """Yield the events of a file in their order."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}") from None
    try:
        whole = json.loads(text)
        rows = whole.get("items", [whole]) if isinstance(whole, dict) else whole
        numbered: list[tuple[int, Any]] = [(1, row) for row in rows]
    except ValueError:
        numbered = []
        for line, one in enumerate(text.splitlines(), 1):
            if one.strip():
                numbered.append((line, _row(path, line, one)))
    events = []
    for line, row in numbered:
        try:
            events.append(convert_known(row, Event))
        except (msgspec.ValidationError, TypeError) as error:
            raise InputError(f"{path}:{line}: this is no event of Stoker's: {error}") from None
    return sorted(events, key=lambda event: event.seq)


def _row(path: Path, line: int, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InputError(f"{path}:{line}: this is no JSON: {error}") from None


def _model(name: str, job: Job, states: Sequence[ElasticState]) -> RecordedModel | None:
    limits = limits_of(states[-1].scaling)
    params: ThroughputParams | None = None
    rows: list[tuple[float, GradientNoise]] = []
    for state in states:
        found = hints_of(state.hints, limits)
        params = found.params or params
        if found.noise is not None and found.progress > (rows[-1][0] if rows else 0.0):
            rows.append((found.progress, found.noise))
    if params is None or not rows:
        return None
    done = states[-1].hints.done_fraction if states[-1].hints is not None else None
    if job.state is not JobState.SUCCEEDED and done:
        rows.append((rows[-1][0] / done, rows[-1][1]))
    chosen = sorted({*np.linspace(0, len(rows) - 1, min(EPOCHS, len(rows))).round().astype(int)})
    return _of(name, limits, params, [rows[index] for index in chosen])


def _of(
    name: str,
    limits: BatchLimits,
    params: ThroughputParams,
    rows: Sequence[tuple[float, GradientNoise]],
) -> RecordedModel:
    batches = np.array(sorted({limits.min_batch, limits.max_batch}), dtype=np.float64)
    goals = np.array([progress / limits.min_batch for progress, _ in rows])
    parts = np.diff(goals, prepend=0.0)
    gains = [
        [float(noise.gain(batch / limits.min_batch)) for _, noise in rows] for batch in batches
    ]
    return RecordedModel(
        name=name,
        limits=limits,
        placements={},
        scalability=np.zeros((0, 5)),
        batches=batches,
        goals=goals,
        iterations=np.cumsum(parts / np.array(gains), axis=1),
        sqr=np.array([[noise.sqr for _, noise in rows]] * len(batches)),
        var=np.array([[noise.var for _, noise in rows]] * len(batches)),
        params=params,
    )


def _workload_job(
    job: Job, model: RecordedModel, states: Sequence[ElasticState], begin_s: float, gpus: int
) -> WorkloadJob:
    """Return a job with the replicas that it had most often, and the batch that it had last."""
    limits = model.limits
    had = Counter(len(state.replicas) for state in states if state.replicas)
    replicas = min(had.most_common(1)[0][0] if had else 1, gpus, limits.max_replicas)
    said = states[-1].hints.batch if states[-1].hints is not None else 0
    least = max(limits.min_batch, replicas * limits.min_local)
    batch = min(max(said, least), limits.max_batch)
    submitted_s = math.floor(job.created_at_s - begin_s)
    return WorkloadJob(job.job_id, submitted_s, model, replicas, batch)
