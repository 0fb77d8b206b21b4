"""The umask of services: what they write is for their own user. What they start for users keeps its own."""

from __future__ import annotations

import os

INHERITED = os.umask(0o022)
"""The umask that this process was started with, for the processes that run users' code."""
os.umask(INHERITED)


def restrict() -> None:
    """Have the files and folders that this process makes be readable by its own user alone."""
    os.umask(0o077)


def private(path: str, flags: int) -> int:
    """Open a file that is its user's alone, before :func:`restrict`: an opener for ``open()``."""
    return os.open(path, flags, 0o600)
