"""Reports about one attempt: in any order, any number of times, they give one record."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_gcs.store.task_merge import inferred_end, merge, merge_all, merge_rows
from stoker_wire.data.spool import rank, record_of, row_of
from stoker_wire.messages.cluster import Demand
from stoker_wire.messages.common import ErrorInfo
from stoker_wire.messages.work import TaskRecord, TaskState

if TYPE_CHECKING:
    from stoker_wire.data.spool import TaskRow

OPEN = (TaskState.WAITING, TaskState.QUEUED, TaskState.RUNNING)

# What one attempt may be reported as: facts agree between reports, some know fewer of them.
reports = st.builds(
    lambda state, knows: TaskRecord(
        task_id="t_1",
        attempt=0,
        state=state,
        job_id="job_1",
        name="f",
        node_id="n_1" if knows[0] else "",
        submitted_at_s=1.0 if knows[1] else None,
        started_at_s=2.0 if knows[2] else None,
        ended_at_s=3.0 if state.terminal else None,
    ),
    st.sampled_from([*OPEN, TaskState.FINISHED]),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
)


@given(st.lists(reports, min_size=1, max_size=6), st.randoms())
def test_the_order_and_the_number_of_reports_do_not_matter(
    told: list[TaskRecord], random: object
) -> None:
    shuffled = [*told, *told]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    merged = merge_all(map(row_of, told))
    assert merged == merge_all(map(row_of, shuffled))
    assert {key: row_of(record_of(row)) for key, row in merged.items()} == merged


texts = st.sampled_from(["", "x", "y"])
numbers = st.sampled_from([None, 1.0, 2.0])
anything = st.builds(
    TaskRecord,
    task_id=st.just("t_1"),
    attempt=st.just(0),
    job_id=st.just("job_1"),
    state=st.sampled_from(TaskState),
    name=texts,
    node_id=texts,
    actor_id=texts,
    parent_task_id=texts,
    submitted_at_s=numbers,
    started_at_s=numbers,
    ended_at_s=numbers,
    worker_id=texts,
    args_nbytes=st.integers(0, 1),
    result_nbytes=st.integers(0, 1),
    error=st.sampled_from([None, ErrorInfo(code="c", message="m", extra={"inferred": True})]),
    demand=st.sampled_from([None, Demand(job_id="job_1", resources={"CPU": 1.0})]),
    waiting_for=texts,
    owner_id=texts,
    reconstructs=texts,
    reconstructions=st.integers(0, 1),
    lineage_depth=st.integers(0, 1),
)


@given(anything, anything)
def test_rows_are_merged_as_records_are(old: TaskRecord, new: TaskRecord) -> None:
    assert merge_rows(row_of(old), row_of(new)) == row_of(merge(old, new))


def newer(row: TaskRow) -> TaskRow:
    """A row as a newer minor version writes it: with one fact more."""
    facts = msgspec.msgpack.decode(row[8])
    return (*row[:8], msgspec.msgpack.encode([*facts, "more"]))


@pytest.mark.parametrize("states", [("RUNNING", "FINISHED"), ("FINISHED", "RUNNING")])
@pytest.mark.parametrize("ahead", ["old", "new", "both"])
def test_what_a_newer_version_adds_to_a_row_outlives_the_merge(
    states: tuple[str, str], ahead: str
) -> None:
    old, new = (
        TaskRecord(
            task_id="t_1", attempt=0, state=TaskState(state), job_id="j", name="f",
            started_at_s=1.0 if state == "RUNNING" else None,
        )
        for state in states
    )  # fmt: skip
    rows = [
        newer(row_of(one)) if ahead in (which, "both") else row_of(one)
        for which, one in (("old", old), ("new", new))
    ]
    merged = merge_rows(rows[0], rows[1])
    assert merged == newer(row_of(merge(old, new)))
    assert record_of(merged).started_at_s == 1.0


@given(reports, reports)
def test_a_state_never_goes_back(one: TaskRecord, other: TaskRecord) -> None:
    assert rank(merge(one, other)) == max(rank(one), rank(other))


def test_the_first_terminal_report_stands() -> None:
    failed = TaskRecord(
        task_id="t_1",
        attempt=0,
        state=TaskState.FAILED,
        job_id="j",
        name="f",
        error=ErrorInfo(code="task_failed", message="no"),
    )
    finished = TaskRecord(task_id="t_1", attempt=0, state=TaskState.FINISHED, job_id="j", name="f")
    assert merge(failed, finished) == failed
    assert merge(finished, failed).state is TaskState.FINISHED


def test_an_inferred_end_yields_to_a_reported_one_in_any_order() -> None:
    running = TaskRecord(task_id="t_1", attempt=0, state=TaskState.RUNNING, job_id="j", name="f")
    inferred = inferred_end(running, "its job ended", 5.0)
    finished = TaskRecord(
        task_id="t_1", attempt=0, state=TaskState.FINISHED, job_id="j", name="f", ended_at_s=6.0
    )
    assert inferred.state is TaskState.FAILED
    assert merge(running, inferred).state is TaskState.FAILED
    assert merge(inferred, running).state is TaskState.FAILED
    assert merge(inferred, finished) == finished
    assert merge(finished, inferred) == finished
