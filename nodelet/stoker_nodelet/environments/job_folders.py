"""The folders of jobs on this node's disk: a private copy of each working_dir, and the output folder.

::

    <session>/jobs/<job id>/
        <first digits of the package's hash>/   the working_dir, this job's alone
        output/                                 STOKER_JOB_OUTPUT_DIR, unless the nodes share one

All processes of a job on this node share its folder; no other job does. Of a job that runs as another
Unix user it lies elsewhere (``user_folders``), and what is in it is that user's. It is removed some time
after the job's end. Called by ``environments`` and ``workers``, and by the routes that send output away.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tarfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from stoker_nodelet.unix_users import UnixUser, give_folder, make_enterable
from stoker_wire.errors import NotFoundError, PayloadTooLargeError
from stoker_wire.ids import Prefix, is_id
from stoker_wire.messages.work import NodeOutput

MAX_OUTPUT_BYTES = 64 << 30
"""Upper bound of a job's output that one node sends; more belongs on storage that the nodes share."""

_log = logging.getLogger(__name__)
_FICLONE = 0x40049409
_CHUNK_BYTES = 1 << 20
_SWEEP_S = 60.0
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(slots=True)
class JobFolders:
    """Folders of jobs under ``root``, kept for ``keep_s`` after a job's end and last process here.

    ``shared_output`` is a folder that all nodes share: then output is there, and only the user
    removes it. ``user`` is the one whose they are, if it is another than this process's own.
    """

    root: Path
    keep_s: float
    shared_output: Path | None = None
    user: UnixUser | None = None
    _outputs: dict[str, str] = field(default_factory=dict)
    _ended_at_s: dict[str, float] = field(default_factory=dict)
    _asked: set[str] = field(default_factory=set)

    def working_dir(self, job_id: str, package: str) -> Path:
        """Return where the copy of a package for a job is, or is to be."""
        return self.root / job_id / package[:16]

    def output_dir(self, job_id: str) -> Path:
        """Return where a job's output goes."""
        if self.shared_output is not None:
            return self.shared_output / job_id
        return self.root / job_id / "output"

    def make_folder(self, job_id: str) -> Path:
        """Make a job's folder, which is this user's alone whatever the umask."""
        for folder in (self.root, self.root / job_id):
            if self.user is None:
                _make_private(folder)
            else:
                make_enterable(folder)
        return self.root / job_id

    def make_output_dir(self, job_id: str) -> str:
        """Make and return the job's output folder; return nothing where it cannot be made."""
        made = self._outputs.get(job_id)
        if made is None:
            folder = self.output_dir(job_id)
            try:
                if self.shared_output is None:
                    self.make_folder(job_id)
                _make_private(folder)
                if self.user is not None:
                    give_folder(folder, self.user)
                made = str(folder)
            except OSError as error:
                _log.warning("%s gets no output folder: %s", job_id, error)
                made = ""
            self._outputs[job_id] = made
        return made

    def job_ids(self) -> set[str]:
        """Return the jobs that have a folder here and are not known to have ended."""
        return self._outputs.keys() - self._ended_at_s.keys()

    def all_job_ids(self) -> set[str]:
        """Return the jobs that have a folder here."""
        return set(self._outputs)

    def ended(self, job_id: str) -> None:
        """Record a job's end: from now on its folder stays for ``keep_s``."""
        if job_id in self._outputs:
            self._ended_at_s.setdefault(job_id, time.monotonic())

    def over(self, in_use: Collection[str]) -> list[str]:
        """Return the jobs whose folder is to be removed; those ``in_use`` stay.

        An actor may outlive its job and be restarted: the time begins anew when it was last here.
        """
        now = time.monotonic()
        self._ended_at_s.update((job_id, now) for job_id in in_use if job_id in self._ended_at_s)
        return [
            job_id
            for job_id, ended_at_s in self._ended_at_s.items()
            if now - ended_at_s >= self.keep_s and job_id not in in_use
        ]

    async def sweep(
        self, in_use: Collection[str], has_ended: Callable[[str], Awaitable[bool]]
    ) -> None:
        """Remove the folders whose time is over; ask ``has_ended`` once about jobs that left this node.

        A folder may be made after the event of its job's end, or on a node that missed the event.
        """
        left = self.job_ids().difference(in_use)
        for job_id in self.over(in_use):
            await self.remove(job_id)
        for job_id in sorted(left - self._asked):
            if await has_ended(job_id):
                self.ended(job_id)
        self._asked = left

    async def remove(self, job_id: str) -> None:
        """Remove a job's folder."""
        await asyncio.to_thread(shutil.rmtree, self.root / job_id, True)
        self._outputs.pop(job_id, None)
        self._ended_at_s.pop(job_id, None)

    @property
    def sweep_s(self) -> float:
        """Seconds between two sweeps."""
        return min(_SWEEP_S, max(0.1, self.keep_s / 4))

    # Download of output

    def summary(self, job_id: str, node_id: str) -> NodeOutput:
        """Return how much a job wrote here; blocks."""
        files = [info for info in _entries(self._existing_output(job_id)) if info.isreg()]
        return NodeOutput(
            node_id=node_id,
            path=str(self.output_dir(job_id)),
            files=len(files),
            nbytes=sum(info.size for info in files),
            shared=self.shared_output is not None,
        )

    async def archive(self, job_id: str) -> AsyncIterator[bytes]:
        """Return the output as the parts of a tar archive.

        NotFoundError if the job has no folder here; PayloadTooLargeError beyond MAX_OUTPUT_BYTES.
        """
        folder = self._existing_output(job_id)
        entries = await asyncio.to_thread(lambda: list(_entries(folder)))
        nbytes = sum(info.size for info in entries)
        if nbytes > MAX_OUTPUT_BYTES:
            raise PayloadTooLargeError(
                f"{job_id} wrote {nbytes / 2**30:.1f} GiB on this node\n"
                f"at most {MAX_OUTPUT_BYTES >> 30} GiB are sent, it is in {folder}\n"
                "let jobs write so much to storage that the nodes share"
            )
        return _tar(folder, entries, self.user)

    def _existing_output(self, job_id: str) -> Path:
        # Only an id may become part of a path.
        folder = self.output_dir(job_id) if is_id(job_id, Prefix.JOB) else None
        if folder is None or not folder.is_dir():
            raise NotFoundError(
                f"{job_id} has no output on this node\n"
                f"it did not run here, or it ended more than {self.keep_s:g} s ago "
                "(STOKER_JOB_DIR_KEEP_S)"
            )
        return folder


