"""Tasks by function: counts by state and error, percentiles of their times. Added up of a few rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import accumulate
from typing import TYPE_CHECKING

from stoker_gcs.dashboard.cost import held_by_function
from stoker_gcs.state import schema
from stoker_gcs.store.task_counts import CPU, GPU, RUN, WAIT, middle_of
from stoker_wire.http.dashboard.figures import Durations, FunctionSummary, TaskSummary

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stoker_gcs.store.changes import Condition
    from stoker_gcs.store.protocol import Store

_PERCENTILES = (0.5, 0.9, 0.99)


async def summarize(
    store: Store, where: Mapping[str, Condition], limit: int, now_s: float
) -> TaskSummary:
    """Return the functions of the jobs that match, those with the most attempts first."""
    given = {name: value for name, value in where.items() if value != ""}
    states: defaultdict[str, Counter[str]] = defaultdict(Counter)
    failures: defaultdict[str, Counter[str]] = defaultdict(Counter)
    by = ("name", "state", "code")
    for row in await store.grouped(schema.TASK_COUNTS, by, ("count",), given):
        # Replicas may have counted a function of very many under another name than it was removed from.
        count = max(0, int(row["count"]))
        states[row["name"]][row["state"]] += count
        if row["code"]:
            failures[row["name"]][row["code"]] += count
    most = sorted(states, key=lambda name: (-states[name].total(), name))[:limit]
    buckets: defaultdict[tuple[str, str], dict[int, int]] = defaultdict(dict)
    totals: Counter[tuple[str, str]] = Counter()
    by = ("name", "measure", "bucket")
    narrowed = given if len(most) == len(states) else {**given, "name": tuple(most)}
    for row in await store.grouped(schema.TASK_DURATIONS, by, ("count", "total_s"), narrowed):
        key = (row["name"], row["measure"])
        buckets[key][row["bucket"]] = int(row["count"])
        totals[key] += row["total_s"]
    held = await held_by_function(store, given, now_s)
    return TaskSummary(
        items=tuple(
            FunctionSummary(
                key=name,
                count=states[name].total(),
                states=dict(+states[name]),
                failures=dict(+failures[name]),
                run_s=durations(buckets[name, RUN], totals[name, RUN]),
                wait_s=durations(buckets[name, WAIT], totals[name, WAIT]),
                cpu_s=held[name][CPU],
                gpu_s=held[name][GPU],
            )
            for name in most
        ),
        states=dict(sum(states.values(), Counter())),
        total=len(states),
        cpu_s=sum(one[CPU] for one in held.values()),
        gpu_s=sum(one[GPU] for one in held.values()),
    )


def durations(buckets: Mapping[int, int], total_s: float) -> Durations:
    """Return the percentiles of a histogram."""
    filled = sorted((bucket, count) for bucket, count in buckets.items() if count > 0)
    if not filled:
        return Durations()
    sums = list(accumulate(count for _, count in filled))
    count = sums[-1]
    found = [
        next(
            middle_of(bucket)
            for (bucket, _), upto in zip(filled, sums, strict=True)
            if upto >= share * count
        )
        for share in _PERCENTILES
    ]
    return Durations(
        count=count,
        total=total_s,
        mean=total_s / count,
        p50=found[0],
        p90=found[1],
        p99=found[2],
        max=middle_of(filled[-1][0]),
    )
