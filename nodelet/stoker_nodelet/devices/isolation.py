"""The device nodes that a worker may open: those of the GPUs of its lease, by a cgroup of its own.

Each worker, and what it starts, is in ``OWN/stoker-NODE-.../WORKER``, OWN being the cgroup of the nodelet.
The fork moves itself there before it runs code of users, so that nothing of a worker is ever outside. Code of
users that runs for no lease (modules that fork servers preload, builds of environments) is in ``none`` beside
them, which may open no GPU. Device nodes that are no GPU's are never touched.

The nodelet owns these cgroups. Those of one that was killed are empty once its workers are dead, and the next
nodelet in the same cgroup removes them. A program that is root, like the nodelet, can move itself elsewhere:
this keeps it from what it opens by mistake, or without looking, not from what it is bent on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from stoker_nodelet.devices.device_cgroups import (
    DeviceHierarchy,
    DevicePrograms,
    DevicesController,
    Number,
    number_of,
)
from stoker_wire.errors import BadRequestError, UnavailableError
from stoker_wire.process import process_tree

if TYPE_CHECKING:
    from stoker_nodelet.devices.inventory import Inventory

HIERARCHIES: tuple[type[DevicesController] | type[DevicePrograms], ...] = (
    DevicesController,
    DevicePrograms,
)
"""Those that are tried, in this order."""
_FOLDER = "stoker-"
_ENTER = 'echo 0 > "$0/cgroup.procs" && exec "$@"'
_OPEN = 'for node; do if (: < "$node") 2> /dev/null; then echo "$node"; fi; done'
_CLOSE_TRIES = 50
_CLOSE_PAUSE_S = 0.02
_OPEN_S = 10.0


@dataclass(frozen=True, slots=True)
class IsolationVerdict:
    """The isolation that is in force; without one ``reason`` says why, or nothing if no GPU asks for it."""

    isolation: Isolation | None = None
    reason: str = ""


def find_isolation(mode: str, gpus: Inventory, node_id: str) -> IsolationVerdict:
    """Begin to isolate the GPUs of a node by the first hierarchy that works; blocks for milliseconds.

    ``mode`` is ``auto``, ``off``, or ``required``: BadRequestError if it cannot be.
    """
    devices = [one for one in gpus.devices if not one.fake or one.index in gpus.nodes]
    if not devices:
        return IsolationVerdict()
    if mode == "off":
        return IsolationVerdict(reason="STOKER_GPU_ISOLATION is off")
    shared = [one.index for one in devices if one.index not in gpus.nodes]
    reason = f"GPU {shared[0]} has no device node of its own" if shared else ""
    if not reason:
        isolation, reason = _begin(gpus, node_id)
        if isolation is not None:
            return IsolationVerdict(isolation)
    if mode == "required":
        raise BadRequestError(
            "STOKER_GPU_ISOLATION=required: workers cannot be kept off the GPUs of others\n"
            f"{reason}\n"
            "run the nodelet as root where it may write to its cgroup (a privileged container; Delegate=yes "
            "of a systemd unit), or set STOKER_GPU_ISOLATION=auto",
            field="gpu_isolation",
        )
    return IsolationVerdict(reason=reason)


def _begin(gpus: Inventory, node_id: str) -> tuple[Isolation | None, str]:
    """Return the isolation by the first hierarchy that works, or why none does."""
    reasons = []
    for hierarchy in HIERARCHIES:
        try:
            return Isolation.begin(hierarchy(), gpus, node_id), ""
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            reasons.append(f"{hierarchy.title}: {error.strerror}{where}")
    return None, "; ".join(reasons)


@dataclass(slots=True)
class Isolation:
    """The cgroups of one nodelet's workers. Methods are a few system calls, or none if nothing changes."""

    hierarchy: DeviceHierarchy
    root: Path
    nodes: Mapping[int, frozenset[Number]]
    """Index of a GPU -> what a lease of it may open."""
    guarded: frozenset[Number]
    """The device nodes of all GPUs of the machine, offered or not."""
    _granted: dict[str, frozenset[int]] = field(default_factory=dict)
    """Worker -> the GPUs that it may open now."""
    _left: set[Path] = field(default_factory=set)
    """Cgroups of workers that have ended, in which something is still on its way out."""

    @classmethod
    def begin(cls, hierarchy: DeviceHierarchy, gpus: Inventory, node_id: str) -> Isolation:
        """Make the folder of a nodelet and try it; OSError if the kernel does not deny what it is told to."""
        numbers = {path: number_of(path) for path in gpus.guarded}
        nodes = {
            index: frozenset(numbers[path] for path in paths) for index, paths in gpus.nodes.items()
        }
        _remove_dead(hierarchy.own)
        owner = f"{_pid_namespace()}-{os.getpid()}-{process_tree.start_time(os.getpid())}"
        root = hierarchy.own / f"{_FOLDER}{node_id}-{owner}"
        made = cls(hierarchy, root, nodes, frozenset(numbers.values()))
        try:
            root.mkdir()
            made._make(root / "none", frozenset())
            made._try(gpus.guarded)
        except OSError:
            made.close()
            raise
        return made

    @property
    def name(self) -> str:
        """The mechanism, as the node's record has it."""
        return self.hierarchy.title

    @property
    def without_gpus(self) -> tuple[str, ...]:
        """The words to put before a command that is to open no GPU."""
        return ("/bin/sh", "-c", _ENTER, str(self.root / "none"))

    def _try(self, paths: Iterable[str]) -> None:
        command = [*self.without_gpus, "/bin/sh", "-c", _OPEN, "sh", *sorted(paths)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_OPEN_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise OSError(0, f"no answer within {_OPEN_S:g} s") from None
        if done.returncode != 0:
            raise OSError(0, f"a process cannot be moved: {done.stderr.strip()}")
        if done.stdout:
            raise OSError(0, f"it does not deny {', '.join(done.stdout.split())}")

    def add(self, worker_id: str, gpus: Iterable[int]) -> str:
        """Make the cgroup of a worker that is about to be forked; return its folder. It raises OSError."""
        self.sweep()
        group = self.root / worker_id
        self._make(group, granted := frozenset(gpus))
        self._granted[worker_id] = granted
        return str(group)

    def grant(self, worker_id: str, gpus: Iterable[int]) -> None:
        """Let a worker open these GPUs alone from now on; UnavailableError if it cannot be, or is gone."""
        granted, before = frozenset(gpus), self._granted.get(worker_id)
        if granted == before:
            return
        if before is None:
            raise UnavailableError(f"{worker_id} is gone")
        group = self.root / worker_id
        try:
            self.hierarchy.deny(group, self._denied(granted), self._denied(before))
        except OSError as error:
            raise UnavailableError(
                f"the devices of {worker_id} cannot be changed\n{error}"
            ) from error
        self._granted[worker_id] = granted

    def remove(self, worker_id: str) -> None:
        """Remove the cgroup of a worker that has ended, now or as soon as it is empty."""
        if self._granted.pop(worker_id, None) is not None:
            self._left.add(self.root / worker_id)
            self.sweep()

    def sweep(self) -> None:
        """Remove what workers have left."""
        self._left = {group for group in self._left if not _removed(group)}

    def close(self) -> bool:
        """Remove all; return whether nothing is left."""
        return _removed(self.root)

    def _make(self, group: Path, gpus: frozenset[int]) -> None:
        group.mkdir()
        try:
            self.hierarchy.deny(group, self._denied(gpus), None)
        except OSError:
            group.rmdir()
            raise

    def _denied(self, gpus: frozenset[int]) -> frozenset[Number]:
        return self.guarded.difference(*(self.nodes.get(index, ()) for index in gpus))


async def remove_cgroups(isolation: Isolation | None) -> None:
    """Remove the cgroups of workers that have ended, of which the kernel may need a moment to let go."""
    for _ in range(_CLOSE_TRIES):
        if isolation is None or isolation.close():
            return
        await asyncio.sleep(_CLOSE_PAUSE_S)


def _removed(group: Path) -> bool:
    """Remove a cgroup with those below it (of a cluster that ran in a worker); return whether it is gone."""
    with contextlib.suppress(OSError):
        for below in os.scandir(group):
            if below.is_dir(follow_symlinks=False):
                _removed(Path(below))
        group.rmdir()
    return not group.exists()


def _remove_dead(own: Path) -> None:
    """Remove what is left of nodelets that were killed."""
    for root in own.glob(f"{_FOLDER}*-{_pid_namespace()}-*-*"):
        _, pid, started = root.name.rsplit("-", 2)
        if pid.isdigit() and started != str(process_tree.start_time(int(pid))):
            _removed(root)


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
