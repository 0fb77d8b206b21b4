"""The two ways in which Linux keeps the processes of a cgroup off device nodes.

cgroups v1 have a hierarchy ``devices`` whose files take one device each; cgroups v2 have BPF programs, which
the kernel asks at every open. Both only ever narrow what the cgroups above allow, and neither takes away
what is open already. The caller makes and removes the cgroups; every failure is an OSError.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import stat
import struct
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

Number = tuple[int, int]
"""Major and minor number of a character device."""


def number_of(path: str) -> Number:
    """Return the number of a device node; OSError if there is none."""
    status = os.stat(path)
    if not stat.S_ISCHR(status.st_mode):
        raise OSError(errno.ENOTTY, "no character device", path)
    return os.major(status.st_rdev), os.minor(status.st_rdev)


def own_cgroup(
    controller: str,
    mounts: Path = Path("/proc/self/mountinfo"),
    own: Path = Path("/proc/self/cgroup"),
) -> Path:
    """Return the folder of our cgroup in the hierarchy of a v1 controller, or in that of v2 for ``""``."""
    kind = "cgroup" if controller else "cgroup2"
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller not in controllers.split(","):
            continue
        for mount in mounts.read_text().splitlines():
            place, _, source = mount.partition(" - ")
            root, point = place.split()[3:5]
            fs_type, _, options = source.split()[:3]
            if fs_type == kind and (not controller or controller in options.split(",")):
                if not Path(path).is_relative_to(root):
                    break  # what is mounted is the cgroup of somebody else
                return Path(point) / Path(path).relative_to(root)
    raise OSError(errno.ENOENT, "it is not mounted")


@dataclass(frozen=True, slots=True)
class DevicesController:
    """The hierarchy ``devices`` of cgroups v1; ``own`` is the folder of our cgroup there."""

    title: ClassVar[str] = "cgroup v1"
    own: Path = field(default_factory=lambda: own_cgroup("devices"))

    def deny(
        self, group: Path, denied: frozenset[Number], before: frozenset[Number] | None
    ) -> None:
        """Have a cgroup open all but ``denied``, where it was all but ``before`` (None: it is new)."""
        before = before or frozenset()
        self._write(group / "devices.deny", denied - before)
        self._write(group / "devices.allow", before - denied)

    def _write(self, file: Path, devices: Collection[Number]) -> None:
        if not devices:
            return
        fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
        try:
            for major, minor in devices:
                os.write(fd, b"c %d:%d rw" % (major, minor))
        finally:
            os.close(fd)


_BPF = {"x86_64": 321, "aarch64": 280}
"""The number of bpf(2), by machine."""
_PROG_LOAD, _PROG_ATTACH, _PROG_DETACH = 5, 8, 9
_PROG_TYPE_CGROUP_DEVICE = 15
_ATTACH_TYPE_CGROUP_DEVICE = 6
_ALLOW_MULTI = 2
"""Programs of the cgroups above are asked as well, and cgroups below may have theirs."""
_CHARACTER_DEVICE = 2


@dataclass(frozen=True, slots=True)
class DevicePrograms:
    """The hierarchy of cgroups v2, with one BPF program for each set of devices that was ever denied.

    ``own`` is the folder of our cgroup there.
    """

    title: ClassVar[str] = "cgroup v2"
    own: Path = field(default_factory=lambda: own_cgroup(""))
    _programs: dict[frozenset[Number], int] = field(default_factory=dict)
    """Denied devices -> the file descriptor of their program."""

    def deny(
        self, group: Path, denied: frozenset[Number], before: frozenset[Number] | None
    ) -> None:
        """Have a cgroup open all but ``denied``, where it was all but ``before`` (None: it is new).

        The one program is attached before the other is detached: at no moment there is none.
        """
        fd = os.open(group, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._apply(_PROG_ATTACH, fd, denied, _ALLOW_MULTI)
            if before is not None:
                self._apply(_PROG_DETACH, fd, before, 0)
        finally:
            os.close(fd)

    def _apply(self, command: int, group_fd: int, denied: frozenset[Number], flags: int) -> None:
        program = self._programs.get(denied)
        if program is None:
            program = self._programs[denied] = _load(denied)
        attributes = (group_fd, program, _ATTACH_TYPE_CGROUP_DEVICE, flags)
        _bpf(command, struct.pack("=IIII", *attributes))


def _load(denied: frozenset[Number]) -> int:
    """Load the program that denies these character devices; return its file descriptor (close-on-exec)."""
    instructions = _instructions(denied)
    code = ctypes.create_string_buffer(instructions, len(instructions))
    license_ = ctypes.create_string_buffer(b"Apache-2.0")
    count = len(instructions) // _instruction.size
    addresses = (ctypes.addressof(code), ctypes.addressof(license_))
    return _bpf(_PROG_LOAD, struct.pack("=IIQQ", _PROG_TYPE_CGROUP_DEVICE, count, *addresses))


_instruction = struct.Struct("=BBhi")
"""Operation, registers (destination, and source << 4), offset of a jump, operand."""
_LOAD, _AND, _SET = 0x61, 0x54, 0xB7
_IF_EQUAL, _IF_NOT, _EXIT = 0x15, 0x55, 0x95


def _instructions(denied: frozenset[Number]) -> bytes:
    """Return the program: 0 (EPERM) for the ``denied``, 1 for every other device.

    R1 points to the question: three words of 32 bits, of which the first has the type in its lower half, the
    others are the numbers. R0 takes the answer.
    """
    context, kind, major, minor, answer = 1, 2, 3, 4, 0
    allow, deny = ([(_SET, answer, 0, value), (_EXIT, 0, 0, 0)] for value in (1, 0))
    tests: list[tuple[int, int, int, int]] = []
    for device in sorted(
        denied, reverse=True
    ):  # from the last on: each has to jump over those behind it
        to_denial = len(tests) + len(allow)
        tests[:0] = [(_IF_NOT, major, 1, device[0]), (_IF_EQUAL, minor, to_denial, device[1])]
    question = [
        (_LOAD, kind | context << 4, 0, 0),
        (_AND, kind, 0, 0xFFFF),
        (_LOAD, major | context << 4, 4, 0),
        (_LOAD, minor | context << 4, 8, 0),
        (_IF_NOT, kind, len(tests), _CHARACTER_DEVICE),
    ]
    # Without tests nothing would lead to a denial, and the kernel refuses what nothing leads to.
    parts = [*question, *tests, *allow, *deny] if tests else allow
    return b"".join(_instruction.pack(*one) for one in parts)


def _bpf(command: int, attributes: bytes) -> int:
    number = _BPF.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"bpf(2) is not known for {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    result = libc.syscall(
        ctypes.c_long(number), ctypes.c_int(command), buffer, ctypes.c_uint(len(attributes))
    )
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"bpf(2): {os.strerror(code)}")
    return int(result)


DeviceHierarchy = DevicesController | DevicePrograms
"""A hierarchy of cgroups in which opening devices can be denied."""
