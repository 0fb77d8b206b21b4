"""The GPUs that NVML finds: inventory, topology, use and health.

NVML is imported only here and only where there is a driver. Its library (``nvidia-ml-py``) is a parameter,
so that tests put a fake in its place. What a GPU does not support is left out, never an error.
"""

from __future__ import annotations

import contextlib
import glob
import math
from collections.abc import Callable, Iterable
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

from msgspec import structs

from stoker_nodelet.core.events import GpuReading
from stoker_nodelet.devices.inventory import Inventory, Sample, visible
from stoker_wire.messages.cluster import Device, Link

T = TypeVar("T")
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_MIG_MINORS = Path("/proc/driver/nvidia-caps/mig-minors")
"""Lines such as ``gpu0/gi3/ci0/access 31``: who may open /dev/nvidia-caps/nvidia-cap31 may use that slice."""
_NO_INSTANCE = 0xFFFFFFFF
"""The GPU instance of an event that is about the whole GPU."""


class MissingNvml:
    """The place of NVML on a node that has a driver and not the library."""

    def inventory(self) -> Inventory:
        """Return no GPUs, and the reason."""
        return Inventory(error="there is a GPU driver but no NVML: pip install nvidia-ml-py")

    def sample(self, indices: Iterable[int]) -> Sample:
        """Return nothing."""
        return Sample()


def load_nvml() -> Nvml | MissingNvml | None:
    """Return NVML; None on a machine without a GPU driver, where even the import is wasted."""
    if not any(Path(path).exists() for path in _DRIVERS):
        return None
    try:
        import pynvml
    except ImportError:
        return MissingNvml()
    return Nvml(pynvml)


