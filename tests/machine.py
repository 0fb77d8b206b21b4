"""Says what machine the tests run on, so that a failure elsewhere can be understood.

``make test`` and ``make flakes`` run it first: processor and its features, memory, system, versions
of what the tests use. It needs nothing beyond the standard library, and reports what is not there.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from tests.services import find_postgres, find_redis

# What decides which code of PyTorch, oneDNN and NumPy runs.
FEATURES = re.compile(r"avx\w*|amx\w*|fma|f16c|bf16|asimd\w*|sve\w*|i8mm")
PACKAGES = ("torch", "triton", "numpy", "aiohttp", "uvloop", "msgspec", "cloudpickle", "pytest")


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1].strip() if found else "unknown"


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


def _version(binary: Path | None) -> str:
    if binary is None:
        return "absent"
    try:
        told = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown ({error})"
    return _first(r"(\d+\.[\d.]+)", told.stdout)


def _package(name: str) -> str:
    try:
        return f"{name} {metadata.version(name)}"
    except metadata.PackageNotFoundError:
        return f"{name} absent"


def _cpu_capability() -> str:
    """What PyTorch has chosen of the processor's instructions; oneDNN chooses by itself, AMX too."""
    try:
        import torch
    except ImportError:
        return ""
    return f", PyTorch uses {torch.backends.cpu.get_cpu_capability()}"


def report() -> list[str]:
    """Return the lines to print."""
    cpu, memory = Path("/proc/cpuinfo").read_text(), Path("/proc/meminfo").read_text()
    flags = _first(r"^(?:flags|Features)\s*: (.*)$", cpu).split()
    free, total = (
        1024 * int(_first(rf"^{key}:\s*(\d+)", memory)) for key in ("MemAvailable", "MemTotal")
    )
    model = _first(r"^model name\s*: (.*)$", cpu)
    known = " ".join(sorted({flag for flag in flags if FEATURES.fullmatch(flag)}))
    shm = shutil.disk_usage("/dev/shm")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    postgres = find_postgres()
    return [
        (
            f"cpu: {model}, {len(os.sched_getaffinity(0))} of "
            f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}{_cpu_capability()}"
        ),
        f"cpu features: {known or 'unknown'}",
        (
            f"memory: {_gib(free)} free of {_gib(total)}; "
            f"/dev/shm {_gib(shm.free)} free of {_gib(shm.total)}; open files {files[0]} of {files[1]}"
        ),
        f"system: {platform.platform()}, Python {platform.python_version()}, uid {os.getuid()}",
        f"packages: {', '.join(_package(name) for name in PACKAGES)}",
        (
            f"servers: redis {_version(find_redis())}, "
            f"postgres {_version(postgres / 'postgres' if postgres else None)}, "
            f"docker {'present' if shutil.which('docker') else 'absent'}"
        ),
    ]


if __name__ == "__main__":
    sys.stdout.write("".join(f"[machine] {line}\n" for line in report()))
