"""Links between two nodes are measured once, kept by the cluster, and read by who plans."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import stoker
import stoker.train
from stoker.exceptions import BadRequestError, GetTimeoutError
from stoker_train.planning.hardware.links import stored_links
from tests.e2e._cluster import environment, head

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The ids of the nodes of a cluster of two, to which this process is connected."""
    with (
        pytest.MonkeyPatch.context() as patch,
        head(tmp_path_factory.mktemp("session"), num_cpus=2) as cluster,
    ):
        patch.setenv("OMP_NUM_THREADS", "1")
        command = [sys.executable, "-m", "stoker.cli", "start", "--address", cluster.info.gcs_url]
        joined = subprocess.run(
            [*command, "--num-cpus", "1", "--num-gpus", "0", "--json"],
            env=environment(cluster),
            capture_output=True,
            text=True,
            check=True,
        )
        started = json.loads(joined.stdout)
        try:
            stoker.init(cluster.info.gcs_url, token=cluster.info.token, log_to_driver=False)
            yield sorted(one["node_id"] for one in stoker.nodes())
        finally:
            stoker.shutdown()
            os.kill(started["pid"], signal.SIGTERM)


def test_each_pair_is_measured_once_and_kept(nodes: list[str]) -> None:
    one, other = nodes
    with pytest.raises(GetTimeoutError, match=f"the link of {one} and {one} was not measured"):
        stoker.train.measure_links([one], resources={"CPU": 64}, timeout_s=1)
    assert stored_links() == {}
    found = stoker.train.measure_links()
    assert set(found) == {(one, one), (one, other), (other, other)}
    for link in found.values():
        assert link.backend == "gloo"
        assert link.bytes_per_s > 1e6
        assert 0 < link.latency_s < 1
    assert stored_links() == found
    assert stoker.train.measure_links([one, other]) == found, "what is known is not measured again"
    assert set(stoker.train.measure_links([one], again=True)) == {(one, one)}
    assert stored_links()[one, one].at_s > found[one, one].at_s
    with pytest.raises(BadRequestError, match="'n_0' is not alive"):
        stoker.train.measure_links(["n_0"])
