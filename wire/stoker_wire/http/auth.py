"""The cluster's secret: where it is stored, how it is made; and how a client carries its token.

Called by the entry points (to find or make the secret) and by clients (to send what it has become).
It must never log or print a token, and never compare one in variable time.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import os
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stoker_wire.errors import OpenBindError, StartError
from stoker_wire.process.files.secret_files import check_private

if TYPE_CHECKING:
    from stoker_wire.settings import Settings

CHANNEL_SCHEME = "Channel"
"""The scheme of the Authorization of a channel: ids of job and actor, and a proof for one peer alone."""

SECRETS = frozenset(
    {
        "STOKER_TOKEN",
        "STOKER_TOKEN_FILE",
        "STOKER_DATABASE_URL",
        "STOKER_DATABASE_PASSWORD_FILE",
        "STOKER_REDIS_URL",
        "STOKER_REDIS_PASSWORD_FILE",
    }
)
"""Variables of services that no process of a user inherits."""

LEAST_CHARACTERS = 16
"""Those of a token that other machines can guess at."""

LOOK_S = 1.0
"""The pause between two looks at a file with a token that may be replaced."""
MAX_SECRETS = 2
"""Lines of the token file: the secret that signs, and the next or the former one."""
COMMENT = "#"
"""How a line of the token file begins that is no secret; the first always is one."""
_FILE_BYTES = 4096
_LOOPBACK_NAMES = frozenset({"localhost", "::1", "[::1]"})


class Credential:
    """The token of a process, which may change while it runs: all of its clients share it.

    A driver comes with a person's token (``given``) and goes on with its job's; a worker gets its job's
    with its first lease.
    """

    __slots__ = ("_header", "_look_at_s", "_path", "_token", "given")

    def __init__(self, token: str) -> None:
        self.given = token
        self._path = ""
        self._look_at_s = 0.0
        self.replace(token)

    @property
    def token(self) -> str:
        """The token to show now."""
        if self._path and time.monotonic() >= self._look_at_s:
            self._look()
        return self._token

    @property
    def header(self) -> str:
        """The ``Authorization`` to send now."""
        if self._path and time.monotonic() >= self._look_at_s:
            self._look()
        return self._header

    def replace(self, token: str) -> None:
        """Send ``token`` from the next request on."""
        self._token, self._header = token, f"Bearer {token}"

    def follow(self, path: str) -> None:
        """Send from now on what is in a file, which its owner replaces; it is looked at once a second."""
        self._path = path

    def _look(self) -> None:
        self._look_at_s = time.monotonic() + LOOK_S
        with contextlib.suppress(StartError):  # what was read before is as good as nothing
            self.replace(load_token(self._path))


def credential_of(token: str | Credential) -> Credential:
    """Return a credential, also for a token that never changes."""
    return token if isinstance(token, Credential) else Credential(token)


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
    """Return the token in ``path``: of a file with two, the first."""
    return load_secrets(path)[0]


def load_secrets(path: str | Path) -> tuple[str, ...]:
    """Return what is in the token file ``path``: the secret that signs, and one that is accepted besides.

    StartError if it is absent, empty, another's, has more than two, or others can read it.
    """
    path = Path(path).expanduser()
    try:
        with path.open("rb") as file:
            check_private(path, file, holds="the cluster's token")
            text = file.read(_FILE_BYTES).decode("ascii", "replace")
    except OSError as error:
        raise StartError(
            f"cannot read the token file {path}\n"
            f"{error.strerror}\n"
            "copy it from the head node, or set STOKER_TOKEN"
        ) from None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise StartError(f"{path} is empty\ndelete it, and a new token is made at the next start")
    # The first line may begin with anything: it is what services had before a file could hold more.
    secrets = tuple(dict.fromkeys(lines[:1] + [one for one in lines[1:] if one[0] != COMMENT]))
    if len(secrets) > MAX_SECRETS:
        raise StartError(
            f"{path} holds {len(secrets)} secrets\n"
            f"leave {MAX_SECRETS} lines at most: the one that signs, then one that is accepted as well"
        )
    return secrets


def find_token(settings: Settings, *, host: str | None = None) -> str:
    """Return the token to use: ``settings.token``, else the token file.

    With ``host``, the caller is about to listen there: on loopback a missing file is made; beyond
    loopback it is an OpenBindError, since no other node could know a token made now, and so is a
    token that can be guessed. Without ``host`` (a client) a missing file is a StartError.
    """
    path = Path(settings.token_file).expanduser()
    if settings.token:
        token = settings.token
    elif host is None or path.exists():
        token = load_token(path)
    elif is_loopback(host):
        token = load_or_create_token(path)
    else:
        raise OpenBindError(
            f"will not listen on {host} without a token\n"
            f"set STOKER_TOKEN, or put one into {path} (mode 0600), the same on every node, or "
            "listen on 127.0.0.1"
        )
    if host is not None:
        check_length(token, host)
    return token


def check_length(token: str, host: str) -> None:
    """Refuse to listen on ``host``, beyond loopback, with a token that can be guessed."""
    if len(token) < LEAST_CHARACTERS and not is_loopback(host):
        raise OpenBindError(
            f"will not listen on {host} with a token of {len(token)} characters\n"
            f"set one of at least {LEAST_CHARACTERS}, the same on every node: "
            "STOKER_TOKEN=$(openssl rand -hex 24), or listen on 127.0.0.1"
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


def channel_authorization(token: str, peer_id: str) -> str:
    """Return the header by which a process with the token of a job opens a channel to ``peer_id``."""
    claims = msgspec.json.decode(base64.urlsafe_b64decode(token.split(".")[1] + "=="))
    actor_id = claims.get("actor", "")
    return f"{CHANNEL_SCHEME} {claims['job']} {actor_id} {channel_proof(token, peer_id)}"


def channel_proof(token: str, peer_id: str) -> str:
    """Return what a process with ``token`` shows to ``peer_id`` to open a channel: good there alone."""
    return hmac.digest(token.encode(), f"channel {peer_id}".encode(), "sha256").hex()


def token_digest(token: str) -> str:
    """Return by what two processes find that they have the same token, without one of them showing it."""
    return hmac.digest(token.encode(), b"stoker token digest", "sha256").hex()


def write_private(path: Path, text: str) -> None:
    """Replace a file by one with ``text``, of mode 0600: whoever reads it meanwhile finds one or the other.

    The owner stays the same where this process may see to that. OSError if it cannot be written.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        fd = os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(fd, "w") as file:
            if os.geteuid() == 0 and path.exists():
                owner = path.stat()
                os.fchown(fd, owner.st_uid, owner.st_gid)
            file.write(text)
            file.flush()
            os.fsync(fd)
        fresh.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        fresh.unlink(missing_ok=True)


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
