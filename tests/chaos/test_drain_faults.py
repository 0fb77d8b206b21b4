"""Drains while a process is killed: the leading gcs, the scheduler, the heir, the drained node itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import stoker
from tests.chaos._services import Apart, Service, apart
from tests.e2e._cluster import actor_record, session_root
from tests.e2e.conftest import Flags
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# What is broken here on purpose is warned of; errors and tracebacks stay unexpected.
pytestmark = pytest.mark.logs(r'"level": "warning"', r"^this process: stoker[._]")

WAIT_S = 60.0
BLOCKS = 12


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Apart]:
    """The driver is beside n0; n1 is drained, n2 takes over; all are as machines of their own."""
    share = {"STOKER_SHARE_ARENAS": "0", "STOKER_LEASE_IDLE_S": "0.1"}
    with (
        session_root(tmp_path / "s"),
        pytest.MonkeyPatch.context() as patch,
        apart(tmp_path, nodelets=3, **share) as made,
    ):
        for item in share.items():
            patch.setenv(*item)
        stoker.init(made.address, token=made.token, log_to_driver=False)
        try:
            yield made
        finally:
            stoker.shutdown()


@stoker.remote(num_cpus=0.1)
def block(number: int) -> Any:
    return np.full(1 << 18, number, dtype=np.int32)


@stoker.remote(num_cpus=0.1, max_retries=0)
def hold(flags: Flags) -> int:
    flags.raise_("runs")
    flags.wait("go", WAIT_S)
    return 1


@stoker.remote(num_cpus=0, max_restarts=1)
class Echo:
    def node(self) -> str:
        return str(stoker.get_runtime_context().node_id)


def on(node_id: str) -> dict[str, Any]:
    """There, or elsewhere once it is gone."""
    return {"scheduling_strategy": stoker.NodeAffinity(node_id=node_id, soft=True)}


def drain(cluster: Apart, node_id: str, deadline_s: float = WAIT_S) -> None:
    body = {"deadline_s": deadline_s, "reason": "a new disk"}
    cluster.client.call("POST", f"/v1/nodes/{node_id}/drain", body, reply=dict[str, Any])


def status(cluster: Apart, node_id: str) -> Any:
    return cluster.client.call("GET", f"/v1/nodes/{node_id}/drain", reply=dict[str, Any])


def blocks_on(node_id: str) -> list[Any]:
    refs = [block.options(**on(node_id)).remote(number) for number in range(BLOCKS)]
    assert (
        len(stoker.wait(refs, num_returns=BLOCKS, timeout=WAIT_S, fetch_local=False)[0]) == BLOCKS
    )
    return refs


def check(refs: list[Any]) -> None:
    values = stoker.get(refs, timeout=WAIT_S)
    assert [int(one[-1]) for one in values] == list(range(BLOCKS)), "no object is lost"


def restart(service: Service) -> None:
    service.kill()
    service.start()


def test_a_drain_goes_on_after_the_leading_gcs_and_the_scheduler_were_killed(
    cluster: Apart, tmp_path: Path
) -> None:
    old = cluster.nodes()["n1"]["node_id"]
    refs = blocks_on(old)
    echo = Echo.options(label_selector={"name": "in(n1,n2)"}).remote()
    flags = Flags(tmp_path)
    running = hold.options(**on(old)).remote(flags)
    flags.wait("runs", WAIT_S)
    drain(cluster, old)
    restart(cluster.gcs)
    restart(cluster.scheduler)
    known = status(cluster, old)
    assert known["state"] == "DRAINING", known
    flags.raise_("go")
    assert stoker.get(running, timeout=WAIT_S) == 1
    assert cluster.nodelets[1].ended(WAIT_S) == 0, cluster.nodelets[1].said()
    assert status(cluster, old)["state"] == "DRAINED"
    check(refs)
    assert stoker.get(echo.node.remote(), timeout=WAIT_S) == cluster.nodes()["n2"]["node_id"]
    assert actor_record(echo._info.actor_id)["restarts"] == 0


def test_objects_are_taken_over_by_another_node_when_their_heir_is_killed_meanwhile(
    cluster: Apart,
) -> None:
    old = cluster.nodes()["n1"]["node_id"]
    refs = blocks_on(old)
    drain(cluster, old)
    heir = until(
        lambda: cluster.client.call("GET", f"/v1/nodes/{old}", reply=dict[str, Any])["objects_at"],
        WAIT_S,
        "a node is chosen",
    )
    names = {node["node_id"]: name for name, node in cluster.nodes().items()}
    cluster.nodelets[int(names[heir][1:])].kill()
    assert cluster.nodelets[1].ended(WAIT_S) == 0, cluster.nodelets[1].said()
    check(refs)


def test_what_a_drained_node_had_is_recovered_when_it_is_killed_meanwhile(
    cluster: Apart, tmp_path: Path
) -> None:
    old = cluster.nodes()["n1"]["node_id"]
    refs = blocks_on(old)
    flags = Flags(tmp_path)
    running = hold.options(max_retries=1, **on(old)).remote(flags)
    flags.wait("runs", WAIT_S)
    drain(cluster, old)
    cluster.nodelets[1].kill()
    known = until(
        lambda: one if (one := status(cluster, old))["state"] == "DEAD" else None, WAIT_S, "it died"
    )
    assert "no heartbeat" in known["summary"] or "refuses" in known["summary"], known
    flags.raise_("go")
    assert stoker.get(running, timeout=WAIT_S) == 1
    check(refs)
