"""Of two gangs only the one that took over last adds to a folder, whenever the other wakes up."""

from __future__ import annotations

import os
import stat
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from stoker.exceptions import FencedError, NotFoundError
from stoker_train.sharded.checkpoints import claims, layout, saving
from stoker_train.sharded.checkpoints.full_state import load_full, save_full
from stoker_train.sharded.checkpoints.store import ShardedCheckpoints

if TYPE_CHECKING:
    from pathlib import Path

WAIT_S = 40.0


def _model(value: float) -> Any:
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.weight, value)
    return model


def _save(store: ShardedCheckpoints, step: int, value: float | None = None) -> saving.Saved:
    return store.save(step, {"model": _model(step if value is None else value)}).result(WAIT_S)


def test_a_stale_rank_0_that_wakes_up_late_never_makes_its_write_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sleeps at each place of a commit in turn while its successor takes over, and loads."""
    asleep, wakes = threading.Event(), threading.Event()
    real_file, real_check = saving.whole_file, claims.check

    def sleeps(place: str, name: str) -> None:
        if place == name and threading.current_thread().name == "sharded-checkpoint":
            asleep.set()
            assert wakes.wait(WAIT_S)

    for number, place in enumerate(("plain.pt", "before", "manifest.json")):
        folder = tmp_path / str(number)
        old = ShardedCheckpoints(folder, keep=1, attempt=1, owner="job")
        assert not _save(old, 100).problem
        asleep.clear()
        wakes.clear()
        checks = iter(("", "before", "after"))

        def check(*given: Any, checks: Any = checks, place: str = place, **named: Any) -> None:
            real_check(*given, **named)
            sleeps(next(checks, ""), place)

        def whole_file(path: Path, place: str = place) -> Any:
            sleeps(path.name, place)
            return real_file(path)

        with monkeypatch.context() as patch:
            patch.setattr(claims, "check", check)
            patch.setattr(saving, "whole_file", whole_file)
            late = old.save(400, {"model": _model(400.0)})
            assert asleep.wait(WAIT_S)
            new = ShardedCheckpoints(folder, keep=1, attempt=2, owner="job")
            model = _model(0.0)
            loaded = new.load({"model": model})
            assert loaded is not None and loaded.step == 100
            wakes.set()
            saved = late.result(WAIT_S)
        assert saved.fenced and "attempt 2 of job has taken over" in saved.problem, place
        assert new.newest() == 100 and load_full(folder)[0] == 100
        with pytest.raises(FencedError, match="attempt 1 writes no more"):
            old.save(500, {"model": model})
        assert not _save(new, 101).problem
        assert new.newest() == 101 == ShardedCheckpoints(folder).newest()
        assert float(load_full(folder)[1]["weight"][0, 0]) == 101.0
        with pytest.raises(FencedError):
            ShardedCheckpoints(folder, attempt=1, owner="job").load({"model": model})


def test_steps_that_are_done_again_replace_later_ones_of_the_gang_before(tmp_path: Path) -> None:
    first = ShardedCheckpoints(tmp_path, keep=5, attempt=1)
    for step in (10, 20, 30):
        assert not _save(first, step).problem
    newest = first.stored()[-1].path / "plain.pt"
    newest.write_bytes(newest.read_bytes()[:-1])
    again = ShardedCheckpoints(tmp_path, keep=5, attempt=2)
    loaded = again.load({"model": _model(0.0)})
    assert loaded is not None and loaded.step == 20
    assert not _save(again, 25).problem
    assert again.newest() == 25
    assert ShardedCheckpoints(tmp_path, attempt=1, owner="another job").load({"model": _model(0.0)})


def test_what_a_gang_wrote_last_is_its_newest_also_after_it_went_back(tmp_path: Path) -> None:
    store = ShardedCheckpoints(tmp_path, attempt=1)
    for step in (100, 200, 300):
        assert not _save(store, step).problem
    loaded = store.load({"model": _model(0.0)}, step=200)
    assert loaded is not None and loaded.step == 200
    assert not _save(store, 210).problem
    assert [one.step for one in store.stored()] == [200, 300, 210]
    assert store.newest() == 210


def test_a_claim_that_is_removed_between_two_looks_is_listed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ShardedCheckpoints(tmp_path, attempt=1)
    assert not _save(store, 1).problem
    real = layout.claims_in
    stale = iter([[0]])  # as it was listed before another gang took over and removed it
    monkeypatch.setattr(layout, "claims_in", lambda folder: next(stale, None) or real(folder))
    assert layout.newest_claim(tmp_path).serial == 1 and store.newest() == 1


def test_data_is_on_the_disk_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of each file at its last fsync, and the manifest after the others."""
    synced: dict[str, int] = {}
    real = os.fsync

    def fsync(file: int) -> None:
        seen = os.fstat(file)
        if stat.S_ISREG(seen.st_mode):
            path = os.path.realpath(f"/proc/self/fd/{file}")
            synced.pop(path, None)
            synced[path] = seen.st_size
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    saved = _save(ShardedCheckpoints(tmp_path), 1)
    assert saved.path is not None
    sizes = {
        name: nbytes
        for name, (nbytes, _) in layout.checkpoints_in(tmp_path)[0].manifest.files.items()
    }
    found = {path.split("/")[-1]: nbytes for path, nbytes in synced.items()}
    for name, nbytes in sizes.items():
        written = {".metadata": ".metadata.tmp"}.get(name, name)
        held = [
            size for one, size in found.items() if one == written or one.startswith(f".{name}.")
        ]
        assert held == [nbytes], (name, found)
    assert list(found)[-1].startswith(".manifest.json."), found


def test_who_only_looks_takes_nothing_over(tmp_path: Path) -> None:
    trains = ShardedCheckpoints(tmp_path, attempt=1)
    assert trains.load({"model": _model(0.0)}) is None
    assert not _save(trains, 1).problem
    looks = ShardedCheckpoints(tmp_path)
    assert looks.newest() == 1 and looks.load({"model": _model(0.0)}) is not None
    assert not _save(trains, 2).problem


def test_gangs_that_begin_at_once_get_claims_of_their_own(tmp_path: Path) -> None:
    found: list[layout.Claim] = []
    starts = threading.Barrier(8)

    def take() -> None:
        starts.wait(WAIT_S)
        found.append(claims.take(tmp_path, "", 0))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(WAIT_S)
    assert len({one.serial for one in found}) == 8
    assert layout.newest_claim(tmp_path).serial == max(one.serial for one in found)


def test_keep_stay_and_a_save_of_the_same_step_counts_anew(tmp_path: Path) -> None:
    store = ShardedCheckpoints(tmp_path, keep=2)
    for step in (1, 2, 3, 3):
        assert not _save(store, step, float(step)).problem
    assert [one.step for one in store.stored()] == [3, 3]
    path = save_full(tmp_path, 9, {"weight": torch.ones(2, 3), "bias": torch.zeros(2)})
    assert path == layout.checkpoints_in(tmp_path)[-1].path
    with pytest.raises(NotFoundError, match="no checkpoint of step 7"):
        load_full(tmp_path, step=7)
    with pytest.raises(NotFoundError, match="has no checkpoint"):
        load_full(tmp_path.parent)
    with pytest.raises(NotFoundError, match="is not there"):
        load_full(tmp_path / "none")