def copy_private(source: Path, target: Path) -> None:
    """Copy a folder so that the copy can be written to; blocks are shared where the disk can do that."""
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial, copy_function=_clone, symlinks=True)
    partial.chmod(0o700)
    partial.rename(target)


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_mode & 0o777 != 0o700:
        folder.chmod(0o700)


def _clone(source: str, target: str) -> str:
    with open(source, "rb") as reader, open(target, "wb") as writer:
        try:
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
        except OSError:
            shutil.copyfileobj(reader, writer, _CHUNK_BYTES)
    shutil.copystat(source, target)
    return target


def _entries(folder: Path) -> list[tarfile.TarInfo]:
    """Return folders, files, and links that stay inside, in an order that a reader can unpack.

    Whoever writes there may put a link in the place of a folder meanwhile: none is followed.
    """
    entries = []
    root = folder.resolve()
    for parent, folders, files, fd in os.fwalk(root):
        folders.sort()
        for name in sorted([*folders, *files]):
            with contextlib.suppress(OSError):
                if info := _entry(Path(parent, name), fd, root):
                    entries.append(info)
    return entries


def _entry(path: Path, folder_fd: int, root: Path) -> tarfile.TarInfo | None:
    status = os.stat(path.name, dir_fd=folder_fd, follow_symlinks=False)
    info = tarfile.TarInfo(str(path.relative_to(root)))
    info.mtime, info.mode = status.st_mtime, status.st_mode & 0o777
    if stat.S_ISLNK(status.st_mode):
        target = os.readlink(path.name, dir_fd=folder_fd)
        if os.path.isabs(target) or not path.resolve().is_relative_to(root):
            return None
        info.type, info.linkname = tarfile.SYMTYPE, target
    elif stat.S_ISDIR(status.st_mode):
        info.type = tarfile.DIRTYPE
    elif stat.S_ISREG(status.st_mode):
        info.size = status.st_size
    else:
        return None
    return info


def _open_inside(root: Path, name: str, user: UnixUser | None) -> BinaryIO:
    """Open a file below a folder, following no link; OSError for what is no file, or not ``user``'s."""
    *folders, last = Path(name).parts
    fd = os.open(root, _FOLDER)
    for part, flags in (*((folder, _FOLDER) for folder in folders), (last, _FILE)):
        try:
            inner = os.open(part, flags, dir_fd=fd)
        finally:
            os.close(fd)
        fd = inner
    status = os.fstat(fd)
    # A hard link to a file of ours is a file, too.
    if not stat.S_ISREG(status.st_mode) or (user is not None and status.st_uid != user.uid):
        os.close(fd)
        raise PermissionError(f"{name} is not a file of this job")
    return os.fdopen(fd, "rb")


async def _tar(
    root: Path, entries: list[tarfile.TarInfo], user: UnixUser | None
) -> AsyncIterator[bytes]:
    for info in entries:
        if not info.isreg():
            yield info.tobuf(tarfile.PAX_FORMAT)
            continue
        try:
            file = await asyncio.to_thread(_open_inside, root, info.name, user)
        except OSError as error:  # it was removed, or may not be read: the rest is still wanted
            _log.info("%s is left out of the output: %s", info.name, error)
            continue
        with file:
            yield info.tobuf(tarfile.PAX_FORMAT)
            left = info.size
            while left:
                # A file that shrinks meanwhile is padded: its size was sent already.
                part = await asyncio.to_thread(file.read, min(_CHUNK_BYTES, left))
                part = part or bytes(min(_CHUNK_BYTES, left))
                left -= len(part)
                yield part
        yield bytes(-info.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)
