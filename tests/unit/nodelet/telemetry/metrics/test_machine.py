"""The counters of a machine, from files as the kernel writes them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from stoker_nodelet.telemetry.metrics import machine

if TYPE_CHECKING:
    from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
DISKS = """\
 259       0 nvme0n1 10 0 200 5 20 0 400 9 0 0 0 0 0 0 0 0 0
 259       1 nvme0n1p1 10 0 200 5 20 0 400 9 0 0 0 0 0 0 0 0 0
   8       0 sda 1 0 8 5 1 0 16 9 0 0 0 0 0 0 0 0 0
   7       0 loop0 1 0 9999 5 1 0 9999 9 0 0 0 0 0 0 0 0 0
 253       0 dm-0 1 0 9999 5 1 0 9999 9 0 0 0 0 0 0 0 0 0
"""
NETWORKS = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 999 1 0 0 0 0 0 0 999 1 0 0 0 0 0 0
  eth0:1000 1 0 0 0 0 0 0 70 1 0 0 0 0 0 0
 bond0: 500 1 0 0 0 0 0 0 30 1 0 0 0 0 0 0
veth12: 999 1 0 0 0 0 0 0 999 1 0 0 0 0 0 0
docker0: 999 1 0 0 0 0 0 0 999 1 0 0 0 0 0 0
"""  # noqa: E501


def test_the_time_of_cpus_is_by_mode(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu  100 2 30 4000 5 0 7 1 0 0\ncpu0 1 2 3\n")
    found = machine.cpu_seconds(tmp_path)
    assert found["user"] == 100 * TICK_S and found["idle"] == 4000 * TICK_S
    assert list(found) == ["user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal"]


def test_whole_disks_count_once(tmp_path: Path) -> None:
    (tmp_path / "diskstats").write_text(DISKS)
    block = tmp_path / "block"
    for name in ("nvme0n1", "sda", "loop0", "dm-0"):
        (block / name).mkdir(parents=True)
    assert machine.disk_traffic(tmp_path, block) == (208 * 512, 416 * 512)
    assert machine.disk_traffic(tmp_path, tmp_path / "none") == (0, 0)


def test_networks_inside_of_the_machine_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net/dev").write_text(NETWORKS)
    assert machine.network_traffic(tmp_path) == (1500, 100)


def test_this_machine_can_be_read() -> None:
    assert machine.cpu_seconds()["user"] > 0
    assert min(machine.network_traffic()) >= 0 and min(machine.disk_traffic()) >= 0
