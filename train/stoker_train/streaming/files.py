"""Find the files of a stream, and open them, here or in a store that fsspec reads.

The stream lists files once, at its beginning; parsers open them, in readers.
"""

from __future__ import annotations

import glob
import gzip
import os
from collections.abc import Iterable
from typing import IO, Any

from stoker.exceptions import BadRequestError, WrongTypeError

__all__ = ("is_compressed", "list_files", "open_file", "size_of")


def list_files(files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[str]:
    """Return the paths that ``files`` names: one path or many, each of which may be a glob pattern.

    The files of a pattern come by name. BadRequestError where a pattern has no file, or nothing is given.
    """
    given = [files] if isinstance(files, str | os.PathLike) else list(files)
    paths: list[str] = []
    for one in given:
        if not isinstance(one, str | os.PathLike):
            raise WrongTypeError(
                f"a file of the stream is of type {type(one).__name__}, not a path\n"
                "give paths, or patterns such as data/*.jsonl",
                field="files",
            )
        path = os.fspath(one)
        if not glob.has_magic(path) or os.path.exists(path):  # "part[1].txt" may be a name
            paths.append(path)
            continue
        found = _matching(path)
        if not found:
            raise BadRequestError(
                f"no file is named as in {path!r}\ngive a pattern or paths that this process can see",
                field="files",
            )
        paths += found
    if not paths:
        raise BadRequestError("the stream has no files\ngive one path at least", field="files")
    return paths


def size_of(path: str) -> int:
    """Return the bytes of a file; BadRequestError if it cannot be seen from here."""
    try:
        if "://" in path:
            system, name = _filesystem(path)
            return int(system.size(name))
        return os.stat(path).st_size
    except OSError as error:
        raise BadRequestError(
            f"the file {path!r} of the stream cannot be read\n{error}", field="files"
        ) from error


def open_file(path: str) -> IO[bytes]:
    """Return a file open to be read, unpacked if its name ends in ``.gz``."""
    if "://" in path:
        system, name = _filesystem(path)
        opened: IO[bytes] = system.open(name, "rb")
    else:
        opened = open(path, "rb")  # noqa: SIM115  # the caller closes it
    if not is_compressed(path):
        return opened
    unpacked: Any = gzip.GzipFile(fileobj=opened)
    unpacked.myfileobj = opened  # it closes that with itself
    gunzipped: IO[bytes] = unpacked
    return gunzipped


def is_compressed(path: str) -> bool:
    """Return whether a file can only be read from its beginning."""
    return path.endswith(".gz")


def _matching(pattern: str) -> list[str]:
    if "://" not in pattern:
        return sorted(path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path))
    system, name = _filesystem(pattern)
    return sorted(str(system.unstrip_protocol(path)) for path in system.glob(name))


def _filesystem(path: str) -> tuple[Any, str]:
    scheme = path.partition("://")[0]
    try:
        import fsspec
    except ImportError as error:
        raise BadRequestError(
            f"{path!r} cannot be read without fsspec\n"
            f"pip install fsspec, and what reads {scheme}://: s3fs, gcsfs or adlfs",
            field="files",
        ) from error
    system, name = fsspec.core.url_to_fs(path)
    return system, name
