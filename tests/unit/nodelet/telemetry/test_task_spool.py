"""The nodelet forwards what lies in its spool folder, once if it can, and deletes what is told."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from stoker_nodelet.telemetry import task_spool as nodelet_spool
from stoker_nodelet.telemetry.task_spool import TaskSpool
from stoker_wire.data import spool as wire_spool
from stoker_wire.data.spool import SpoolWriter, TaskRow, row_of, rows_in, spool_folder
from stoker_wire.errors import (
    BadRequestError,
    ConflictError,
    NotFoundError,
    PayloadTooLargeError,
    StokerError,
    UnauthorizedError,
    UnavailableError,
)
from stoker_wire.messages.work import TaskRecord, TaskState

if TYPE_CHECKING:
    from pathlib import Path


def a_row(task_id: str, name: str = "f") -> TaskRow:
    record = TaskRecord(task_id=task_id, attempt=0, state=TaskState.FINISHED, job_id="j", name=name)
    return row_of(record)


class Gcs:
    def __init__(self) -> None:
        self.error: Exception | None = None
        self.told: list[str] = []
        self.dropped = 0
        self.calls = 0
        self.nodes: set[str] | None = set()
        """Those that it knows; None while it is away."""

    async def knows_node(self, node_id: str) -> bool:
        if self.nodes is None:
            raise UnavailableError("away")
        return node_id in self.nodes

    async def forward(self, frames: bytes) -> None:
        if self.error is not None:
            raise self.error
        rows, dropped = rows_in(frames)
        self.told += [row[0] for row in rows]
        self.dropped += dropped
        self.calls += 1


@pytest.fixture
def gcs() -> Gcs:
    return Gcs()


@pytest.fixture
def spool(tmp_path: Path, gcs: Gcs, monkeypatch: pytest.MonkeyPatch) -> TaskSpool:
    monkeypatch.setattr(nodelet_spool, "_REAP_S", 0.0)
    made = TaskSpool(tmp_path / "session", "n_1", gcs.forward, gcs.knows_node)
    made.open()
    return made


def files(spool: TaskSpool) -> list[str]:
    return sorted(path.name for path in spool.folder.iterdir() if path.name[0] != ".")


def leave(spool: TaskSpool, name: str) -> None:
    """Rename the only file as if its writer was another, dead process."""
    (path,) = (path for path in spool.folder.iterdir() if path.name[0] != ".")
    path.rename(path.with_name(name))


async def test_nothing_is_lost_or_told_twice_while_the_gcs_comes_and_goes(
    spool: TaskSpool, gcs: Gcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_spool, "SEGMENT_BYTES", 500)
    writers = [SpoolWriter(spool.folder, f"w_{i}") for i in range(3)]
    sent = []
    for index in range(60):
        gcs.error = UnavailableError("away") if index % 7 in (2, 3, 4) else None
        sent.append(f"t_{index}")
        writers[index % 3].write([a_row(sent[-1])])
        assert await spool.flush() is (gcs.error is None)
    gcs.error = None
    assert await spool.flush()
    assert sorted(gcs.told) == sorted(sent)
    assert len(files(spool)) <= 3, "only what living writers may add to is left"
    assert spool.forwarded == 60


async def test_a_batch_is_bounded_and_no_writer_is_left_behind(
    spool: TaskSpool, gcs: Gcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodelet_spool, "BATCH_BYTES", 4000)
    monkeypatch.setattr(nodelet_spool, "_FILE_BYTES", 2000)
    large = SpoolWriter(spool.folder, "w_0")
    large.write([a_row(f"t_{i}", "x" * 900) for i in range(30)])  # one frame above both bounds
    for i in range(30):
        large.write([a_row(f"u_{i}", "x" * 900)])
    SpoolWriter(spool.folder, "w_1").write([a_row("late")])
    assert await spool.flush()
    assert len(gcs.told) == 61
    assert gcs.told.index("late") < 40, "it went with the first batches"
    assert gcs.calls > 5


async def test_a_torn_end_of_a_dead_writer_is_no_hindrance(spool: TaskSpool, gcs: Gcs) -> None:
    SpoolWriter(spool.folder, "w_0").write([a_row("t_1")])
    leave(spool, "w_0.1.7.00000000")  # process 1 never started at tick 7
    with (spool.folder / "w_0.1.7.00000000").open("ab") as file:
        file.write(b"\0\0\0\x99torn")
    assert await spool.flush()
    assert gcs.told == ["t_1"]
    assert files(spool) == []


async def test_what_is_written_between_the_last_look_and_a_death_is_told(
    spool: TaskSpool, gcs: Gcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = SpoolWriter(spool.folder, "w_0")
    writer.write([a_row("t_1")])

    def dies_now(path: Path) -> bool:
        writer.write([a_row("t_2")])
        return False

    monkeypatch.setattr(nodelet_spool, "writer_lives", dies_now)
    assert await spool.flush()
    monkeypatch.setattr(nodelet_spool, "writer_lives", lambda path: False)
    assert await spool.flush()
    assert gcs.told == ["t_1", "t_2"]
    assert files(spool) == []


async def test_rows_that_the_gcs_refuses_for_ever_are_counted_and_hold_nobody_up(
    spool: TaskSpool, gcs: Gcs
) -> None:
    writer = SpoolWriter(spool.folder, "w_0")
    writer.write([a_row("t_1"), a_row("t_2")])
    gcs.error = BadRequestError("no")
    assert await spool.flush()
    gcs.error = None
    writer.write([a_row("t_3")])
    assert await spool.flush()
    assert gcs.told == ["t_3"]
    assert spool.dropped == gcs.dropped == 2


async def test_one_frame_that_the_gcs_refuses_costs_no_other(
    spool: TaskSpool, gcs: Gcs, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = SpoolWriter(spool.folder, "w_0"), SpoolWriter(spool.folder, "w_1")
    for number in range(9):
        good.write([a_row(f"t_{number}")])
        if number in {2, 3, 7}:
            bad.write([(*a_row(f"bad_{number}")[:8], b"\xc1noise")])
    bad.write([a_row("t_9")])
    assert await spool.flush()
    assert sorted(gcs.told) == [f"t_{number}" for number in range(10)]
    assert (spool.forwarded, spool.dropped) == (10, 3)
    assert caplog.text.count("are lost") == 1
    good.write([a_row("t_10")])
    assert await spool.flush() and gcs.dropped == 3, "the gcs learns how many"


@pytest.mark.parametrize("status", [PayloadTooLargeError, NotFoundError, ConflictError])
async def test_no_refusal_is_tried_for_ever(
    spool: TaskSpool, gcs: Gcs, status: type[StokerError]
) -> None:
    writer = SpoolWriter(spool.folder, "w_0")
    writer.write([a_row("t_1")])
    gcs.error = status("no")
    assert await spool.flush()
    gcs.error = None
    assert await spool.flush() and gcs.told == []
    writer.write([a_row("t_2")])
    gcs.error = UnauthorizedError("the token is being rotated")
    assert not await spool.flush(), "that is no fault of the frame"
    gcs.error = None
    assert await spool.flush() and gcs.told == ["t_2"]


async def test_a_file_that_cannot_be_read_is_put_aside(spool: TaskSpool, gcs: Gcs) -> None:
    SpoolWriter(spool.folder, "w_1").write([a_row("t_1")])
    (spool.folder / "w_0.1.7.00000000").write_bytes(b"\xff" * 100)
    (spool.folder / "notes.txt").write_text("not ours")
    assert await spool.flush()
    assert gcs.told == ["t_1"]
    assert spool.dropped == 1
    assert "w_0.1.7.00000000.broken" in files(spool)


async def test_a_new_nodelet_takes_over_the_folders_of_dead_ones_only(
    tmp_path: Path, gcs: Gcs, spool: TaskSpool
) -> None:
    here = spool.session_dir
    for session, name in (
        (here, "n_0"),
        (tmp_path / "earlier", "n_3"),
        (tmp_path / "other", "n_9"),
    ):
        dead = TaskSpool(session, name, gcs.forward, gcs.knows_node)
        dead.open()
        SpoolWriter(dead.folder, "w_0").write([a_row(f"t_{name[2:]}")])
        leave(dead, "w_0.1.7.00000000")
        (dead.folder / ".owner").write_text("1 7")
    SpoolWriter(spool.folder, "w_1").write([a_row("t_1")])
    after = TaskSpool(here, "n_2", gcs.forward, gcs.knows_node)
    after.open()
    gcs.nodes = None  # away
    await after.take_over()
    assert await after.flush() and gcs.told == ["t_0"], "its own session is of its cluster"
    gcs.nodes = {"n_3"}
    for _ in range(2):
        await after.take_over()
        assert await after.flush()
    assert gcs.told == ["t_0", "t_3"], "a living one's is its own, another cluster's not ours"
    assert (
        not spool_folder(here, "n_0").exists()
        and not spool_folder(tmp_path / "earlier", "n_3").exists()
    )
    assert spool_folder(tmp_path / "other", "n_9").exists()


async def test_a_nodelet_that_stops_tells_all_and_leaves_no_folder(
    spool: TaskSpool, gcs: Gcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    SpoolWriter(spool.folder, "w_0").write([a_row("t_1")])
    gcs.error = UnavailableError("away")
    monkeypatch.setattr(nodelet_spool, "writer_lives", lambda path: False)
    await spool.close(1.0)
    assert len(files(spool)) == 1, "it waits for the next nodelet"
    assert (spool.folder / ".owner").read_text().split()[0] == str(os.getpid())
    gcs.error = None
    await spool.close(1.0)
    assert gcs.told == ["t_1"]
    assert not spool.folder.exists()
