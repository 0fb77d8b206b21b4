"""The one quick proof that a service is gone: its host lives, and refuses connections at its port.

A lost connection proves nothing, and neither does silence: the process may be frozen, its network slow.
"""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

AGAIN_S = 0.2
"""Pause between the two refusals that count, in which a service that starts anew may begin to listen."""
CONNECT_S = 1.0


async def refuses_connections(url: str) -> bool:
    """Return whether the host of ``url`` refuses connections there, twice in a row."""
    if not await _refuses(url):
        return False
    await asyncio.sleep(AGAIN_S)
    return await _refuses(url)


async def _refuses(url: str) -> bool:
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False
