"""An inventory of GPUs, their measurement, and the names by which CUDA knows them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from stoker_nodelet.core.events import GpuReading
from stoker_wire.messages.cluster import Device

FAKE_MEMORY_BYTES = 16 << 30
"""The memory of a fake GPU."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """The GPUs that were found, and the versions of their driver; ``error`` is why some are missing.

    ``nodes`` maps the index of a GPU to the paths of the device nodes that its user opens, ``guarded`` has
    those of all GPUs of the machine, offered or not. A GPU that has none of its own is left out.
    """

    devices: tuple[Device, ...] = ()
    driver_version: str = ""
    cuda_version: str = ""
    error: str = ""
    nodes: Mapping[int, frozenset[str]] = field(default_factory=dict)
    guarded: frozenset[str] = frozenset()

    @property
    def labels(self) -> dict[str, str]:
        """The labels by which work asks for a kind of GPU: "NVIDIA H200" -> "H200"; slices by profile."""
        names = [device.name.removeprefix("NVIDIA ").replace(" ", "-") for device in self.devices]
        kind = {"accelerator_type": names[0]} if names else {}
        profiles = Counter(one.mig_profile for one in self.devices if one.mig_profile)
        return kind | {f"nvidia.com/mig-{name}.count": str(n) for name, n in profiles.items()}


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement: what the lease machine decides from, and ``usage`` for the heartbeat."""

    readings: Mapping[int, GpuReading] = field(default_factory=dict)
    usage: Mapping[str, float] = field(default_factory=dict)


class GpuLibrary(Protocol):
    """The source of an inventory that can be measured: NVML, or a file in its place. Its calls may block."""

    def inventory(self) -> Inventory:
        """Return all GPUs; one that fails is left out and named in the error."""
        ...

    def sample(self, indices: Iterable[int]) -> Sample:
        """Measure GPUs of the inventory."""
        ...


def visible(devices: Iterable[Device]) -> list[Device]:
    """Return those that our own CUDA_VISIBLE_DEVICES names, in its order."""
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        return list(devices)
    names = [part.strip() for part in mask.split(",") if part.strip()]
    known = list(devices)
    return [device for name in names for device in known if _is_named(device, name)]


def _is_named(device: Device, name: str) -> bool:
    """Return whether ``name`` is the device's index or uuid, or those of the GPU that it is a slice of."""
    if device.mig_profile:
        return device.uuid == name or device.parent_uuid.startswith(name)
    return name == str(device.index) or device.uuid.startswith(name)


def visible_mask(gpus: Mapping[int, float], uuids: Mapping[int, str]) -> str:
    """Return CUDA_VISIBLE_DEVICES for a lease: indices, or ``uuids`` of those that have one; or nothing."""
    return ",".join(uuids.get(index, str(index)) for index in sorted(gpus))
