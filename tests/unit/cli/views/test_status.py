"""What ``stoker status`` says of a cluster, without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.cli.views.status import NOT_ENFORCED, Status, _print_nodes

if TYPE_CHECKING:
    import pytest


def shown(capsys: pytest.CaptureFixture[str], *nodes: dict[str, object]) -> str:
    rows = [
        {"node_id": f"n_{number}", "state": "ALIVE", "resources": {"CPU": 2.0}, **node}
        for number, node in enumerate(nodes, 1)
    ]
    _print_nodes(Status("http://h", "s", rows, 0, None, [], 0, 0, [], [], None))
    return " ".join(capsys.readouterr().out.split())


def test_a_cluster_whose_kernels_let_workers_open_any_gpu_says_so_and_why(
    capsys: pytest.CaptureFixture[str],
) -> None:
    real, fake = [{"name": "NVIDIA H100", "fake": False}], [{"name": "fake", "fake": True}]
    told = shown(capsys, {"devices": real})  # a nodelet of an older version
    assert f"GPUs {NOT_ENFORCED}" in told and not told.endswith(")")
    why = "cgroup v1: it is not mounted"
    told = shown(capsys, {"devices": real, "gpu_isolation_error": why}, {"devices": []})
    assert f"GPUs of n_1 {NOT_ENFORCED} ({why})" in told
    for silent in ({"devices": fake}, {}, {"devices": real, "gpu_isolation": "cgroup v2"}):
        assert "not enforced" not in shown(capsys, silent)
