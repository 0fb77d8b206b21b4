"""Where our cgroup is, and what the kernel is told of devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stoker_nodelet.devices.device_cgroups import number_of, own_cgroup

if TYPE_CHECKING:
    from pathlib import Path

MOUNTS = """\
30 29 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
31 30 0:27 /docker/c1 /sys/fs/cgroup/devices ro,nosuid master:9 - cgroup cgroup rw,devices
32 30 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
33 30 0:29 / /sys/fs/cgroup/unified rw shared:4 - cgroup2 cgroup2 rw,nsdelegate
"""


@pytest.mark.parametrize(
    ("own", "controller", "folder"),
    [
        ("5:devices:/docker/c1/pod\n0::/", "devices", "/sys/fs/cgroup/devices/pod"),
        ("5:devices:/docker/c1\n0::/", "devices", "/sys/fs/cgroup/devices"),
        ("5:devices:/docker/c2\n0::/", "devices", ""),  # mounted is the cgroup of another
        ("5:devices:/\n0::/", "devices", ""),
        ("2:cpuacct,cpu:/user\n0::/", "cpu", "/sys/fs/cgroup/cpu,cpuacct/user"),
        ("0::/system.slice/a.service\n", "", "/sys/fs/cgroup/unified/system.slice/a.service"),
        ("0::/system.slice/a.service\n", "devices", ""),
        ("5:devices:/docker/c1\n", "", ""),
    ],
)
def test_our_cgroup_is_where_its_hierarchy_is_mounted(
    tmp_path: Path, own: str, controller: str, folder: str
) -> None:
    mounts, cgroup = tmp_path / "mountinfo", tmp_path / "cgroup"
    mounts.write_text(MOUNTS)
    cgroup.write_text(own)
    if folder:
        assert str(own_cgroup(controller, mounts, cgroup)) == folder
    else:
        with pytest.raises(OSError, match="not mounted"):
            own_cgroup(controller, mounts, cgroup)


def test_only_a_character_device_has_a_number(tmp_path: Path) -> None:
    assert number_of("/dev/null") == (1, 3)
    with pytest.raises(OSError, match="no character device"):
        number_of(str(tmp_path))
