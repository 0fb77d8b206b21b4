"""The URIs of code: taken apart and checked. Pure.

``https://host/code.zip#sha256=...``, ``git+https://host/repository@revision``, ``s3://bucket/code.tar.gz``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

ARCHIVES = (".zip", ".whl", ".tar.gz", ".tgz", ".tar")
GIT = ("git+https", "git+ssh", "git+file")
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")
_SHA256 = re.compile(r"sha256=([0-9a-f]{64})")
_REVISION = re.compile(r"[A-Za-z0-9_][\w./+-]*")
_MAX_CHARS = 4096
"""Signed addresses of stores are long."""


@dataclass(frozen=True, slots=True)
class CodeUri:
    """A URI in its parts; ``location`` is what its tool is given."""

    scheme: str
    location: str
    path: str
    revision: str = ""
    sha256: str = ""

    @property
    def shown(self) -> str:
        """Return it for people: without a query, which may have a signature."""
        return self.location.partition("?")[0]


def is_uri(value: object) -> bool:
    """Return whether a value is a URI, and no path or hash."""
    return isinstance(value, str) and _SCHEME.match(value) is not None


def parse(text: str) -> CodeUri:
    """Return a URI in its parts; ValueError says what was expected."""
    found = _SCHEME.match(text)
    if found is None or len(text) > _MAX_CHARS or not text.isprintable() or " " in text:
        raise ValueError("a URI such as 'https://host/code.zip'")
    scheme = found[1].lower()
    location, _, fragment = text.partition("#")
    try:
        parts = urlsplit(location)
        has_password = parts.password is not None
    except ValueError:
        raise ValueError("a URI such as 'https://host/code.zip'") from None
    if has_password or ("@" in parts.netloc and scheme in ("https", "git+https")):
        raise ValueError("a URI without a password; git takes it from its credential helper")
    if scheme in GIT:
        return _repository(scheme, location, fragment)
    if scheme == "http":
        raise ValueError("https://, for anybody on the way can change what comes by http://")
    if scheme.startswith("git+") or "::" in location:
        raise ValueError(
            f"one of {', '.join(f'{one}://' for one in ('https', *GIT))} or of a store"
        )
    digest = _SHA256.fullmatch(fragment)
    if fragment and digest is None:
        raise ValueError("no fragment but #sha256= and 64 digits")
    if not parts.path.endswith(ARCHIVES):
        raise ValueError(f"a file that ends in one of {', '.join(ARCHIVES)}")
    return CodeUri(scheme, location, parts.path, sha256=digest[1] if digest else "")


def _repository(scheme: str, location: str, fragment: str) -> CodeUri:
    if fragment:
        raise ValueError("a repository without a fragment; @ and a commit pin it")
    location = location[len("git+") :]
    revision = ""
    if "@" in urlsplit(location).path:
        location, _, revision = location.rpartition("@")
        if not _REVISION.fullmatch(revision) or ".." in revision:
            raise ValueError("a commit, tag or branch after @")
    return CodeUri(scheme, location, urlsplit(location).path, revision)
