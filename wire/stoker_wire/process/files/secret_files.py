"""Passwords in files, as container engines and orchestrators hand them to a service.

Read once by an entry point. A password stays out of environments and command lines, which others see.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import quote, urlsplit

from stoker_wire.errors import StartError

MOUNTS = Path("/run/secrets")
"""Where Docker, Podman and (by custom) Kubernetes mount secrets, with owners and modes of their own."""


def is_mounted(path: Path) -> bool:
    """Return whether ``path`` is a mounted secret: then its mode is not ours, and no other user is there."""
    return path.resolve().is_relative_to(MOUNTS)


def read_secret(path: str | Path) -> str:
    """Return what is in ``path``; StartError if it is absent, empty, or readable by other users."""
    path = Path(path).expanduser()
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077 and not is_mounted(path):
                raise StartError(
                    f"{path} is readable by other users (mode {mode:04o}) and holds a password\n"
                    f"run: chmod 600 {path}"
                )
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
