"""Packages: a folder of code as one zip with a name made from its content.

Equal folders give equal bytes (sorted names, fixed times and permissions), so a package is uploaded
once per cluster and unpacked once per node. Called by ``runtime_env``; it sends nothing, but shows the
progress of a large folder on stderr.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
import sys
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stoker_wire.errors import BadRequestError, PayloadTooLargeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_BYTES = 512 * 2**20
"""Largest package, as the sum of its files before compression."""

ALWAYS_LEFT_OUT = frozenset(
    {".git", ".hg", ".svn", ".venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
)
"""Folders that are never packed, at any depth."""

_VENV_MARK = "pyvenv.cfg"
"""Every virtual environment has this file, whatever its name: it is of this machine alone."""
IGNORE_FILES = (".gitignore", ".stokerignore")
_EPOCH = (1980, 1, 1, 0, 0, 0)
_NAMED = 5
NOTICE_BYTES = 16 * 2**20
"""Packing and uploading of this size and more show their progress on stderr."""
_NOTICE_EVERY_S = 2.0


class Package(msgspec.Struct, frozen=True):
    """A zip, named by the SHA-256 of its bytes (64 hex digits)."""

    hash: str
    content: bytes


def pack(
    path: str | Path,
    *,
    inside: str = "",
    excludes: tuple[str, ...] = (),
    max_bytes: int = MAX_BYTES,
) -> Package:
    """Return the folder (or one ``.py`` file) at ``path`` as a package.

    ``inside`` puts everything below a folder of that name. A ``.zip`` or ``.whl`` is taken as it
    is. Left out: what the folder's ``.gitignore`` and ``.stokerignore`` say, ALWAYS_LEFT_OUT,
    virtual environments, and what ``excludes`` names in the same patterns.
    Raises BadRequestError, or PayloadTooLargeError naming the largest files.
    """
    path = Path(path).expanduser()
    if path.is_file() and path.suffix in (".zip", ".whl"):
        content = path.read_bytes()
        _check_size([(path.name, len(content))], max_bytes, path)
    elif path.is_dir():
        content = _zip(list(_members(path, excludes)), path, inside, max_bytes)
    elif path.is_file() and path.suffix == ".py":
        content = _zip([(path.name, path)], path.parent, inside, max_bytes)
    else:
        what = "does not exist" if not path.exists() else "is no folder, .py, .zip or .whl file"
        raise BadRequestError(f"cannot pack {path}: it {what}", field="working_dir")
    return Package(hashlib.sha256(content).hexdigest(), content)


def pack_files(folder: Path, names: tuple[str, ...]) -> Package:
    """Return those of the named files of a folder that are there as a package."""
    members = [(name, folder / name) for name in names if (folder / name).is_file()]
    content = _zip(members, folder, "", MAX_BYTES)
    return Package(hashlib.sha256(content).hexdigest(), content)


class Progress:
    """The progress of a long transfer on stderr: at its start, every 2 s, and at its end.

    Nothing is printed of one that is smaller than 16 MiB.
    """

    def __init__(self, what: str, total_nbytes: int) -> None:
        self._what = what
        self._total = total_nbytes
        self._is_long = total_nbytes >= NOTICE_BYTES
        self._began_s = self._printed_s = time.monotonic()
        self._print(mib(total_nbytes))

    def done(self, nbytes: int) -> None:
        """Report that ``nbytes`` of the total are done."""
        now_s = time.monotonic()
        if self._is_long and now_s >= self._printed_s + _NOTICE_EVERY_S:
            self._printed_s = now_s
            self._print(f"{mib(nbytes)} of {mib(self._total)} ({100 * nbytes // self._total} %)")

    def end(self) -> None:
        """Report that all is done."""
        self._print(f"done in {time.monotonic() - self._began_s:.1f} s")

    def _print(self, text: str) -> None:
        if self._is_long:
            sys.stderr.write(f"stoker: {self._what}: {text}\n")
            sys.stderr.flush()


def _zip(members: list[tuple[str, Path]], root: Path, inside: str, max_bytes: int) -> bytes:
    try:
        sizes = [(name, path.stat().st_size) for name, path in members]
        _check_size(sizes, max_bytes, root)
        progress = Progress(f"packing {root}", sum(nbytes for _, nbytes in sizes))
        packed = 0
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=3) as archive:
            for name, path in sorted(members):
                info = zipfile.ZipInfo(f"{inside}/{name}" if inside else name, _EPOCH)
                executable = path.stat().st_mode & stat.S_IXUSR
                info.external_attr = (stat.S_IFREG | (0o755 if executable else 0o644)) << 16
                info.compress_type = zipfile.ZIP_DEFLATED
                info.create_system = 3
                content = path.read_bytes()
                archive.writestr(info, content)
                packed += len(content)
                progress.done(packed)
        progress.end()
    except OSError as error:
        raise BadRequestError(
            f"cannot pack {error.filename or root}\n{error.strerror}\n"
            f"name it in {root / '.stokerignore'} to leave it out",
            field="working_dir",
        ) from None
    return buffer.getvalue()


def _check_size(sizes: list[tuple[str, int]], max_bytes: int, root: Path) -> None:
    total = sum(nbytes for _, nbytes in sizes)
    if total <= max_bytes:
        return
    largest = sorted(sizes, key=lambda pair: (-pair[1], pair[0]))[:_NAMED]
    named = ", ".join(f"{name} ({mib(nbytes)})" for name, nbytes in largest)
    raise PayloadTooLargeError(
        f"{root} is {mib(total)}, more than the {mib(max_bytes)} that a package may hold\n"
        f"name what the job does not need in {root / '.stokerignore'}\nlargest: {named}",
        field="working_dir",
    )


def mib(nbytes: int) -> str:
    """Return a number of bytes in MiB, for people."""
    return f"{nbytes / 2**20:.1f} MiB"


def _members(root: Path, excludes: tuple[str, ...] = ()) -> Iterator[tuple[str, Path]]:
    """Yield (name with slashes, path) of every file to pack. Links are followed, loops are not."""
    ignored = _ignored(root, excludes)
    seen: set[str] = set()

    def walk(folder: Path, prefix: str) -> Iterator[tuple[str, Path]]:
        real = os.path.realpath(folder)
        if real in seen:
            return
        seen.add(real)
        for entry in sorted(folder.iterdir(), key=lambda path: path.name):
            name = prefix + entry.name
            if entry.is_dir():
                is_left_out = entry.name in ALWAYS_LEFT_OUT or (entry / _VENV_MARK).is_file()
                if not is_left_out and not ignored(name, True):
                    yield from walk(entry, name + "/")
            elif entry.is_file() and not ignored(name, False):
                yield name, entry
        seen.discard(real)

    return walk(root, "")


def _ignored(root: Path, excludes: tuple[str, ...] = ()) -> Callable[[str, bool], bool]:
    """Read the ignore files of ``root``; return whether (name, is a folder) is left out.

    The common part of git's rules: comments, ``!``, a leading or inner slash anchors, a trailing
    slash means folders, ``*``, ``?``, ``[...]`` and ``**``. The last rule that matches decides.
    """
    rules: list[tuple[re.Pattern[str], bool, bool]] = []
    files = [root / file for file in IGNORE_FILES if (root / file).is_file()]
    lists = [path.read_text(errors="replace").splitlines() for path in files]
    for lines in (*lists, excludes):
        for line in lines:
            pattern = line.strip()
            if not pattern or pattern.startswith("#"):
                continue
            keep = pattern.startswith("!")
            pattern = pattern[1:] if keep else pattern.removeprefix("\\")
            folders_only = pattern.endswith("/")
            pattern = pattern.rstrip("/")
            anchored = "/" in pattern
            expression = ("" if anchored else "(?:.*/)?") + _glob(pattern.lstrip("/"))
            rules.append((re.compile(expression), keep, folders_only))

    def ignored(name: str, is_folder: bool) -> bool:
        verdict = False
        for expression, keep, folders_only in rules:
            if (is_folder or not folders_only) and expression.fullmatch(name):
                verdict = not keep
        return verdict

    return ignored


def _glob(pattern: str) -> str:
    parts = re.split(r"(/\*\*/|\*\*/|/\*\*|\*\*|\*|\?|\[[^\]]+\])", pattern)
    special = {
        "/**/": "/(?:.*/)?",
        "**/": "(?:.*/)?",
        "/**": "/.*",
        "**": ".*",
        "*": "[^/]*",
        "?": "[^/]",
    }
    return "".join(
        special.get(part)
        or (part.replace("[!", "[^") if part.startswith("[") and part.endswith("]") else "")
        or re.escape(part)
        for part in parts
    )
