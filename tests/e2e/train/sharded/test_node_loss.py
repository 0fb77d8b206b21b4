"""A node that dies under a gang: its bundles are placed again, and the gang goes on from its checkpoint."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import stoker
from stoker.train import Checkpoint, Failure, ShardedTrainer, Strategy
from tests.chaos._services import Apart, Service, apart
from tests.e2e._cluster import session_root
from tests.e2e.train.sharded import loops
from tests.e2e.train.sharded.conftest import WAIT_S
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("torch")
# What is broken here on purpose is warned of; errors and tracebacks stay unexpected.
pytestmark = pytest.mark.logs(r'"level": "warning"', r"^this process: stoker[._]")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Apart]:
    """A node for one rank; this process is a driver."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with session_root(tmp_path / "s"), apart(tmp_path, nodelets=1, cpus=1) as made:
        stoker.init(made.gcs.url, token=made.token, log_to_driver=False)
        try:
            yield made
        finally:
            stoker.shutdown()


def loses_power(node: Service) -> None:
    """Kill a nodelet and all that it has started."""
    started = psutil.Process(node.pid).children(recursive=True)
    node.kill()
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends with its nodelet
            process.kill()


def test_a_gang_waits_for_a_node_in_place_of_the_lost_one_and_goes_on(
    cluster: Apart, tmp_path: Path
) -> None:
    (tmp_path / "notes").mkdir()
    one = ShardedTrainer(
        loops.noted,
        plan=Strategy(data=2, zero=1),
        batch=loops.BATCH,
        config={"folder": str(tmp_path / "notes"), "epochs": 100_000, "pause_s": 0.05},
        resources={"CPU": 1},
        checkpoint=Checkpoint(str(tmp_path / "checkpoints"), every=4),
        failure=Failure(collective_timeout_s=40.0, hang_s=60.0),
    )
    one.submit()
    # So its controller is on the first node, which stays.
    until(lambda: one.progress().get("waits_for"), WAIT_S, "it says what it waits for")
    cluster.add_nodelet(cpus=1)

    def trains(after: int, restarts: int) -> dict[str, Any] | None:
        now = one.progress()
        if now.get("phase") != "RUNNING" or now["restarts"] < restarts:
            return None
        return now if now["committed"] > after else None

    before = until(lambda: trains(0, 0), WAIT_S, "it has made a checkpoint")
    assert before is not None
    loses_power(cluster.nodelets[1])
    until(lambda: one.progress().get("waits_for"), WAIT_S, "it says what it waits for")
    cluster.add_nodelet(cpus=1)
    after = until(lambda: trains(before["committed"], 1), WAIT_S, "it makes checkpoints again")
    assert after is not None
    assert {rank["node"] for rank in after["ranks"]} != {rank["node"] for rank in before["ranks"]}
    one.stop()
    result = one.result(WAIT_S)
    assert not result.error
    assert result.steps >= after["committed"]
