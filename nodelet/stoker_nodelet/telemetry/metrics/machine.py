"""The machine's counters since boot, as the kernel has them: CPUs, disks, network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MODES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
_SECTOR_NBYTES = 512
_NO_DISKS = ("loop", "ram", "zram", "dm-", "md")
"""Not disks, or disks that are counted by what they consist of."""
_NO_NETWORKS = ("lo", "veth", "docker", "br-", "virbr", "cni", "cali", "flannel")
"""Networks inside of the machine."""
_PROC, _BLOCK = Path("/proc"), Path("/sys/block")


class Traffic(NamedTuple):
    """Bytes that came in, and bytes that went out."""

    in_nbytes: int
    out_nbytes: int


def cpu_seconds(proc: Path = _PROC) -> dict[str, float]:
    """Return the time of all CPUs by mode."""
    with (proc / "stat").open() as lines:
        ticks = lines.readline().split()[1:]
    return {mode: int(count) / _TICKS_PER_S for mode, count in zip(_MODES, ticks, strict=False)}


def disk_traffic(proc: Path = _PROC, block: Path = _BLOCK) -> Traffic:
    """Return what was read from, and written to, whole disks."""
    disks = {path.name for path in block.iterdir()} if block.is_dir() else set()
    read = written = 0
    for line in (proc / "diskstats").read_text().splitlines():
        fields = line.split()
        if fields[2] in disks and not fields[2].startswith(_NO_DISKS):
            read += int(fields[5])
            written += int(fields[9])
    return Traffic(read * _SECTOR_NBYTES, written * _SECTOR_NBYTES)


def network_traffic(proc: Path = _PROC) -> Traffic:
    """Return what was received and sent by networks with other machines."""
    received = sent = 0
    for line in (proc / "net/dev").read_text().splitlines()[2:]:
        name, _, counts = line.partition(":")
        if not name.strip().startswith(_NO_NETWORKS):
            fields = counts.split()
            received += int(fields[0])
            sent += int(fields[8])
    return Traffic(received, sent)
