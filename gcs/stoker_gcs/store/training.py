"""Values that training reports: one by step, and added up over wider ranges of steps.

A curve of a million steps is drawn by some hundred points. Each of these is added up of rows that are a
hundred or ten thousand steps wide where that is fine enough, so it costs the same at any length. Wider rows
are made of narrower ones as these are written, again for each range that was touched: a step that is
reported again replaces what was there, and nothing is counted twice. A value that is not a number is
counted in ``nans``; infinite ones are in ``low`` and ``high`` alone, so that no sum is lost to them.
"""

from __future__ import annotations

import hashlib
import math
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from stoker_gcs.state.schema import TRAINING_METRICS, TRAINING_RUNS, TRAINING_VALUES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

WIDTHS = (1, 100, 10_000)
"""The steps that a row has, each a multiple of the one before."""


class Point(NamedTuple):
    """A value of a metric at a step of a run."""

    job_id: str
    run: str
    metric: str
    step: int
    value: float
    at_s: float


class Touched(NamedTuple):
    """A range of steps of a series, both ends included, whose wider rows are to be made again."""

    series: int
    first: int
    last: int


class Batch(NamedTuple):
    """The rows that some points are stored as, each kind in the order of its key."""

    runs: list[tuple[str, str, float]]
    metrics: list[tuple[str, str, str, int, int, int, int, int, float, float, float | None]]
    values: list[tuple[int, int, int, int, float, float | None, float | None, int, float]]


def series_of(job_id: str, run: str, metric: str) -> int:
    """Return the number under which the values of a metric are stored: the same in every replica."""
    name = "\0".join((job_id, run, metric)).encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), signed=True)


def batch_of(points: Iterable[Point]) -> Batch:
    """Return what is stored of some points; of a step that is there twice, the later value."""
    newest: dict[tuple[str, str, str], dict[int, Point]] = {}
    for point in points:
        steps = newest.setdefault(point[:3], {})
        known = steps.get(point.step)
        if known is None or known.at_s <= point.at_s:
            steps[point.step] = point
    runs: dict[tuple[str, str], float] = {}
    metrics, values = [], []
    for key, steps in newest.items():
        series = series_of(*key)
        last = max(steps.values(), key=lambda one: one.at_s)
        first_s = min(one.at_s for one in steps.values())
        runs[key[:2]] = min(first_s, runs.get(key[:2], math.inf))
        ends = (min(steps), max(steps), last.step, first_s, last.at_s, _stored(last.value))
        metrics.append((*key, series, len(steps), *ends))
        values += [_row(series, point) for point in steps.values()]
    return Batch(
        sorted((*key, at_s) for key, at_s in runs.items()), sorted(metrics), sorted(values)
    )


def _row(
    series: int, point: Point
) -> tuple[int, int, int, int, float, float | None, float | None, int, float]:
    value = _stored(point.value)
    finite = math.isfinite(point.value)
    total = point.value if finite else 0.0
    return (
        series, 1, point.step, int(finite), total, value, value, int(value is None), point.at_s
    )  # fmt: skip


def _stored(value: float) -> float | None:
    return None if math.isnan(value) else value  # SQLite has no NaN


def touched(values: Sequence[tuple[Any, ...]], width: int) -> list[Touched]:
    """Return the ranges, of whole rows of ``width``, in which values lie that were written."""
    found: list[Touched] = []
    for series, step in sorted({(row[0], row[2] // width * width) for row in values}):
        if found and found[-1].series == series and found[-1].last + 1 == step:
            found[-1] = found[-1]._replace(last=step + width - 1)
        else:
            found.append(Touched(series, step, step + width - 1))
    return found


def width_for(size: int) -> int:
    """Return the widest rows of which ranges of ``size`` steps can be added up."""
    return max(width for width in WIDTHS if width <= max(1, size))


_SUMS = (
    "CAST(SUM(count) AS BIGINT) AS count, COALESCE(SUM(total), 0) AS total, "
    "MIN(low) AS low, MAX(high) AS high, CAST(SUM(nans) AS BIGINT) AS nans, MAX(at_s) AS at_s"
)
_RANGE = "series = :series AND width = :width AND step BETWEEN :first AND :last"
_REPLACED = ", ".join(
    f"{name} = excluded.{name}" for name in TRAINING_VALUES.names if name not in TRAINING_VALUES.key
)


def _insert(name: str, columns: Sequence[str]) -> str:
    marks = ", ".join(f":{column}" for column in columns)
    return f"INSERT INTO {name} ({', '.join(columns)}) VALUES ({marks})"


_NEWER = "excluded.newest_at_s >= training_metrics.newest_at_s"


def _if_newer(column: str) -> str:
    return (
        f"{column} = CASE WHEN {_NEWER} THEN excluded.{column} ELSE training_metrics.{column} END"
    )


def _extreme(column: str, sign: str) -> str:
    """Return the assignment of the least, or greatest: that function has two names in SQL."""
    mine, new = f"training_metrics.{column}", f"excluded.{column}"
    return f"{column} = CASE WHEN {new} {sign} {mine} THEN {new} ELSE {mine} END"


ADD_RUNS = f"{_insert('training_runs', TRAINING_RUNS.names)} ON CONFLICT DO NOTHING"
ADD_METRICS = (
    f"{_insert('training_metrics', TRAINING_METRICS.names)} ON CONFLICT (job_id, run, metric) DO UPDATE SET "
    + ", ".join(
        (
            "count = training_metrics.count + excluded.count",
            _extreme("first_step", "<"),
            _extreme("last_step", ">"),
            _extreme("first_at_s", "<"),
            *map(_if_newer, ("newest_step", "newest_value", "newest_at_s")),
        )
    )
)
ADD_VALUES = (
    f"{_insert('training_values', TRAINING_VALUES.names)} ON CONFLICT (series, width, step) DO UPDATE SET "
    f"{_REPLACED} WHERE excluded.at_s >= training_values.at_s"
)
WIDEN = (
    f"INSERT INTO training_values ({', '.join(TRAINING_VALUES.names)}) "
    "SELECT series, CAST(:wider AS BIGINT), step - step % CAST(:wider AS BIGINT), "
    f"{_SUMS} FROM training_values WHERE {_RANGE} GROUP BY 1, 3 "
    f"ON CONFLICT (series, width, step) DO UPDATE SET {_REPLACED}"
)
"""Makes the rows ``wider`` steps wide in a range, of those ``width`` wide."""
CURVE = (
    f"SELECT MIN(step) AS step, {_SUMS} FROM training_values WHERE {_RANGE} "
    "GROUP BY (step - CAST(:first AS BIGINT)) / CAST(:size AS BIGINT) ORDER BY 1"
)
"""A curve: what is in each range of ``size`` steps, from ``first`` on."""
ADD_RUNS_BY_POSITION = re.sub(r":\w+", "?", ADD_RUNS)
ADD_METRICS_BY_POSITION = re.sub(r":\w+", "?", ADD_METRICS)
ADD_VALUES_BY_POSITION = re.sub(r":\w+", "?", ADD_VALUES)


def widenings(values: Sequence[tuple[Any, ...]]) -> list[dict[str, int]]:
    """Return the parameters of :data:`WIDEN` for values that were written, in the order to do them."""
    return [
        {"wider": wider, "width": width, **one._asdict()}
        for width, wider in pairwise(WIDTHS)
        for one in touched(values, wider)
    ]
