"""Archives from the web and from stores, copied into a file: with a deadline, a limit and a hash."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import time
import urllib.error
import urllib.request
import zlib
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import unquote

from stoker_wire.errors import PayloadTooLargeError, RuntimeEnvSetupError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.runtime.options.fetching.uris import CodeUri

_CHUNK_BYTES = 1 << 20
_SOCKET_S = 60.0
"""Longest silence of a server."""


def download(uri: CodeUri, target: Path, *, max_bytes: int, until_s: float) -> None:
    """Copy an archive into ``target``; its hash is checked where the URI has one."""
    with _opened(uri) as reader:
        digest = _copy(reader, target, uri.shown, max_bytes, until_s)
    if uri.sha256 and digest != uri.sha256:
        raise RuntimeEnvSetupError(
            f"{uri.shown} is not what its hash says\n"
            f"the SHA-256 of what came is {digest}, not {uri.sha256}"
        )


def unzip_tar(packed: Path, target: Path, shown: str, *, max_bytes: int, until_s: float) -> None:
    """Decompress a ``.tar.gz`` into a ``.tar``, which has a bounded size then."""
    try:
        with gzip.open(packed, "rb") as reader:
            _copy(reader, target, shown, max_bytes, until_s)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RuntimeEnvSetupError(f"{shown} cannot be unpacked\n{error}") from None


@contextlib.contextmanager
def _opened(uri: CodeUri) -> Iterator[Any]:
    try:
        if uri.scheme == "https":
            with new_opener().open(uri.location, timeout=_SOCKET_S) as response:
                yield response
        elif uri.scheme == "file":
            with Path(unquote(uri.path)).open("rb") as reader:
                yield reader
        else:
            with _fsspec(uri).open(uri.location, "rb") as reader:
                yield reader
    except urllib.error.HTTPError as error:
        error.close()
        raise RuntimeEnvSetupError(
            f"{uri.shown} cannot be fetched\nthe server answered {error.code}"
        ) from None
    except urllib.error.URLError as error:
        raise RuntimeEnvSetupError(f"{uri.shown} cannot be fetched\n{error.reason}") from None
    except (RuntimeEnvSetupError, PayloadTooLargeError):
        raise
    except Exception as error:  # the backends of stores raise errors of many kinds
        why = f"{type(error).__name__}: {error}"
        raise RuntimeEnvSetupError(f"{uri.shown} cannot be fetched\n{why}") from error


def _fsspec(uri: CodeUri) -> Any:
    """Return fsspec; RuntimeEnvSetupError names what is to be installed."""
    try:
        import fsspec
    except ImportError:
        raise RuntimeEnvSetupError(
            f"{uri.shown} cannot be fetched without fsspec\n"
            f"pip install fsspec, and what reads {uri.scheme}://: s3fs, gcsfs or adlfs"
        ) from None
    try:
        fsspec.get_filesystem_class(uri.scheme)
    except (ImportError, ValueError) as error:
        raise RuntimeEnvSetupError(
            f"{uri.shown} cannot be fetched\n{error}\n"
            f"pip install what reads {uri.scheme}://: s3fs, gcsfs or adlfs"
        ) from None
    return fsspec


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Redirects that stay encrypted."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Any,
        newurl: str,
    ) -> urllib.request.Request | None:
        """Return the next request."""
        if not newurl.lower().startswith("https://"):
            raise RuntimeEnvSetupError(
                f"{req.full_url.partition('?')[0]} cannot be fetched\n"
                "it is redirected to an address that is not https://"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def new_opener() -> urllib.request.OpenerDirector:
    """Return what opens addresses, by the proxies and the certificates that this process trusts now."""
    return urllib.request.build_opener(_Redirects)


def _copy(reader: Any, target: Path, shown: str, max_bytes: int, until_s: float) -> str:
    digest, nbytes = hashlib.sha256(), 0
    read = getattr(reader, "read1", reader.read)  # what has come, so that the deadline is looked at
    with target.open("wb") as writer:
        while chunk := read(_CHUNK_BYTES):
            nbytes += len(chunk)
            if nbytes > max_bytes:
                raise PayloadTooLargeError(
                    f"{shown} has more than {max_bytes >> 20} MiB\na package may not hold more"
                )
            if time.monotonic() > until_s:
                raise RuntimeEnvSetupError(f"{shown} did not come in time")
            digest.update(chunk)
            writer.write(chunk)
    return digest.hexdigest()
