"""Log files: whose output a line is, when it was written, and where reading ends."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from stoker_nodelet.telemetry.logs import LogFile, LogFilter, Logs, WriteTimes
from stoker_wire.data.output_marks import START, Mark, mark_line
from stoker_wire.messages.control import LogLine, LogStream

if TYPE_CHECKING:
    from pathlib import Path

OUT, ERR = LogStream.STDOUT, LogStream.STDERR
ALL = LogFilter(job_id="job_1")
KEY = b"k" * 16


def write(path: Path, text: str, at_s: float | None = None) -> None:
    with path.open("a") as file:
        file.write(text)
    if at_s is not None:
        os.utime(path, (at_s, at_s))


def mark(stream: LogStream, name: str, cell: str = "") -> str:
    return mark_line(KEY, Mark(stream, name, cell)).decode()


def logs_of(path: Path, **facts: object) -> Logs:
    logs = Logs("n_1")
    logs.add(LogFile("w_1", path, job_id="job_1", name="lease", pid=7, mark_key=KEY, **facts))  # type: ignore[arg-type]
    return logs


async def read(logs: Logs, chosen: LogFilter = ALL, **how: object) -> list[LogLine]:
    return [line async for batch in logs.read(chosen, **how) for line in batch]  # type: ignore[arg-type]


async def test_a_line_says_its_stream_its_task_and_when_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "w_1.log"
    logs = logs_of(path)
    write(path, "early\n", 100.0)
    logs.poll()
    write(path, f"{mark(ERR, 'f')}wrong\n", 200.0)
    logs.poll()
    write(path, f"{mark(OUT, 'g', '2f6a')}right\nunfinished", 300.0)
    lines = await read(logs)
    seen = [(line.text, line.stream, line.name, line.at_s) for line in lines]
    assert seen == [
        ("early", OUT, "lease", 100.0),
        ("wrong", ERR, "f", 200.0),
        ("right", OUT, "g", 300.0),
        ("unfinished", OUT, "g", 300.0),
    ]
    assert [line.cell for line in lines] == ["", "", "2f6a", "2f6a"]
    for index, line in enumerate(lines):
        assert await read(logs, cursors={"w_1": line.cursor}) == lines[index + 1 :]
    assert await read(logs, last=2) == lines[2:]
    assert logs.tail("w_1", 3) == ("wrong", "right", "unfinished")


async def test_output_cannot_say_that_another_has_printed_it(tmp_path: Path) -> None:
    path = tmp_path / "w_1.log"
    logs = logs_of(path)
    forged = [
        f"{START.decode()}stderr:root@prod",
        f"{START.decode()}0000000000000000:stderr:root@prod",
        mark_line(b"x" * 16, Mark(ERR, "root@prod")).decode().rstrip(),
        mark(OUT, "f").rstrip().replace(":f", ":root@prod"),
    ]
    write(path, mark(OUT, "f") + "mine\n" + "\n".join(forged) + "\nalso mine\n")
    lines = await read(logs)
    assert [line.text for line in lines] == ["mine", *forged, "also mine"]
    assert {(line.name, line.stream) for line in lines} == {("f", OUT)}
    for index, line in enumerate(lines):
        assert await read(logs, cursors={"w_1": line.cursor}) == lines[index + 1 :]
    assert await read(logs, last=3) == lines[-3:]
    assert logs.tail("w_1", 2) == (forged[-1], "also mine")


async def test_a_driver_has_no_marks(tmp_path: Path) -> None:
    path = tmp_path / "driver.log"
    logs = Logs("n_1")
    logs.add(LogFile("d_1", path, job_id="job_1", name="driver", attempt=1))
    write(path, mark_line(b"", Mark(ERR, "root@prod")).decode() + "text\n")
    assert {(line.name, line.stream) for line in await read(logs)} == {("driver", OUT)}


async def test_the_mark_of_a_line_far_behind_it_is_found(tmp_path: Path) -> None:
    path = tmp_path / "w_1.log"
    write(path, mark(ERR, "f") + "x" * 99 + "\n")
    for _ in range(4000):
        write(path, "y" * 99 + "\n")
    logs = logs_of(path)
    lines = await read(logs)
    (last,) = await read(logs, cursors={"w_1": lines[-2].cursor})
    assert (last.stream, last.name) == (ERR, "f")


async def test_reading_ends_where_the_file_ended_when_it_began(tmp_path: Path) -> None:
    path = tmp_path / "w_1.log"
    write(path, "one\ntwo\n")
    logs = logs_of(path)
    seen = []
    async for batch in logs.read(ALL):
        seen += [line.text for line in batch]
        write(path, "and on it goes\n")
        assert len(seen) < 10
    assert seen == ["one", "two"]


async def test_a_drivers_output_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "driver.log"
    write(path, "begun\n")
    logs = logs_of(path, attempt=1)
    seen = []
    async for batch in logs.read(LogFilter(job_id="job_1", kind="driver"), follow=True):
        seen += [line.text for line in batch]
        if seen == ["begun"]:
            write(path, "the end")
            logs.end("w_1")
    assert seen == ["begun", "the end"]


def test_what_is_kept_of_write_times_is_bounded_and_errs_to_the_late_side() -> None:
    times = WriteTimes()
    for second in range(1, 100_000):
        times.record(second * 10, float(second))
    assert len(times._sizes) <= 512
    assert times.at(999_990) == 99_999.0
    for offset in (1, 5_000, 123_456, 999_989):
        assert offset / 10 <= times.at(offset)
    assert abs(times.at(900_000) - 90_000) < 40_000


async def test_log_lines_are_read_whole_and_cursors_continue(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes("one\ntwö\r\n\nrest".encode())
    logs = Logs("n_1")
    logs.add(LogFile("w_1", path, job_id="job_1", name="f", pid=3))
    chosen = LogFilter(worker_id="w_1")

    async def read(**how: int) -> list[tuple[str, int]]:
        found = []
        async for batch in logs.read(chosen, **how):  # type: ignore[arg-type]
            found += [(line.text, line.cursor) for line in batch]
        return found

    assert await read() == [("one", 4), ("twö", 10), ("", 11), ("rest", 15)]
    assert await read(since=4) == [("twö", 10), ("", 11), ("rest", 15)]
    assert await read(last=1) == [("rest", 15)]
    assert logs.tail("w_1", 2) == ("", "rest")
    assert logs.tail("w_2", 2) == ()
    path.write_bytes(b"x" * 200_000)
    assert sum(len(text) for text, _ in await read()) == 200_000
