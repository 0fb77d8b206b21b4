"""The task history of this node on its way to the gcs: at least once, however long that is away.

Each process appends frames of rows to a file of its own in the node's spool folder (see
:mod:`stoker_wire.data.spool`); a record is written before the result of its task leaves the worker,
so none is lost with a killed worker. The loop here forwards whole frames as they are on disk, every
``POLL_S``, and deletes a file when all of it is acknowledged and its writer has left it. While the
gcs is away nothing is read: the disk is the buffer, memory holds one batch at most.

A nodelet takes over the folders of dead nodelets on its machine: those of its session, and those of other
sessions whose node its gcs knows (a node that does not come back, or in another session). Frames that
were forwarded and not yet deleted at a death are sent again; the gcs merges. There is no fsync: the files
survive the processes, not the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from stoker_wire.data.spool import (
    HEAD,
    SPOOL,
    frame_nbytes,
    frames_of,
    halves,
    is_refusal,
    rows_in_frames,
    spool_folder,
    whole_frames,
    writer_lives,
)
from stoker_wire.errors import StokerError
from stoker_wire.process import process_tree

POLL_S = 0.2
BATCH_BYTES = 1 << 20
_FILE_BYTES = 256 << 10
_AWAY_S = 0.5  # pause between tries while the gcs is away
_REAP_S = 2.0  # pause between checks for files whose writers are gone
_TAKE_OVER_S = 10.0  # pause between searches for folders of dead nodelets
_OWNER = ".owner"
_BROKEN = ".broken"
_DOTS = 3  # in the name of a spool file

Forward = Callable[[bytes], Awaitable[None]]
KnowsNode = Callable[[str], Awaitable[bool]]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class TaskSpool:
    """Forwarder of one node's task history; the nodelets of a session share ``session_dir``.

    ``knows_node`` asks the gcs whether a node is, or was, of its cluster.
    """

    session_dir: Path
    node_id: str
    forward: Forward
    knows_node: KnowsNode
    forwarded: int = 0
    dropped: int = 0
    _acknowledged: dict[Path, int] = field(default_factory=dict)
    """The offset up to which the gcs has acknowledged each file."""
    _taken_over: list[Path] = field(default_factory=list)
    _unreported_drops: int = 0
    _away: bool = False
    _reaped_at_s: float = 0.0
    _flushing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def folder(self) -> Path:
        """Return the folder that the processes of this node write to."""
        return spool_folder(self.session_dir.resolve(), self.node_id)

    def open(self) -> None:
        """Make the folder."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        pid = os.getpid()
        (self.folder / _OWNER).write_text(f"{pid} {process_tree.start_time(pid)}")

    async def run(self) -> None:
        """Forward for ever."""
        taken_over_s = -math.inf
        while True:
            await asyncio.sleep(_AWAY_S if self._away else POLL_S)
            if time.monotonic() - taken_over_s > _TAKE_OVER_S:
                taken_over_s = time.monotonic()
                await self.take_over()
            await self.flush()

    async def take_over(self) -> None:
        """Take over the folders that dead nodelets of this cluster have left."""
        for folder in _other_folders(self.session_dir):
            if folder == self.folder or folder in self._taken_over or not _is_abandoned(folder):
                continue
            try:
                is_beside = folder.parent == self.folder.parent
                is_ours = is_beside or await self.knows_node(folder.name)
            except StokerError:
                return  # the gcs is away: next time
            if is_ours:
                _log.info("taking over the task history that node %s has left", folder.name)
                self._taken_over.append(folder)

    async def flush(self) -> bool:
        """Forward everything that is there; return False if the gcs does not accept it now."""
        async with self._flushing:
            try:
                while batch := self._read():
                    await self._send(batch)
            except (StokerError, OSError) as error:
                if not self._away:
                    _log.warning("task history waits on disk: %s", error)
                self._away = True
                return False
            self._away = False
            if time.monotonic() - self._reaped_at_s > _REAP_S:
                self._reap()
            return True

    async def close(self, timeout_s: float) -> None:
        """Forward the rest, or leave it on disk for the next nodelet."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.flush()
        self._reap()
        _remove_if_empty(self.folder)

    async def _send(self, batch: dict[Path, bytes]) -> None:
        body = b"".join(batch.values())
        if self._unreported_drops:
            body += frames_of((), self._unreported_drops)
        await self._forward(body)
        for path, data in batch.items():
            self._acknowledged[path] = self._acknowledged.get(path, 0) + len(data)

    async def _forward(self, frames: bytes) -> None:
        """Forward whole frames, but for the single ones that the gcs refuses: those are lost."""
        refused, why, reported = 0, "", self._unreported_drops
        todo = [frames]
        while todo:
            some = todo.pop()
            nrows = rows_in_frames(some)
            try:
                await self.forward(some)
                self.forwarded += nrows
            except StokerError as error:
                if not is_refusal(error):
                    raise
                # It would be refused for ever, and block everything behind it.
                first, second = halves(some)
                if second:
                    todo += (second, first)
                    continue
                refused, why = refused + nrows, error.one_line
        self._unreported_drops += refused - reported
        if refused:
            _log.error("%d task records are lost, the gcs refuses them: %s", refused, why)
            self.dropped += refused

    def _read(self) -> dict[Path, bytes]:
        """Return the next whole frames of each file, up to a batch."""
        batch: dict[Path, bytes] = {}
        room = BATCH_BYTES
        for path, size in self._files():
            offset = self._acknowledged.get(path, 0)
            if size > offset and room > 0 and (data := self._frames(path, offset)):
                batch[path] = data
                room -= len(data)
        return batch

    def _files(self) -> Iterator[tuple[Path, int]]:
        for folder in (self.folder, *self._taken_over):
            with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    if entry.name.count(".") == _DOTS:
                        yield Path(entry.path), entry.stat().st_size

    def _frames(self, path: Path, offset: int) -> bytes:
        try:
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read(_FILE_BYTES)
                nbytes = whole_frames(data)
                if nbytes == 0 and len(data) == _FILE_BYTES:
                    data += file.read(HEAD.size + frame_nbytes(data) - len(data))
                    nbytes = whole_frames(data)
                return data[:nbytes]
        except FileNotFoundError:
            return b""  # another nodelet of the session has taken over the same folder
        except ValueError as error:
            _log.error("the rest of %s is unreadable and put aside: %s", path, error)
            self.dropped += 1
            self._unreported_drops += 1
            path.rename(path.with_name(path.name + _BROKEN))
            return b""

    def _reap(self) -> None:
        """Delete the files that are acknowledged and that nobody will append to."""
        self._reaped_at_s = time.monotonic()
        paths = [path for path, _ in self._files()]
        for path, after in zip(paths, [*paths[1:], None], strict=False):
            left = after is not None and after.stem == path.stem
            if not left and writer_lives(path):
                continue
            # Only now its size is final. Without another whole frame, the rest is torn or there is none.
            if not self._frames(path, self._acknowledged.get(path, 0)):
                path.unlink(missing_ok=True)
                self._acknowledged.pop(path, None)
        for folder in self._taken_over:
            _remove_if_empty(folder)
        self._taken_over = [folder for folder in self._taken_over if folder.exists()]


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        if all(one.name == _OWNER for one in folder.iterdir()):
            (folder / _OWNER).unlink(missing_ok=True)
            folder.rmdir()


def _other_folders(session_dir: Path) -> list[Path]:
    """Return the spool folders of this session, then of the others beside it."""
    folders: list[Path] = []
    own = session_dir.resolve()
    beside = {path.resolve() for path in own.parent.iterdir()}  # sessions elsewhere are linked
    for session in (own, *sorted(beside - {own})):
        with contextlib.suppress(OSError):
            folders += sorted((session / SPOOL).iterdir())
    return folders


def _is_abandoned(folder: Path) -> bool:
    try:
        pid, started = (folder / _OWNER).read_text().split()
    except (OSError, ValueError):
        return False  # it is being made
    return process_tree.start_time(int(pid)) != int(started)
