"""Packages: a folder of code as one zip, or as several in pieces, with a name made from its content.

Equal folders give equal bytes (sorted names, fixed times and permissions), so a package is uploaded
once per cluster and unpacked once per node, and so is each piece of a large one. Called by
``runtime_env``; it sends nothing, but shows the progress of a large folder on stderr.
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
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stoker.runtime.options.pieces import Member, split
from stoker_wire.data.piece_lists import MAX_PIECES, write_list
from stoker_wire.errors import BadRequestError, PayloadTooLargeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_BYTES = 512 * 2**20
"""Largest package, as the sum of its files before compression."""

IN_PIECES_NBYTES = 1 << 20
"""Folders of this size and more, before compression, are packed in pieces."""

ALWAYS_LEFT_OUT = frozenset(
    {".git", ".hg", ".svn", ".venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
)
"""Folders that are never packed, at any depth."""

VENV_MARK = "pyvenv.cfg"
"""Every virtual environment has this file, whatever its name: it is of this machine alone."""
IGNORE_FILES = (".gitignore", ".stokerignore")
_EPOCH = (1980, 1, 1, 0, 0, 0)
_NAMED = 5
NOTICE_BYTES = 16 * 2**20
"""Packing and uploading of this size and more show their progress on stderr."""
_NOTICE_EVERY_S = 2.0


class Package(msgspec.Struct, frozen=True):
    """A zip, or a list of ``pieces`` that are zips, named by the SHA-256 of its bytes (64 hex digits)."""

    hash: str
    content: bytes
    pieces: tuple[Package, ...] = ()


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
        return _pack_folder(path, inside, excludes, max_bytes)
    elif path.is_file() and path.suffix == ".py":
        content = _zip([(path.name, path)], path.parent, inside, max_bytes)
    else:
        what = "does not exist" if not path.exists() else "is no folder, .py, .zip or .whl file"
        raise BadRequestError(f"cannot pack {path}: it {what}", field="working_dir")
    return package_of(content)


def _pack_folder(root: Path, inside: str, excludes: tuple[str, ...], max_bytes: int) -> Package:
    members = _files(list(_members(root, excludes)), root)
    total = sum(one.nbytes for one in members)
    pieces = list(split(members)) if IN_PIECES_NBYTES <= total <= max_bytes else []
    if not 1 < len(pieces) <= MAX_PIECES:
        return package_of(zip_members(members, root, inside, max_bytes))
    progress = Progress(f"packing {root}", total)
    packed, found = 0, {}
    for piece in pieces:
        one = package_of(_zip_bytes(piece, root, inside, progress, packed))
        packed += sum(file.nbytes for file in piece)
        found[one.hash] = one
    progress.end()
    return Package(*_named(write_list(tuple(found))), tuple(found.values()))


def pack_files(folder: Path, names: tuple[str, ...]) -> Package:
    """Return those of the named files of a folder that are there as a package."""
    members = [(name, folder / name) for name in names if (folder / name).is_file()]
    return package_of(_zip(members, folder, "", MAX_BYTES))


def package_of(content: bytes) -> Package:
    """Return the bytes of a zip under their name."""
    return Package(*_named(content))


def _named(content: bytes) -> tuple[str, bytes]:
    return hashlib.sha256(content).hexdigest(), content


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


def zip_members(members: list[Member], root: str | Path, inside: str, max_bytes: int) -> bytes:
    """Return files as the bytes of a zip that depend on nothing but their names, modes and content."""
    _check_size([(one.name, one.nbytes) for one in members], max_bytes, root)
    progress = Progress(f"packing {root}", sum(one.nbytes for one in members))
    content = _zip_bytes(members, root, inside, progress, 0)
    progress.end()
    return content


def _zip_bytes(
    members: list[Member], root: str | Path, inside: str, progress: Progress, packed: int
) -> bytes:
    try:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=3) as archive:
            for one in sorted(members, key=lambda one: one.name):
                info = zipfile.ZipInfo(f"{inside}/{one.name}" if inside else one.name, _EPOCH)
                info.external_attr = (stat.S_IFREG | (0o755 if one.executable else 0o644)) << 16
                info.compress_type = zipfile.ZIP_DEFLATED
                info.create_system = 3
                content = one.read()
                archive.writestr(info, content)
                packed += len(content)
                progress.done(packed)
    except OSError as error:
        raise _unreadable(error, root) from None
    return buffer.getvalue()


def _unreadable(error: OSError, root: str | Path) -> BadRequestError:
    return BadRequestError(
        f"cannot pack {error.filename or root}\n{error.strerror}\n"
        f"name it in {_ignore_file(root)} to leave it out",
        field="working_dir",
    )


def _ignore_file(root: str | Path) -> str:
    return str(root / IGNORE_FILES[-1]) if isinstance(root, Path) else "excludes"


def _file(name: str, path: Path) -> Member:
    facts = path.stat()
    return Member(name, facts.st_size, bool(facts.st_mode & stat.S_IXUSR), path.read_bytes)


def _zip(members: list[tuple[str, Path]], root: Path, inside: str, max_bytes: int) -> bytes:
    return zip_members(_files(members, root), root, inside, max_bytes)


def _files(members: list[tuple[str, Path]], root: Path) -> list[Member]:
    try:
        return [_file(name, path) for name, path in members]
    except OSError as error:
        raise _unreadable(error, root) from None


def _check_size(sizes: list[tuple[str, int]], max_bytes: int, root: str | Path) -> None:
    total = sum(nbytes for _, nbytes in sizes)
    if total <= max_bytes:
        return
    largest = sorted(sizes, key=lambda pair: (-pair[1], pair[0]))[:_NAMED]
    named = ", ".join(f"{name} ({mib(nbytes)})" for name, nbytes in largest)
    raise PayloadTooLargeError(
        f"{root} is {mib(total)}, more than the {mib(max_bytes)} that a package may hold\n"
        f"name what the job does not need in {_ignore_file(root)}\nlargest: {named}",
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
                is_left_out = entry.name in ALWAYS_LEFT_OUT or (entry / VENV_MARK).is_file()
                if not is_left_out and not ignored(name, True):
                    yield from walk(entry, name + "/")
            elif entry.is_file() and not ignored(name, False):
                yield name, entry
        seen.discard(real)

    return walk(root, "")


def _ignored(root: Path, excludes: tuple[str, ...] = ()) -> Callable[[str, bool], bool]:
    """Read the ignore files of ``root``; return whether (name, is a folder) is left out."""
    files = [root / file for file in IGNORE_FILES if (root / file).is_file()]
    lists = [path.read_text(errors="replace").splitlines() for path in files]
    return ignored_by(line for lines in (*lists, excludes) for line in lines)


def ignored_by(lines: Iterable[str]) -> Callable[[str, bool], bool]:
    """Return whether (name, is a folder) is left out by patterns of ``.gitignore``.

    The common part of git's rules: comments, ``!``, a leading or inner slash anchors, a trailing
    slash means folders, ``*``, ``?``, ``[...]`` and ``**``. The last rule that matches decides.
    """
    rules: list[tuple[re.Pattern[str], bool, bool]] = []
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
