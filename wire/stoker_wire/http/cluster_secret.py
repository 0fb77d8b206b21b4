"""The cluster's secret as one process has it, which may change while it runs.

Made by the entry points of services. One that came from a file follows that file: its first line signs,
the second is accepted as well, so that every service can have a new secret before any uses it. A file
that cannot be read, or holds what a start would refuse, changes nothing.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from stoker_wire.errors import StartError
from stoker_wire.http.auth import (
    LOOK_S,
    check_length,
    find_token,
    load_or_create_token,
    load_secrets,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker_wire.settings import Settings

_ID_DIGITS = 16

_log = logging.getLogger(__name__)


def secret_id(secret: str) -> str:
    """Return the name of a secret, by which one is told from another and which gives none away."""
    return hmac.digest(secret.encode(), b"stoker secret id", "sha256").hex()[:_ID_DIGITS]


class ClusterSecret:
    """The secrets of a process: ``values`` has the one that signs first. Without a ``path`` they stay."""

    def __init__(self, values: tuple[str, ...], path: Path | None = None, host: str = "") -> None:
        self.values = values
        self.path = path
        self._host = host
        self._stamp = _stamp(path)
        self._users: list[Callable[[], object]] = []

    @classmethod
    def of_file(cls, path: str | Path, host: str = "") -> ClusterSecret:
        """Return what is in a file, made if it is absent."""
        path = Path(path).expanduser().absolute()
        load_or_create_token(path)
        secret = cls((), path, host)
        secret.values = load_secrets(path)
        return secret

    @property
    def id(self) -> str:
        """The name of the secret that signs."""
        return secret_id(self.values[0])

    @property
    def ids(self) -> tuple[str, ...]:
        """The names of all that are accepted."""
        return tuple(secret_id(one) for one in self.values)

    def on_change(self, call: Callable[[], object]) -> None:
        """Call ``call`` after each change, in the order of registration."""
        self._users.append(call)

    def look(self) -> None:
        """Take over what the file holds now, if it has changed."""
        stamp = _stamp(self.path)
        if self.path is None or stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            values = load_secrets(self.path)
            for one in values if self._host else ():
                check_length(one, self._host)
        except StartError as error:
            _log.warning("the secret that was read before stays in use: %s", error.one_line)
            return
        if values != self.values:
            self.values = values
            _log.info("took the secrets of %s: %s signs", self.path, self.id)
            for call in self._users:
                call()

    async def follow(self) -> None:
        """Take over changes of the file, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()


def secret_of(given: str | ClusterSecret) -> ClusterSecret:
    """Return a secret, also for one that never changes."""
    return given if isinstance(given, ClusterSecret) else ClusterSecret((given,))


def find_secret(settings: Settings, *, host: str | None = None) -> ClusterSecret:
    """Return the secret to use, by the rules of :func:`find_token`; that of the file follows it."""
    token = find_token(settings, host=host)
    if settings.token:
        return ClusterSecret((token,))
    return ClusterSecret.of_file(settings.token_file, host or "")


def _stamp(path: Path | None) -> tuple[int, int, int] | None:
    """Return what changes with a file; None if it cannot be seen."""
    if path is None:
        return None
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_ino, status.st_size)
