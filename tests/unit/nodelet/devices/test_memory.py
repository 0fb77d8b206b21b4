"""The use of memory by what the kernel says of the machine and of our cgroups; the disk of a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_nodelet.devices.memory import disk, limited_cgroups, node_memory

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


def meminfo(folder: Path, total_mib: int, available_mib: int) -> Path:
    path = folder / "meminfo"
    text = (
        f"MemTotal: {total_mib * 1024} kB\nMemFree: 1 kB\nMemAvailable: {available_mib * 1024} kB\n"
    )
    path.write_text(text)
    return path


def test_without_a_limit_the_machine_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text(f"{90 * MIB}\n")
    seen = node_memory([tmp_path], meminfo(tmp_path, 100, 40))
    assert (seen.used_bytes, seen.total_bytes) == (60 * MIB, 100 * MIB)


def test_a_cgroup_counts_without_what_the_kernel_can_drop(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{50 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{48 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {8 * MIB}\nactive_file 9\n")
    seen = node_memory([tmp_path], meminfo(tmp_path, 100, 40))
    assert (seen.used_bytes, seen.total_bytes) == (40 * MIB, 50 * MIB)
    seen = node_memory([tmp_path], meminfo(tmp_path, 100, 10))
    assert seen.total_bytes == 100 * MIB, "the machine is nearer to its end"


def test_a_cgroup_of_version_1_counts_too(tmp_path: Path) -> None:
    (tmp_path / "memory.limit_in_bytes").write_text(f"{50 * MIB}\n")
    (tmp_path / "memory.usage_in_bytes").write_text(f"{45 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {MIB}\n")
    seen = node_memory([tmp_path], meminfo(tmp_path, 100, 90))
    assert (seen.used_bytes, seen.total_bytes) == (44 * MIB, 50 * MIB)


def test_this_machine_and_its_disk_can_be_measured(tmp_path: Path) -> None:
    seen = node_memory(limited_cgroups())
    assert 0 < seen.used_bytes < seen.total_bytes
    free = disk(tmp_path)
    assert 0 < free.free_bytes <= free.total_bytes
