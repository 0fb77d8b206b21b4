"""The question whether a service is alive: a busy one answers late, a frozen one not at all.

The answer proves nothing more: who leads is decided by the election alone.
"""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

ANSWER_S = 0.5
_HELD_UP_S = 0.2
"""A silence that took so much longer to notice proves only that this process was held up."""
_PATH = "/healthz"


async def answers(url: str) -> bool:
    """Return whether something answers at ``url`` within :data:`ANSWER_S`, in whatever words."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    try:
        async with asyncio.timeout(ANSWER_S):
            return await _first_line(url) != b""
    except TimeoutError:
        return loop.time() - began_s > ANSWER_S + _HELD_UP_S
    except (OSError, ValueError):
        return False


async def _first_line(url: str) -> bytes:
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure or None)
    try:
        writer.write(
            f"GET {_PATH} HTTP/1.1\r\nHost: {parts.hostname}\r\nConnection: close\r\n\r\n".encode()
        )
        return await reader.readline()
    finally:
        writer.close()
