"""Names of compiled kernels and of measured configurations, equal for driver, scheduler and nodelet.

Equal requests for kernels have the same :func:`kernel_set`, by which the scheduler knows which nodes have
compiled them. Measured configurations are in the gcs's key-value store, one key each.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

from stoker_wire.messages.common import Record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stoker_wire.messages.common import RuntimeEnv

TUNING_NAMESPACE = "stoker.kernels"
TABLE_VARIABLE = "STOKER_KERNELS_TUNING"
"""Names a file of TunedKernel records; stoker_kernels reads it on first use."""
CPU_DEVICE = "cpu"
"""The device name under which measurements without a GPU are stored."""
DIGEST_LENGTH = 16

_encode = msgspec.msgpack.Encoder(order="sorted").encode


class TunedKernel(Record):
    """The fastest measured configuration of ``kernel`` at ``key`` on ``device``, and how it was found.

    ``seconds`` and ``default_seconds`` are medians of one step of ``op`` with this configuration and with
    the launcher's own; ``low_seconds`` and ``high_seconds`` the 20 % and 80 % quantiles. ``least_seconds`` is
    what the bytes and operations of that step take on this device at least (0: not known). ``measured`` of
    ``candidates`` gave right results in time. It holds for the ``version`` of Stoker that found it: another
    one may have other kernels.
    """

    kernel: str
    key: dict[str, int | str]
    config: dict[str, int]
    device: str
    op: str = ""
    dtype: str = ""
    sizes: dict[str, int] = {}
    seconds: float = 0.0
    low_seconds: float = 0.0
    high_seconds: float = 0.0
    default_seconds: float = 0.0
    least_seconds: float = 0.0
    candidates: int = 0
    measured: int = 0
    version: str = ""
    torch: str = ""
    triton: str = ""
    at_s: float = 0.0


def kernel_set(env: RuntimeEnv) -> str:
    """Return the name of the kernels that ``env`` asks for: equal for equal code; empty for none."""
    if not env.kernels:
        return ""
    facts: tuple[object, ...] = (env.kernels, env.pip)
    others = (env.uv, env.uv_project, env.conda, env.conda_file)
    if any(others):
        facts += others
    if any(spec.call for spec in env.kernels):
        facts += (env.working_dir, env.py_modules, env.sys_path, env.cwd)
    return digest_of(facts)


def digest_of(facts: object) -> str:
    """Return a short name for plain data and messages; equal data give equal names."""
    return hashlib.sha256(_encode(facts)).hexdigest()[:DIGEST_LENGTH]


def device_prefix(device: str) -> str:
    """Return the prefix of the keys of all measurements on ``device``."""
    return f"{device}/"


def tuning_key(device: str, kernel: str, key: Mapping[str, int | str]) -> str:
    """Return the key in ``TUNING_NAMESPACE`` of one choice, as ``NVIDIA H200/rms_norm/columns=4096``."""
    shape = ",".join(f"{name}={value}" for name, value in sorted(key.items()))
    return f"{device_prefix(device)}{kernel}/{shape}"
