"""The bearer token: where it is stored, how it is made, and how a request's token is checked.

Called by the entry points (to find or make the token), by the HTTP server base (to check) and by
clients (to send). It must never log or print a token, and never compare one in variable time.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from stoker_wire.errors import OpenBindError, StartError
from stoker_wire.process.secret_files import is_mounted

if TYPE_CHECKING:
    from stoker_wire.settings import Settings

SHARED_PRINCIPAL = "cluster"
"""The principal of requests that carry the cluster's own token."""

_LOOPBACK_NAMES = frozenset({"localhost", "::1", "[::1]"})


class Authenticator(Protocol):
    """Verifier of further tokens (the gcs: those in SQL)."""

    async def principal(self, token: str) -> str | None:
        """Return who ``token`` belongs to, or None if it is unknown, expired or revoked."""
        ...


def load_or_create_token(path: str | Path) -> str:
    """Return the token in ``path``, making it (mode 0600) if there is none.

    Of several processes that start at once, all return the same token: the file appears whole,
    by a link that fails if another process was first.
    """
    path = Path(path).expanduser()
    if not path.exists():
        _create(path)
    return load_token(path)


def load_token(path: str | Path) -> str:
    """Return the token in ``path``; StartError if it is absent, empty, or readable by others."""
    path = Path(path).expanduser()
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077 and not is_mounted(path):
                raise StartError(
                    f"{path} is readable by other users (mode {mode:04o}) and holds the cluster's "
                    "token\n"
                    f"run: chmod 600 {path}"
                )
            token = file.read(4096).decode("ascii", "replace").strip()
    except OSError as error:
        raise StartError(
            f"cannot read the token file {path}\n"
            f"{error.strerror}\n"
            "copy it from the head node, or set STOKER_TOKEN"
        ) from None
    if not token:
        raise StartError(f"{path} is empty\ndelete it, and a new token is made at the next start")
    return token


def find_token(settings: Settings, *, host: str | None = None) -> str:
    """Return the token to use: ``settings.token``, else the token file.

    With ``host``, the caller is about to listen there: on loopback a missing file is made; beyond
    loopback it is an OpenBindError, since no other node could know a token made now. Without
    ``host`` (a client) a missing file is a StartError.
    """
    if settings.token:
        return settings.token
    path = Path(settings.token_file).expanduser()
    if host is None or path.exists():
        return load_token(path)
    if is_loopback(host):
        return load_or_create_token(path)
    raise OpenBindError(
        f"will not listen on {host} without a token\n"
        f"set STOKER_TOKEN, or put one into {path} (mode 0600), the same on every node, or listen "
        "on 127.0.0.1"
    )


def check(header: str | None, token: str) -> bool:
    """Return whether an ``Authorization`` header carries ``token``, in constant time."""
    return hmac.compare_digest(bearer(header).encode(), token.encode())


def bearer(header: str | None) -> str:
    """Return the token of an ``Authorization: Bearer`` header, or nothing."""
    if header is None or header[:7].lower() != "bearer ":
        return ""
    # Bytes that are no UTF-8 arrive as lone surrogates, which nothing can hash or compare.
    return header[7:].encode("utf-8", "replace").decode().strip()


def is_loopback(host: str) -> bool:
    """Return whether ``host`` (a name or an address) can only be reached from this machine."""
    return host in _LOOPBACK_NAMES or host.startswith("127.")


def private_dir(path: str | Path) -> Path:
    """Make ``path`` (and its parents) with mode 0700, or check that it is ours and private."""
    path = Path(path).expanduser()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise StartError(f"{path} belongs to another user\nset STOKER_SESSION_ROOT to another one")
    if stat.S_IMODE(status.st_mode) & 0o077:
        path.chmod(0o700)
    return path


def _create(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        fd = os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(os.urandom(24).hex() + "\n")
        # If another process made it between our look and now, its token is the one.
        with contextlib.suppress(FileExistsError):
            os.link(fresh, path)
    except OSError as error:
        raise StartError(
            f"cannot make the token file {path}\n{error.strerror}\nset STOKER_TOKEN_FILE"
        ) from None
    finally:
        fresh.unlink(missing_ok=True)
