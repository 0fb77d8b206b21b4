"""Events of timelines against the Trace Event Format: fields, slices that nest, arrows that pair."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest

from stoker.api.tracing.timeline import Timeline

FIELDS = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "b": {"name", "cat", "pid", "tid", "ts", "id", "args"},
    "e": {"name", "cat", "pid", "tid", "ts", "id"},
    "s": {"name", "cat", "pid", "tid", "ts", "id"},
    "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
    "C": {"name", "pid", "tid", "ts", "args"},
}


def check(events: list[dict[str, Any]]) -> None:
    """Check what viewers need of the events of a file."""
    slices = defaultdict(list)
    flows: dict[Any, dict[str, Any]] = defaultdict(dict)
    pairs = defaultdict(list)
    named = set()
    for event in events:
        assert FIELDS[event["ph"]] <= set(event), event
        assert all(type(event[name]) is int for name in ("pid", "tid"))
        assert all(type(event.get(name, 0)) is int for name in ("ts", "dur"))
        if event["ph"] == "M":
            named.add((event["pid"], event["tid"]))
            continue
        assert (event["pid"], event["tid"]) in named, "a row has its name before what is on it"
        if event["ph"] == "X":
            assert event["dur"] >= 0
            row = slices[event["pid"], event["tid"]]
            row.append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "sf":
            assert event["ph"] not in flows[event["id"]]
            flows[event["id"]][event["ph"]] = event
        elif event["ph"] in "be":
            pairs[event["cat"], event["id"]].append(event)
    for row in slices.values():
        open_: list[int] = []
        for begin, end in sorted(row, key=lambda one: (one[0], -one[1])):
            while open_ and open_[-1] <= begin:
                open_.pop()
            assert not open_ or end <= open_[-1], "slices of a row lie beside or within each other"
            open_.append(end)
    for flow in flows.values():
        begin, end = flow["s"], flow["f"]
        assert begin["ts"] <= end["ts"]
        for one in (begin, end):
            assert any(b <= one["ts"] <= e for b, e in slices[one["pid"], one["tid"]])
    for first, second in pairs.values():
        assert (first["ph"], second["ph"]) == ("b", "e") and first["ts"] <= second["ts"]


def attempt(task_id: str, began_s: float, ended_s: float | None, **more: Any) -> dict[str, Any]:
    return {
        "task_id": task_id, "attempt": 0, "state": "FINISHED" if ended_s else "RUNNING",
        "name": "work", "job_id": "job_1", "actor_id": "", "node_id": "n_1", "worker_id": "w_1",
        "submitted_at_s": began_s - 0.5, "started_at_s": began_s, "ended_at_s": ended_s,
        "parent_task_id": "", "error": None, "spans": None, **more,
    }  # fmt: skip


def job(job_id: str) -> dict[str, Any] | None:
    if job_id != "job_1":
        return None
    return {"started_at_s": 100.0, "ended_at_s": None, "name": "train", "state": "RUNNING"}


def made(*tasks: dict[str, Any], **window: float) -> tuple[list[dict[str, Any]], Timeline]:
    timeline = Timeline(job, {"n_1": "host"}, 200.0, **window)
    events = [event for task in tasks for event in timeline.attempt(task)]
    timeline.close()
    check(events)
    return events, timeline


def shown(events: list[dict[str, Any]], ph: str) -> list[str]:
    return [event["name"] for event in events if event["ph"] == ph]


def test_an_attempt_tells_where_and_how_it_ran() -> None:
    error = {"code": "task_error", "message": "ValueError: no\nmore"}
    events, timeline = made(attempt("t_1", 110.0, 111.5, state="FAILED", error=error))
    (event,) = [one for one in events if one["ph"] == "X" and one["cat"] == "task"]
    assert (event["ts"], event["dur"]) == (110_000_000, 1_500_000)
    assert event["args"]["error"] == "task_error: ValueError: no"
    assert event["args"]["queued_ms"] == 500.0
    assert timeline.attempts == 1
    names = [one["args"]["name"] for one in events if one["ph"] == "M"]
    assert names == ["node n_1 on host", "worker w_1", "drivers", "driver of job_1"]


def test_what_still_runs_ends_now_and_what_has_not_begun_is_counted() -> None:
    events, timeline = made(
        attempt("t_1", 110.0, None), {**attempt("t_2", 1.0, None), "started_at_s": None}
    )
    assert [one["dur"] for one in events if one.get("cat") == "task"] == [90_000_000]
    assert timeline.not_begun == 1


@pytest.mark.parametrize("order", [1, -1])
def test_arrows_go_from_callers_to_calls_in_either_order(order: int) -> None:
    child = attempt(
        "t_2", 113.0, 114.0, parent_task_id="t_1", submitted_at_s=112.0, worker_id="w_2"
    )
    events, timeline = made(*[attempt("t_1", 111.0, 115.0), child][::order])
    arrows = [one["ts"] for one in events if one["ph"] == "s"]
    assert sorted(arrows) == [110_500_000, 112_000_000]
    assert timeline.arrows_left_out == 0


def test_an_arrow_comes_from_the_attempt_that_called() -> None:
    first = attempt("t_1", 111.0, 112.0, worker_id="w_a")
    second = attempt("t_1", 121.0, 124.0, attempt=1, worker_id="w_b")
    child = attempt("t_2", 123.0, 123.5, parent_task_id="t_1", submitted_at_s=122.5)
    for tasks in ((first, second, child), (child, first, second)):
        events, _ = made(*tasks)
        rows = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["ph"] == "M"}
        (start,) = [one for one in events if one["ph"] == "s" and one["ts"] == 122_500_000]
        assert rows[start["pid"], start["tid"]] == "worker w_b"


def test_calls_without_a_caller_in_it_are_counted() -> None:
    lost = attempt("t_2", 113.0, 114.0, parent_task_id="t_gone")
    _, timeline = made(lost, attempt("t_3", 115.0, 116.0, job_id="job_hidden"))
    assert timeline.arrows_left_out == 2


def test_calls_that_run_at_once_have_rows_of_their_own() -> None:
    rng = random.Random(7)
    tasks = [
        attempt(f"t_{number}", begin := rng.uniform(110, 150), begin + rng.uniform(0, 3),
                actor_id="a_1", name="Shop.sell")
        for number in range(600)
    ]  # fmt: skip
    for ordered in (tasks, sorted(tasks, key=lambda one: -one["started_at_s"])):
        events, timeline = made(*ordered)
        assert timeline.attempts == 600
    rows = {one["args"]["name"] for one in events if one["ph"] == "M"}
    assert {"actor Shop a_1", "actor Shop a_1 (2)"} <= rows
    assert len(rows) < 120, "lanes are used again"


def span(name: str, began_s: float, ended_s: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "started_at_s": began_s, "ended_at_s": ended_s, **more}


def test_spans_lie_within_their_attempt_and_those_that_cross_beside() -> None:
    items = [
        span("inner", 110.2, 110.4), span("outer", 110.1, 110.6, attributes={"size": 3}),
        span("crosses", 110.5, 110.8, error="ValueError"), span("late", 110.9, 119.0),
    ]  # fmt: skip
    spans = {"items": items, "left_out": 5}
    events, timeline = made(attempt("t_1", 110.0, 111.0, spans=spans))
    slices = {one["name"]: one for one in events if one["ph"] == "X"}
    assert set(slices) == {"work", "inner", "outer", "late", "train"}
    assert slices["outer"]["args"] == {"size": 3}
    assert slices["late"]["ts"] + slices["late"]["dur"] == 111_000_000
    (crosses,) = [one for one in events if one["ph"] == "b"]
    assert (crosses["name"], crosses["args"]) == ("crosses", {"error": "ValueError"})
    assert timeline.spans_left_out == 5


def test_spans_outside_of_tasks_are_on_the_row_of_their_process() -> None:
    of_driver = attempt("t_9", 120.0, 121.0, name="(driver)", submitted_at_s=None,
                        spans={"items": [span("main", 120.0, 121.0)], "left_out": 0})  # fmt: skip
    of_worker = {**of_driver, "name": "(worker)", "actor_id": "a_1"}
    events, timeline = made(of_driver, of_worker)
    rows = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["ph"] == "M"}
    where = [rows[one["pid"], one["tid"]] for one in events if one["ph"] == "b"]
    assert where == ["driver of job_1", "actor (worker) a_1"]
    assert timeline.attempts == 0


def test_a_window_leaves_out_what_was_not_under_way() -> None:
    tasks = [attempt(f"t_{at}", float(at), at + 2.0) for at in (110, 120, 130)]
    _, timeline = made(*tasks, since_s=121.0, until_s=125.0)
    assert timeline.attempts == 1


def test_a_node_shows_transfers_spills_starts_and_gpus() -> None:
    timeline = Timeline(job, {}, 200.0)
    rows = [
        {"kind": kind, "began_at_s": 110.0, "ended_at_s": 111.0, "name": "o_1", "job_id": "job_1",
         "peer": peer, "nbytes": 5, "amount": 2.0}
        for kind, peer in (
            ("transfer", "n_2"), ("transfer", "n_3"), ("spill", ""), ("lease", ""), ("gpus", ""),
            ("of a newer nodelet", ""),
        )
    ]  # fmt: skip
    events = [event for row in rows for event in timeline.activity("n_1", row)]
    check(events)
    assert len(shown(events, "X")) == 4
    assert [one["args"] for one in events if one["ph"] == "C"] == [{"GPUs": 2.0}]
    assert [one["args"].get("from") for one in events if one.get("cat") == "transfer"] == [
        "n_2",
        "n_3",
    ]
