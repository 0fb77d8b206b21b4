"""The choice of what is stopped when memory runs short, and the watermarks that stop placement before that.

The rule, in this order:

1. Whoever uses more than the ``memory`` that its lease declares is stopped, wherever the node stands.
2. While the node uses more than the threshold, one worker at a time is stopped: a task before an actor that
   is restarted, that before one whose state would be lost, and a driver last. Of these, work that is
   preemptible or in the background first, and work that stays within what it declared last. Then an
   owner with several workers gives one up before an owner with a single one, and the newest goes first:
   the oldest goes on, so that something always gets done.
3. Only a worker that frees enough to come below the threshold is the newest in this sense; where none does,
   the largest goes. One that would free next to nothing is left alone: others than work have the memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

_LEAST_SHARE = 0.01
"""A worker that has less of the node's memory than this is not worth its end."""
_HYSTERESIS = 0.05
"""How far below its watermark the use of memory must fall until the node takes new work again."""
_NEAR_SHARE = 0.05
_FILLING_SHARE = 0.7
"""Of the node's memory: above it, it is measured every period whatever the threshold."""
"""So near the threshold the node is measured more often; twice as far from it less often."""


class Loss(IntEnum):
    """Loss that the end of a worker is, the least first."""

    TASK = 0
    ACTOR = 1
    """It is restarted."""
    STATE = 2
    """An actor that is not restarted."""
    DRIVER = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """A worker at work, and its memory. ``limit_bytes`` 0 means that its lease declared none."""

    worker_id: str
    loss: Loss
    owner_id: str
    since_s: float
    """When its lease began."""
    used_bytes: int
    limit_bytes: int = 0
    yields: bool = False
    """Whether it is preemptible, or runs in the background."""


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """The memory of the node, or of the cgroup that it is in: whichever is nearer to its end."""

    used_bytes: int
    total_bytes: int

    @property
    def share(self) -> float:
        """The part that is used."""
        return self.used_bytes / self.total_bytes if self.total_bytes else 0.0


def over_limit(consumers: Sequence[Consumer]) -> list[Consumer]:
    """Return those that use more than they declared."""
    return [one for one in consumers if one.limit_bytes and one.used_bytes > one.limit_bytes]


def choose(consumers: Sequence[Consumer], node: NodeMemory, threshold: float) -> Consumer | None:
    """Return the worker to stop so that the node comes below the threshold; None if none is worth it."""
    excess = node.used_bytes - int(threshold * node.total_bytes)
    if excess <= 0:
        return None
    least = _LEAST_SHARE * node.total_bytes
    worth = [one for one in consumers if one.used_bytes >= least]
    if not worth:
        return None
    loss = min(one.loss for one in worth)
    worth = [one for one in worth if one.loss is loss]
    first = min(map(_standing, worth))
    worth = [one for one in worth if _standing(one) == first]
    enough = [one for one in worth if one.used_bytes >= excess]
    if not enough:
        return max(worth, key=lambda one: (one.used_bytes, one.worker_id))
    of_owner = Counter(one.owner_id for one in consumers if one.loss is loss)
    return max(enough, key=lambda one: (of_owner[one.owner_id] > 1, one.since_s, one.worker_id))


def _standing(one: Consumer) -> tuple[bool, bool]:
    return not one.yields, bool(one.limit_bytes)


def pause_s(node: NodeMemory, threshold: float, period_s: float, *, has_limits: bool) -> float:
    """Return the time to the next measurement: short near the threshold, long far from it."""
    room = threshold - node.share
    if room < _NEAR_SHARE:
        return period_s / 5
    is_filling = room < 2 * _NEAR_SHARE or node.share > _FILLING_SHARE
    return period_s if has_limits or is_filling else period_s * 4


@dataclass(frozen=True, slots=True)
class Disk:
    """A file system that the node writes to, by a folder in it."""

    path: str
    free_bytes: int
    total_bytes: int


@dataclass(slots=True)
class Watermarks:
    """Conditions of a node under which it takes no new work, each with hysteresis.

    Memory is short from a share on, until less than that by a twentieth of all is used. Disk is short while
    a file system has less free than ``disk_free_bytes`` (of a small one 5 %), until it has twice as much.
    """

    memory_at: float
    disk_free_bytes: int
    memory: str = ""
    """Why memory is short, empty while it is not."""
    disk: str = ""

    def see_memory(self, node: NodeMemory) -> bool:
        """Judge a measurement; return whether the condition has changed."""
        if not self.memory_at:
            return False
        below = self.memory_at - _HYSTERESIS
        before = self.memory
        if not before and node.share >= self.memory_at:
            self.memory = (
                f"{size(node.used_bytes)} of {size(node.total_bytes)} of memory are in use "
                f"({node.share:.0%}): it takes new work again below {below:.0%}"
            )
        elif before and node.share < below:
            self.memory = ""
        return before != self.memory

    def see_disk(self, disks: Sequence[Disk]) -> bool:
        """Judge the file systems that the node writes to; return whether the condition has changed."""
        if not self.disk_free_bytes:
            return False
        before = self.disk
        wanted = [(min(self.disk_free_bytes, one.total_bytes // 20), one) for one in disks]
        if not before:
            short = [(least, one) for least, one in wanted if one.free_bytes < least]
            if short:
                least, one = short[0]
                self.disk = (
                    f"the disk of {one.path} has {size(one.free_bytes)} of {size(one.total_bytes)} free: "
                    f"it takes new work again with {size(2 * least)} free"
                )
        elif all(one.free_bytes >= 2 * least for least, one in wanted):
            self.disk = ""
        return before != self.disk


def size(nbytes: int) -> str:
    """Return bytes as people write them: ``1.5 GiB``."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes} bytes"
