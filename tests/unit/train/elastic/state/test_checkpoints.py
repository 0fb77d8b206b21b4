"""Checkpoints on disk: whole or not there, whatever breaks, and never the job's end."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from stoker.exceptions import BadRequestError
from stoker_train.elastic.state import checkpoints
from stoker_train.elastic.state.checkpoints import CheckpointStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WAIT_S = 40.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    store = CheckpointStore(tmp_path / "checkpoints", keep=3)
    yield store
    store.close()


def payload(step: int) -> dict[str, Any]:
    return {"version": 1, "shared": {"x": torch.full((1000,), float(step))}, "per_rank": {}}


def save(
    store: CheckpointStore, step: int, rank: int = 0, generation: int = 0
) -> checkpoints.Saved:
    saving = store.save(step, payload(step), rank=rank, generation=generation)
    return saving.result(WAIT_S)


def test_what_was_saved_is_the_latest_and_torch_reads_it(store: CheckpointStore) -> None:
    assert store.latest() is None
    assert store.steps() == ()
    saved = save(store, 5)
    assert saved.problem == ""
    assert saved.path is not None
    assert saved.nbytes == saved.path.stat().st_size
    step, found = store.latest() or (0, {})
    assert step == 5
    assert torch.equal(found["shared"]["x"], payload(5)["shared"]["x"])
    assert torch.load(saved.path, weights_only=True)["version"] == 1


def test_the_last_three_stay(store: CheckpointStore) -> None:
    for step in range(1, 7):
        save(store, step, rank=2)
        save(store, step)
    assert store.steps() == (4, 5, 6)
    assert len(os.listdir(store.path)) == 3 * 4
    assert store.load(5, rank=2) is not None
    assert store.load(5, rank=1) is None
    assert store.load(1) is None
    with pytest.raises(BadRequestError) as caught:
        CheckpointStore(store.path, keep=0)
    assert caught.value.field == "keep"


@pytest.mark.parametrize(
    "damage", ["cut", "flipped", "emptied", "gone", "manifest cut", "no manifest"]
)
def test_a_torn_checkpoint_is_passed_over(
    store: CheckpointStore, damage: str, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    draw = random.Random(seed)
    save(store, 1)
    saved = save(store, 2)
    assert saved.path is not None
    manifest = saved.path.with_suffix(".json")
    data = saved.path.read_bytes()
    match damage:
        case "cut":
            saved.path.write_bytes(data[: draw.randrange(len(data))])
        case "flipped":
            place = draw.randrange(len(data))
            saved.path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        case "emptied":
            saved.path.write_bytes(b"")
        case "gone":
            saved.path.unlink()
        case "manifest cut":
            manifest.write_bytes(manifest.read_bytes()[:-2])
        case "no manifest":
            manifest.unlink()
    step, found = store.latest() or (0, {})
    assert step == 1
    assert found["shared"]["x"][0] == 1.0


def test_a_full_disk_costs_a_checkpoint_and_is_said_once(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(store, 1)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.os, "fsync", full)
        for step in (2, 3):
            saved = save(store, step)
            assert "No space left" in saved.problem
            assert saved.path is None
    assert "No space left" in store.problem
    assert sum("cannot be written" in one.message for one in caplog.records) == 1
    assert store.steps() == (1,)
    assert len(os.listdir(store.path)) == 2  # nothing of the others takes up room
    save(store, 4)
    assert store.problem == ""
    assert store.steps() == (1, 4)
    assert any("written again" in one.message for one in caplog.records)


def test_a_folder_that_cannot_be_made_is_a_problem_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = CheckpointStore(tmp_path / "file" / "checkpoints")
    assert "NotADirectoryError" in save(store, 1).problem
    store.close()


def test_one_is_written_one_waits_and_a_third_takes_its_place(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()
    held: set[int] = set()
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        began.set()
        assert go_on.wait(WAIT_S)
        fsync(descriptor)

    @contextmanager
    def held_payload(step: int) -> Iterator[dict[str, Any]]:
        held.add(step)
        yield payload(step)
        held.remove(step)

    monkeypatch.setattr(checkpoints.os, "fsync", slow)
    first = store.save(1, lambda: held_payload(1))
    assert began.wait(WAIT_S)
    second = store.save(2, lambda: held_payload(2))
    assert held == {1, 2}  # from now on, not from when it is its turn
    third = store.save(3, lambda: held_payload(3))
    assert "a later one came" in second.result(WAIT_S).problem
    assert held == {1, 3}
    assert not first.done()
    go_on.set()
    assert [first.result(WAIT_S).problem, third.result(WAIT_S).problem] == ["", ""]
    assert store.steps() == (1, 3)
    assert held == set()


def test_what_waits_is_written_before_the_end_and_nothing_after(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    waiting = store.save(1, payload(1))
    store.close()
    assert waiting.result(0).problem == ""
    assert "closed" in store.save(2, payload(2)).result(0).problem
    assert store.steps() == (1,)


def test_a_payload_that_cannot_be_written_is_a_problem(store: CheckpointStore) -> None:
    assert store.save(1, {"lock": threading.Lock()}).result(WAIT_S).problem
    assert store.steps() == ()


KILLED = """
import os, sys, torch
from stoker_train.elastic.state import checkpoints
store = checkpoints.CheckpointStore(sys.argv[1])
store.save(1, {"x": torch.ones(1000)}).result()
left = int(sys.argv[2])
fsync = os.fsync
def dies(descriptor):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), 9)
    fsync(descriptor)
