"""Retention of logs: long ones are shortened behind what was shown, and old ones of ended processes leave."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from stoker_nodelet.telemetry import log_retention
from stoker_nodelet.telemetry.log_retention import LogRetention
from stoker_nodelet.telemetry.logs import LogFile, LogFilter, Logs
from stoker_wire.data.output_marks import Mark, mark_line
from stoker_wire.messages.control import LogLine, LogStream

if TYPE_CHECKING:
    from pathlib import Path

ALL = LogFilter(job_id="job_1")
KEY = b"k" * 16
MAX = 1 << 20
LINE = 100


@pytest.fixture
def nobody_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_retention, "HELD_S", -1.0)


def add(logs: Logs, path: Path, worker_id: str = "w_1", **facts: object) -> LogFile:
    path.touch()
    log = LogFile(worker_id, path, job_id="job_1", name="lease", mark_key=KEY, **facts)  # type: ignore[arg-type]
    logs.add(log)
    return log


def write(path: Path, first: int, count: int) -> None:
    with path.open("a") as file:
        file.writelines(f"{i:<{LINE - 1}}\n" for i in range(first, first + count))


def limits(folder: Path, logs: Logs, *, total: int = 0, files: int = 0) -> LogRetention:
    return LogRetention(folder, logs, MAX, total, files, sweep_s=0.0)


async def read(logs: Logs, **how: object) -> list[LogLine]:
    return [line async for batch in logs.read(ALL, **how) for line in batch]  # type: ignore[arg-type]


def used(path: Path) -> int:
    return os.stat(path).st_blocks * 512


@pytest.mark.usefixtures("nobody_is_waited_for")
async def test_a_long_log_loses_its_oldest_lines_and_its_disk_space(tmp_path: Path) -> None:
    logs, path = Logs("n_1"), tmp_path / "worker-w_1.log"
    add(logs, path)
    retention = limits(tmp_path, logs)
    count = 0
    with path.open("ab", buffering=0) as held:  # as a child of the worker may hold it
        for _ in range(10):
            with path.open("ab") as marked:  # workers repeat it
                marked.write(mark_line(KEY, Mark(LogStream.STDERR, "f")))
            write(path, count, 5000)
            count += 5000
            retention.tick()
            assert used(path) <= MAX + 8192
        size = path.stat().st_size
        assert size > count * LINE
        notice, *lines = await read(logs)
        first = int(lines[0].text)
        dropped = lines[0].cursor - LINE
        assert notice.text.startswith(f"{dropped} bytes of output were here")
        assert (notice.stream, notice.cursor) == (LogStream.STDERR, dropped)
        assert [int(line.text) for line in lines] == list(range(first, count))
        assert {(line.name, line.stream) for line in lines} == {("f", LogStream.STDERR)}
        assert await read(logs, cursors={"w_1": lines[7].cursor}) == lines[8:]
        assert [line.text for line in await read(logs, last=3)] == [x.text for x in lines[-3:]]
        assert logs.tail("w_1", 1)[0].strip() == str(count - 1)
        held.write(b"by the child\n")
    assert (await read(logs))[-1].text == "by the child"
    assert path.stat().st_size == size + 13


async def test_what_a_follower_has_not_seen_is_not_dropped(tmp_path: Path) -> None:
    logs, path = Logs("n_1"), tmp_path / "worker-w_1.log"
    log = add(logs, path)
    retention = limits(tmp_path, logs)
    count = 50_000
    write(path, 0, count)
    retention.tick()
    assert used(path) > 4 * MAX, "its reader may yet come"
    seen: list[int] = []
    low = used(path)
    async for batch in logs.read(ALL, follow=True):
        seen += [int(line.text) for line in batch]
        log.positions.pop(0, None)  # as after 30 s
        retention.tick()
        low = min(low, used(path))
        if len(seen) == count:
            break
    assert seen == list(range(count)), "nothing was lost"
    assert low < 4 * MAX, "what was shown was dropped meanwhile"


async def test_a_reader_that_stands_still_is_told_what_it_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs, path = Logs("n_1"), tmp_path / "worker-w_1.log"
    add(logs, path)
    retention = limits(tmp_path, logs)
    write(path, 0, 10)
    reader = logs.read(LogFilter(worker_id="w_1"), follow=True)
    assert len(await anext(reader)) == 10
    write(path, 10, 50_000)
    retention.tick()
    assert used(path) > 4 * MAX
    monkeypatch.setattr(log_retention, "HELD_S", -1.0)
    retention.tick()
    assert used(path) < MAX
    logs.end("w_1")
    rest = [line async for batch in reader for line in batch]
    assert "dropped by retention" in rest[0].text
    assert int(rest[-1].text) == 50_009


@pytest.mark.usefixtures("nobody_is_waited_for")
def test_logs_of_ended_processes_leave_by_number_and_by_size(tmp_path: Path) -> None:
    logs = Logs("n_1")
    for index in range(10):
        path = tmp_path / f"worker-w_{index}.log"
        add(logs, path, f"w_{index}")
        write(path, 0, 1000)
        if index not in (0, 9):
            logs.end(f"w_{index}")

    def there() -> list[str]:
        known = {log.path.name for log in logs.all()}
        files = sorted(path.name for path in tmp_path.iterdir())
        assert set(files) == known
        return [name.removeprefix("worker-w_").removesuffix(".log") for name in files]

    limits(tmp_path, logs, files=6).tick()
    assert there() == ["0", "3", "4", "5", "6", "7", "8", "9"]
    each = used(tmp_path / "worker-w_0.log")
    assert logs.nbytes == 8 * each
    limits(tmp_path, logs, total=4 * each).tick()
    assert there() == ["0", "7", "8", "9"]
    limits(tmp_path, logs, total=1).tick()
    assert there() == ["0", "9"], "those of living processes stay"


def test_an_ended_log_that_is_followed_stays_until_it_was_read(tmp_path: Path) -> None:
    logs, path = Logs("n_1"), tmp_path / "worker-w_1.log"
    log = add(logs, path)
    write(path, 0, 10)
    logs.end("w_1")
    limits(tmp_path, logs, total=1).tick()
    assert path.exists()
    log.positions[0] = (path.stat().st_size, log.positions[0][1])
    limits(tmp_path, logs, total=1).tick()
    assert not path.exists()


@pytest.mark.usefixtures("nobody_is_waited_for")
def test_the_services_own_logs_are_shortened_too(tmp_path: Path) -> None:
    path, other = tmp_path / "head.log", tmp_path / "worker-of-another-node.log"
    for one in (path, other):
        write(one, 0, 50_000)
    before = used(other)
    limits(tmp_path, Logs("n_1")).tick()
    assert used(path) <= MAX
    assert used(other) == before
