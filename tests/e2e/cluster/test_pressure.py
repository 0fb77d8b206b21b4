"""A node short of disk: it takes no new work, says so, and goes on by itself; nothing accepted is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import stoker
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
