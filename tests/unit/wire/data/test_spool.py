"""Rows, frames and spool files: what is written is what is read, whatever the disk and the text."""

from __future__ import annotations

import errno
import math
import os
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields

from stoker_wire.data import spool
from stoker_wire.data.spans import Span, TaskSpans
from stoker_wire.data.spool import (
    UNREADABLE,
    SpoolWriter,
    TaskFacts,
    TaskRow,
    frames_of,
    pack_facts,
    record_of,
    row_of,
    rows_in,
    rows_in_frames,
    whole_frames,
)
from stoker_wire.errors import BadRequestError
from stoker_wire.messages.cluster import Demand
from stoker_wire.messages.common import ErrorInfo
from stoker_wire.messages.work import TaskRecord, TaskState

if TYPE_CHECKING:
    from pathlib import Path


def a_row(number: int = 0, name: str = "f") -> TaskRow:
    record = TaskRecord(
        task_id=f"t_{number}", attempt=0, state=TaskState.FINISHED, job_id="j", name=name
    )
    return row_of(record)


def test_a_record_is_the_same_after_its_journey() -> None:
    record = TaskRecord(
        task_id="t_1",
        attempt=2,
        state=TaskState.FAILED,
        job_id="j",
        name="f",
        actor_id="a_1",
        parent_task_id="t_0",
        submitted_at_s=1.0,
        started_at_s=2.0,
        ended_at_s=3.0,
        node_id="n_1",
        worker_id="w_1",
        args_nbytes=4,
        result_nbytes=5,
        error=ErrorInfo(code="task_failed", message="no", extra={"a": 1}),
        demand=Demand(job_id="j", resources={"CPU": 1.0}, name="f"),
        waiting_for="a lease",
        owner_id="p_1",
        reconstructs="o_1 is lost",
        reconstructions=1,
        lineage_depth=2,
        spans=TaskSpans(
            items=(
                Span(
                    name="load",
                    started_at_s=2.0,
                    ended_at_s=2.5,
                    attributes={"n": 1, "s": "x"},
                    error="ValueError",
                ),
            ),
            left_out=3,
        ),
        cpus=2.0,
        gpus=0.5,
        group_id="pg_1",
    )
    assert [f.name for f in fields(record) if getattr(record, f.name) == f.default] == []
    [row], dropped = rows_in(frames_of([row_of(record)], 7))
    assert (record_of(row), dropped) == (record, 7)


def test_text_that_is_no_unicode_is_recorded_as_far_as_it_can_be_read() -> None:
    odd = TaskRecord(
        task_id="t_1",
        attempt=0,
        state=TaskState.FAILED,
        job_id="j",
        name="caf\udce9",
        error=ErrorInfo(code="task_failed", message="no file caf\udce9"),
    )
    [row], _ = rows_in(frames_of([row_of(odd), a_row()]))[0][:1], 0
    found = record_of(row)
    assert found.name == "caf?"
    assert found.error is not None and found.error.message == "no file caf?"


@given(st.lists(st.integers(0, 3), max_size=5), st.integers(0, 400))
def test_a_prefix_of_frames_is_cut_where_the_last_whole_one_ends(
    counts: list[int], length: int
) -> None:
    frames = [frames_of([a_row(i) for i in range(count)]) for count in counts]
    data = b"".join(frames)[:length]
    whole = whole_frames(data)
    ends = [sum(map(len, frames[:i])) for i in range(len(frames) + 1)]
    assert whole == max(end for end in ends if end <= len(data))
    rows, _ = rows_in(data[:whole])
    assert len(rows) == rows_in_frames(data[:whole]) == sum(counts[: ends.index(whole)])


def test_what_is_no_spool_is_refused() -> None:
    unknown = (*a_row()[:3], "ASLEEP", *a_row()[4:])
    for body in (b"x", b"\xff" * 40, frames_of([a_row()])[:-1], frames_of([unknown])):  # type: ignore[list-item]
        with pytest.raises(BadRequestError, match="no spool"):
            rows_in(body)
    with pytest.raises(ValueError, match="no frame"):
        whole_frames(b"\xff" * 40)


_NESTED = b"\x91" * 100_000


@pytest.mark.parametrize(
    "bad",
    [
        *((*a_row()[:8], facts) for facts in (b"", b"\xc1", b"\xff" * 9, _NESTED)),
        (*a_row()[:8], pack_facts(TaskFacts(args_nbytes=2**63))),
        (*a_row()[:8], pack_facts(TaskFacts(ended_at_s=math.nan))),
        (*a_row()[:8], pack_facts(TaskFacts("\xe9"))[:-1].replace(b"\xc3", b"\xff")),
        ("t" * 3000, *a_row()[1:]),
        ("t", 2**63, *a_row()[2:]),
        ("t", -1, *a_row()[2:]),
        (*a_row()[:7], 2**63, a_row()[8]),
        (*a_row()[:7], 5, a_row()[8]),
    ],
)
def test_a_row_that_could_not_be_stored_or_read_is_refused(bad: TaskRow) -> None:
    began = time.process_time()
    with pytest.raises(BadRequestError, match="no spool"):
        rows_in(frames_of([a_row(), bad]))
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    "facts", [b"", b"\xc1", b"\xff" * 9, b"\x80", b"\xde\x00", _NESTED], ids=len
)
def test_a_damaged_row_is_shown_by_its_columns(facts: bytes) -> None:
    found = record_of((*a_row()[:8], facts))
    assert (found.task_id, found.name, found.state) == ("t_0", "f", TaskState.FINISHED)
    assert found.error is UNREADABLE


def test_a_writer_begins_a_new_file_when_one_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "SEGMENT_BYTES", 200)
    writer = SpoolWriter(tmp_path, "w_1")
    for number in range(20):
        writer.write([a_row(number)])
    files = sorted(tmp_path.iterdir())
    assert len(files) > 3
    rows = [row for file in files for row in rows_in(file.read_bytes())[0]]
    assert rows == [a_row(number) for number in range(20)]
    assert all(spool.writer_lives(file) for file in files)
    dead = files[0].with_name("w_1.1.7.00000000")  # process 1 never started at tick 7
    assert not spool.writer_lives(dead)


def test_a_full_disk_costs_nothing_at_first_and_is_counted_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spool, "MAX_UNWRITTEN_BYTES", 600)
    real, room = os.write, [150]

    def write(file: int, data: bytes) -> int:
        """A disk that takes part of a write, as full ones do."""
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        nbytes = real(file, bytes(data[: room[0]]))
        room[0] -= nbytes
        return nbytes

    monkeypatch.setattr(spool.os, "write", write)
    writer = SpoolWriter(tmp_path, "w_1")
    for number in range(20):
        writer.write([a_row(number)])
    assert writer.waits
    lost = writer.dropped
    assert 0 < lost < 20
    assert "No space left" in caplog.text
    room[0] = 1 << 20
    writer.write([a_row(20)])
    assert writer.dropped == lost + 1, "there was still no room when it came"
    writer.write([a_row(21)])
    assert not writer.waits
    (file,) = tmp_path.iterdir()
    rows, told = rows_in(file.read_bytes())
    kept = 20 - lost
    assert rows == [*(a_row(number) for number in range(kept)), a_row(21)]
    assert told == writer.dropped == lost + 1
