"""The question whether a service is alive: a busy one answers late, a frozen one not at all.

The answer proves nothing more: who leads is decided by the election alone.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from stoker_wire.errors import StokerError
from stoker_wire.tls.contexts import context_for

if TYPE_CHECKING:
    from stoker_wire.tls.files import TlsFiles

ANSWER_S = 0.5
_HELD_UP_S = 0.2
"""A silence that took so much longer to notice proves only that this process was held up."""
_PATH = "/healthz"


async def answers(url: str, tls: TlsFiles) -> bool:
    """Return whether something answers at ``url`` within :data:`ANSWER_S`, in whatever words."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    try:
        async with asyncio.timeout(ANSWER_S):
            return await _first_line(url, tls) != b""
    except TimeoutError:
        return loop.time() - began_s > ANSWER_S + _HELD_UP_S
    except ssl.SSLError:
        return True  # what refuses a certificate is alive
    except (OSError, ValueError, StokerError):
        return False


async def _first_line(url: str, tls: TlsFiles) -> bytes:
    parts, context = urlsplit(url), context_for(url, tls)
    port = parts.port or (80 if context is None else 443)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=context)
    try:
        writer.write(
            f"GET {_PATH} HTTP/1.1\r\nHost: {parts.hostname}\r\nConnection: close\r\n\r\n".encode()
        )
        return await reader.readline()
    finally:
        writer.close()
