"""Passwords in files, as container engines and orchestrators hand them to a service.

Read once by an entry point. A password stays out of environments and command lines, which others see.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, urlsplit

from stoker_wire.errors import StartError

MOUNTS = Path("/run/secrets")
"""Where Docker, Podman and (by custom) Kubernetes mount secrets, with owners and modes of their own."""


def is_mounted(path: Path) -> bool:
    """Return whether ``path`` is a mounted secret: then its mode is not ours, and no other user is there."""
    return path.resolve().is_relative_to(MOUNTS)


def check_private(path: Path, file: BinaryIO, *, holds: str) -> None:
    """Raise StartError if ``path``, opened as ``file``, is another user's or others can read it."""
    if is_mounted(path):
        return
    status = os.fstat(file.fileno())
    if status.st_uid not in (os.geteuid(), 0):
        raise StartError(
            f"{path} belongs to another user (uid {status.st_uid}), who knows or chose {holds} in it\n"
            f"run: chown {os.geteuid()} {path} if that is as it should be, or name another file"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise StartError(
            f"{path} is readable by other users (mode {mode:04o}) and holds {holds}\n"
            f"run: chmod 600 {path}"
        )


def read_secret(path: str | Path) -> str:
    """Return what is in ``path``; StartError if it is absent, empty, another's, or others can read it."""
    path = Path(path).expanduser()
    try:
        with path.open("rb") as file:
            check_private(path, file, holds="a password")
            secret = file.read(4096).decode("utf-8", "replace").strip()
    except OSError as error:
        raise StartError(
            f"cannot read the password in {path}\n{error.strerror}\nwrite it there, mode 0600"
        ) from None
    if not secret:
        raise StartError(f"{path} is empty\nwrite the password into it")
    return secret


def with_password(url: str, path: str) -> str:
    """Return the URL of a database with the password in ``path``, or as it is where no file is named."""
    if not path or not url:
        return url
    parts = urlsplit(url)
    if parts.password is not None:
        raise StartError(f"a URL has a password, and {path} another\ntake it out of the URL")
    user, _, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{user}:{quote(read_secret(path), safe='')}@{host}").geturl()