class Nvml:
    """The GPUs of this machine, by the library ``nvml``."""

    def __init__(
        self, nvml: Any, pci_devices: Path = _PCI_DEVICES, mig_minors: Path = _MIG_MINORS
    ) -> None:
        self._nvml = nvml
        self._pci_devices = pci_devices
        self._mig_minors = mig_minors
        self._handles: dict[int, Any] = {}
        """Device index -> its handle; of a slice, that of the slice."""
        self._by_uuid: dict[str, list[tuple[int, int]]] = {}
        """Uuid of a GPU -> the devices that are it or its slices, each with its GPU instance."""
        self._parents: dict[int, Any] = {}
        self._nodes: dict[int, frozenset[str]] = {}
        """Device index -> the paths of its device nodes."""
        self._events: Any = None

    def inventory(self) -> Inventory:
        """Return all GPUs; one that fails is left out and named in the error."""
        nvml = self._nvml
        for known in (self._handles, self._parents, self._by_uuid, self._nodes):
            known.clear()
        try:
            nvml.nvmlInit()
            driver = _text(nvml.nvmlSystemGetDriverVersion())
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            return Inventory(error=f"NVML does not work: {error}")
        cuda = self._optional(nvml.nvmlSystemGetCudaDriverVersion) or 0
        found: list[Device] = []
        errors = []
        next_slice = count
        for index in range(count):
            try:
                gpus = self._gpu(index, next_slice)
            except nvml.NVMLError as error:
                errors.append(f"GPU {index} does not work: {error}")
                continue
            next_slice += len(gpus) if gpus and gpus[0].mig_profile else 0
            found += gpus
        self._register_events()
        guarded = frozenset(glob.glob("/dev/nvidia[0-9]*")).union(*self._nodes.values())
        found = self._with_links(visible(found))
        version = f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else ""
        return Inventory(
            tuple(found),
            driver,
            version,
            "; ".join(errors),
            nodes={one.index: nodes for one in found if (nodes := self._nodes.get(one.index))},
            guarded=guarded,
        )

    def _optional(self, call: Callable[..., T], *arguments: Any) -> T | None:
        """Return what a call of NVML returns, or None where it is not supported."""
        try:
            return call(*arguments)
        except self._nvml.NVMLError:
            return None

    def _gpu(self, index: int, next_slice: int) -> list[Device]:
        """Return the GPU as a device, or its MIG slices in its place, with indices from ``next_slice`` on."""
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
        gpu = Device(
            index=index,
            uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
            name=_text(nvml.nvmlDeviceGetName(handle)),
            memory_bytes=memory,
            arch=_arch(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
            numa_node=self._numa_node(handle),
        )
        minor = self._optional(nvml.nvmlDeviceGetMinorNumber, handle)
        own_nodes = frozenset(() if minor is None else (f"/dev/nvidia{minor}",))
        mode = self._optional(nvml.nvmlDeviceGetMigMode, handle)
        if mode is None or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            self._nodes[index] = own_nodes
            self._add(gpu, handle, handle, gpu.uuid, _NO_INSTANCE)
            return [gpu]
        slices: list[Device] = []
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            part = self._optional(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
            if part is None:
                continue  # nothing of the GPU is in this place
            one = structs.replace(
                gpu,
                index=next_slice + len(slices),
                uuid=_text(nvml.nvmlDeviceGetUUID(part)),
                name=_text(nvml.nvmlDeviceGetName(part)),
                memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(part).total),
                mig_profile=_profile(nvml.nvmlDeviceGetAttributes(part), memory),
                parent_uuid=gpu.uuid,
            )
            instance = int(nvml.nvmlDeviceGetGpuInstanceId(part))
            if own_nodes:
                self._nodes[one.index] = own_nodes | self._rights(minor, instance, part)
            self._add(one, part, handle, gpu.uuid, instance)
            slices.append(one)
        return slices

    def _add(self, device: Device, handle: Any, parent: Any, uuid: str, instance: int) -> None:
        self._handles[device.index] = handle
        self._parents[device.index] = parent
        self._by_uuid.setdefault(uuid, []).append((device.index, instance))

    def _rights(self, minor: int | None, instance: int, part: Any) -> frozenset[str]:
        """Return the device nodes by which the driver tells who may use a slice besides its GPU."""
        compute = self._optional(self._nvml.nvmlDeviceGetComputeInstanceId, part)
        whole = f"gpu{minor}/gi{instance}"
        wanted = (f"{whole}/access", f"{whole}/ci{compute}/access")
        with contextlib.suppress(OSError):
            lines = (line.split() for line in self._mig_minors.read_text().splitlines())
            rights = {line[0]: line[1] for line in lines if len(line) == 2}
            found = [rights[name] for name in wanted if name in rights]
            return frozenset(f"/dev/nvidia-caps/nvidia-cap{number}" for number in found)
        return frozenset()  # a driver that keeps slices apart by other means

    def _numa_node(self, handle: Any) -> int:
        """Return the NUMA node as the kernel has it, by the PCI address ``00000000:3B:00.0``."""
        info = self._optional(self._nvml.nvmlDeviceGetPciInfo, handle)
        if info is None:
            return -1
        address = _text(info.busId).lower()[4:]
        with contextlib.suppress(OSError, ValueError):
            return int((self._pci_devices / address / "numa_node").read_text())
        return -1

    # Topology

    def _with_links(self, devices: list[Device]) -> list[Device]:
        links: dict[int, dict[int, Link]] = {device.index: {} for device in devices}
        for one, other in combinations(devices, 2):
            link = self._link(one, other)
            links[one.index][other.index] = links[other.index][one.index] = link
        return [structs.replace(device, links=links[device.index]) for device in devices]

    def _link(self, one: Device, other: Device) -> Link:
        nvml = self._nvml
        first, second = self._parents[one.index], self._parents[other.index]
        if one.parent_uuid and one.parent_uuid == other.parent_uuid:
            return Link.PCIE  # slices do not reach each other's memory directly
        if not one.mig_profile and not other.mig_profile:
            index = nvml.NVML_P2P_CAPS_INDEX_NVLINK
            status = self._optional(nvml.nvmlDeviceGetP2PStatus, first, second, index)
            if status == nvml.NVML_P2P_STATUS_OK:
                return Link.NVLINK
        level = self._optional(nvml.nvmlDeviceGetTopologyCommonAncestor, first, second)
        if level is None:
            same = one.numa_node == other.numa_node >= 0
            return Link.NUMA if same else Link.SYSTEM
        if level <= nvml.NVML_TOPOLOGY_MULTIPLE:
            return Link.PCIE
        return Link.NUMA if level <= nvml.NVML_TOPOLOGY_NODE else Link.SYSTEM

    # Measurements

    def _register_events(self) -> None:
        """Have NVML collect XID errors; where it cannot, only the counters tell of errors."""
        nvml = self._nvml
        self._events = self._optional(nvml.nvmlEventSetCreate)
        if self._events is None:
            return
        for members in self._by_uuid.values():
            handle = self._parents[members[0][0]]
            self._optional(
                nvml.nvmlDeviceRegisterEvents,
                handle,
                nvml.nvmlEventTypeXidCriticalError,
                self._events,
            )

    def sample(self, indices: Iterable[int]) -> Sample:
        """Measure GPUs of the inventory."""
        xids = self._new_xids()
        readings: dict[int, GpuReading] = {}
        usage: dict[str, float] = {}
        for index in indices:
            handle = self._handles.get(index)
            if handle is None:
                continue
            reading = self._reading(index, handle, tuple(xids.get(index, ())))
            if reading is None:
                continue
            readings[index] = reading
            usage |= self._usage(index, handle, reading.ecc_errors)
        return Sample(readings, usage)

    def _new_xids(self) -> dict[int, list[int]]:
        """Return the XID errors since the last look, by device."""
        nvml = self._nvml
        xids: dict[int, list[int]] = {}
        while self._events is not None:
            event = self._optional(nvml.nvmlEventSetWait_v2, self._events, 0)
            if event is None:
                break  # none is left
            uuid = _text(self._optional(nvml.nvmlDeviceGetUUID, event.device) or "")
            for index, instance in self._by_uuid.get(uuid, ()):
                if event.gpuInstanceId in (_NO_INSTANCE, instance) or instance == _NO_INSTANCE:
                    xids.setdefault(index, []).append(int(event.eventData))
        return xids

    def _reading(self, index: int, handle: Any, xids: tuple[int, ...]) -> GpuReading | None:
        """Return what the lease machine decides from, or None if NVML does not tell."""
        nvml = self._nvml
        try:
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except nvml.NVMLError as error:
            gone = (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED)
            if error.value in gone:
                return GpuReading(processes=None, xids=xids, lost=str(error))
            return GpuReading(processes=None, xids=xids) if xids else None
        ecc_errors = self._optional(
            nvml.nvmlDeviceGetTotalEccErrors,
            self._parents[index],
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_VOLATILE_ECC,
        )
        held = {int(process.pid): int(process.usedGpuMemory or 0) for process in processes}
        errors = None if ecc_errors is None else int(ecc_errors)
        return GpuReading(processes=held, xids=xids, ecc_errors=errors)

    def _usage(self, index: int, handle: Any, ecc_errors: int | None) -> dict[str, float]:
        nvml = self._nvml
        usage = {} if ecc_errors is None else {f"gpu{index}_ecc_errors": float(ecc_errors)}
        rates = self._optional(nvml.nvmlDeviceGetUtilizationRates, handle)  # slices have none
        if rates is not None:
            usage[f"gpu{index}_percent"] = float(rates.gpu)
        memory = self._optional(nvml.nvmlDeviceGetMemoryInfo, handle)
        if memory is not None:
            usage[f"gpu{index}_memory_bytes"] = float(memory.used)
        parent, sensor = self._parents[index], nvml.NVML_TEMPERATURE_GPU
        celsius = self._optional(nvml.nvmlDeviceGetTemperature, parent, sensor)
        if celsius is not None:
            usage[f"gpu{index}_temperature_celsius"] = float(celsius)
        milliwatts = self._optional(nvml.nvmlDeviceGetPowerUsage, parent)
        if milliwatts is not None:
            usage[f"gpu{index}_power_watts"] = milliwatts / 1000
        return usage


def _profile(attributes: Any, total_bytes: int) -> str:
    """Return the name of a MIG profile, ``1g.10gb``: memory counts in eighths of the GPU's."""
    eighths = math.ceil(attributes.memorySizeMB * (1 << 20) / total_bytes * 8)
    gigabytes = round(math.ceil(total_bytes / (1 << 30)) * eighths / 8)
    compute, whole = attributes.computeInstanceSliceCount, attributes.gpuInstanceSliceCount
    part = "" if compute == whole else f"{compute}c."
    return f"{part}{whole}g.{gigabytes}gb"


def _arch(capability: tuple[int, int]) -> int:
    major, minor = capability
    return major * 10 + minor


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
