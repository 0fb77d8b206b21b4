"""NVML's Python library with GPUs that are made up; its names, arguments and constants are the real ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

GIB = 1 << 30
NO_INSTANCE = 0xFFFFFFFF


@dataclass
class FakeSlice:
    """A MIG device; its handle is itself."""

    uuid: str
    instance: int
    memory: int
    compute_slices: int = 1
    gpu_slices: int = 1
    processes: dict[int, int | None] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return "NVIDIA A100-SXM4-80GB MIG"


@dataclass
class FakeGpu:
    """A GPU; its handle is itself. ``error`` is what every call about it raises."""

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    memory: int = 80 * GIB
    bus: str = "00000000:3B:00.0"
    numa: int = 0
    switch: int = 0
    nvlink: int = -1
    slices: list[FakeSlice | None] = field(default_factory=list)
    processes: dict[int, int | None] = field(default_factory=dict)
    ecc_errors: int = 0
    error: int = 0
    minor: int | None = 0


class FakeNvml:
    """The functions of pynvml that the nodelet calls; everything else of it is the real module's."""

    def __init__(self, *gpus: FakeGpu) -> None:
        self.gpus = list(gpus)
        self.events: list[Any] = []
        self.init_error = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("nvmlDevice"):
            raise AssertionError(f"the fake lacks {name}")
        return getattr(pynvml, name)

    def _check(self, handle: Any) -> None:
        if getattr(handle, "error", 0):
            raise pynvml.NVMLError(handle.error)

    def nvmlInit(self) -> None:
        if self.init_error:
            raise pynvml.NVMLError(self.init_error)

    def nvmlSystemGetDriverVersion(self) -> str:
        return "550.90.07"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 12040

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        self._check(self.gpus[index])
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return str(handle.uuid)

    def nvmlDeviceGetName(self, handle: Any) -> bytes:
        return str(handle.name).encode()  # as older versions give it

    def nvmlDeviceGetCudaComputeCapability(self, handle: FakeGpu) -> tuple[int, int]:
        return (9, 0)

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        used = sum(nbytes or 0 for nbytes in handle.processes.values())
        return SimpleNamespace(total=handle.memory, used=used)

    def nvmlDeviceGetPciInfo(self, handle: FakeGpu) -> Any:
        return SimpleNamespace(busId=handle.bus.encode())

    def nvmlDeviceGetMigMode(self, device: FakeGpu) -> list[int]:
        if "A100" not in device.name:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [int(bool(device.slices))] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, device: FakeGpu) -> int:
        return len(device.slices)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: FakeGpu, index: int) -> FakeSlice:
        found = device.slices[index]
        if found is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return found

    def nvmlDeviceGetAttributes(self, device: FakeSlice) -> Any:
        return SimpleNamespace(
            memorySizeMB=device.memory >> 20,
            computeInstanceSliceCount=device.compute_slices,
            gpuInstanceSliceCount=device.gpu_slices,
        )

    def nvmlDeviceGetMinorNumber(self, handle: FakeGpu) -> int:
        if handle.minor is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return handle.minor

    def nvmlDeviceGetComputeInstanceId(self, device: FakeSlice) -> int:
        return 0

    def nvmlDeviceGetGpuInstanceId(self, device: FakeSlice) -> int:
        return device.instance

    def nvmlDeviceGetP2PStatus(self, device1: FakeGpu, device2: FakeGpu, p2pIndex: int) -> int:
        assert p2pIndex == pynvml.NVML_P2P_CAPS_INDEX_NVLINK
        joined = device1.nvlink == device2.nvlink >= 0
        return pynvml.NVML_P2P_STATUS_OK if joined else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED

    def nvmlDeviceGetTopologyCommonAncestor(self, device1: FakeGpu, device2: FakeGpu) -> int:
        if device1.numa != device2.numa:
            return pynvml.NVML_TOPOLOGY_SYSTEM
        same = device1.switch == device2.switch
        return pynvml.NVML_TOPOLOGY_SINGLE if same else pynvml.NVML_TOPOLOGY_NODE

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        self._check(handle)
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=nbytes)
            for pid, nbytes in handle.processes.items()
        ]

    def nvmlDeviceGetTotalEccErrors(self, handle: FakeGpu, errorType: int, counterType: int) -> int:
        assert errorType == pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        assert counterType == pynvml.NVML_VOLATILE_ECC
        return handle.ecc_errors

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        if isinstance(handle, FakeSlice):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(gpu=37, memory=5)

    def nvmlDeviceGetTemperature(self, handle: FakeGpu, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return 41

    def nvmlDeviceGetPowerUsage(self, handle: FakeGpu) -> int:
        if "A100" in handle.name:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return 250_500

    def nvmlEventSetCreate(self) -> str:
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: FakeGpu, eventTypes: int, eventSet: str) -> None:
        assert eventTypes == pynvml.nvmlEventTypeXidCriticalError and eventSet == "events"

    def nvmlEventSetWait_v2(self, eventSet: str, timeoutms: int) -> Any:
        if not self.events:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        return self.events.pop(0)

    def xid(self, gpu: FakeGpu, code: int, instance: int = NO_INSTANCE) -> None:
        """Have the driver report an error."""
        self.events.append(SimpleNamespace(device=gpu, eventData=code, gpuInstanceId=instance))
