"""Archives of strangers as packages: read member by member, never unpacked to disk.

A link becomes the file of the archive that it leads to; one that leads out of it, or to a folder, is
refused. Names, counts and sizes are bounded before anything is read.
"""

from __future__ import annotations

import posixpath
import stat
import tarfile
import zipfile
import zlib
from typing import TYPE_CHECKING, NamedTuple

from stoker.runtime.options.packages import (
    ALWAYS_LEFT_OUT,
    VENV_MARK,
    Package,
    ignored_by,
    mib,
    package_of,
    zip_members,
)
from stoker.runtime.options.pieces import Member
from stoker_wire.errors import PayloadTooLargeError, RuntimeEnvSetupError, StokerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

_MAX_MEMBERS = 100_000
_MAX_LINKS = 8
"""Links that lead to links, one after the other."""
_MAX_LINK_CHARS = 4096
_METHODS = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED})
"""Compressions that are read: of others a few bytes can ask for gigabytes of memory to begin with."""
_BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError)
"""What the readers of archives raise, of encrypted ones too."""


class _Entry(NamedTuple):
    """A file of an archive; of a link, ``link`` is the name in the archive that it leads to."""

    name: str
    nbytes: int
    executable: bool
    read: Callable[[], bytes]
    link: str = ""


def package_of_archive(
    file: Path,
    shown: str,
    *,
    zipped: bool,
    has_top: bool,
    excludes: tuple[str, ...],
    max_bytes: int,
) -> Package:
    """Return the archive ``file``, a zip if ``zipped``, else a tar, as a package.

    With ``has_top`` its only folder at the top is left out, as archives of repositories have one, unless it
    is a Python package. RuntimeEnvSetupError says of which ``shown`` what is wrong.
    """
    try:
        if zipped:
            with zipfile.ZipFile(file) as archive:
                return _package(_of_zip(archive, shown), shown, has_top, excludes, max_bytes)
        with tarfile.open(file, "r:") as tar:
            return _package(_of_tar(tar, shown), shown, has_top, excludes, max_bytes)
    except StokerError:
        raise
    except _BROKEN as error:
        raise RuntimeEnvSetupError(f"{shown} cannot be unpacked\n{error}") from None


def _package(
    found: Iterable[_Entry], shown: str, has_top: bool, excludes: tuple[str, ...], max_bytes: int
) -> Package:
    entries: dict[str, _Entry] = {}
    for entry in found:
        entries[entry.name] = entry
        if len(entries) > _MAX_MEMBERS:
            raise PayloadTooLargeError(f"{shown} has more than {_MAX_MEMBERS} files")
    top = _top(entries) if has_top else ""
    left_out = _left_out(entries, top, excludes)
    members, nbytes = [], 0
    for entry in entries.values():
        inner = entry.name[len(top) :]
        if left_out(inner):
            continue
        source = _source(entry, entries, shown)
        nbytes += source.nbytes
        if nbytes > max_bytes:
            raise PayloadTooLargeError(
                f"{shown} has more than the {mib(max_bytes)} that a package may hold\n"
                "name in excludes what the job does not need"
            )
        members.append(Member(inner, source.nbytes, source.executable, source.read))
    if not members:
        raise RuntimeEnvSetupError(f"{shown} has no files\nlook at what it holds, and at excludes")
    return package_of(zip_members(members, shown, "", max_bytes))


def _of_zip(archive: zipfile.ZipFile, shown: str) -> Iterator[_Entry]:
    for info in archive.infolist():
        if info.is_dir():
            continue
        name, mode = _checked(info.filename, shown), info.external_attr >> 16
        if info.compress_type not in _METHODS:
            raise RuntimeEnvSetupError(
                f"{shown} is compressed by a method that is not taken\n"
                f"member {name!r}; write it with ZIP_DEFLATED"
            )
        link = ""
        if stat.S_ISLNK(mode):
            if info.file_size > _MAX_LINK_CHARS:
                raise _leaves(name, shown)
            target = archive.read(info).decode(errors="replace")
            link = posixpath.join(posixpath.dirname(name), target)
        yield _Entry(name, info.file_size, bool(mode & 0o100), _reader(archive, info), link)


def _reader(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Callable[[], bytes]:
    return lambda: archive.read(info)


def _of_tar(archive: tarfile.TarFile, shown: str) -> Iterator[_Entry]:
    for info in archive:
        if info.isdir():
            continue
        name, link = _checked(info.name, shown), ""
        if info.issym():
            link = posixpath.join(posixpath.dirname(name), info.linkname)
        elif info.islnk():
            link = info.linkname
        elif not info.isreg():
            raise RuntimeEnvSetupError(
                f"{shown} has a member that is no file\n{name!r} is a device, or a pipe"
            )
        yield _Entry(name, info.size, bool(info.mode & 0o100), _tar_reader(archive, info), link)


def _tar_reader(archive: tarfile.TarFile, info: tarfile.TarInfo) -> Callable[[], bytes]:
    def read() -> bytes:
        reader = archive.extractfile(info)
        return reader.read() if reader is not None else b""

    return read


def _checked(name: str, shown: str) -> str:
    """Return a member's name without ``./``; one that leads out of the archive is refused."""
    path = posixpath.normpath(name)
    if path.startswith(("/", "../")) or path in ("..", ".") or "\0" in path:
        raise _leaves(name, shown)
    return path


def _leaves(name: str, shown: str) -> RuntimeEnvSetupError:
    return RuntimeEnvSetupError(f"{shown} has a member that leaves it\nmember {name!r}")


def _source(entry: _Entry, entries: dict[str, _Entry], shown: str) -> _Entry:
    """Return what a link leads to, and any other file as it is."""
    source = entry
    for _ in range(_MAX_LINKS):
        if not source.link:
            return source
        target = entries.get(posixpath.normpath(source.link))
        if target is None:
            break
        source = target
    raise RuntimeEnvSetupError(
        f"{shown} has a link that leads to no file of it\n"
        f"link {entry.name!r} leads to {source.link!r}; name it in excludes to leave it out"
    )


def _top(entries: dict[str, _Entry]) -> str:
    tops = {name.partition("/")[0] for name in entries}
    if len(tops) != 1:
        return ""
    top = f"{next(iter(tops))}/"
    is_folder = all(name.startswith(top) for name in entries)
    return top if is_folder and f"{top}__init__.py" not in entries else ""


def _left_out(
    entries: dict[str, _Entry], top: str, excludes: tuple[str, ...]
) -> Callable[[str], bool]:
    ignored = ignored_by(excludes)
    venvs = {posixpath.dirname(one) for one in entries if posixpath.basename(one) == VENV_MARK}

    def left_out(name: str) -> bool:
        folders = name.split("/")[:-1]
        for depth, folder in enumerate(folders, 1):
            path = "/".join(folders[:depth])
            if folder in ALWAYS_LEFT_OUT or top + path in venvs or ignored(path, True):
                return True
        return ignored(name, False)

    return left_out
