"""GPUs that a JSON file describes, in the place of NVML: to try a rack on a laptop, and for tests.

The file is read again for every measurement, so that what is in it can be changed while the node runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import msgspec

from stoker_nodelet.core.events import GpuReading
from stoker_nodelet.devices.inventory import FAKE_MEMORY_BYTES, Inventory, Sample
from stoker_wire.errors import BadRequestError
from stoker_wire.messages.cluster import Device, Link


class FakeGpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One GPU, or a MIG slice; ``processes`` maps a pid to the bytes that it has allocated.

    ``device_node`` is the path of a character device in the place of /dev/nvidia0.
    """

    name: str = "Fake GPU"
    memory_bytes: int = FAKE_MEMORY_BYTES
    uuid: str = ""
    arch: int = 0
    numa_node: int = -1
    mig_profile: str = ""
    parent_uuid: str = ""
    processes: dict[int, int] = {}
    percent: float = 0.0
    xids: tuple[int, ...] = ()
    ecc_errors: int = 0
    device_node: str = ""


class FakeRack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node's GPUs. ``nvlink`` and ``pcie`` are groups of indices that such a path joins."""

    devices: tuple[FakeGpu, ...] = ()
    nvlink: tuple[tuple[int, ...], ...] = ()
    pcie: tuple[tuple[int, ...], ...] = ()
    driver_version: str = ""
    cuda_version: str = ""
    error: str = ""


_decode = msgspec.json.Decoder(FakeRack).decode


@dataclass(slots=True)
class FakeGpuFile:
    """The GPUs of one file."""

    path: str
    _rack: FakeRack = field(default_factory=FakeRack)
    _reported: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def inventory(self) -> Inventory:
        """Return the GPUs of the file; BadRequestError for one that cannot be read."""
        try:
            self._rack = rack = _decode(Path(self.path).read_bytes())
        except (OSError, msgspec.MsgspecError) as error:
            raise BadRequestError(
                f"fake_gpu_file: {self.path} is no list of GPUs\n{error}\ndocs/gpus.md shows one",
                field="fake_gpu_file",
            ) from None
        devices = tuple(
            Device(
                index=index,
                uuid=gpu.uuid or f"FAKE-{index}",
                name=gpu.name,
                memory_bytes=gpu.memory_bytes,
                fake=True,
                arch=gpu.arch,
                mig_profile=gpu.mig_profile,
                parent_uuid=gpu.parent_uuid,
                numa_node=gpu.numa_node,
                links=_links(rack, index),
            )
            for index, gpu in enumerate(rack.devices)
        )
        nodes = {
            index: frozenset((gpu.device_node,))
            for index, gpu in enumerate(rack.devices)
            if gpu.device_node
        }
        return Inventory(
            devices,
            rack.driver_version,
            rack.cuda_version,
            rack.error,
            nodes=nodes,
            guarded=frozenset().union(*nodes.values()),
        )

    def sample(self, indices: Iterable[int]) -> Sample:
        """Return what the file says now; while it is being written, what it said before."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            self._rack = _decode(Path(self.path).read_bytes())
        readings: dict[int, GpuReading] = {}
        usage: dict[str, float] = {}
        gpus = dict(enumerate(self._rack.devices))
        for index in indices:
            gpu = gpus.get(index)
            if gpu is None:
                continue
            new = gpu.xids[len(self._reported.get(index, ())) :]
            self._reported[index] = gpu.xids
            readings[index] = GpuReading(
                processes=gpu.processes, xids=new, ecc_errors=gpu.ecc_errors
            )
            usage[f"gpu{index}_percent"] = gpu.percent
            usage[f"gpu{index}_memory_bytes"] = float(sum(gpu.processes.values()))
            usage[f"gpu{index}_ecc_errors"] = float(gpu.ecc_errors)
        return Sample(readings, usage)


def _links(rack: FakeRack, index: int) -> dict[int, Link]:
    """Return the paths from a GPU to the others; none if the file says nothing of paths."""
    numa = [gpu.numa_node for gpu in rack.devices]
    if not rack.nvlink and not rack.pcie and all(node < 0 for node in numa):
        return {}
    links = {
        other: Link.NUMA if numa[other] == numa[index] else Link.SYSTEM
        for other in range(len(numa))
        if other != index
    }
    for groups, link in ((rack.pcie, Link.PCIE), (rack.nvlink, Link.NVLINK)):
        for pair in (pair for group in groups for pair in combinations(group, 2)):
            if index in pair:
                links[pair[0] if pair[1] == index else pair[1]] = link
    return links
