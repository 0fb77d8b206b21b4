"""The inventory and the measurements that come of NVML, with a fake at its seam."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

import pynvml
import pytest

from stoker_nodelet.devices import nvml as nvml_module
from stoker_nodelet.devices.nvml import Nvml, load_nvml
from stoker_wire.messages.cluster import Link
from tests.unit.nodelet.devices.fake_nvml import GIB, FakeGpu, FakeNvml, FakeSlice

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _every_gpu_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_the_fake_has_the_arguments_of_the_real_library() -> None:
    for name, fake in inspect.getmembers(FakeNvml, inspect.isfunction):
        if name.startswith("nvml"):
            asked = list(inspect.signature(fake).parameters)[1:]
            real = inspect.signature(getattr(pynvml, name)).parameters
            assert asked == list(real)[: len(asked)], name
            rest = list(real.values())[len(asked) :]
            assert all(one.default is not inspect.Parameter.empty for one in rest), name


def test_whole_gpus_with_their_paths_to_each_other(tmp_path: Path) -> None:
    for address, node in (("0000:3b:00.0", 0), ("0000:86:00.0", 1)):
        (tmp_path / address).mkdir()
        (tmp_path / address / "numa_node").write_text(f"{node}\n")
    fake = FakeNvml(
        FakeGpu("GPU-a", nvlink=1),
        FakeGpu("GPU-b", nvlink=1),
        FakeGpu("GPU-c"),
        FakeGpu("GPU-d", switch=1),
        FakeGpu("GPU-e", numa=1, bus="00000000:86:00.0"),
    )
    found = Nvml(fake, tmp_path).inventory()
    assert (found.driver_version, found.cuda_version, found.error) == ("550.90.07", "12.4", "")
    assert [one.index for one in found.devices] == [0, 1, 2, 3, 4]
    first = found.devices[0]
    assert (first.uuid, first.name, first.arch) == ("GPU-a", "NVIDIA H100 80GB HBM3", 90)
    assert first.memory_bytes == 80 * GIB and not first.fake
    assert first.links == {1: Link.NVLINK, 2: Link.PCIE, 3: Link.NUMA, 4: Link.SYSTEM}
    assert [one.numa_node for one in found.devices] == [0, 0, 0, 0, 1]
    assert found.labels == {"accelerator_type": "H100-80GB-HBM3"}


def test_each_slice_of_a_gpu_is_a_device_with_an_index_behind_the_gpus() -> None:
    small = FakeSlice("MIG-1", instance=7, memory=int(9.75 * GIB))
    large = FakeSlice("MIG-2", instance=1, memory=int(39.5 * GIB), compute_slices=1, gpu_slices=3)
    sliced = FakeGpu("GPU-b", name="NVIDIA A100-SXM4-80GB", slices=[small, None, large])
    fake = FakeNvml(FakeGpu("GPU-a", name="NVIDIA A100-SXM4-80GB"), sliced)
    library = Nvml(fake)
    found = library.inventory()
    assert [(one.index, one.uuid) for one in found.devices] == [
        (0, "GPU-a"),
        (2, "MIG-1"),
        (3, "MIG-2"),
    ]
    assert [one.mig_profile for one in found.devices] == ["", "1g.10gb", "1c.3g.40gb"]
    assert found.devices[1].parent_uuid == "GPU-b"
    assert found.devices[1].links == {0: Link.PCIE, 3: Link.PCIE}
    assert found.labels["nvidia.com/mig-1g.10gb.count"] == "1"
    fake.xid(sliced, 79, instance=7)
    fake.xid(sliced, 95)
    small.processes = {5: None}
    sample = library.sample((0, 2, 3))
    assert {i: one.xids for i, one in sample.readings.items()} == {0: (), 2: (79, 95), 3: (95,)}
    assert sample.readings[2].processes == {5: 0}, "its memory is not told"
    assert "gpu2_percent" not in sample.usage and sample.usage["gpu0_percent"] == 37


def test_measurements_of_a_gpu_and_one_that_is_lost() -> None:
    gpu = FakeGpu("GPU-a", processes={7: 3 * GIB}, ecc_errors=1)
    library = Nvml(FakeNvml(gpu))
    library.inventory()
    sample = library.sample((0, 8))
    assert sample.readings[0].processes == {7: 3 * GIB} and sample.readings[0].ecc_errors == 1
    assert sample.usage == {
        "gpu0_percent": 37.0,
        "gpu0_power_watts": 250.5,
        "gpu0_temperature_celsius": 41.0,
        "gpu0_memory_bytes": 3.0 * GIB,
        "gpu0_ecc_errors": 1.0,
    }
    gpu.error = pynvml.NVML_ERROR_GPU_IS_LOST
    assert library.sample((0,)).readings[0].lost == "GPU is lost"
    gpu.error = pynvml.NVML_ERROR_UNKNOWN
    assert library.sample((0,)).readings == {}, "it does not tell"


def test_one_gpu_that_does_not_work_does_not_hide_the_others() -> None:
    broken = FakeGpu("GPU-b", error=pynvml.NVML_ERROR_GPU_IS_LOST)
    found = Nvml(FakeNvml(FakeGpu("GPU-a"), broken, FakeGpu("GPU-c"))).inventory()
    assert [one.index for one in found.devices] == [0, 2]
    assert found.error == "GPU 1 does not work: GPU is lost"


def test_a_broken_driver_or_library_is_a_reason_and_no_crash(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = FakeNvml()
    fake.init_error = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
    found = Nvml(fake).inventory()
    assert found.devices == () and "NVML does not work: RM has detected" in found.error
    monkeypatch.setattr(nvml_module, "_DRIVERS", (str(tmp_path),))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    missing: Any = load_nvml()
    assert missing.inventory().error.endswith("pip install nvidia-ml-py")
    monkeypatch.setattr(nvml_module, "_DRIVERS", ())
    assert load_nvml() is None


def test_only_what_this_process_may_see_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    sliced = FakeGpu("GPU-b", name="NVIDIA A100", slices=[FakeSlice("MIG-1", 7, 10 * GIB)])
    library = Nvml(FakeNvml(FakeGpu("GPU-a"), sliced))
    for mask, seen in (("0", ["GPU-a"]), ("MIG-1", ["MIG-1"]), ("GPU-b,0", ["MIG-1", "GPU-a"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
        assert [one.uuid for one in library.inventory().devices] == seen, mask


def test_the_device_nodes_of_a_gpu_go_by_its_minor_number(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml(
        FakeGpu("GPU-a", minor=1), FakeGpu("GPU-b", minor=0), FakeGpu("GPU-c", minor=None)
    )
    found = Nvml(fake).inventory()
    assert found.nodes == {0: {"/dev/nvidia1"}, 1: {"/dev/nvidia0"}}, "one has none of its own"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = Nvml(fake).inventory()
    assert found.nodes == {1: {"/dev/nvidia0"}}
    assert {"/dev/nvidia0", "/dev/nvidia1"} <= found.guarded


def test_a_slice_is_its_gpu_and_the_right_to_use_that_slice(tmp_path: Path) -> None:
    minors = tmp_path / "mig-minors"
    minors.write_text(
        "config 1\nmonitor 2\ngpu0/gi7/access 66\ngpu3/gi7/access 129\ngpu3/gi7/ci0/access 130\n"
        "gpu3/gi9/access 147\ngpu3/gi9/ci0/access 148\n"
    )
    slices: list[FakeSlice | None] = [FakeSlice("MIG-1", 7, GIB), FakeSlice("MIG-2", 9, GIB)]
    fake = FakeNvml(FakeGpu("GPU-b", name="NVIDIA A100", slices=slices, minor=3))
    found = Nvml(fake, tmp_path, minors).inventory()
    of_slices = [
        {"/dev/nvidia3", *(f"/dev/nvidia-caps/nvidia-cap{number}" for number in pair)}
        for pair in ((129, 130), (147, 148))
    ]
    assert found.nodes == {1: of_slices[0], 2: of_slices[1]}
    assert found.guarded >= of_slices[0] | of_slices[1]
    found = Nvml(fake, tmp_path, tmp_path / "none").inventory()
    assert found.nodes == {1: {"/dev/nvidia3"}, 2: {"/dev/nvidia3"}}
