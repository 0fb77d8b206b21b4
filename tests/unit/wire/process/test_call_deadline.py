"""What a nodelet reads of the call that a worker runs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from stoker_wire.process.call_deadline import FOLDER, DeadlineCell, cell_path, read_deadline

if TYPE_CHECKING:
    from pathlib import Path


def test_the_call_that_runs_is_read_with_its_deadline(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    cell, path = DeadlineCell(str(tmp_path), "w_1"), cell_path(tmp_path, "w_1")
    assert read_deadline(path) is None
    cell.disarm()
    assert not path.exists(), "it is made by the first call with a timeout"
    before_s = time.monotonic()
    cell.arm("t_0123456789abcdef", 2.5, 4.0)
    call = read_deadline(path)
    assert call is not None
    assert (call.task_id, call.timeout_s) == ("t_0123456789abcdef", 2.5)
    assert before_s + 6.5 <= call.at_s <= time.monotonic() + 6.5
    cell.leave(call.task_id, 1.0)
    assert read_deadline(path) == call, "it is never brought forward"
    cell.leave(call.task_id, 100.0)
    later = read_deadline(path)
    assert later is not None and later.at_s > call.at_s + 90.0
    cell.disarm()
    assert read_deadline(path) is None


def test_a_worker_that_leaves_because_of_a_call_without_a_timeout_has_a_deadline(
    tmp_path: Path,
) -> None:
    (tmp_path / FOLDER).mkdir()
    cell, path = DeadlineCell(str(tmp_path), "w_1"), cell_path(tmp_path, "w_1")
    before_s = time.monotonic()
    cell.leave("t_1", 10.0)
    call = read_deadline(path)
    assert call is not None and (call.task_id, call.timeout_s) == ("t_1", 0.0)
    assert before_s + 10.0 <= call.at_s <= time.monotonic() + 10.0


def test_a_worker_whose_nodelet_reads_no_deadlines_runs_calls_all_the_same(tmp_path: Path) -> None:
    cell = DeadlineCell(str(tmp_path), "w_1")
    cell.arm("t_1", 1.0, 1.0)
    cell.leave("t_1", 1.0)
    cell.disarm()
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_making_is_no_deadline(tmp_path: Path) -> None:
    path = tmp_path / "w_1"
    path.write_bytes(b"\1" * 20)
    assert read_deadline(path) is None