checkpoints.os.fsync = dies
store.save(2, {"x": torch.ones(1000)}).result()
"""


@pytest.mark.parametrize("point", [1, 2])
def test_a_writer_that_is_killed_leaves_the_one_before(tmp_path: Path, point: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), str(point)], timeout=120, check=False
    )
    assert done.returncode == -9
    store = CheckpointStore(tmp_path, keep=1)
    assert (store.latest() or (0,))[0] == 1
    left = [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert len(left) == 1
    old = time.time() - 3600
    os.utime(tmp_path / left[0], (old, old))
    save(store, 3)
    store.close()
    assert sorted(os.listdir(tmp_path))[:1] != left
    assert store.steps() == (3,)


def test_a_rank_0_of_an_older_generation_is_fenced(store: CheckpointStore) -> None:
    save(store, 10, generation=1)
    zombie = CheckpointStore(store.path, keep=1)
    save(zombie, 90, generation=1)  # that it is cut off, and the others went back, it does not know
    save(store, 20, generation=2)
    step, found = store.latest() or (0, {})
    assert step == 20, "the newest generation counts, whatever its step"
    assert found["shared"]["x"][0] == 20.0
    late = save(zombie, 100, generation=1)
    assert "generation 1 is over" in late.problem
    assert save(zombie, 100, rank=1, generation=1).path is None
    assert store.steps() == (20, 90)
    zombie.close()
    for step in (30, 40):
        save(store, step, generation=2)
    assert store.steps() == (20, 30, 40), "the oldest go first: those of the older generation"
    save(store, 50, rank=1, generation=2)
    assert store.load(50, rank=1, generation=2) is not None
    assert store.load(50, rank=1, generation=3) is None
    assert store.generation_of(40) == 2
    assert store.generation_of(41) == 0


def test_what_was_written_before_generations_were_counts_as_the_oldest(
    store: CheckpointStore,
) -> None:
    for step, generation in ((300, 1), (20, 2)):
        save(store, step, generation=generation)
    manifest = store.path / "checkpoint-0000000300.json"
    manifest.write_text(manifest.read_text().replace(',"generation":1', ""))
    assert store.generation_of(300) == 0
    step, _ = store.latest() or (0, {})
    assert step == 20
