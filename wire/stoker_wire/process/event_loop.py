"""The event loop of every process: uvloop where it is installed, else asyncio's own.

uvloop resolves even ``127.0.0.1`` on a pool of four threads when a socket connects, because the
request does not say that it is for a stream. With that, it reads a literal address by itself: a
worker saves the threads, and a fifth of the time that it takes to start.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Callable
from typing import Any


def new_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop."""
    return loop_factory()()


@functools.cache
def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return the class of loops; imports uvloop, which a fork server does before it forks."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop

    class StreamLoop(uvloop.Loop):
        """A uvloop that resolves names for streams by default."""

        async def getaddrinfo(
            self, host: Any, port: Any, *, family: int = 0, type: int = 0, **how: int
        ) -> Any:
            kind = type or socket.SOCK_STREAM
            return await super().getaddrinfo(host, port, family=family, type=kind, **how)

    return StreamLoop
