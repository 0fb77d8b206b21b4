"""The cluster at one moment: who comes first, and who holds a GPU."""

from __future__ import annotations

from typing import Any

from stoker.cli.views.snapshot import gpus_now, nodes_now
from stoker_wire.messages.cluster import ClusterResources


def node(node_id: str, **more: Any) -> dict[str, Any]:
    return {"node_id": node_id, "state": "ALIVE", "resources": {"CPU": 4.0}, **more}


def test_the_most_loaded_nodes_come_first() -> None:
    rows = [node("n_a", usage={"cpu_percent": 1.0}), node("n_b"), node("n_c"), node("n_d")]
    cluster = ClusterResources(
        total={},
        available={},
        nodes={name: {"CPU": 4.0, "GPU": 2.0} for name in ("n_a", "n_b", "n_c")},
        nodes_available={
            "n_a": {"CPU": 4.0, "GPU": 2.0},
            "n_b": {"CPU": 4.0},
            "n_c": {"CPU": 2.0, "GPU": 2.0},
        },
    )
    found = nodes_now(rows, cluster)
    assert [one.node_id for one in found] == ["n_b", "n_c", "n_a", "n_d"]
    assert found[0].used == {"CPU": 0.0, "GPU": 2.0}
    assert nodes_now(rows, None)[0].node_id == "n_a", "without a scheduler the busiest"


def test_a_gpu_names_its_holders_once() -> None:
    device = {"index": 0, "name": "NVIDIA H100", "memory_bytes": 80}
    idle = {"index": 1, "name": "NVIDIA H100", "quarantine": "errors"}
    rows = [node("n_a", devices=[idle, device], usage={"gpu0_percent": 30.0, "gpu0_held": 0.5})]
    lease = {"node_id": "n_a", "gpus": {"0": 0.5}, "job_id": "job_1", "name": "f"}
    other = {"node_id": "n_b", "gpus": {"1": 1.0}, "job_id": "job_2", "name": "g"}
    first, second = gpus_now(rows, [lease, dict(lease), other])
    assert (first.index, first.holders, first.percent) == (0, ["f of job_1"], 30.0)
    assert (second.index, second.holders, second.quarantine) == (1, [], "errors")
