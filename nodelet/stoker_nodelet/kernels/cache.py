"""The node's folder of compiled kernels: on a local disk, ours alone, and bounded.

``triton/`` is Triton's cache (``TRITON_CACHE_DIR`` of every worker), ``sets/`` notes which of its
entries each finished compilation used, ``tuned/`` holds the tables of measured configurations. It
outlives sessions and is shared by the nodelets of one user on one machine. Everything here blocks;
``KernelCompiler`` calls it in threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING

from stoker_wire.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker_wire.settings import Settings

TRITON_VARIABLE = "TRITON_CACHE_DIR"
DYING_S = 600.0
"""A hidden entry is removed after so long: a process that found it before may still read it."""
MAX_NOTES = 4096
_GROUP = "__grp__"
_NETWORK = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "fuse.sshfs", "glusterfs", "gpfs", "lustre", "nfs",
     "nfs4", "smb3", "smbfs"}
)  # fmt: skip
_SETTLED_S = 3600.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompiledSet:
    """The result of one compilation: the kernel set's name, and the entries of ``triton_dir`` it used.

    ``version`` is that of the code that compiled; ``sources`` are the files of a user's function with
    the nanosecond at which each was last changed.
    """

    name: str
    triton_dir: str
    entries: tuple[str, ...]
    version: str = ""
    sources: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KernelCache:
    """The cache folder. Files in ``triton_dir`` are removed only if it is inside ``root``."""

    root: Path
    triton_dir: Path
    max_bytes: int

    # Compiled sets

    def note(self, key: str, compiled: CompiledSet) -> None:
        """Record that the compilation ``key`` is done."""
        self.write(self.root / "sets" / f"{key}.json", json.dumps(asdict(compiled)).encode())

    def find(self, key: str) -> CompiledSet | None:
        """Return the compilation ``key`` if all of its files are still there, and mark it as used."""
        path = self.root / "sets" / f"{key}.json"
        compiled = _set_in(path)
        if compiled is None or not _is_complete(compiled):
            return None
        for used in (path, *(Path(compiled.triton_dir, entry) for entry in compiled.entries)):
            with contextlib.suppress(OSError):
                os.utime(used)
        return compiled

    def names(self, version: str) -> list[str]:
        """Return the names of ``version``'s sets that are complete, the last used last.

        Notes of sets that are not complete are removed, and the oldest of too many.
        """
        last_used: dict[str, float] = {}
        notes = [path for path in _entries(self.root / "sets") if path.suffix == ".json"]
        notes.sort(key=_changed_s)
        for path in notes[:-MAX_NOTES]:
            path.unlink(missing_ok=True)
        for path in notes[-MAX_NOTES:]:
            compiled = _set_in(path)
            if compiled is None or not _is_complete(compiled):
                path.unlink(missing_ok=True)
            elif compiled.version == version:
                last_used[compiled.name] = max(last_used.get(compiled.name, 0.0), _changed_s(path))
        return sorted(last_used, key=lambda name: (last_used[name], name))

    def table(self, name: str, content: bytes) -> Path:
        """Keep a table of measured configurations under its digest; return its path."""
        path = self.root / "tuned" / f"{name}.json"
        try:
            os.utime(path)  # in use, so not one of the old
        except FileNotFoundError:
            self.write(path, content)
        return path

    def write(self, path: Path, content: bytes) -> None:
        """Write a file atomically: nobody reads half of it."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Two threads may write the same table at once, and so may two nodelets.
        partial = path.with_name(f".{path.name}.{token_hex(8)}")
        try:
            partial.write_bytes(content)
            partial.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise

    # Size

    def trim(self, now_s: float | None = None) -> int:
        """Remove the entries used least recently until the rest fits; return the bytes removed.

        An entry is hidden first (Triton finds it by its group file) and removed ten minutes later, so
        that a process that has found it can read it. A process that needs it meanwhile compiles it again.
        """
        now_s = time.time() if now_s is None else now_s
        with self._exclusive() as exclusive:
            if not exclusive:
                return 0
            self._remove_old_files(now_s)
            return self._trim(now_s) if self.triton_dir.is_relative_to(self.root) else 0

    def _trim(self, now_s: float) -> int:
        living: list[tuple[float, int, Path]] = []
        removed = 0
        for folder in _entries(self.triton_dir):
            files = _entries(folder)
            nbytes, used_s, changed_s = _facts(folder, files)
            if any(file.name.startswith(_GROUP) for file in files):
                living.append((used_s, nbytes, folder))
            elif any(file.suffix == ".so" for file in files):
                continue  # launchers: few, small, and mapped without a group file
            elif now_s - changed_s > DYING_S:
                shutil.rmtree(folder, ignore_errors=True)
                removed += nbytes
        excess = sum(nbytes for _, nbytes, _ in living) - self.max_bytes
        for _, nbytes, folder in sorted(living):
            if excess <= 0:
                break
            for file in _entries(folder):
                if file.name.startswith(_GROUP):
                    file.unlink(missing_ok=True)
            os.utime(folder, (now_s, now_s))
            excess -= nbytes
        return removed

    def _remove_old_files(self, now_s: float) -> None:
        """Remove files of killed writers, and tables that no worker can be about to read: a day old, and
        not the newest few."""
        ours = [path for name in ("sets", "tuned") for path in _entries(self.root / name)]
        partials = [path for path in ours if path.name.startswith(".")]
        tables = [path for path in ours if path.parent.name == "tuned" and path not in partials]
        for path in (*partials, *sorted(tables, key=lambda one: (_changed_s(one), one))[:-16]):
            if now_s - _changed_s(path) > 24 * _SETTLED_S:
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[bool]:
        """Hold the right to trim; yield False if another nodelet trims the same folder now."""
        descriptor = os.open(self.root / ".trimming", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(descriptor)


def open_cache(settings: Settings, session_dir: Path) -> KernelCache:
    """Make and return the cache that the settings name; StartError if it cannot be used.

    The default is a folder of ours under ``/var/tmp``, which outlives restarts and is no home folder
    on a network; if that does not work, the session's.
    """
    limit = settings.kernel_cache_max_bytes
    if settings.kernel_cache_dir:
        root = Path(settings.kernel_cache_dir).expanduser().resolve()
        problem = _problem_with(root)
        if problem and not problem.startswith("it is on"):
            raise StartError(
                f"kernel_cache_dir={root} cannot be used\n{problem}\nname a folder on a local disk"
            )
        if problem:
            _log.warning("kernel_cache_dir=%s: %s, where jobs race for it", root, problem)
        return KernelCache(root, root / "triton", limit)
    root = Path(f"/var/tmp/stoker-{os.getuid()}/kernels")
    problem = _problem_with(root.parent) or _problem_with(root)
    if problem:
        _log.warning("compiled kernels are kept for this session only: %s: %s", root, problem)
        root = session_dir / "kernels"
        root.mkdir(mode=0o700, exist_ok=True)
    named = os.environ.get(TRITON_VARIABLE)
    return KernelCache(root, Path(named).absolute() if named else root / "triton", limit)


def _problem_with(folder: Path) -> str:
    """Make ``folder``; return why it must not hold code that this user will run, or nothing."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        return str(error)
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        return "it is not ours alone to write"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "it cannot be written"
    kind = filesystem_of(folder)
    return f"it is on a network file system ({kind})" if kind in _NETWORK else ""


def filesystem_of(path: Path, mounts: str | None = None) -> str:
    """Return the type of the file system that holds ``path``, as in the kernel's table of mounts."""
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text()
        except OSError:
            return ""
    where, best, kind = path.resolve(), -1, ""
    for line in mounts.splitlines():
        fields, _, tail = line.partition(" - ")
        point = Path(fields.split()[4].replace("\\040", " "))
        if where.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), tail.split()[0]
    return kind


