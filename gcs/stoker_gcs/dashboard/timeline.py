"""The timeline of workers: attempts where they are few, else how busy each was in each bucket of time.

The database adds up, so a range with a million attempts costs it one pass, and this process nothing.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from stoker_gcs.state import schema
from stoker_gcs.store.changes import Between, Unexpired
from stoker_gcs.store.task_counts import RUN, middle_of
from stoker_wire.errors import BadRequestError
from stoker_wire.http.dashboard.figures import Lane, Timeline, TimelineQuery
from stoker_wire.messages.work import TaskState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from stoker_gcs.store.changes import Condition, Row
    from stoker_gcs.store.protocol import Store

MOST_SPANS = 5000
"""Attempts that are sent as they are; of more, how busy the workers were."""
RECENT_S = 600.0
"""The range that is shown of all jobs, unless another is asked for."""
MOST_LONG = 20_000
"""Attempts longer than a bucket that are looked at, the oldest."""
_STATES = tuple(state.value for state in TaskState)
_COLUMNS = (
    *("task_id", "attempt", "name", "state", "node_id", "worker_id", "actor_id"),
    *("started_at_s", "ended_at_s"),
)


class _Lane(NamedTuple):
    node_id: str
    worker_id: str
    actor_id: str


async def timeline(
    store: Store,
    where: Mapping[str, Condition],
    query: TimelineQuery,
    *,
    now_s: float,
    ended_at_s: float | None,
) -> Timeline:
    """Return the lanes of a range of time; BadRequestError for one that ends before it begins.

    ``ended_at_s`` is when the job ended that is asked for, if it has.
    """
    given = {name: value for name, value in where.items() if value != ""}
    first_s = await store.first_start(given)
    first_s = now_s if first_s is None else first_s
    last_s = max(first_s, ended_at_s or now_s)
    recent_s = first_s if query.job_id else max(first_s, last_s - RECENT_S)
    from_s = query.from_s or recent_s
    to_s = query.to_s or max(last_s, from_s + 1e-3)
    if to_s <= from_s:
        raise BadRequestError("to_s: the range ends before it begins", field="to_s")
    bucket_s = (to_s - from_s) / query.buckets
    longest_s = await _longest_s(store, given)
    running: dict[str, Condition] = {**given, "state": TaskState.RUNNING.value}
    if await store.count(schema.TASKS, running, most=1):
        longest_s = now_s  # it may have begun at any time
    inside: dict[str, Condition] = {
        **given,
        "started_at_s": Between(max(0.0, from_s - longest_s), to_s),
        "ended_at_s": Unexpired(from_s),
    }
    rows = await store.select(
        schema.TASKS, inside, limit=MOST_SPANS + 1, columns=_COLUMNS, any_order=True
    )
    few = len(rows) <= MOST_SPANS
    rows = rows if few else await store.grouped(schema.TASKS, _Lane._fields, (), inside)
    after = tuple(query.cursor.split(" ")) if query.cursor else ()
    keys = sorted(key for key in set(map(_lane_of, rows)) if not after or tuple(key) > after)
    shown = keys[: query.lane_limit]
    names: dict[str, int] = {}
    if few:
        lanes = _with_spans(rows, names, now_s)
    else:
        # Of the lanes of this page alone: a range may have very many.
        inside["worker_id"] = tuple({lane.worker_id for lane in shown})
        counts = {_lane_of(row): row["n"] for row in rows}
        has_long = longest_s > bucket_s
        busy = await _busy(store, inside, from_s, to_s, bucket_s, now_s, has_long)
        idle = (0.0,) * query.buckets
        lanes = {
            key: Lane(**key._asdict(), count=counts[key], busy=busy.get(key, idle)) for key in shown
        }
    called = await _actor_names(store, {key.actor_id for key in shown} - {""})
    return Timeline(
        from_s=from_s,
        to_s=to_s,
        bucket_s=bucket_s,
        first_s=first_s,
        last_s=last_s,
        lanes=tuple(replace(lanes[key], name=called.get(key.actor_id, "")) for key in shown),
        names=tuple(names),
        states=_STATES,
        next_cursor=" ".join(shown[-1]) if len(shown) < len(keys) else "",
    )


async def _actor_names(store: Store, actor_ids: set[str]) -> dict[str, str]:
    """Return what actors are called, else their classes, of those that are still known."""
    if not actor_ids:
        return {}
    where: dict[str, Condition] = {"actor_id": tuple(sorted(actor_ids))}
    rows = await store.select(
        schema.ACTORS, where, limit=len(actor_ids), columns=("actor_id", "name", "class_name")
    )
    return {row["actor_id"]: row["name"] or row["class_name"] for row in rows}


async def _longest_s(store: Store, where: Mapping[str, Condition]) -> float:
    """Return a bound of how long attempts ran that have ended."""
    jobs = {name: value for name, value in where.items() if name == "job_id"}
    buckets = await store.distinct(schema.TASK_DURATIONS, "bucket", {**jobs, "measure": RUN})
    return 1.1 * middle_of(max((int(one or 0) for one in buckets), default=0))


def _lane_of(row: Row) -> _Lane:
    return _Lane(row["node_id"], row["worker_id"] or "", row["actor_id"])


def _with_spans(rows: Iterable[Row], names: dict[str, int], now_s: float) -> dict[_Lane, Lane]:
    spans: defaultdict[_Lane, list[tuple[float, float, int, int, str, int]]] = defaultdict(list)
    for row in rows:
        end_s = now_s if row["ended_at_s"] is None else row["ended_at_s"]
        name = names.setdefault(row["name"], len(names))
        state = _STATES.index(row["state"])
        spans[_lane_of(row)].append(
            (row["started_at_s"], end_s, name, state, row["task_id"], row["attempt"])
        )
    return {
        key: Lane(**key._asdict(), count=len(some), spans=tuple(sorted(some)))
        for key, some in spans.items()
    }


async def _busy(
    store: Store,
    inside: Mapping[str, Condition],
    from_s: float,
    to_s: float,
    bucket_s: float,
    now_s: float,
    has_long: bool,
) -> dict[_Lane, tuple[float, ...]]:
    """Return which part of each bucket the lanes were busy."""
    size = round((to_s - from_s) / bucket_s)
    busy: defaultdict[_Lane, list[float]] = defaultdict(lambda: [0.0] * size)
    for row in await store.busy(inside, from_s, bucket_s):
        # One that began before the range, and ends in it, counts for the first bucket.
        busy[_lane_of(row)][min(max(row["bucket"], 0), size - 1)] += row["busy_s"]
    long: list[Row] = []
    if has_long:
        long = await store.long_attempts(inside, bucket_s, _COLUMNS, limit=MOST_LONG)
    for row in long:
        end_s = now_s if row["ended_at_s"] is None else row["ended_at_s"]
        _spread(
            busy[_lane_of(row)], max(row["started_at_s"], from_s) - from_s, end_s - from_s, bucket_s
        )
    return {
        key: tuple(round(min(1.0, one / bucket_s), 4) for one in parts)
        for key, parts in busy.items()
    }


def _spread(busy: list[float], start_s: float, end_s: float, bucket_s: float) -> None:
    """Add a span to the buckets that it covers."""
    first = int(start_s / bucket_s)
    last = min(int(end_s / bucket_s), len(busy) - 1)
    for index in range(first, last + 1):
        lower, upper = index * bucket_s, (index + 1) * bucket_s
        busy[index] += max(0.0, min(end_s, upper) - max(start_s, lower))
