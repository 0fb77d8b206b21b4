"""The files of the dashboard's page, as they are sent: typed, compressed, with a tag of their content.

They hold nothing of the cluster, so they are public. Read once, and again when a file has changed, so
that whoever works on the page only loads it again.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from stoker_wire.errors import NotFoundError

FOLDER = Path(__file__).with_name("static")
INDEX = "index.html"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Cache-Control": "no-cache",  # kept, and asked for by its tag
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept-Encoding",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class _Asset:
    changed_ns: int
    content_type: str
    plain: bytes
    packed: bytes
    etag: str


class Assets:
    """The files below :data:`FOLDER` by their names."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._known: dict[Path, _Asset] = {}

    def respond(self, request: web.Request, name: str) -> web.Response:
        """Answer a request for a file; NotFoundError if the page has none of this name."""
        asset = self._find(name)
        headers = {**_HEADERS, "ETag": asset.etag, "Content-Type": asset.content_type}
        if asset.etag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=headers)
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            headers["Content-Encoding"] = "gzip"
            return web.Response(body=asset.packed, headers=headers)
        return web.Response(body=asset.plain, headers=headers)

    def _find(self, name: str) -> _Asset:
        content_type = _TYPES.get(Path(name).suffix)
        try:
            path = (
                self._folder / name
            ).resolve()  # one file is kept once, by whatever name it is asked for
            if content_type is None or not path.is_relative_to(self._folder.resolve()):
                raise _missing(name)
            changed_ns = path.stat().st_mtime_ns
            known = self._known.get(path)
            if known is not None and known.changed_ns == changed_ns:
                return known
            plain = path.read_bytes()
        except (OSError, ValueError):
            raise _missing(name) from None
        etag = f'"{hashlib.sha256(plain).hexdigest()[:20]}"'
        packed = gzip.compress(plain, 9, mtime=0)
        self._known[path] = asset = _Asset(changed_ns, content_type, plain, packed, etag)
        return asset


def _missing(name: str) -> NotFoundError:
    return NotFoundError(f"the dashboard has no file {name[:100]!r}\nopen / instead")
