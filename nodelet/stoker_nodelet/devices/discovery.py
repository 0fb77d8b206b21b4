"""The GPUs that a node offers: those that NVML finds, those of a file, or fake ones.

Whatever is wrong with a driver, the node registers: without GPUs, and with the reason in its record.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec import structs

from stoker_nodelet.devices.fake_file import FakeGpuFile
from stoker_nodelet.devices.inventory import FAKE_MEMORY_BYTES, GpuLibrary, Inventory
from stoker_nodelet.devices.nvml import load_nvml
from stoker_wire.messages.cluster import Device

if TYPE_CHECKING:
    from stoker_wire.settings import Settings


def find_gpus(settings: Settings, num_gpus: float | None) -> tuple[Inventory, GpuLibrary | None]:
    """Return the GPUs that this node offers, and what measures them (None: nothing can).

    ``num_gpus`` limits them; more than there are become fake ones, as do ``fake_gpus`` of the settings.
    """
    library = None if settings.fake_gpus else _library(settings)
    found = library.inventory() if library is not None else Inventory()
    num_gpus = settings.num_gpus if num_gpus is None else num_gpus
    count = settings.fake_gpus or len(found.devices)
    return _limited(found, count if num_gpus is None else int(num_gpus)), library


def _library(settings: Settings) -> GpuLibrary | None:
    return FakeGpuFile(settings.fake_gpu_file) if settings.fake_gpu_file else load_nvml()


def _limited(found: Inventory, wanted: int) -> Inventory:
    """Return so many of the GPUs, filled up with fake ones."""
    devices = list(found.devices[:wanted])
    used = {device.index for device in devices}
    devices = [
        structs.replace(
            one, links={index: way for index, way in one.links.items() if index in used}
        )
        for one in devices
    ]
    free = (index for index in range(wanted + len(used)) if index not in used)
    while len(devices) < wanted:
        index = next(free)
        devices.append(
            Device(
                index=index,
                uuid=f"FAKE-{index}",
                name="Fake GPU",
                memory_bytes=FAKE_MEMORY_BYTES,
                fake=True,
            )
        )
    return replace(found, devices=tuple(devices))
