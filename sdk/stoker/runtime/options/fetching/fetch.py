"""A URI of code as a package: fetched where the call is made, then uploaded like a folder.

What nodes get is named by its content: tasks that start later get the same, whatever the branch, the tag or
the file has become. Nodes need neither the network nor credentials.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.runtime.options.fetching.archives import package_of_archive
from stoker.runtime.options.fetching.download import download, unzip_tar
from stoker.runtime.options.fetching.repositories import archive_commit
from stoker.runtime.options.fetching.uris import GIT
from stoker.runtime.options.packages import MAX_BYTES

if TYPE_CHECKING:
    from stoker.runtime.options.fetching.uris import CodeUri
    from stoker.runtime.options.packages import Package

FETCH_S = 600.0
"""The deadline of one fetch."""
_HEADERS_BYTES = 128 << 20
"""What a tar may have besides the content of its files."""


def fetch(uri: CodeUri, *, excludes: tuple[str, ...] = (), max_bytes: int = MAX_BYTES) -> Package:
    """Return what a URI names as a package, without what ``excludes`` names.

    Raises RuntimeEnvSetupError with what went wrong, or PayloadTooLargeError.
    """
    until_s = time.monotonic() + FETCH_S
    with tempfile.TemporaryDirectory(prefix="stoker-fetch-") as name:
        folder = Path(name)
        tar, tar_bytes = folder / "archive.tar", max_bytes + _HEADERS_BYTES
        if uri.scheme in GIT:
            archive_commit(uri, folder, tar, max_bytes=tar_bytes, until_s=until_s)
            return _package(tar, uri, excludes, max_bytes)
        file = folder / "archive"
        download(uri, file, max_bytes=tar_bytes, until_s=until_s)
        if uri.path.endswith((".gz", ".tgz")):
            unzip_tar(file, tar, uri.shown, max_bytes=tar_bytes, until_s=until_s)
            file = tar
        return _package(file, uri, excludes, max_bytes)


def _package(file: Path, uri: CodeUri, excludes: tuple[str, ...], max_bytes: int) -> Package:
    is_repository = uri.scheme in GIT
    return package_of_archive(
        file,
        uri.shown,
        zipped=not is_repository and uri.path.endswith((".zip", ".whl")),
        has_top=not is_repository and not uri.path.endswith(".whl"),
        excludes=excludes,
        max_bytes=max_bytes,
    )
