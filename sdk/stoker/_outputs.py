"""Unpacks what a job wrote: tar archives of several nodes into one folder, and nothing outside of it.

Called by ``stoker.jobs``. A path that two nodes have written is kept twice: the second time below a
folder with the node's id.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tarfile
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any

from stoker_wire.errors import BadRequestError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Container


def unpack(
    archive: Any, target: Path, *, node_id: str = "", taken: Container[str] = ()
) -> list[str]:
    """Unpack the tar archive that ``archive`` reads into ``target``; return the paths of its files.

    Paths in ``taken``, and those where a file and a folder meet, go below ``target/node_id``. Files
    that are there already are replaced. BadRequestError for a member that would leave ``target`` or
    cannot be written there, UnavailableError for a cut archive.
    """
    written = []
    try:
        target.mkdir(parents=True, exist_ok=True)
        root = target.resolve()
        with tarfile.open(fileobj=archive, mode="r|") as members:
            for member in members:
                name = PurePosixPath(member.name)
                if (str(name) in taken and not member.isdir()) or _clashes(root, name, member):
                    name = node_id / name
                if _put(members, member, root, name):
                    written.append(str(name))
    except (ConnectionError, TimeoutError):  # of the archive on its way
        raise
    except OSError as error:
        raise BadRequestError(
            f"the output of {node_id} cannot be written to {target}\n{error}\nname another folder"
        ) from None
    except tarfile.TarError as error:
        raise UnavailableError(f"the output of {node_id} broke off\n{error}") from None
    return written


def _clashes(root: Path, name: PurePosixPath, member: tarfile.TarInfo) -> bool:
    """Whether a folder is where a file is to be, or a file where a folder is to be."""
    path = root / name
    folders = [root / above for above in name.parents]
    if member.isdir():
        folders.append(path)
    elif path.is_dir() and not path.is_symlink():
        return True
    return any(os.path.lexists(folder) and not folder.is_dir() for folder in folders)


def _put(
    members: tarfile.TarFile, member: tarfile.TarInfo, root: Path, name: PurePosixPath
) -> bool:
    path = root / name
    if not path.parent.resolve().is_relative_to(root) or ".." in name.parts:
        raise BadRequestError(f"the output has a member {member.name!r} that leaves its folder")
    if member.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    content = members.extractfile(member) if member.isreg() else None
    if content is not None:
        _write(path, content, member.mode)
    elif member.issym() and _stays(path, member.linkname, root):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        path.symlink_to(member.linkname)
    else:
        return False
    return True


def _write(path: Path, content: IO[bytes], mode: int) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        shutil.copyfileobj(content, file, 1 << 20)
    partial.chmod(mode & 0o777 | 0o600)
    partial.replace(path)


def _stays(path: Path, link: str, root: Path) -> bool:
    return not os.path.isabs(link) and (path.parent / link).resolve().is_relative_to(root)
