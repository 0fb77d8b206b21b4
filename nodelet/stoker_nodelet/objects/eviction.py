"""Eviction from the arena: recycled extents are trimmed, old objects spilled, orphaned files swept.

The arena's use stays within its limit. Writers take memory from the quota by themselves; they ask for
more here (``make_room``) when it is used up. An object that somebody reads stays where it is: to spill
it would free nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from stoker_nodelet.objects.index import ObjectIndex
from stoker_nodelet.telemetry.activity import ActivityLog
from stoker_wire.arena import Arena, ByteQuota, read_head
from stoker_wire.arena.extents import FREE, QUOTA, SPILL
from stoker_wire.arena.layout import id_of
from stoker_wire.errors import ArenaFullError, ObjectLostError, StartError
from stoker_wire.messages.node_api import ActivityKind
from stoker_wire.messages.objects import ObjectInfo

if TYPE_CHECKING:
    from stoker_wire.settings import Settings

_EVERY_S = 1.0
_IDLE_S = 4.0
"""A recycled extent that nobody claims for so long is given back to the machine. To touch its pages
anew costs 0.4 ms a MB: less than a hundredth of that time for all but the largest."""
_MOST_RECYCLED = 256
_ORPHAN_S = 10.0
"""A half-written file younger than this may have a writer that has not locked it yet."""
_UNREPORTED_S = 2.0
"""An object that was not reported for so long is taken for one of a dead writer."""
_REPORT_S = 2.0
"""An object cannot be spilled before it is reported; so long that is waited for."""
_AGAIN_S = 0.02
_LARGEST = 3

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ArenaEvictor:
    """Keeper of the arena's limit. ``warm_bytes`` of recycled extents are kept for the next writers."""

    objects: ObjectIndex
    spill_dir: Path
    warm_bytes: int
    spill_at: float
    """Share of the limit above which the oldest objects are spilled."""
    has_ended: Callable[[str, str], bool]
    """Whether a job (its id) or an owner (its id) is known to have ended."""
    spilled_count: int = 0
    spilled_nbytes: int = 0
    """Objects that were moved to disk since the start."""
    activity: ActivityLog = field(default_factory=ActivityLog)
    """What goes to disk is entered there."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _spill_fails: bool = False
    """Whether the disk refused the last object: that is told once, not each second."""

    @property
    def arena(self) -> Arena:
        return self.objects.arena

    async def run(self) -> None:
        """Trim, sweep and spill for as long as the nodelet lives."""
        while True:
            await asyncio.sleep(_EVERY_S)
            try:
                self.sweep()
                self.trim()
                await self.spill()
            except OSError:
                _log.exception("the arena's eviction failed; it is tried again")

    async def spill(self) -> None:
        """Spill the oldest objects as far as more than ``spill_at`` of the limit is in use."""
        target_bytes = int(self._limit_bytes() * self.spill_at)
        if self.arena.quota.used_bytes > target_bytes:
            async with self._lock:
                await self._evict_to(target_bytes)

    def _limit_bytes(self) -> int:
        """Return how much the arena may take now: less than its limit where others use the file system too.

        What it evicts is free then, so this stays the same meanwhile.
        """
        quota = self.arena.quota
        return min(quota.limit_bytes, quota.used_bytes + self._free_bytes())

    def _free_bytes(self) -> int:
        status = os.statvfs(self.arena.path)
        return status.f_bavail * status.f_frsize

    async def make_room(self, nbytes: int) -> None:
        """Free memory so that ``nbytes`` more can be taken; raises :class:`ArenaFullError`."""
        quota = self.arena.quota
        if nbytes > quota.limit_bytes:
            raise ArenaFullError(
                f"an object of {nbytes} bytes is larger than the node's whole shared memory for "
                "objects\n"
                f"it has {quota.limit_bytes} bytes: split the object, or raise "
                "STOKER_ARENA_MAX_BYTES"
            )
        deadline_s = time.monotonic() + _REPORT_S
        while True:
            async with self._lock:
                obstacle = await self._evict_to(self._limit_bytes() - nbytes)
            waits = self._unreported() and time.monotonic() < deadline_s
            is_room = quota.used_bytes + nbytes <= self._limit_bytes()
            if is_room or not waits:
                break
            await asyncio.sleep(_AGAIN_S)
        if not is_room:
            holders = ", ".join(
                f"{one.object_id} of {one.owner_id or 'an unknown owner'} ({one.nbytes} bytes)"
                for one in self.objects.largest(_LARGEST)
            )
            freed = sum(size for _, size, path in self.recycled() if self.arena.in_use(path))
            if freed:
                holders += (", " if holders else "") + f"views of freed objects ({freed} bytes)"
            raise ArenaFullError(
                f"no room for {nbytes} bytes in the node's shared memory\n"
                f"{quota.used_bytes} of {quota.limit_bytes} bytes are in use, and {obstacle}\n"
                f"its file system has {self._free_bytes()} bytes free for all who use it\n"
                f"largest holders: {holders or 'none'}\n"
                "drop refs and values that are no longer needed, or raise STOKER_ARENA_MAX_BYTES"
            )

    def _unreported(self) -> bool:
        """Return whether files are being written, or reports of them are on their way."""
        names = (entry.name for entry in _entries(self.arena.path) if entry.is_file())
        return any(name[0] != "." and name not in self.objects for name in names)

    async def _evict_to(self, target_bytes: int) -> str:
        """Evict until the arena uses ``target_bytes``; return the obstacle if it cannot."""
        quota = self.arena.quota
        self._delete_recycled(lambda: quota.used_bytes > target_bytes)
        # Copies of other nodes' objects first: they can be had again, and cost no disk.
        for one in sorted(self.objects.in_memory(), key=lambda one: not one.copy_of):
            if quota.used_bytes <= target_bytes:
                return ""
            if not self.arena.in_use(self.arena.path / one.object_id):
                try:
                    if one.copy_of:
                        self.objects.free([one.object_id])
                    else:
                        await self._spill(one)
                except OSError as error:
                    obstacle = f"nothing can be spilled to {self.spill_dir}: {error.strerror}"
                    if not self._spill_fails:
                        _log.warning("%s; it is tried again", obstacle)
                    self._spill_fails = True
                    return obstacle
                self._delete_recycled(lambda: quota.used_bytes > target_bytes)
        return "what is left is being read or written"

    async def _spill(self, one: ObjectInfo) -> None:
        """Move an object to disk. Readers find it there; views of it keep what they have."""
        began = time.monotonic()
        try:
            fd = self.arena.open(one.object_id)
        except ObjectLostError:
            return  # freed meanwhile
        final = self.arena.path / SPILL / one.object_id
        copying = asyncio.get_running_loop().run_in_executor(None, _copy, fd, one.nbytes, final)
        try:
            await asyncio.shield(copying)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                await copying  # it has the descriptor
            final.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        if not self.objects.mark_spilled(one):
            final.unlink(missing_ok=True)
            return
        self.arena.recycle(one.object_id)
        self.spilled_count += 1
        self.spilled_nbytes += one.nbytes
        if self._spill_fails:
            self._spill_fails = False
            _log.info("objects can be spilled to %s again", self.spill_dir)
        at_s = time.time() - (time.monotonic() - began)
        self.activity.add(
            ActivityKind.SPILL, at_s, name=one.object_id, job_id=one.job_id, nbytes=one.nbytes
        )
        _log.info(
            "spilled %s, %d bytes, in %.2f s", one.object_id, one.nbytes, time.monotonic() - began
        )

    # -- recycled extents ------------------------------------------------------------------------

    def recycled(self) -> list[tuple[float, int, Path]]:
        """Return (when recycled, bytes, path) of the extents that wait to be claimed, oldest first."""
        extents = []
        for entry in _entries(self.arena.path / FREE):
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat()
                extents.append((status.st_ctime, status.st_size, Path(entry.path)))
        return sorted(extents)

    def trim(self) -> None:
        """Delete recycled extents that are too old, too many or too large together."""
        extents = self.recycled()
        total, count = sum(nbytes for _, nbytes, _ in extents), len(extents)
        before_s = time.time() - _IDLE_S
        for recycled_s, nbytes, path in extents:
            if recycled_s > before_s and total <= self.warm_bytes and count <= _MOST_RECYCLED:
                return
            self.arena.delete(path)
            total, count = total - nbytes, count - 1

    def _delete_recycled(self, wanted: Callable[[], bool]) -> None:
        if wanted():
            for _, _, path in self.recycled():
                self.arena.delete(path)
                if not wanted():
                    return

    # -- orphaned files --------------------------------------------------------------------------

    def sweep(self) -> None:
        """Recycle half-written files of dead writers, index unreported objects, recount the bytes in use."""
        half_done_s, unreported_s = time.time() - _ORPHAN_S, time.time() - _UNREPORTED_S
        orphans = []
        counted = self.arena.quota.used_bytes
        used = 0
        for entry in _entries(self.arena.path):
            if entry.name.startswith(".") or not entry.is_file(follow_symlinks=False):
                continue
            try:
                status = entry.stat()
            except FileNotFoundError:
                continue
            used += status.st_size
            path = Path(entry.path)
            since_s = half_done_s if path.suffix == ".tmp" else unreported_s
            if status.st_ctime < since_s and entry.name not in self.objects:
                orphans.append(path)
        with contextlib.suppress(FileNotFoundError):
            for entry in _entries(self.arena.path / SPILL):
                self._sweep_disk(entry, half_done_s)
        # After the others: what is recycled meanwhile is counted twice, not never.
        used += sum(nbytes for _, nbytes, _ in self.recycled())
        for path in orphans:
            if path.suffix != ".tmp":
                self.index_again(path)
            elif not self.arena.in_use(path):
                self.arena.recycle_file(str(path))
        self.arena.quota.recount(used, counted)

    def _sweep_disk(self, entry: os.DirEntry[str], before_s: float) -> None:
        """Remove or index a file that a writer left on disk half-written or unreported."""
        with contextlib.suppress(FileNotFoundError):
            if entry.name in self.objects or entry.stat().st_mtime >= before_s:
                return
            if entry.name.endswith(".tmp"):
                os.unlink(entry.path)
            elif entry.is_file(follow_symlinks=False):
                self.index_again(Path(entry.path), spilled=True)

    def index_again(self, path: Path, *, spilled: bool = False) -> None:
        """Add an object to the index by what its own head says."""
        try:
            with path.open("rb") as file:
                start = file.read(1 << 16)
            head, _, nbytes = read_head(start)
        except (FileNotFoundError, ValueError):
            return
        if id_of(start) != path.name:
            return  # it was freed and written again meanwhile
        if self.has_ended(head.job_id, head.owner_id):
            if spilled:
                self.arena.drop_from_disk(path.name)
            else:
                self.arena.recycle(path.name)
        else:
            self.objects.seal(
                [
                    ObjectInfo(
                        object_id=path.name,
                        nbytes=nbytes,
                        job_id=head.job_id,
                        owner_id=head.owner_id,
                        spilled=spilled,
                    )
                ]
            )


def create_arena(
    arena_dir: Path,
    node_id: str,
    settings: Settings,
    *,
    spill_dir: Path,
    limit_bytes: int,
    has_ended: Callable[[str, str], bool],
) -> ArenaEvictor:
    """Create an empty arena in a folder; its limit is at most the size of the file system."""
    status = os.statvfs(arena_dir)
    try:
        (arena_dir / FREE).mkdir(mode=0o700)
        spill_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        (arena_dir / SPILL).symlink_to(spill_dir)
        ByteQuota(arena_dir / QUOTA, min(limit_bytes, status.f_blocks * status.f_frsize)).close()
    except OSError as error:
        raise StartError(
            f"the node's shared memory cannot be made in {arena_dir}\n{error.strerror}\n"
            f"its file system has {status.f_bavail * status.f_frsize} of "
            f"{status.f_blocks * status.f_frsize} bytes free: delete files of others there, or have "
            "it enlarged (mount -o remount,size=)"
        ) from None
    objects = ObjectIndex(Arena(arena_dir), node_id)
    return ArenaEvictor(
        objects, spill_dir, settings.arena_warm_bytes, settings.arena_spill_at, has_ended
    )


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)


def _copy(fd: int, nbytes: int, final: Path) -> None:
    temporary = final.with_name(f"{final.name}.tmp")
    try:
        out = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            offset = 0
            while offset < nbytes:
                sent = os.sendfile(out, fd, offset, nbytes - offset)
                if not sent:
                    raise OSError(errno.EIO, f"its file ends after {offset} of {nbytes} bytes")
                offset += sent
        finally:
            os.close(out)
        temporary.rename(final)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
