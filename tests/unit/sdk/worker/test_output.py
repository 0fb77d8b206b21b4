"""Output of tasks on a disk that fills up and has room again."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from stoker.runtime.process.cells import CELLS
from stoker.runtime.process.current_task import TaskInfo, current_task
from stoker.runtime.worker.output import MarkedOutput, _OutputState
from stoker_wire.data.output_marks import Mark, read_mark
from stoker_wire.messages.control import LogStream

if TYPE_CHECKING:
    from pathlib import Path


def test_what_a_full_disk_did_not_take_is_counted_and_said_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    write, is_full = os.write, False

    def writes(fd: int, data: bytes) -> int:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr("stoker.runtime.worker.output.os.write", writes)
    with path.open("wb") as file:
        output = MarkedOutput(file.fileno(), LogStream.STDOUT, _OutputState(b"k" * 16))
        output.write("before\n")
        is_full = True
        output.write("12345678\n")
        output.write("9\n")
        is_full = False
        output.write("after\n")
        output.flush()
        output.detach()
    lines = path.read_text().splitlines()
    assert lines[0] == "before"
    assert lines[-1] == "after"
    assert "[11 bytes of output were lost: the disk was full]" in lines


def test_only_the_key_of_the_worker_reads_its_marks(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        printed = _OutputState(b"k" * 16)
        out = MarkedOutput(file.fileno(), LogStream.STDOUT, printed)
        err = MarkedOutput(file.fileno(), LogStream.STDERR, printed)
        out.write("begun")
        out.flush()
        err.write("wrong\n")
        out.detach()
        err.detach()
    begun, mark, wrong = path.read_bytes().splitlines()
    assert (begun, wrong) == (b"begun", b"wrong")
    assert read_mark(b"k" * 16, mark) == Mark(LogStream.STDERR)
    assert read_mark(b"x" * 16, mark) is None
    assert b"k" * 16 not in mark


def test_what_a_task_prints_is_marked_with_the_cell_of_its_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    key = b"k" * 16
    with path.open("wb") as file:
        out = MarkedOutput(file.fileno(), LogStream.STDOUT, _OutputState(key))
        for cell in ("2f6a", "2f6a", ""):
            token = current_task.set(TaskInfo("t", "f", 0, cell=cell))
            out.write("x\n")
            current_task.reset(token)
        monkeypatch.setattr(CELLS, "of_actor", "3b1c")
        out.write("of no call\n")
        out.detach()
    lines = path.read_bytes().splitlines()
    first, last, of_actor = (read_mark(key, lines[i]) for i in (0, 3, 5))
    assert first == Mark(LogStream.STDOUT, "f", "2f6a")
    assert last == Mark(LogStream.STDOUT, "f")
    assert of_actor == Mark(LogStream.STDOUT, "f", "3b1c")
    assert len(lines) == 7


def test_other_errors_of_a_log_are_those_of_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(fd: int, data: bytes) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("stoker.runtime.worker.output.os.write", broken)
    with (tmp_path / "log").open("wb") as file:
        output = MarkedOutput(file.fileno(), LogStream.STDOUT, _OutputState(b"k" * 16))
        with pytest.raises(OSError, match="Input/output error"):
            output.write("x\n")
        monkeypatch.undo()
        output.detach()
