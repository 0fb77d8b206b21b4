"""Values of training are in every store what they are in a plain list, at any number of steps."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

import pytest

from stoker_gcs.state import schema
from stoker_gcs.store.training import WIDTHS, Point, series_of, width_for

if TYPE_CHECKING:
    from stoker_gcs.store.protocol import Store

JOB, RUN, LOSS = "job_1", "default", "loss"
SERIES = series_of(JOB, RUN, LOSS)


def point(step: int, value: float, at_s: float = 0.0, metric: str = LOSS, run: str = RUN) -> Point:
    return Point(JOB, run, metric, step, value, at_s or 100.0 + step)


async def curve(store: Store, size: int, last: int = 10**6, first: int = 0) -> list[dict[str, Any]]:
    rows = await store.curve(SERIES, first, last, size)
    return [dict(row) for row in rows]


def expected(values: dict[int, tuple[float, float]], size: int) -> list[dict[str, Any]]:
    """What a curve over (value, time) by step has to be."""
    ranges: dict[int, list[int]] = {}
    for step in sorted(values):
        ranges.setdefault(step // size, []).append(step)
    found = []
    for steps in ranges.values():
        numbers = [values[step][0] for step in steps]
        finite = [one for one in numbers if math.isfinite(one)]
        known = [one for one in numbers if not math.isnan(one)]
        found.append(
            {
                "count": len(finite),
                "total": pytest.approx(sum(finite), abs=1e-9),
                "low": min(known, default=None),
                "high": max(known, default=None),
                "nans": len(numbers) - len(known),
                "at_s": max(values[step][1] for step in steps),
            }
        )
    return found


async def test_a_curve_is_what_the_values_are(store: Store) -> None:
    dice = random.Random(4)
    kept: dict[int, tuple[float, float]] = {}
    at_s = 1000.0
    for _ in range(40):
        batch = []
        for _ in range(dice.choice((1, 7, 300))):
            step = dice.randrange(25_000)
            value = dice.choice((dice.gauss(0, 1), dice.gauss(0, 1), math.nan, math.inf, -math.inf))
            at_s += 1.0
            batch.append(point(step, value, at_s))
            kept[step] = (value, at_s)
        await store.put_points(batch)
        await store.put_points(dice.sample(batch, len(batch) // 2))  # as after a lost answer
    for size in (1, 30, 100, 700, 10_000, 20_000):
        rows = await curve(store, size)
        assert [
            {name: value for name, value in row.items() if name != "step"} for row in rows
        ] == expected(kept, size)
        for row, step in zip(rows, sorted({one // size * size for one in kept}), strict=True):
            assert step <= row["step"] < step + size
    (metric,) = await store.select(schema.TRAINING_METRICS)
    newest = max(kept, key=lambda step: kept[step][1])
    assert (metric["first_step"], metric["last_step"]) == (min(kept), max(kept))
    assert (metric["newest_step"], metric["newest_at_s"]) == (newest, at_s)
    assert metric["newest_value"] == (None if math.isnan(kept[newest][0]) else kept[newest][0])


async def test_the_later_value_of_a_step_stays_whichever_comes_first(store: Store) -> None:
    await store.put_points([point(5, 1.0, 20.0), point(5, 2.0, 30.0)])
    await store.put_points([point(5, 9.0, 10.0)])
    for size in WIDTHS:
        (row,) = await curve(store, size)
        assert (row["count"], row["low"], row["high"]) == (1, 2.0, 2.0)
    (metric,) = await store.select(schema.TRAINING_METRICS)
    assert (metric["newest_value"], metric["newest_at_s"], metric["first_at_s"]) == (
        2.0,
        30.0,
        10.0,
    )


async def test_metrics_and_runs_do_not_mix(store: Store) -> None:
    await store.put_points(
        [point(1, 1.0), point(1, 2.0, metric="lr"), point(1, 3.0, run="other"), point(2, 4.0)]
    )
    assert [row["total"] for row in await curve(store, 1)] == [1.0, 4.0]
    runs = await store.select(schema.TRAINING_RUNS, arrival=True)
    assert [(row["run"], row["first_at_s"]) for row in runs] == [(RUN, 101.0), ("other", 101.0)]
    assert len(await store.select(schema.TRAINING_METRICS)) == 3


async def test_a_curve_has_the_steps_that_it_is_asked_for(store: Store) -> None:
    await store.put_points([point(step, float(step)) for step in range(1000)])
    rows = await curve(store, 100, first=200, last=499)
    assert [(row["step"], row["count"]) for row in rows] == [(200, 100), (300, 100), (400, 100)]
    rows = await curve(store, 50, first=220, last=299)
    assert [(row["step"], row["count"]) for row in rows] == [(220, 50), (270, 30)]


def test_wide_rows_are_taken_only_where_they_are_narrow_enough() -> None:
    assert [width_for(size) for size in (1, 99, 100, 9_999, 10_000, 10**12)] == [
        1, 1, 100, 100, 10_000, 10_000,
    ]  # fmt: skip
