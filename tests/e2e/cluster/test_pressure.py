"""Work that takes too much memory, a node short of disk: what users are told; it goes on by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

import stoker
from stoker.exceptions import OutOfMemoryError
from stoker_wire.messages.control import Page
from stoker_wire.messages.work import TaskRecord
from tests.e2e import _cluster
from tests.e2e.conftest import get
from tests.services import fill, mounted, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stoker.launch import LocalCluster

MIB = 1 << 20
WAIT_S = 40.0


@pytest.fixture
def spill_dir(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "spill", 64 * MIB) as made:
        yield made


@pytest.fixture
def cluster(
    tmp_path: Path, spill_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LocalCluster]:
    monkeypatch.setenv("STOKER_SPILL_DIR", str(spill_dir))
    with _cluster.head(tmp_path / "sessions", num_cpus=2) as made:
        stoker.init(made.info.gcs_url, token=made.info.token, log_to_driver=False)
        yield made
        stoker.shutdown()


def cli(cluster: LocalCluster, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "stoker.cli", *args],
        env=_cluster.environment(cluster),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    return done.stdout


def conditions() -> list[str]:
    (node,) = stoker.nodes()
    return [one["kind"] for one in node["conditions"]]


@stoker.remote
def square(x: int) -> int:
    return x * x


@pytest.mark.logs(r"takes no new work: the disk of")
def test_a_full_disk_stops_placement_until_there_is_room(
    cluster: LocalCluster, spill_dir: Path
) -> None:
    assert get(square.remote(3)) == 9
    assert conditions() == []
    fill(spill_dir / "others")
    until(lambda: conditions() == ["DiskPressure"], WAIT_S, "the node reports it")
    assert "ALIVE, DiskPressure" in cli(cluster, "list", "nodes")
    assert "ALIVE, DiskPressure" in cli(cluster, "status")
    waits = square.options(num_cpus=2).remote(4)
    until(
        lambda: f"the disk of {spill_dir}/" in cli(cluster, "explain", str(waits.task_id)),
        WAIT_S,
        "explain says why",
    )
    assert stoker.wait([waits], timeout=0)[0] == []
    os.unlink(spill_dir / "others")
    assert get(waits) == 16
    until(lambda: conditions() == [], WAIT_S, "the condition has ended")


@pytest.mark.logs(r"exceeded memory=")
def test_a_task_over_its_limit_says_so_with_the_numbers_also_in_the_history(
    cluster: LocalCluster,
) -> None:
    @stoker.remote(memory=150 * MIB, max_retries=0)
    def hoard() -> None:
        kept = b"x" * (400 * MIB)
        time.sleep(len(kept))

    ref = hoard.remote()
    with pytest.raises(OutOfMemoryError, match=r"exceeded memory=157286400 bytes") as caught:
        stoker.get(ref, timeout=WAIT_S)
    assert "of memory=150 MiB, the node " in str(caught.value)
    memory = caught.value.extra["memory"]
    assert memory["limit_bytes"] == 150 * MIB < memory["used_bytes"] < memory["node_total_bytes"]
    assert memory["largest"][0]["nbytes"] > 150 * MIB

    def codes() -> set[str]:
        page = _cluster.http(cluster).call(
            "GET", "/v1/tasks", reply=Page[TaskRecord], query={"state": "FAILED"}
        )
        return {one.error.code for one in page.items if one.error is not None}

    until(lambda: codes() == {"out_of_memory"}, WAIT_S, "the attempt has the cause")