def _set_in(path: Path) -> CompiledSet | None:
    if path.suffix != ".json":
        return None
    try:
        facts = json.loads(path.read_bytes())
        return CompiledSet(
            facts["name"],
            facts["triton_dir"],
            tuple(facts["entries"]),
            facts["version"],
            dict(facts["sources"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_complete(compiled: CompiledSet) -> bool:
    folders = (Path(compiled.triton_dir, entry) for entry in compiled.entries)
    return all(
        any(f.name.startswith(_GROUP) for f in _entries(folder)) for folder in folders
    ) and all(_is_unchanged(path, changed_ns) for path, changed_ns in compiled.sources.items())


def _is_unchanged(path: str, changed_ns: int) -> bool:
    try:
        return os.stat(path).st_mtime_ns == changed_ns
    except OSError:
        return False


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _entries(folder: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(folder)]
    except OSError:
        return []


def _facts(folder: Path, files: list[Path]) -> tuple[int, float, float]:
    """Return an entry's bytes, when it was last used, and when it last changed.

    Reads count where the disk notes them (once a day, with ``relatime``); so does the folder's time,
    which :meth:`KernelCache.find` sets.
    """
    nbytes, used_s, changed_s = 0, 0.0, 0.0
    for path in (folder, *files):
        try:
            stat = path.stat()
        except OSError:
            continue
        nbytes += stat.st_size if path is not folder else 0
        used_s = max(used_s, stat.st_mtime, stat.st_atime if path is not folder else 0.0)
        changed_s = max(changed_s, stat.st_mtime)
    return nbytes, used_s, changed_s
