"""The resources of this machine: CPUs, memory and GPUs, as far as its cgroup lets us use them.

Called once when the nodelet starts. NVML is imported only here and only on use; without the library
or a driver there are simply no GPUs.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from stoker_nodelet import process_tree
from stoker_wire.messages.cluster import Device

_CGROUP = Path("/sys/fs/cgroup")
_MEMORY_SHARE = 0.7


def usable_cpus() -> float:
    """Return the CPUs of our affinity mask, or the cgroup's quota if that is smaller."""
    count = float(len(os.sched_getaffinity(0)))
    quota = _cpu_quota()
    return min(count, quota) if quota else count


def _cpu_quota() -> float | None:
    text = _read(_own_cgroup("cpu") / "cpu.max") or _read(_CGROUP / "cpu.max")
    if text:
        limit, _, period = text.partition(" ")
        return None if limit == "max" else max(1.0, float(limit) / float(period or 100_000))
    limit_us = _read(_CGROUP / "cpu/cpu.cfs_quota_us")
    period_us = _read(_CGROUP / "cpu/cpu.cfs_period_us")
    if limit_us and period_us and int(limit_us) > 0:
        return max(1.0, int(limit_us) / int(period_us))
    return None


def memory_limit_bytes() -> int:
    """Return the most memory that processes here can have: the cgroup's limit or the machine's."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in (_own_cgroup("memory") / "memory.max", _CGROUP / "memory.max"):
        text = _read(path)
        if text and text != "max":
            total = min(total, int(text))
    for path in (_own_cgroup("memory") / "memory.limit_in_bytes",):
        text = _read(path)
        if text:
            total = min(total, int(text))
    return total


def schedulable_memory_bytes() -> int:
    """Return what tasks may declare by default: 70 % of what is available now."""
    available = memory_limit_bytes()
    for line in (_read(Path("/proc/meminfo")) or "").splitlines():
        if line.startswith("MemAvailable:"):
            available = min(available, int(line.split()[1]) * 1024)
    return int(available * _MEMORY_SHARE)


def in_use(pid: int) -> bool:
    """Return whether the process, or one that it started, has opened a GPU."""
    return any(_opens_gpu(one) for one in (pid, *process_tree.descendants(pid)))


def _opens_gpu(pid: int) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(f"{folder}/{name}").startswith(("/dev/nvidia", "/dev/dxg")):
                    return True
    except PermissionError:
        return True  # it cannot be ruled out
    except OSError:
        return False  # it is gone
    return False


def oom_kills() -> int:
    """Return how often the kernel killed for memory in our cgroup (v2 or v1)."""
    own = _own_cgroup("memory")
    for path in (own / "memory.events", _CGROUP / "memory.events", own / "memory.oom_control"):
        for line in (_read(path) or "").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def _own_cgroup(controller: str) -> Path:
    for line in (_read(Path("/proc/self/cgroup")) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return _CGROUP / controller / path.lstrip("/")
    for line in (_read(Path("/proc/self/cgroup")) or "").splitlines():
        if line.startswith("0::"):
            return _CGROUP / line[3:].lstrip("/")
    return _CGROUP


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def find_devices(num_gpus: float | None = None, fake_gpus: int = 0) -> tuple[Device, ...]:
    """Return the GPUs that this node offers.

    ``num_gpus`` limits them; more than there are become fake ones, as do ``fake_gpus``, so that
    scheduling can be tried without hardware.
    """
    real = [] if fake_gpus else _nvml_devices()
    wanted = fake_gpus or (len(real) if num_gpus is None else int(num_gpus))
    if num_gpus is not None:
        wanted = int(num_gpus)
    devices = real[:wanted]
    used = {device.index for device in devices}
    free = (index for index in range(wanted + len(used)) if index not in used)
    while len(devices) < wanted:
        index = next(free)
        devices.append(Device(index=index, uuid=f"FAKE-{index}", name="Fake GPU", fake=True))
    return tuple(devices)


def _nvml_devices() -> list[Device]:
    if not Path("/dev/nvidiactl").exists() and not Path("/dev/dxg").exists():
        return []  # without a driver the import is wasted
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        present = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            present.append(
                Device(
                    index=index,
                    uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
                    name=_text(pynvml.nvmlDeviceGetName(handle)),
                    memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                    arch=_arch(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
                )
            )
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()
    return _visible(present)


def _arch(capability: tuple[int, int]) -> int:
    major, minor = capability
    return major * 10 + minor


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _visible(devices: list[Device]) -> list[Device]:
    """Return those that our own CUDA_VISIBLE_DEVICES names, in its order."""
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        return devices
    names = [part.strip() for part in mask.split(",") if part.strip()]
    return [
        device
        for name in names
        for device in devices
        if name == str(device.index) or device.uuid.startswith(name)
    ]


def accelerator_labels(devices: tuple[Device, ...]) -> dict[str, str]:
    """Return the label by which work asks for a kind of GPU: "NVIDIA H200" -> "H200"."""
    names = [device.name.removeprefix("NVIDIA ").replace(" ", "-") for device in devices]
    return {"accelerator_type": names[0]} if names else {}


def visible_mask(gpus: dict[int, float]) -> str:
    """Return CUDA_VISIBLE_DEVICES for a lease: its device indices, or nothing at all."""
    return ",".join(str(index) for index in sorted(gpus))
