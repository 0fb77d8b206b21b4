"""GPUs of a file on a running cluster: reported, quarantined while their memory is taken, and put back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from stoker_wire.messages.cluster import Node
from stoker_wire.messages.control import Page
from tests.e2e._cluster import driver, environment, head, http, line_of, run_driver
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stoker.launch import LocalCluster

WAIT_S = 40.0
STUCK = {"4711": int(9.1 * (1 << 30))}


class Rack:
    """A file of two GPUs, joined by NVLink, and a MIG slice, and the cluster that pretends to have them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        part = {"mig_profile": "1g.10gb", "uuid": "MIG-1", "memory_bytes": 10 << 30}
        self.gpus: list[dict[str, Any]] = [{"name": "NVIDIA H100", "percent": 37}, {}, part]
        self.write()
        self.cluster: LocalCluster

    def write(self) -> None:
        rack = {"driver_version": "550.90.07", "nvlink": [[0, 1]], "devices": self.gpus}
        written = self.path.with_suffix(".new")
        written.write_text(json.dumps(rack))
        os.replace(written, self.path)

    def cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "stoker.cli", *arguments],
            env=environment(self.cluster),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def json(self, *arguments: str) -> Any:
        told = self.cli(*arguments, "--json")
        assert told.returncode == 0, told.stderr
        return json.loads(told.stdout)

    def quarantine_of(self, index: int) -> str:
        (node,) = self.json("list", "nodes")
        return str(node["devices"][index].get("quarantine", ""))


@pytest.fixture(scope="module")
def rack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    made = Rack(tmp_path_factory.mktemp("rack") / "rack.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_FAKE_GPU_FILE", str(made.path))
        patch.setenv("STOKER_GPU_FREE_TIMEOUT_S", "0.5")
        with head(tmp_path_factory.mktemp("g"), num_cpus=2, num_gpus=None) as made.cluster:
            yield made


def test_a_node_tells_what_its_gpus_are(rack: Rack) -> None:
    (node,) = rack.json("list", "nodes")
    assert node["driver_version"] == "550.90.07"
    links = [one["links"] for one in node["devices"]]
    assert (links[0]["1"], links[0]["2"], links[1]["0"]) == ("nvlink", "numa", "nvlink")
    assert node["labels"]["accelerator_type"] == "H100"
    assert node["labels"]["nvidia.com/mig-1g.10gb.count"] == "1"

    def measured() -> bool:
        usage = rack.json("get", node["node_id"])["usage"]
        return bool(usage.get("gpu0_percent") == 37)

    until(measured, WAIT_S, "the use of GPU 0 is reported")


def test_a_gpu_whose_memory_stays_taken_is_quarantined_until_it_is_free(rack: Rack) -> None:
    program = """
        import os, time, stoker
        stoker.init(log_to_driver=False)

        @stoker.remote(num_cpus=0, num_gpus=1)
        def use():
            return stoker.get_gpu_ids()

        @stoker.remote(num_cpus=0, num_gpus=2, name="both")
        def both():
            return stoker.get_gpu_ids()

        print("used", stoker.get(use.remote()), flush=True)
        while not os.path.exists(os.environ["STOKER_TEST_GO"]):
            time.sleep(0.02)
        waits = both.remote()
        stoker.wait([waits], timeout=0.5)
        print("waits", waits.task_id, flush=True)
        print("ran", stoker.get(waits), flush=True)
    """
    rack.gpus[0]["processes"] = STUCK  # not there before the nodelet: it counts
    rack.write()
    go = rack.path.with_name("go")
    with driver(rack.cluster, program, STOKER_TEST_GO=str(go)) as process:
        assert line_of(process, "used") == "[0]"
        until(lambda: rack.quarantine_of(0), WAIT_S, "GPU 0 is quarantined")
        why = "9.1 GiB are still allocated by pid 4711"
        assert rack.quarantine_of(0) == why
        events = [one["kind"] for one in rack.json("list", "events", "--filter", "kind=gpu.")]
        assert events[0] == "gpu.quarantined", events
        go.touch()
        task_id = line_of(process, "waits")
        told = rack.cli("explain", task_id)
        assert "1 of 2 devices are wholly free" in told.stdout, told
        assert "GPU 0 of n_" in told.stdout and f"is quarantined: {why}" in told.stdout
        rack.gpus[0]["processes"] = {}
        rack.write()
        assert line_of(process, "ran") == "[0, 1]"
        assert rack.quarantine_of(0) == ""


def test_cuda_is_told_of_a_slice_by_its_uuid(rack: Rack) -> None:
    program = """
        import os, stoker
        stoker.init(log_to_driver=False)

        @stoker.remote(num_cpus=0, gpu_memory="8GiB")
        def visible():
            return os.environ["CUDA_VISIBLE_DEVICES"], stoker.get_gpu_ids()

        print("sees", stoker.get(visible.remote()))
    """
    told = run_driver(rack.cluster, program)
    assert told.stdout == "sees ('MIG-1', [2])\n", told.stderr


def test_a_broken_driver_is_a_reason_in_the_record_of_its_node(tmp_path: Path) -> None:
    path = tmp_path / "rack.json"
    path.write_text('{"error": "NVML does not work: Driver Not Loaded"}')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_FAKE_GPU_FILE", str(path))
        with head(tmp_path, num_cpus=1, num_gpus=None) as cluster:
            node = http(cluster).call("GET", "/v1/nodes", reply=Page[Node]).items[0]
    assert node.gpu_error == "NVML does not work: Driver Not Loaded"
    assert node.devices == () and "GPU" not in node.resources


def test_after_an_error_of_the_gpu_an_operator_puts_it_back(rack: Rack) -> None:
    (node,) = rack.json("list", "nodes")
    refused = rack.cli("node", "release-gpu", node["node_id"], "1")
    assert refused.returncode == 1 and "is not quarantined" in refused.stderr
    rack.gpus[1]["xids"] = [13, 79]
    rack.write()
    until(lambda: rack.quarantine_of(1), WAIT_S, "GPU 1 is quarantined")
    assert rack.quarantine_of(1) == "the driver reported XID 79"
    told = rack.cli("node", "release-gpu", node["node_id"], "1")
    assert told.stdout == f"GPU 1 of {node['node_id']} is back in use\n", told.stderr
    until(lambda: not rack.quarantine_of(1), WAIT_S, "GPU 1 is back in use")
