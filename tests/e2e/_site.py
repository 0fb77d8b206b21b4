"""A head for this driver, and nodes that come, are drained and go."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.local.cluster import LocalCluster, spawn_node
from stoker.runtime.net.http import HttpClient
from tests.e2e import _cluster
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WAIT_S = 60.0
HERE = {"num_cpus": 0, "resources": {"seat": 1}}


class Site:
    """A head for this driver, and nodes with seats that come and go."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.nodes: dict[str, LocalCluster] = {}

    def add(self, name: str) -> str:
        """Start a node; return its id."""
        node = spawn_node(
            self.cluster.info.gcs_url,
            token=self.cluster.info.token,
            num_cpus=2,
            num_gpus=0,
            resources={"seat": 4},
            labels={"name": name},
            session_dir=self.folder / name,
        )
        self.nodes[name] = node
        node.wait_ready()
        (node_id,) = [one["node_id"] for one in stoker.nodes() if one["labels"]["name"] == name]
        return str(node_id)

    def call(self, method: str, path: str, **body: Any) -> Any:
        return _cluster.http(self.cluster).call(method, path, body or None, reply=dict)

    def drain(self, node_id: str, deadline_s: float = WAIT_S) -> None:
        self.call("POST", f"/v1/nodes/{node_id}/drain", deadline_s=deadline_s, reason="a new disk")

    @property
    def options(self) -> tuple[str, ...]:
        """What names the cluster on the command line."""
        return "--address", self.cluster.info.gcs_url, "--token", self.cluster.info.token

    def objects(self, node_id: str) -> set[str]:
        """The objects on a node."""
        url = self.call("GET", f"/v1/nodes/{node_id}")["url"]
        client = HttpClient(url, token=self.cluster.info.token)
        page = client.call("GET", "/v1/objects", reply=dict[str, Any], query={"limit": 1000})
        return {one["object_id"] for one in page["items"]}

    def status(self, node_id: str) -> Any:
        return self.call("GET", f"/v1/nodes/{node_id}/drain")

    def until_gone(self, name: str, node_id: str) -> Any:
        """Wait until a drained node has left in order; return its record."""
        record = until(
            lambda: next(
                (
                    one
                    for one in [self.call("GET", f"/v1/nodes/{node_id}")]
                    if one["state"] == "DEAD"
                ),
                None,
            ),
            WAIT_S,
            f"{name} has left: {self.status(node_id)}",
            interval_s=0.05,
        )
        code = self.nodes[name]._proc.wait(WAIT_S)
        assert code == 0, f"its nodelet ended with {code}"
        return record


@contextlib.contextmanager
def site_of(folder: Path, *, share: bool) -> Iterator[Site]:
    """Unless nodes ``share`` memory, each is as if it were a machine of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_SHARE_ARENAS", str(int(share)))
        patch.setenv("STOKER_LEASE_IDLE_S", "0.1")
        with _cluster.head(folder, num_cpus=2, labels={"name": "head"}) as cluster:
            stoker.init(cluster.info.gcs_url, token=cluster.info.token, log_to_driver=False)
            made = Site(cluster, folder)
            try:
                yield made
            finally:
                stoker.shutdown()
                for node in made.nodes.values():
                    node.stop()
