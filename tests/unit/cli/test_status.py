"""What ``stoker status`` says of a cluster, without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.cli.status import GPUS_ARE_NOT_ENFORCED, Status, _print_nodes

if TYPE_CHECKING:
    import pytest


def shown(capsys: pytest.CaptureFixture[str], devices: list[dict[str, object]]) -> str:
    node = {"node_id": "n_1", "state": "ALIVE", "resources": {"CPU": 2.0}, "devices": devices}
    _print_nodes(Status("http://h", "s", [node], 0, None, [], 0, 0, [], [], None))
    return capsys.readouterr().out


def test_a_cluster_with_gpus_says_that_a_lease_of_some_is_not_enforced(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert GPUS_ARE_NOT_ENFORCED in shown(capsys, [{"name": "NVIDIA H100", "fake": False}])
    assert "not enforced" not in shown(capsys, [{"name": "fake", "fake": True}])
    assert "not enforced" not in shown(capsys, [])
