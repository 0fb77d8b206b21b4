"""The cost of jobs: seconds times the CPUs and GPUs of their tasks, actors, placement groups and drivers.

Tasks that have ended were counted as they were written; of those that run, and of all else, the records say
since when. A placement group holds its bundles whether they are used or not, so what is held within one is
not counted again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from stoker_gcs.registry.actors.registry import spec_of
from stoker_gcs.registry.actors.rules import ACTORS
from stoker_gcs.registry.groups.rules import GROUPS
from stoker_gcs.state import schema
from stoker_gcs.store.task_counts import CPU, GPU, GROUP_CPU, GROUP_GPU, held_times
from stoker_wire.http.dashboard.figures import CostPart, JobCost
from stoker_wire.messages.work import TaskState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stoker_gcs.store.changes import Condition, Row
    from stoker_gcs.store.protocol import Store
    from stoker_wire.messages.work import Job

MOST = 5000
"""Attempts that run, actors and groups that are looked at."""
_MEASURES = (CPU, GPU, GROUP_CPU, GROUP_GPU)

Held = dict[str, float]
"""Seconds times what was held, by measure."""


async def held_by_function(
    store: Store, where: Mapping[str, Condition], now_s: float
) -> dict[str, Held]:
    """Return what the tasks of each function have held."""
    given = {name: value for name, value in where.items() if value != ""}
    held: dict[str, Held] = defaultdict(lambda: dict.fromkeys(_MEASURES, 0.0))
    wanted: dict[str, Condition] = {**given, "measure": _MEASURES}
    for row in await store.grouped(
        schema.TASK_DURATIONS, ("name", "measure"), ("total_s",), wanted
    ):
        held[row["name"]][row["measure"]] += row["total_s"]
    running = await store.select(
        schema.TASKS,
        {**given, "state": TaskState.RUNNING.value},
        limit=MOST,
        columns=("name", "started_at_s", "record"),
        any_order=True,
    )
    for row in running:
        times = held_times([(row["started_at_s"], now_s, row["record"])])
        for measure, held_s in times.items():
            held[row["name"]][measure] += held_s
    return held


async def cost_of(store: Store, job: Job, now_s: float) -> JobCost:
    """Return what a job has held until now, those parts first that held the most GPUs."""
    mine: dict[str, Condition] = {"job_id": job.job_id}
    parts = [_driver(job, now_s)]
    actors = await store.select(schema.ACTORS, mine, limit=MOST + 1)
    parts += [_actor(row, now_s) for row in actors[:MOST]]
    groups = await store.select(schema.PLACEMENT_GROUPS, mine, limit=MOST + 1)
    parts += [_group(row, now_s) for row in groups[:MOST]]
    for name, held in (await held_by_function(store, mine, now_s)).items():
        parts.append(
            CostPart(kind="function", id="", name=name, **{f"{one}_s": held[one] for one in held})
        )
    parts = [part for part in parts if part.cpu_s or part.gpu_s]
    parts.sort(key=lambda part: (-part.gpu_s, -part.cpu_s, part.id, part.name))
    return JobCost(
        job_id=job.job_id,
        cpu_s=sum(part.cpu_s - part.group_cpu_s for part in parts),
        gpu_s=sum(part.gpu_s - part.group_gpu_s for part in parts),
        parts=tuple(parts),
        complete=len(actors) <= MOST and len(groups) <= MOST,
    )


def _driver(job: Job, now_s: float) -> CostPart:
    """Return what the attempts of a submitted driver held; one that attached holds nothing."""
    run_s = sum(one.ended_at_s - one.started_at_s for one in job.attempts)
    if job.submitted and job.array is None:
        run_s += _lasted(job.attempt_started_at_s or job.started_at_s, job.ended_at_s, now_s)
    return _part("driver", job.job_id, job.name or job.entrypoint, run_s, job.resources)


def _actor(row: Row, now_s: float) -> CostPart:
    actor = ACTORS.decode(row).record
    run_s = actor.ran_before_s + _lasted(actor.started_at_s, actor.ended_at_s, now_s)
    in_group = bool(spec_of(row).demand.strategy.group_id)
    name = actor.name or actor.class_name
    return _part("actor", actor.actor_id, name, run_s, actor.resources, in_group=in_group)


def _group(row: Row, now_s: float) -> CostPart:
    """Return what a group held since it was placed; of one that was placed anew, since then."""
    group = GROUPS.decode(row).record
    run_s = _lasted(group.placed_at_s, group.removed_at_s, now_s)
    resources: Counter[str] = Counter()
    for bundle in group.bundles:
        resources.update(bundle.resources)
    return _part("placement group", group.group_id, group.name, run_s, resources)


def _lasted(start_s: float | None, end_s: float | None, now_s: float) -> float:
    return 0.0 if start_s is None else max(0.0, (end_s or now_s) - start_s)


def _part(
    kind: str,
    id_: str,
    name: str,
    run_s: float,
    resources: Mapping[str, float],
    *,
    in_group: bool = False,
) -> CostPart:
    cpu_s, gpu_s = run_s * resources.get("CPU", 0.0), run_s * resources.get("GPU", 0.0)
    return CostPart(
        kind=kind,
        id=id_,
        name=name,
        cpu_s=cpu_s,
        gpu_s=gpu_s,
        group_cpu_s=cpu_s * in_group,
        group_gpu_s=gpu_s * in_group,
    )
