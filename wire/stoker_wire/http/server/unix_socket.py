"""Unix sockets that are private from their first moment."""

from __future__ import annotations

import contextlib
import os
import socket


def private_socket(path: str) -> socket.socket:
    """Return a socket bound to ``path``, mode 0600; one that was left there is removed."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    try:
        # The path gets the mode of the socket: the process's umask, which all threads share, stays.
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(path)
    except OSError:
        listener.close()
        raise
    return listener
