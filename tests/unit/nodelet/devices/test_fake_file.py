"""GPUs that a file describes, measured again and again."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from stoker_nodelet.devices.discovery import find_gpus
from stoker_nodelet.devices.fake_file import FakeGpuFile
from stoker_wire.errors import BadRequestError
from stoker_wire.messages.cluster import Link
from stoker_wire.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

RACK = {
    "driver_version": "550.90.07",
    "cuda_version": "12.4",
    "nvlink": [[0, 1]],
    "pcie": [[1, 2]],
    "devices": [{"numa_node": 0}, {"numa_node": 0}, {"numa_node": 0}, {"numa_node": 1}],
}


def test_the_file_gives_devices_paths_and_versions(tmp_path: Path) -> None:
    path = tmp_path / "rack.json"
    path.write_text(json.dumps(RACK))
    found, library = find_gpus(Settings(fake_gpu_file=str(path)), 3)
    assert found.driver_version == "550.90.07" and library is not None
    assert [one.links for one in found.devices] == [
        {1: Link.NVLINK, 2: Link.NUMA},
        {0: Link.NVLINK, 2: Link.PCIE},
        {0: Link.NUMA, 1: Link.PCIE},
    ]


def test_what_is_written_into_the_file_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "rack.json"
    path.write_text('{"devices": [{}]}')
    library = FakeGpuFile(str(path))
    assert library.inventory().devices[0].links == {}, "it says nothing of paths"
    path.write_text('{"devices": [{"processes": {"4711": 1024}, "xids": [79], "percent": 5}]}')
    sample = library.sample((0, 1))
    assert dict(sample.readings[0].processes) == {4711: 1024}
    assert sample.readings[0].xids == (79,)
    assert sample.usage["gpu0_memory_bytes"] == 1024
    assert library.sample((0,)).readings[0].xids == (), "it was reported"
    path.write_text("{")
    assert dict(library.sample((0,)).readings[0].processes) == {4711: 1024}


def test_a_file_that_is_no_list_of_gpus_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rack.json"
    for text in ("[]", '{"gpus": []}'):
        path.write_text(text)
        with pytest.raises(BadRequestError, match="fake_gpu_file"):
            FakeGpuFile(str(path)).inventory()
