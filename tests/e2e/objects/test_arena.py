"""A small arena on a real cluster: objects go to disk and come back, and what cannot fit says why."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.exceptions import ArenaFullError
from stoker_wire.messages.node_api import ArenaUsage
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
LIMIT = 48 * MIB
WAIT_S = 40.0


@pytest.fixture(scope="module")
def spill_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where a cluster with 48 MiB of shared memory spills to."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("spill")
        patch.setenv("STOKER_SESSION_ROOT", str(tmp_path_factory.mktemp("s")))
        patch.setenv("STOKER_SPILL_DIR", str(folder))
        stoker.init(num_cpus=2, object_store_memory=LIMIT, log_to_driver=False)
        try:
            yield folder
        finally:
            stoker.shutdown()


def usage() -> ArenaUsage:
    runtime = stoker.runtime.current.runtime()
    assert runtime.identity.node is not None
    client = runtime.clients.client_of(runtime.identity.node.url)
    return runtime.io.run(client.call("GET", "/v1/arena", reply=ArenaUsage), WAIT_S)


def spilled(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("o_*")]


def empty(folder: Path) -> bool:
    now = usage()
    return not spilled(folder) and (now.objects, now.object_bytes, now.spilled_bytes) == (0, 0, 0)


def block(number: int, nbytes: int = 8 * MIB) -> bytearray:
    return bytearray([number % 256]) * nbytes


def test_more_than_fits_goes_to_disk_and_comes_back(spill_dir: Path) -> None:
    refs = [stoker.put(block(number)) for number in range(16)]
    now = usage()
    assert now.spilled_bytes >= 16 * 8 * MIB - LIMIT
    assert now.used_bytes <= LIMIT
    assert len(spilled(spill_dir)) == now.spilled_bytes // (8 * MIB)
    for number, ref in enumerate(refs):
        assert stoker.get(ref, timeout=WAIT_S) == block(number)
    del refs, ref
    until(lambda: empty(spill_dir), WAIT_S, "memory and disk are free again")


def test_results_and_arguments_of_tasks_are_spilled_too(spill_dir: Path) -> None:
    @stoker.remote
    def make(number: int) -> bytearray:
        return bytearray([number]) * (8 << 20)

    @stoker.remote
    def check(number: int, value: bytearray) -> bool:
        return value == bytearray([number]) * (8 << 20)

    made = [make.remote(number) for number in range(12)]
    stoker.wait(made, num_returns=len(made), timeout=WAIT_S)
    checks = [check.remote(number, ref) for number, ref in enumerate(made)]
    assert all(stoker.get(checks, timeout=WAIT_S))
    del made, checks
    until(lambda: empty(spill_dir), WAIT_S, "memory and disk are free again")


def test_views_stay_while_others_are_spilled(spill_dir: Path) -> None:
    np = pytest.importorskip("numpy")
    refs = [stoker.put(np.full(8 * MIB, number, np.uint8)) for number in range(3)]
    views = [stoker.get(ref, timeout=WAIT_S) for ref in refs]
    more = [stoker.put(block(number)) for number in range(10)]
    assert all((view == number).all() for number, view in enumerate(views))
    assert {ref.id for ref in refs}.isdisjoint(spilled(spill_dir)), "they are being read"
    del refs, views, more
    until(lambda: empty(spill_dir), WAIT_S, "memory and disk are free again")


def test_beside_what_is_read_values_go_to_disk(spill_dir: Path) -> None:
    np = pytest.importorskip("numpy")

    @stoker.remote
    def make(number: int) -> Any:
        return np.full(8 * MIB, number, np.uint8)

    refs, views = [], []
    for number in range(12):
        array = np.full(8 * MIB, number, np.uint8)
        refs.append(stoker.put(array) if number % 2 else make.remote(number))
        views.append(stoker.get(refs[-1], timeout=WAIT_S))
    assert len(spilled(spill_dir)) >= 6
    assert all((view == number).all() for number, view in enumerate(views))
    del refs
    stoker.put(array)  # freed before anybody has heard of it
    until(lambda: not spilled(spill_dir), WAIT_S, "the disk is free")
    assert all((view == number).all() for number, view in enumerate(views))
    del views
    until(lambda: empty(spill_dir), WAIT_S, "memory and disk are free again")


def test_what_all_readers_hold_cannot_make_room(spill_dir: Path) -> None:
    np = pytest.importorskip("numpy")
    refs, views = [], []
    node = stoker.runtime.current.runtime().identity.node
    assert node is not None
    disk = Path(node.arena_dir) / "spill"
    folder = os.readlink(disk)
    disk.unlink()
    try:
        with pytest.raises(ArenaFullError, match=r"(?s)largest holders: o_.*drop refs") as caught:
            for number in range(20):
                refs.append(stoker.put(np.full(8 * MIB, number, np.uint8)))
                views.append(stoker.get(refs[-1], timeout=WAIT_S))
    finally:
        disk.symlink_to(folder)
    said = str(caught.value)
    assert "being read" in said
    assert "Disk has no room either: No such file" in said
    assert "This process itself has values that are views of shared memory: o_" in said
    assert 4 <= len(views) <= 6
    assert all((view == number).all() for number, view in enumerate(views))
    del refs[1:], caught
    gc.collect()
    with pytest.raises(MemoryError, match="views of freed objects"):
        disk.unlink()
        try:
            refs.append(stoker.put(np.full(40 * MIB, 1, np.uint8)))
        finally:
            disk.symlink_to(folder)
    del refs, views
    until(lambda: empty(spill_dir), WAIT_S, "memory and disk are free again")
    assert stoker.get(stoker.put(block(1)), timeout=WAIT_S) == block(1)


def test_what_is_larger_than_all_says_so(spill_dir: Path) -> None:
    with pytest.raises(ArenaFullError, match=r"(?s)larger than the node's whole .*ARENA_MAX_BYTES"):
        stoker.put(block(0, LIMIT + 1))


def test_a_result_outlives_the_worker_that_made_it(spill_dir: Path) -> None:
    @stoker.remote(max_calls=1)
    def make() -> tuple[int, bytearray]:
        return os.getpid(), bytearray(MIB)

    ref = make.remote()
    stoker.wait([ref], timeout=WAIT_S)

    def workers() -> list[Any]:
        http = stoker.runtime.current.runtime().job.http  # asks the gcs, which asks the nodelet
        page: dict[str, Any] = http.call("GET", "/v1/workers", reply=dict)
        return list(page["items"])

    pid, value = stoker.get(ref, timeout=WAIT_S)
    until(lambda: pid not in [w["pid"] for w in workers()], WAIT_S, "the worker is gone")
    del value
    assert stoker.get(ref, timeout=WAIT_S)[1] == bytearray(MIB)
