"""The pieces of packages on this node's disk: what another package has already is not fetched again.

Each package in pieces has a folder of them (``retention``), named by their hashes. Packages that share a
piece have links to one file, so it leaves with the last of them. Owned by ``environments``.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from stoker_nodelet.environments.retention import touch
from stoker_wire.errors import RuntimeEnvSetupError, StokerError

_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces below ``root``; ``download`` fetches one by its hash."""

    root: Path
    download: Callable[[str], Awaitable[bytes]]

    def folder_of(self, package: str) -> Path:
        """Return where the pieces of a package are."""
        return self.root / package

    async def fetch(self, package: str, pieces: tuple[str, ...]) -> list[Path]:
        """Return the files of all pieces of a package, each whole, in their order."""
        try:
            return await self._fetch(self.folder_of(package), pieces)
        except OSError as error:
            if isinstance(error, StokerError):  # of the download, which may be retried
                raise
            # What is there of it would keep a full disk full.
            shutil.rmtree(self.folder_of(package), ignore_errors=True)
            raise RuntimeEnvSetupError(
                f"the pieces of a package cannot be kept\n{error}\nit is {package}"
            ) from None

    async def _fetch(self, folder: Path, pieces: tuple[str, ...]) -> list[Path]:
        paths = [folder / piece for piece in pieces]
        missing = iter(await asyncio.to_thread(self._link, folder, pieces))

        async def fetch_some() -> None:
            for piece in missing:
                content = await self.download(piece)
                await asyncio.to_thread(_write, folder / piece, content)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(_AT_ONCE):
                    group.create_task(fetch_some())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return paths

    def _link(self, folder: Path, pieces: tuple[str, ...]) -> list[str]:
        """Take the pieces that other packages have; return those that are missing."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        touch(folder)
        others = [path for path in self.root.iterdir() if path != folder and path.is_dir()]
        return [
            piece
            for piece in dict.fromkeys(pieces)
            if not is_whole(folder / piece)
            and not any(_linked(other / piece, folder / piece) for other in others)
        ]


def is_whole(path: Path) -> bool:
    """Return whether a piece is there, and what it is named by."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == path.name
    except OSError:
        return False


def read_piece(path: Path) -> bytes:
    """Return the content of a piece; RuntimeEnvSetupError if it is not what it is named by."""
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != path.name:
        raise RuntimeEnvSetupError(
            f"a piece of a package is not what it is named by\n"
            f"the SHA-256 of {path.name} is {digest}: it is fetched again at the next try"
        )
    return content


def _linked(source: Path, target: Path) -> bool:
    if not is_whole(source):
        return False
    try:
        target.unlink(missing_ok=True)
        os.link(source, target)
    except OSError:  # it has left meanwhile, or the file system has no links
        return False
    return True


def _write(path: Path, content: bytes) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(content)
    partial.rename(path)
